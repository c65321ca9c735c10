// Whole experts: down(act(gate x) * up x), each for the tokens that were routed to it. In two steps: what the tokens'
// hidden rows are, and what `down` makes of them.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "product.h"

namespace lean {
namespace {

constexpr int64_t HIDDEN_BYTES = 4 << 20;  // of hidden rows at once, as floats (or a tile for each thread, with its tokens)
                                           // and rounded
constexpr int64_t PART_BYTES = 1 << 20;    // of hidden rows that share a core's second cache with what they meet
constexpr int64_t MIN_WAVE = 256;          // pairs
constexpr int64_t SUM_BYTES = 1 << 20;     // of some columns of all tokens' sums, which stay there too
constexpr int64_t FETCHED_BYTES = 8 << 10;  // of the next expert's rows, before its turn

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
        if (call.dest[i] < 0 || call.dest[i] >= call.places)
            throw std::invalid_argument("dest index " + std::to_string(call.dest[i]) + " is outside " +
                                        (call.weights == nullptr ? "out, which has " : "the weights, of which there are ") +
                                        std::to_string(call.places) + (call.weights == nullptr ? " rows" : ""));
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

Partner partner_of(const KernelTable& table, const ExpertMatrix& m) {
    return find_kernel(table, m.matrix.format->qtype, m.matrix.layout).partner;
}

// A token rounded for an expert's gate and, where that has another partner, again for its up.
struct Rounding {
    Partner gate, up;
    int64_t width;
    size_t up_offset;  // within the token's bytes
    size_t bytes;      // of a token

    Rounding(const KernelTable& table, const FfnPlan& plan)
        : gate(partner_of(table, plan.gate)), up(partner_of(table, plan.up)), width(plan.gate.matrix.cols),
          up_offset(gate == up ? 0 : act_stride(gate, width)), bytes(up_offset + act_stride(up, width)) {}

    void operator()(const KernelTable& table, const float* x, uint8_t* rounded) const {
        table.quantize[gate](x, width, rounded);
        if (gate != up) table.quantize[up](x, width, rounded + up_offset);
    }
};

// A call with its tokens rounded, and the steps of a part.
struct Ffn {
    const KernelTable& table;
    const FfnPlan& plan;
    const FfnCall& call;
    Rounding rounding{table, plan};
    const uint8_t* tokens = nullptr;  // rounded
    const int32_t* place = nullptr;   // of each token among those; null: its number
    Partner partner = partner_of(table, plan.down);
    size_t rounded_bytes = act_stride(partner, plan.down.matrix.cols);  // of a hidden row

    int64_t inner() const { return plan.gate.matrix.rows; }
    const uint8_t* token(int64_t pair) const {
        const int32_t i = call.token[pair];
        return tokens + rounding.bytes * static_cast<size_t>(place == nullptr ? i : place[i]);
    }

    // The part's rounded tokens, one after the other.
    void gather(const Part& part, uint8_t* rows) const {
        for (int64_t i = 0; i < part.count; ++i)
            std::memcpy(rows + rounding.bytes * static_cast<size_t>(i), token(part.first + i), rounding.bytes);
    }

    // Rows [begin, end) of gate and up, gated, into the part's rows of `hidden`. The tokens may have been `gathered`.
    void gate_and_up(const Part& part, int64_t begin, int64_t end, float* hidden, const uint8_t* gathered = nullptr) const {
        const Operand gate = operand(table, part.slot, plan.gate), up = operand(table, part.slot, plan.up);
        float up_tile[TILE][ROW_CHUNK], *gate_to[TILE], *up_to[TILE];
        const uint8_t* rows[2][TILE];
        for (int64_t i = 0; i < part.count; i += TILE) {
            const int n = static_cast<int>(std::min<int64_t>(TILE, part.count - i));
            for (int t = 0; t < n; ++t) {
                rows[0][t] = gathered == nullptr ? token(part.first + i + t)
                                                 : gathered + rounding.bytes * static_cast<size_t>(i + t);
                rows[1][t] = rows[0][t] + rounding.up_offset;
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

    // The same, weighted, onto what the tokens have. Meanwhile the first of those rows of the `next` slot are fetched.
    void add_down(const Part& part, int64_t begin, int64_t end, const uint8_t* rounded, const uint8_t* next) const {
        const Operand w = operand(table, part.slot, plan.down);
        const int64_t model = plan.down.matrix.rows, row_bytes = static_cast<int64_t>(w.row_bytes);
        const uint8_t* ahead = next == nullptr ? nullptr : next + plan.down.offset + begin * row_bytes;
        int64_t lines = next == nullptr ? 0 : std::min(FETCHED_BYTES, (end - begin) * row_bytes) / 64;
        float tile[TILE][ROW_CHUNK], *to[TILE];
        const uint8_t* rows[TILE];
        for (int64_t i = 0; i < part.count; i += TILE) {
            const int n = static_cast<int>(std::min<int64_t>(TILE, part.count - i));
            for (int t = 0; t < n; ++t) {
                rows[t] = rounded + rounded_bytes * static_cast<size_t>(i + t);
                to[t] = tile[t];
            }
            for (int64_t row = begin; row < end; row += ROW_CHUNK) {
                const int64_t some = std::min(ROW_CHUNK, end - row);
                for (int some_lines = 0; some_lines < 32 && lines > 0; ++some_lines, --lines, ahead += 64)
                    __builtin_prefetch(ahead, 0, 2);
                multiply_tile(w, row, row + some, rows, n, to, 0);
                for (int t = 0; t < n; ++t) {
                    const int64_t pair = part.first + i + t;
                    table.add(call.out + call.token[pair] * model + row, tile[t], call.weights[call.dest[pair]], some);
                }
            }
        }
    }
};

// Rounds each token that is used, once.
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
    const Rounding& rounding = ffn.rounding;
    uint8_t* rounded = act.get(rounding.bytes * static_cast<size_t>(count));
    ffn.place = place;
    ffn.tokens = rounded;
    pool.parallel_for(count, [&](int64_t i) {
        rounding(ffn.table, call.x + used[i] * rounding.width, rounded + rounding.bytes * static_cast<size_t>(i));
    });
}

// Some consecutive parts, and their hidden rows.
struct Wave {
    const Part* parts;
    int64_t count;
    uint8_t* rounded = nullptr;  // hidden row of each pair

    int64_t first() const { return parts[0].first; }
    int64_t pairs() const { return parts[count - 1].first + parts[count - 1].count - first(); }
    uint8_t* of(const Ffn& ffn, const Part& part) const {
        return rounded + ffn.rounded_bytes * static_cast<size_t>(part.first - first());
    }
};

// Hidden rows of whole parts, the largest first as they come, each by the thread that takes it: what it makes stays in
// that core's caches.
void hide_by_parts(ThreadPool& pool, const Ffn& ffn, const Wave& wave, Scratch& scratch) {
    const int64_t threads = pool.threads(), inner = ffn.inner();
    std::vector<const Part*> order;
    for (int64_t i = 0; i < wave.count; ++i) order.push_back(wave.parts + i);
    std::stable_sort(order.begin(), order.end(), [](const Part* a, const Part* b) { return a->count > b->count; });
    const size_t most = static_cast<size_t>(order[0]->count), tokens = most * ffn.rounding.bytes;
    const size_t size = tokens + most * static_cast<size_t>(inner) * sizeof(float);
    uint8_t* space = scratch.get(static_cast<size_t>(threads) * size);
    std::atomic<size_t> next{0};
    pool.parallel_for(threads, [&](int64_t thread) {
        uint8_t* gathered = space + static_cast<size_t>(thread) * size;
        auto* hidden = reinterpret_cast<float*>(gathered + tokens);
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < order.size();) {
            const Part& part = *order[i];
            ffn.gather(part, gathered);
            for (int64_t row = 0; row < inner; row += ROW_CHUNK)
                ffn.gate_and_up(part, row, std::min(row + ROW_CHUNK, inner), hidden, gathered);
            uint8_t* rounded = wave.of(ffn, part);
            for (int64_t t = 0; t < part.count; ++t)
                ffn.round(hidden + t * inner, rounded + static_cast<size_t>(t) * ffn.rounded_bytes);
        }
    });
}

// body(part, begin, end) for runs of each part's `rows` rows, on the threads.
template <class F> void in_chunks(ThreadPool& pool, const Wave& wave, int64_t rows, F&& body) {
    const int64_t chunk = chunk_rows(rows * wave.count, pool.threads()), chunks = (rows + chunk - 1) / chunk;
    pool.parallel_for(wave.count * chunks, [&](int64_t task) {
        const int64_t begin = task % chunks * chunk;
        body(wave.parts[task / chunks], begin, std::min(begin + chunk, rows));
    });
}

// Hidden rows, each part's divided between the threads.
void hide_by_rows(ThreadPool& pool, const Ffn& ffn, const Wave& wave, Scratch& floats) {
    const int64_t inner = ffn.inner(), pairs = wave.pairs();
    auto* hidden = reinterpret_cast<float*>(floats.get(static_cast<size_t>(pairs * inner) * sizeof(float)));
    in_chunks(pool, wave, inner, [&](const Part& part, int64_t begin, int64_t end) {
        ffn.gate_and_up(part, begin, end, hidden + (part.first - wave.first()) * inner);
    });
    pool.parallel_for(pairs, [&](int64_t i) {
        ffn.round(hidden + i * inner, wave.rounded + ffn.rounded_bytes * static_cast<size_t>(i));
    });
}

// What down makes of the hidden rows. Sums are divided between the threads by rows of down: each adds the parts in order.
void go_down(ThreadPool& pool, const Ffn& ffn, const Wave& wave) {
    const int64_t model = ffn.plan.down.matrix.rows;
    if (ffn.call.weights == nullptr) {
        in_chunks(pool, wave, model, [&](const Part& part, int64_t begin, int64_t end) {
            ffn.down(part, begin, end, wave.of(ffn, part));
        });
        return;
    }
    const int64_t most = SUM_BYTES / static_cast<int64_t>(sizeof(float)) / ffn.call.tokens;
    int64_t chunk = std::min(model / (pool.threads() * 4), most);
    chunk = std::max(chunk < ROW_CHUNK ? chunk / ROW_STEP * ROW_STEP : chunk / ROW_CHUNK * ROW_CHUNK, ROW_STEP);
    pool.parallel_for((model + chunk - 1) / chunk, [&](int64_t task) {
        const int64_t begin = task * chunk, end = std::min(begin + chunk, model);
        for (const Part *part = wave.parts, *last = part + wave.count - 1; part <= last; ++part)
            ffn.add_down(*part, begin, end, wave.of(ffn, *part), part < last ? part[1].slot : nullptr);
    });
}

// body(wave) for consecutive parts of at most `limit` pairs together.
template <class F> void for_each_wave(const std::vector<Part>& parts, int64_t limit, F&& body) {
    for (size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
        int64_t pairs = 0;
        for (; end < parts.size() && pairs + parts[end].count <= limit; ++end) pairs += parts[end].count;
        body(Wave{parts.data() + begin, static_cast<int64_t>(end - begin)});
    }
}

}  // namespace

size_t Engine::rounded_bytes(const FfnPlan& plan) const { return Rounding(*table_, plan).bytes; }

void Engine::round(const FfnPlan& plan, const float* x, int64_t tokens, uint8_t* rounded) {
    const KernelTable& table = *table_;
    const Rounding rounding(table, plan);
    for_each(tokens, [&](int64_t i) {
        rounding(table, x + i * rounding.width, rounded + rounding.bytes * static_cast<size_t>(i));
    });
}

void Engine::moe_ffn(const FfnPlan& plan, const FfnCall& call) {
    check_call(call);
    std::lock_guard lock(mutex_);
    uint8_t* written = index_.get(static_cast<size_t>(call.places));
    std::memset(written, 0, static_cast<size_t>(call.places));
    for (int64_t i = 0; i < call.pairs; ++i)
        if (written[call.dest[i]]++ != 0)
            throw std::invalid_argument("dest names row " + std::to_string(call.dest[i]) + " twice");
    if (call.pairs == 0) return;
    Ffn ffn{*table_, plan, call};
    if (call.rounded != nullptr)
        ffn.tokens = call.rounded;
    else
        round_tokens(*pool_, ffn, index_, act_);

    const int64_t threads = pool_->threads();
    const int64_t row = ffn.inner() * static_cast<int64_t>(sizeof(float));
    const int64_t gathered = row + static_cast<int64_t>(ffn.rounding.bytes);
    const int64_t tiles = std::min(std::max<int64_t>(HIDDEN_BYTES / threads / gathered / TILE, 1), PART_BYTES / row / TILE);
    int64_t limit = std::max(MIN_WAVE, HIDDEN_BYTES / static_cast<int64_t>(ffn.rounded_bytes));
    std::vector<Part> parts;
    bool whole = tiles > 0 && call.pairs >= threads * TILE;
    if (whole) {
        parts = parts_of(call, std::min(tiles * TILE, limit));
        int64_t most = 0;
        for (const Part& part : parts) most = std::max(most, part.count);
        whole = 2 * threads * most <= call.pairs;
    }
    if (!whole) {
        limit = std::max(MIN_WAVE, HIDDEN_BYTES / row);
        parts = parts_of(call, limit);
    }
    for_each_wave(parts, limit, [&](Wave wave) {
        wave.rounded = hidden_act_.get(ffn.rounded_bytes * static_cast<size_t>(wave.pairs()));
        (whole ? hide_by_parts : hide_by_rows)(*pool_, ffn, wave, hidden_);
        go_down(*pool_, ffn, wave);
    });
}

}  // namespace lean
