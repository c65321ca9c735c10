#include "step.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace lean {
namespace {

constexpr int64_t LANES = 16;  // partial sums, so that the loop vectorises and long rows lose no accuracy
constexpr float LEAST_SUM = 6.103515625e-05f;  // of chosen weights, as in llama.cpp: the smallest normal half
constexpr float LEAST_SPAN = 1e-6f;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

double sum_of_squares(const float* x, int64_t n) {
    float part[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int64_t l = 0; l < LANES; ++l) part[l] += x[i + l] * x[i + l];
    double sum = 0;
    for (; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
    for (float p : part) sum += p;
    return sum;
}

void norm(const float* x, const float* weight, float* out, int64_t width, float eps) {
    const double mean = sum_of_squares(x, width) / static_cast<double>(width);
    const float factor = static_cast<float>(1.0 / std::sqrt(mean + eps));
    for (int64_t i = 0; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

void softmax(const float* x, float* out, int64_t n) {
    const float most = *std::max_element(x, x + n);
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += out[i] = std::exp(x[i] - most);
    for (int64_t i = 0; i < n; ++i) out[i] /= sum;
}

// The places of the `count` largest of n numbers, largest first; the earlier of equals. Always distinct places.
template <class Id> void largest(const float* x, int64_t n, int64_t count, Id* places) {
    bool taken[MOST_EXPERTS] = {};
    for (int64_t k = 0; k < count; ++k) {
        int64_t best = -1;
        for (int64_t i = 0; i < n; ++i)
            if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
        taken[best] = true;
        places[k] = static_cast<Id>(best);
    }
}

// Gives -inf to every score outside the best groups.
void keep_best_groups(const RouteCall& c, float* scores) {
    const int64_t size = c.experts / c.groups;
    float worth[MOST_EXPERTS];
    for (int64_t g = 0; g < c.groups; ++g) {
        int32_t best[2];
        largest(scores + g * size, size, c.best_two ? 2 : 1, best);
        worth[g] = scores[g * size + best[0]] + (c.best_two ? scores[g * size + best[1]] : 0.0f);
    }
    int32_t kept[MOST_EXPERTS];
    bool stays[MOST_EXPERTS] = {};
    largest(worth, c.groups, c.groups_used, kept);
    for (int64_t k = 0; k < c.groups_used; ++k) stays[kept[k]] = true;
    for (int64_t e = 0; e < c.experts; ++e)
        if (!stays[e / size]) scores[e] = -INFINITY;
}

void gate(Gating gating, const float* logits, float* out, int64_t n) {
    switch (gating) {
    case SOFTMAX:
        return softmax(logits, out, n);
    case SIGMOID:
        for (int64_t i = 0; i < n; ++i) out[i] = sigmoid(logits[i]);
        return;
    case CHOSEN_SOFTMAX:
        std::copy_n(logits, n, out);
        return;
    case SQRT_SOFTPLUS:
        for (int64_t i = 0; i < n; ++i) out[i] = std::sqrt(softplus(logits[i]));
        return;
    }
}

// Probabilities where they are what selects; else the scores, stretched to reach from 0 to 1.
void tell_chances(const RouteCall& c, const float* scores, bool probabilities, float* chances) {
    if (c.gating == CHOSEN_SOFTMAX) return softmax(scores, chances, c.experts);
    if (probabilities) {
        std::copy_n(scores, c.experts, chances);
        return;
    }
    float low = INFINITY, high = -INFINITY;
    for (int64_t e = 0; e < c.experts; ++e) {
        if (scores[e] > -INFINITY) low = std::min(low, scores[e]);
        high = std::max(high, scores[e]);
    }
    const float span = std::max(high - low, LEAST_SPAN);
    for (int64_t e = 0; e < c.experts; ++e) chances[e] = std::max((scores[e] - low) / span, 0.0f);
}

}  // namespace

void norm_row(const NormCall& c, int64_t row) {
    norm(c.x + row * c.width, c.weight, c.out + row * c.width, c.width, c.eps);
}

void turn_head(const TurnCall& c, int64_t token, int64_t head) {
    const int64_t at = (token * c.heads + head) * c.dim, half = c.half;
    const float *x = c.x + at, *cos = c.cos + token * half, *sin = c.sin + token * half;
    float* out = c.out + at;
    if (c.norm != nullptr)
        norm(x, c.norm, out, c.dim, c.eps);
    else
        std::copy_n(x, c.dim, out);
    if (c.apart) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = out[i], b = out[i + half];
            out[i] = a * cos[i] - b * sin[i];
            out[i + half] = a * sin[i] + b * cos[i];
        }
    } else {
        for (int64_t i = 0; i < half; ++i) {
            const float a = out[2 * i], b = out[2 * i + 1];
            out[2 * i] = a * cos[i] - b * sin[i];
            out[2 * i + 1] = a * sin[i] + b * cos[i];
        }
    }
}

void route_token(const RouteCall& c, int64_t token) {
    float given[MOST_EXPERTS], scores[MOST_EXPERTS];
    gate(c.gating, c.logits + token * c.experts, given, c.experts);
    for (int64_t e = 0; e < c.experts; ++e) scores[e] = c.bias == nullptr ? given[e] : given[e] + c.bias[e];
    if (c.groups > 1) keep_best_groups(c, scores);
    int64_t* ids = c.ids + token * c.top_k;
    float* weights = c.weights + token * c.top_k;
    largest(scores, c.experts, c.top_k, ids);
    for (int64_t k = 0; k < c.top_k; ++k) weights[k] = given[ids[k]];
    if (c.gating == CHOSEN_SOFTMAX) softmax(weights, weights, c.top_k);
    if (c.renormalise) {
        float sum = 0;
        for (int64_t k = 0; k < c.top_k; ++k) sum += weights[k];
        for (int64_t k = 0; k < c.top_k; ++k) weights[k] /= std::max(sum, LEAST_SUM);
    }
    for (int64_t k = 0; k < c.top_k; ++k) weights[k] *= c.scale;
    tell_chances(c, scores, c.bias == nullptr && c.groups == 1 && c.gating != SQRT_SOFTPLUS, c.chances + token * c.experts);
}

int64_t largest_numbers(const float* x, int64_t n, int64_t count, float* values, int64_t* places) {
    constexpr int64_t RUN = 64;
    using Entry = std::pair<float, int64_t>;
    const auto before = [](const Entry& a, const Entry& b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    std::vector<Entry> best;  // a heap with the least of them in front
    best.reserve(static_cast<size_t>(count));
    for (int64_t begin = 0; begin < n; begin += RUN) {
        const int64_t end = std::min(begin + RUN, n);
        const bool full = static_cast<int64_t>(best.size()) == count;
        const float least = full ? best.front().first : -INFINITY;
        int larger = 0;
        for (int64_t i = begin; i < end; ++i) larger += x[i] > least;
        if (full && larger == 0) continue;  // nearly all runs: no number of theirs comes in
        for (int64_t i = begin; i < end; ++i) {
            const Entry entry{x[i], i};
            if (std::isnan(x[i]) || (static_cast<int64_t>(best.size()) == count && !before(entry, best.front())))
                continue;
            if (static_cast<int64_t>(best.size()) == count) {
                std::pop_heap(best.begin(), best.end(), before);
                best.pop_back();
            }
            best.push_back(entry);
            std::push_heap(best.begin(), best.end(), before);
        }
    }
    std::sort(best.begin(), best.end(), before);
    for (size_t i = 0; i < best.size(); ++i) values[i] = best[i].first, places[i] = best[i].second;
    return static_cast<int64_t>(best.size());
}

void sum_token(const SumCall& c, AddFn add, int64_t token) {
    const float *rows = c.rows + token * c.count * c.width, *weights = c.weights + token * c.count;
    const int64_t* ids = c.ids + token * c.count;
    float* out = c.out + token * c.width;
    if (c.onto == nullptr)
        std::fill_n(out, c.width, 0.0f);
    else
        std::copy_n(c.onto + token * c.width, c.width, out);
    int64_t last = -1;  // the place that was added before
    for (int64_t n = 0; n < c.count; ++n) {
        int64_t next = -1;
        for (int64_t j = 0; j < c.count; ++j) {
            const bool follows = last < 0 || ids[j] > ids[last] || (ids[j] == ids[last] && j > last);
            if (follows && (next < 0 || ids[j] < ids[next])) next = j;
        }
        last = next;
        add(out, rows + next * c.width, weights[next], c.width);
    }
}

void add_row(const AddCall& c, int64_t row) {
    const float *x = c.x + row * c.width, *y = c.every ? c.y : c.y + row * c.width;
    float* out = c.out + row * c.width;
    for (int64_t i = 0; i < c.width; ++i) out[i] = x[i] + c.scale * y[i];
}

void gate_row(const GateCall& c, int64_t row) {
    const float* x = c.x + row * c.width;
    float* out = c.out + row * c.width;
    if (c.whole) {
        const float factor = sigmoid(c.gate[row]);
        for (int64_t i = 0; i < c.width; ++i) out[i] = x[i] * factor;
    } else {
        for (int64_t i = 0; i < c.width; ++i) out[i] = x[i] * sigmoid(c.gate[row * c.width + i]);
    }
}

void decay_row(const DecayCall& c, int64_t token) {
    for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t i = token * c.heads + h;
        c.share[i] = sigmoid(c.beta[i]);
        c.decay[i] = c.rate[h] * softplus(c.alpha[i] + c.step[h]);
    }
}

void unit_row(const UnitCall& c, int64_t row) {
    const float* x = c.x + row * c.width;
    const float factor = c.scale / static_cast<float>(std::sqrt(sum_of_squares(x, c.width) + c.eps));
    for (int64_t i = 0; i < c.width; ++i) c.out[row * c.width + i] = x[i] * factor;
}

void angle_row(const AngleCall& c, int64_t token) {
    const auto position = static_cast<double>(c.positions[token]);
    for (int64_t i = 0; i < c.half; ++i) {
        const double angle = position * c.frequencies[i];
        c.cos[token * c.half + i] = static_cast<float>(std::cos(angle) * c.magnitude);
        c.sin[token * c.half + i] = static_cast<float>(std::sin(angle) * c.magnitude);
    }
}

void copy_row(const CopyCall& c, int64_t row) {
    std::copy_n(c.from + row / c.inner * c.outer_stride + row % c.inner * c.inner_stride, c.width,
                c.to + row / c.inner * c.to_outer_stride + row % c.inner * c.to_inner_stride);
}

}  // namespace lean
