// Whole experts: down(act(gate x) * up x), each for the tokens that were routed to it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "product.h"

namespace lean {
namespace {

constexpr int64_t HIDDEN_BYTES = 8 << 20;  // of hidden rows at once
constexpr int64_t PART_BYTES = 1 << 20;    // of hidden rows that share a core's second cache with what they meet
constexpr int64_t MIN_WAVE = 256;          // pairs

// Consecutive (token, expert) pairs of one expert that are computed together.
struct Part {
    const uint8_t* slot;
    int64_t first;  // pair index in the call
    int64_t count;
};

void check_call(const FfnCall& call) {
    if (call.slots.size() != call.counts.size()) throw std::invalid_argument("one count is wanted for each slot");
    int64_t pairs = 0;
    for (int64_t count : call.counts) {
        if (count < 0 || count > call.pairs) throw std::invalid_argument("a count is negative or too large");
        pairs += count;
    }
    if (pairs != call.pairs)
        throw std::invalid_argument("counts sum to " + std::to_string(pairs) + ", but there are " +
                                    std::to_string(call.pairs) + " token and dest indices");
    for (int64_t i = 0; i < pairs; ++i) {
        if (call.token[i] < 0 || call.token[i] >= call.tokens)
            throw std::invalid_argument("token index " + std::to_string(call.token[i]) + " is outside x, which has " +
                                        std::to_string(call.tokens) + " rows");
        if (call.dest[i] < 0 || call.dest[i] >= call.out_rows)
            throw std::invalid_argument("dest index " + std::to_string(call.dest[i]) + " is outside out, which has " +
                                        std::to_string(call.out_rows) + " rows");
    }
}

// The experts' pairs in parts of at most `limit`.
std::vector<Part> parts_of(const FfnCall& call, int64_t limit) {
    std::vector<Part> parts;
    int64_t first = 0;
    for (size_t e = 0; e < call.slots.size(); ++e)
        for (int64_t left = call.counts[e]; left > 0;) {
            const int64_t count = std::min(left, limit);
            parts.push_back({call.slots[e], first, count});
            first += count;
            left -= count;
        }
    return parts;
}

// A call with its tokens rounded, and the steps of a part.
struct Ffn {
    const KernelTable& table;
    const FfnPlan& plan;
    const FfnCall& call;
    const int32_t* place = nullptr;              // of each token among the rounded ones
    const uint8_t* acts[2] = {nullptr, nullptr};  // tokens rounded for gate and for up
    size_t strides[2] = {0, 0};
    Partner partner = partner_of(plan.down);
    size_t rounded_bytes = act_stride(partner, plan.down.matrix.cols);  // of a hidden row

    int64_t inner() const { return plan.gate.matrix.rows; }
    Partner partner_of(const ExpertMatrix& m) const {
        return find_kernel(table, m.matrix.format->qtype, m.matrix.layout).partner;
    }

    // Rows [begin, end) of gate and up, gated, into the part's rows of `hidden`.
    void gate_and_up(const Part& part, int64_t begin, int64_t end, float* hidden) const {
        const Operand gate = operand(table, part.slot, plan.gate), up = operand(table, part.slot, plan.up);
        float up_tile[TILE][ROW_CHUNK], *gate_to[TILE], *up_to[TILE];
        const uint8_t* rows[2][TILE];
        for (int64_t i = 0; i < part.count; i += TILE) {
            const int n = static_cast<int>(std::min<int64_t>(TILE, part.count - i));
            for (int t = 0; t < n; ++t) {
                for (int p = 0; p < 2; ++p)
                    rows[p][t] = acts[p] + strides[p] * static_cast<size_t>(place[call.token[part.first + i + t]]);
                gate_to[t] = hidden + (i + t) * inner();
                up_to[t] = up_tile[t];
            }
            multiply_tile(gate, begin, end, rows[0], n, gate_to, begin);
            multiply_tile(up, begin, end, rows[1], n, up_to, 0);
            for (int t = 0; t < n; ++t) table.glu(call.activation, gate_to[t] + begin, up_tile[t], end - begin);
        }
    }

    void round(const float* hidden, uint8_t* rounded) const {
        table.quantize[partner](hidden, plan.down.matrix.cols, rounded);
    }

    // Rows [begin, end) of down from the part's rounded rows, to where they belong.
    void down(const Part& part, int64_t begin, int64_t end, const uint8_t* rounded) const {
        multiply_rows(
            operand(table, part.slot, plan.down), begin, end, 0, part.count, begin,
            [&](int64_t i) { return rounded + rounded_bytes * static_cast<size_t>(i); },
            [&](int64_t i) { return call.out + call.dest[part.first + i] * plan.down.matrix.rows; });
    }
};

// Rounds each token that is used once, for gate's partner and for up's where it differs.
void round_tokens(ThreadPool& pool, Ffn& ffn, Scratch& index, Scratch& act) {
    const FfnCall& call = ffn.call;
    auto* place = reinterpret_cast<int32_t*>(index.get(static_cast<size_t>(2 * call.tokens) * sizeof(int32_t)));
    int32_t* used = place + call.tokens;
    std::fill_n(place, call.tokens, -1);
    int32_t count = 0;
    for (int64_t i = 0; i < call.pairs; ++i) {
        const int32_t token = call.token[i];
        if (place[token] < 0) {
            used[count] = token;
            place[token] = count++;
        }
    }
    const int64_t width = ffn.plan.gate.matrix.cols;
    const Partner partners[2] = {ffn.partner_of(ffn.plan.gate), ffn.partner_of(ffn.plan.up)};
    const int kinds = partners[0] == partners[1] ? 1 : 2;
    for (int p = 0; p < 2; ++p) ffn.strides[p] = act_stride(partners[p], width);
    const size_t first = ffn.strides[0] * static_cast<size_t>(count);
    uint8_t* rounded = act.get(first + (kinds == 2 ? ffn.strides[1] * static_cast<size_t>(count) : 0));
    ffn.place = place;
    ffn.acts[0] = rounded;
    ffn.acts[1] = kinds == 2 ? rounded + first : rounded;
    pool.parallel_for(count, [&](int64_t i) {
        for (int p = 0; p < kinds; ++p)
            ffn.table.quantize[partners[p]](call.x + used[i] * width, width,
                                            rounded + first * static_cast<size_t>(p) + ffn.strides[p] * static_cast<size_t>(i));
    });
}

// Whole parts, the largest first as they come, each by the thread that takes it: what it makes stays in that core's
// caches, and no thread waits for another before the end.
void by_parts(ThreadPool& pool, const Ffn& ffn, const std::vector<Part>& parts, Scratch& hidden_rows,
              Scratch& rounded_rows) {
    const int64_t threads = pool.threads(), inner = ffn.inner(), model = ffn.plan.down.matrix.rows;
    const auto most = static_cast<size_t>(parts[0].count);
    const size_t hidden_size = most * static_cast<size_t>(inner), rounded_size = most * ffn.rounded_bytes;
    auto* hidden = reinterpret_cast<float*>(
        hidden_rows.get(static_cast<size_t>(threads) * hidden_size * sizeof(float)));
    uint8_t* rounded = rounded_rows.get(static_cast<size_t>(threads) * rounded_size);
    std::atomic<size_t> next{0};
    pool.parallel_for(threads, [&](int64_t thread) {
        float* mine = hidden + static_cast<size_t>(thread) * hidden_size;
        uint8_t* my_rounded = rounded + static_cast<size_t>(thread) * rounded_size;
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts.size();) {
            const Part& part = parts[i];
            for (int64_t row = 0; row < inner; row += ROW_CHUNK)
                ffn.gate_and_up(part, row, std::min(row + ROW_CHUNK, inner), mine);
            for (int64_t t = 0; t < part.count; ++t)
                ffn.round(mine + t * inner, my_rounded + static_cast<size_t>(t) * ffn.rounded_bytes);
            for (int64_t row = 0; row < model; row += ROW_CHUNK)
                ffn.down(part, row, std::min(row + ROW_CHUNK, model), my_rounded);
        }
    });
}

// The rows of `count` consecutive parts divided between the threads, one step after the other.
void by_rows(ThreadPool& pool, const Ffn& ffn, const Part* parts, int64_t count, Scratch& hidden_rows,
             Scratch& rounded_rows) {
    const int64_t inner = ffn.inner(), model = ffn.plan.down.matrix.rows, first = parts[0].first;
    const int64_t pairs = parts[count - 1].first + parts[count - 1].count - first;
    auto* hidden = reinterpret_cast<float*>(hidden_rows.get(static_cast<size_t>(pairs * inner) * sizeof(float)));
    uint8_t* rounded = rounded_rows.get(ffn.rounded_bytes * static_cast<size_t>(pairs));
    const auto in_chunks = [&](int64_t rows, auto&& body) {
        const int64_t chunk = chunk_rows(rows * count, pool.threads()), chunks = (rows + chunk - 1) / chunk;
        pool.parallel_for(count * chunks, [&](int64_t task) {
            const Part& part = parts[task / chunks];
            const int64_t begin = task % chunks * chunk;
            body(part, part.first - first, begin, std::min(begin + chunk, rows));
        });
    };
    in_chunks(inner, [&](const Part& part, int64_t at, int64_t begin, int64_t end) {
        ffn.gate_and_up(part, begin, end, hidden + at * inner);
    });
    pool.parallel_for(pairs, [&](int64_t i) {
        ffn.round(hidden + i * inner, rounded + ffn.rounded_bytes * static_cast<size_t>(i));
    });
    in_chunks(model, [&](const Part& part, int64_t at, int64_t begin, int64_t end) {
        ffn.down(part, begin, end, rounded + ffn.rounded_bytes * static_cast<size_t>(at));
    });
}

// body(parts, count) for consecutive parts of at most `limit` pairs together.
template <class F> void for_each_wave(const std::vector<Part>& parts, int64_t limit, F&& body) {
    for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
        int64_t pairs = 0;
        for (; end < parts.size() && pairs + parts[end].count <= limit; ++end) pairs += parts[end].count;
        body(parts.data() + begin, static_cast<int64_t>(end - begin));
    }
}

}  // namespace

void Engine::moe_ffn(const FfnPlan& plan, const FfnCall& call) {
    check_call(call);
    std::lock_guard lock(mutex_);
    uint8_t* written = index_.get(static_cast<size_t>(call.out_rows));
    std::memset(written, 0, static_cast<size_t>(call.out_rows));
    for (int64_t i = 0; i < call.pairs; ++i)
        if (written[call.dest[i]]++ != 0)
            throw std::invalid_argument("dest names row " + std::to_string(call.dest[i]) + " twice");
    if (call.pairs == 0) return;
    Ffn ffn{*table_, plan, call};
    round_tokens(*pool_, ffn, index_, act_);
    const int64_t threads = pool_->threads();
    const int64_t row = ffn.inner() * static_cast<int64_t>(sizeof(float));
    const int64_t tiles = std::min(HIDDEN_BYTES / threads, PART_BYTES) / row / TILE;
    if (tiles > 0 && call.pairs >= threads * TILE) {
        std::vector<Part> parts = parts_of(call, tiles * TILE);
        std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.count > b.count; });
        if (2 * threads * parts[0].count <= call.pairs) return by_parts(*pool_, ffn, parts, hidden_, hidden_act_);
    }
    const int64_t limit = std::max(MIN_WAVE, HIDDEN_BYTES / row);
    for_each_wave(parts_of(call, limit), limit, [&](const Part* parts, int64_t count) {
        by_rows(*pool_, ffn, parts, count, hidden_, hidden_act_);
    });
}

}  // namespace lean
