#include "engine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#if !defined(_WIN32)
#include <pthread.h>
#include <sys/mman.h>
#endif

#include "isa.h"
#include "product.h"

namespace lean {

namespace {

constexpr size_t SCRATCH_ALIGNMENT = size_t{2} << 20;  // a huge page
constexpr size_t PANEL_BYTES = size_t{1} << 19;    // of rounded activations

// body(task, first, last) for each of `tasks` and all tokens, on the threads. All tasks take a panel of tokens, as many as
// leave room for weights in a core's second cache, before the next panel; a token's rounded activations have `stride` bytes.
template <class F> void over_panels(ThreadPool& pool, int64_t tasks, int64_t tokens, size_t stride, F&& body) {
    const auto most = static_cast<int64_t>(PANEL_BYTES / stride) / TILE * TILE;
    const int64_t panel = std::max<int64_t>(most, TILE), panels = (tokens + panel - 1) / panel;
    pool.parallel_for(panels * tasks, [&](int64_t i) {
        const int64_t first = i / tasks * panel;
        body(i % tasks, first, std::min(first + panel, tokens));
    });
}

}  // namespace

Matrix make_matrix(int32_t qtype, Layout layout, int64_t rows, int64_t cols) {
    const Format* format = find_format(qtype);
    if (format == nullptr) throw std::invalid_argument("no product for tensor type " + std::to_string(qtype));
    if (layout != CANONICAL && (layout != ROWS16 || find_strip_format(qtype) == nullptr))
        throw std::invalid_argument("tensor type " + std::to_string(qtype) + " has no layout " + std::to_string(layout));
    const int64_t together = layout == ROWS16 ? STRIP : 1;
    if (rows <= 0 || cols <= 0 || cols % format->block != 0 || rows % together != 0)
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) +
                                    " is not made of whole blocks of " + std::to_string(together) + " x " +
                                    std::to_string(format->block));
    return {format, layout, rows, cols};
}

void check_section(int64_t offset, int64_t bytes, int64_t expert_bytes, const char* what) {
    if (offset < 0 || bytes > expert_bytes || offset > expert_bytes - bytes)
        throw std::invalid_argument(std::string(what) + " ends outside the expert's " + std::to_string(expert_bytes) +
                                    " bytes");
}

Activation make_activation(int kind, float limit, float alpha) {
    if (kind < Activation::SILU || kind > Activation::SWIGLU_OAI)
        throw std::invalid_argument("unknown activation " + std::to_string(kind));
    return {static_cast<Activation::Kind>(kind), limit, alpha};
}

uint8_t* Scratch::get(size_t bytes) {
    if (bytes > size_) {
        release();
        data_.reset(static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{SCRATCH_ALIGNMENT})));
        size_ = bytes;
#if defined(MADV_HUGEPAGE)
        if (bytes >= SCRATCH_ALIGNMENT) madvise(data_.get(), bytes, MADV_HUGEPAGE);  // a hint
#endif
    }
    return data_.get();
}

void Scratch::release() {
    data_.reset();
    size_ = 0;
}

void Scratch::Free::operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t{SCRATCH_ALIGNMENT}); }

namespace {
std::atomic<Engine*> engine{nullptr};
}

Engine::Engine()
    : pool_(std::make_unique<ThreadPool>(static_cast<int>(std::max(1u, std::thread::hardware_concurrency())))),
      table_(available_tables().back()) {}

Engine& Engine::get() {
    // Never destroyed: the threads may still be asleep in it when the process ends.
    static const bool made = [] {
        engine = new Engine;
#if !defined(_WIN32)
        pthread_atfork(nullptr, nullptr, [] { engine = new Engine; });
#endif
        return true;
    }();
    (void)made;
    return *engine;
}

int Engine::threads() {
    std::lock_guard lock(mutex_);
    return pool_->threads();
}

void Engine::set_threads(int threads) {
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("the number of threads must be 1 to 1024, not " + std::to_string(threads));
    std::lock_guard lock(mutex_);
    if (threads != pool_->threads()) pool_ = std::make_unique<ThreadPool>(threads);
}

size_t Engine::scratch_bytes() {
    std::lock_guard lock(mutex_);
    return act_.bytes() + hidden_.bytes() + hidden_act_.bytes() + index_.bytes() + attended_.bytes();
}

void Engine::release_scratch() {
    std::lock_guard lock(mutex_);
    for (Scratch* scratch : {&act_, &hidden_, &hidden_act_, &index_, &attended_}) scratch->release();
}

void Engine::linear(const uint8_t* w, const Matrix& matrix, int64_t count, const float* x, int64_t tokens, float* out) {
    std::lock_guard lock(mutex_);
    const KernelTable& table = *table_;
    ExpertMatrix whole;
    whole.matrix = matrix;
    const Operand op = operand(table, w, whole);
    const size_t stride = act_stride(op.kernel->partner, matrix.cols);
    uint8_t* act = act_.get(stride * static_cast<size_t>(tokens * count));
    const QuantizeFn quantize = table.quantize[op.kernel->partner];
    pool_->parallel_for(tokens * count, [&](int64_t row) {
        quantize(x + row * matrix.cols, matrix.cols, act + static_cast<size_t>(row) * stride);
    });
    const int64_t chunk = chunk_rows(count * matrix.rows, pool_->threads());
    const int64_t chunks = (matrix.rows + chunk - 1) / chunk;
    const size_t together = stride * static_cast<size_t>(count);
    over_panels(*pool_, count * chunks, tokens, together, [&](int64_t task, int64_t first, int64_t last) {
        const int64_t which = task / chunks, begin = task % chunks * chunk, end = std::min(begin + chunk, matrix.rows);
        const int64_t above = which * matrix.rows;
        multiply_rows(
            op, above + begin, above + end, first, last, above + begin,
            [&](int64_t t) { return act + static_cast<size_t>(t * count + which) * stride; },
            [&](int64_t t) { return out + t * count * matrix.rows; });
    });
}

void Engine::linear_group(const std::vector<GroupMatrix>& group, const float* x, int64_t tokens,
                          const std::vector<float*>& out) {
    std::lock_guard lock(mutex_);
    const KernelTable& table = *table_;
    const int64_t cols = group[0].matrix.cols;
    std::vector<Operand> operands;
    std::vector<Partner> partners;
    std::vector<size_t> places;  // of each operand's rounded tokens
    size_t bytes = 0, place_of[ACT_COUNT];
    int64_t total = 0;
    for (const GroupMatrix& each : group) {
        ExpertMatrix whole;
        whole.matrix = each.matrix;
        operands.push_back(operand(table, each.data, whole));
        const Partner partner = operands.back().kernel->partner;
        if (std::find(partners.begin(), partners.end(), partner) == partners.end()) {
            partners.push_back(partner);
            place_of[partner] = bytes;
            bytes += act_stride(partner, cols) * static_cast<size_t>(tokens);
        }
        places.push_back(place_of[partner]);
        total += each.matrix.rows;
    }
    uint8_t* act = act_.get(bytes);
    const auto round = [&](int64_t token) {
        for (const Partner partner : partners)
            table.quantize[partner](x + token * cols, cols,
                                    act + place_of[partner] + act_stride(partner, cols) * static_cast<size_t>(token));
    };
    pool_->parallel_for(tokens, [&](int64_t token) { round(token); });

    const int64_t chunk = chunk_rows(total, pool_->threads());
    std::vector<int64_t> ends;  // of each operand's tasks
    for (const GroupMatrix& each : group)
        ends.push_back((ends.empty() ? 0 : ends.back()) + (each.matrix.rows + chunk - 1) / chunk);
    const size_t together = bytes / static_cast<size_t>(tokens);
    over_panels(*pool_, ends.back(), tokens, together, [&](int64_t task, int64_t first, int64_t last) {
        const size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
        const int64_t rows = group[i].matrix.rows, begin = (task - (i == 0 ? 0 : ends[i - 1])) * chunk;
        const int64_t end = std::min(begin + chunk, rows);
        const size_t stride = act_stride(operands[i].kernel->partner, cols);
        multiply_rows(
            operands[i], begin, end, first, last, begin,
            [&](int64_t t) { return act + places[i] + static_cast<size_t>(t) * stride; },
            [&](int64_t t) { return out[i] + t * rows; });
    });
}

void Engine::dequantize(const uint8_t* w, const Format& format, int64_t rows, int64_t cols, float* out) {
    std::lock_guard lock(mutex_);
    const size_t row_bytes = static_cast<size_t>(format.row_bytes(cols));
    pool_->parallel_for(rows, [&](int64_t r) {
        format.dequantize(w + static_cast<size_t>(r) * row_bytes, cols, out + r * cols);
    });
}

void Engine::embed(const uint8_t* w, const Matrix& matrix, const int64_t* ids, int64_t count, float* out) {
    std::lock_guard lock(mutex_);
    const Format& format = *matrix.format;
    const int64_t cols = matrix.cols, blocks = cols / format.block;
    const size_t row_bytes = static_cast<size_t>(format.row_bytes(cols));
    const StripFormat* strip = matrix.layout == ROWS16 ? find_strip_format(format.qtype) : nullptr;
    uint8_t* rows = strip == nullptr ? nullptr : act_.get(row_bytes * static_cast<size_t>(count));
    pool_->parallel_for(count, [&](int64_t i) {
        const uint8_t* row = w + static_cast<size_t>(ids[i]) * row_bytes;
        if (strip != nullptr) {
            uint8_t* apart = rows + static_cast<size_t>(i) * row_bytes;
            extract_row(*strip, blocks, w + static_cast<size_t>(ids[i] / STRIP * STRIP) * row_bytes, ids[i] % STRIP, apart);
            row = apart;
        }
        format.dequantize(row, cols, out + i * cols);
    });
}

bool Engine::multiplies(int32_t qtype, Layout layout) const { return look_up(*table_, qtype, layout) != nullptr; }

void Engine::arrange(uint8_t* w, const Matrix& matrix, bool alone) {
    if (matrix.layout == CANONICAL) return;
    const StripFormat& format = *find_strip_format(matrix.format->qtype);
    const size_t strip_bytes = static_cast<size_t>(STRIP * matrix.format->row_bytes(matrix.cols));
    const int64_t blocks = matrix.cols / matrix.format->block, strips = matrix.rows / STRIP;
    const ArrangeFn arrange = table().arrange;
    const auto one = [&](int64_t i) {
        thread_local std::vector<uint8_t> apart;
        uint8_t* strip = w + static_cast<size_t>(i) * strip_bytes;
        apart.assign(strip, strip + strip_bytes);
        if (i + 1 < strips)  // the next one is on its way meanwhile: 8.8 GB/s instead of 6.8
            for (size_t at = 0; at < strip_bytes; at += 64) __builtin_prefetch(strip + strip_bytes + at, 1, 2);
        arrange(format, blocks, apart.data(), strip);
    };
    if (alone) {
        for (int64_t i = 0; i < strips; ++i) one(i);
        return;
    }
    std::lock_guard lock(mutex_);
    pool_->parallel_for(strips, [&](int64_t i) { one(i); });
}

bool Engine::encode(const float* x, const Format& format, int64_t rows, int64_t cols, uint8_t* out) {
    std::lock_guard lock(mutex_);
    const KernelTable& table = *table_;
    const Encoder* encoder = nullptr;
    for (int32_t i = 0; i < table.encoder_count; ++i)
        if (table.encoders[i].qtype == format.qtype) encoder = &table.encoders[i];
    if (encoder == nullptr)
        throw std::invalid_argument("no quantiser for tensor type " + std::to_string(format.qtype));
    const size_t row_bytes = static_cast<size_t>(format.row_bytes(cols));
    std::atomic<bool> good = true;
    pool_->parallel_for(rows, [&](int64_t r) {
        const float* row = x + r * cols;
        constexpr float LIMIT = 65504.0f;  // a scale is at most the largest element
        bool fits = true;
        for (int64_t i = 0; i < cols; ++i) fits &= row[i] <= LIMIT && row[i] >= -LIMIT;
        if (fits)
            encoder->encode(row, cols, out + static_cast<size_t>(r) * row_bytes);
        else
            good = false;
    });
    return good;
}

void Engine::convolve(const ConvolutionCall& call) {
    std::lock_guard lock(mutex_);
    const ConvolveFn convolve = table().convolve;
    const int64_t pieces = (call.channels + CONVOLUTION_CHANNELS - 1) / CONVOLUTION_CHANNELS;
    pool_->parallel_for(call.tokens * pieces, [&](int64_t i) {
        const int64_t first = i % pieces * CONVOLUTION_CHANNELS;
        convolve(call, i / pieces, first, std::min(CONVOLUTION_CHANNELS, call.channels - first));
    });
    const int64_t recent = call.taps - 1, fresh = std::min(recent, call.tokens), kept = recent - fresh;
    std::copy_n(call.recent + fresh * call.channels, kept * call.channels, call.recent);
    std::copy_n(call.x + (call.tokens - fresh) * call.channels, fresh * call.channels, call.recent + kept * call.channels);
}

void Engine::delta_rule(const DeltaCall& call) {
    std::lock_guard lock(mutex_);
    const DeltaFn delta = table().delta;
    const int64_t pieces = (call.value_dim + DELTA_COLUMNS - 1) / DELTA_COLUMNS;
    pool_->parallel_for(call.heads * pieces, [&](int64_t i) {
        const int64_t first = i % pieces * DELTA_COLUMNS;
        delta(call, i / pieces, first, std::min(DELTA_COLUMNS, call.value_dim - first));
    });
}

}  // namespace lean
