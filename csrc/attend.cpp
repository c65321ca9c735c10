// Attention of one token: key heads and spans of keys are divided between the threads, then put together. Where the
// spans end depends on the positions alone, so the bits do not depend on the number of threads.
// Attention of a chunk: key heads and runs of rows are divided, and a row's bits do not depend on the run that it is in.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace lean {
namespace {

// Multiplications below which other threads are not worth waking.
constexpr int64_t WORTH_SHARING = 1 << 15;

// out[head] from its parts over all spans: values weigh as much as their keys' scores say.
void put_together(const AttendCall& call, const float* parts, int64_t spans, int64_t head) {
    const int64_t dim = call.dim, stride = attend_part(dim), share = call.heads / call.kv_heads;
    const float* first = parts + (head / share * spans * share + head % share) * stride;
    const auto part = [&](int64_t span) { return first + span * share * stride; };
    float most = call.sinks == nullptr ? part(0)[dim + 1] : std::max(part(0)[dim + 1], call.sinks[head]);
    for (int64_t s = 1; s < spans; ++s) most = std::max(most, part(s)[dim + 1]);
    float total = call.sinks == nullptr ? 0.0f : std::exp(call.sinks[head] - most);
    for (int64_t s = 0; s < spans; ++s) total += std::exp(part(s)[dim + 1] - most) * part(s)[dim];
    float* out = call.out + head * dim;
    for (int64_t s = 0; s < spans; ++s) {
        const float weight = std::exp(part(s)[dim + 1] - most) / total;
        for (int64_t i = 0; i < dim; ++i) out[i] = (s == 0 ? 0.0f : out[i]) + part(s)[i] * weight;
    }
}

// Rows of one task: unpacking a block of keys costs as much as some ten rows of products, and what a task works in should
// stay in the second cache.
constexpr int64_t FEWEST_ROWS = 8 * CHUNK_TILE, MOST_ROWS = 64 * CHUNK_TILE, MOST_NUMBERS = MOST_ROWS * 128;

int64_t rows_of_task(int64_t rows, int64_t kv_heads, int64_t dim, int64_t threads) {
    const int64_t most = std::min(MOST_ROWS, MOST_NUMBERS / dim), even = rows * kv_heads / (4 * threads);
    return std::clamp(even, std::min(FEWEST_ROWS, most), most) / CHUNK_TILE * CHUNK_TILE;
}

}  // namespace

void Engine::attend_chunk(const ChunkCall& call) {
    std::lock_guard lock(mutex_);
    const KernelTable& table = *table_;
    const int64_t rows = call.tokens * (call.heads / call.kv_heads);
    const bool few = call.tokens * (call.start + call.tokens) * call.heads * call.dim < WORTH_SHARING;
    const int64_t each = rows_of_task(rows, call.kv_heads, call.dim, pool_->threads());
    const int64_t runs = (rows + each - 1) / each, tasks = runs * call.kv_heads;
    const int64_t workers = few ? 1 : std::min<int64_t>(pool_->threads(), tasks);
    const int64_t size = (chunk_scratch(each, call.dim) + 15) / 16 * 16;
    auto* scratch = reinterpret_cast<float*>(attended_.get(static_cast<size_t>(workers * size) * sizeof(float)));
    const auto store = [&](int64_t token) { table.store_chunk(call, token); };
    std::atomic<int64_t> next = 0;
    const auto work = [&](int64_t worker) {
        for (int64_t task; (task = next++) < tasks;) {
            const int64_t begin = (runs - 1 - task / call.kv_heads) * each;  // the last rows see the most keys
            table.attend_chunk(call, task % call.kv_heads, begin, std::min(begin + each, rows), scratch + worker * size);
        }
    };
    if (few) {
        for (int64_t token = 0; token < call.tokens; ++token) store(token);
        work(0);
        return;
    }
    pool_->parallel_for(call.tokens, [&](int64_t token) { store(token); });
    pool_->parallel_for(workers, [&](int64_t worker) { work(worker); });
}

void Engine::attend(const AttendCall& call) {
    std::lock_guard lock(mutex_);
    const AttendFn attend = table().attend;
    const int64_t base = call.first / ATTEND_SPAN, spans = (call.end - 1) / ATTEND_SPAN - base + 1;
    const int64_t share = call.heads / call.kv_heads, stride = attend_part(call.dim);
    auto* parts = reinterpret_cast<float*>(
        attended_.get(static_cast<size_t>(spans * call.heads * stride) * sizeof(float)));
    const auto span = [&](int64_t task) {
        const int64_t kv_head = task / spans, s = task % spans;
        const int64_t begin = std::max(call.first, (base + s) * ATTEND_SPAN);
        attend(call, kv_head, begin, std::min(call.end, (base + s + 1) * ATTEND_SPAN), parts + task * share * stride);
    };
    const auto head = [&](int64_t h) { put_together(call, parts, spans, h); };
    const int64_t tasks = call.kv_heads * spans;
    if ((call.end - call.first) * call.heads * call.dim < WORTH_SHARING)
        for (int64_t task = 0; task < tasks; ++task) span(task);
    else
        pool_->parallel_for(tasks, [&](int64_t task) { span(task); });
    if (spans < 8)
        for (int64_t h = 0; h < call.heads; ++h) head(h);
    else
        pool_->parallel_for(call.heads, [&](int64_t h) { head(h); });
}

}  // namespace lean
