// A weight matrix times some rounded activation rows: what products of whole matrices and of experts are made of.
#pragma once
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "engine.h"

namespace lean {

constexpr int64_t ROW_STEP = 16;  // every layout's rows divide it

inline const Kernel* look_up(const KernelTable& table, int32_t qtype, Layout layout) {
    for (int32_t i = 0; i < table.kernel_count; ++i)
        if (table.kernels[i].qtype == qtype && table.kernels[i].layout == layout) return &table.kernels[i];
    return nullptr;
}

inline const Kernel& find_kernel(const KernelTable& table, int32_t qtype, Layout layout) {
    if (const Kernel* kernel = look_up(table, qtype, layout)) return *kernel;
    throw std::invalid_argument("no product for tensor type " + std::to_string(qtype) + " in layout " +
                                std::to_string(layout) + " on " + table.name);
}

inline float float_at(const uint8_t* p) {
    float value;
    std::memcpy(&value, p, sizeof(value));
    return value;
}

// Rows per task: small enough that every thread gets several, large enough to reuse a tile of activations.
inline int64_t chunk_rows(int64_t rows, int threads) {
    const int64_t even = rows / (threads * 8);
    return std::clamp<int64_t>(even / ROW_STEP * ROW_STEP, ROW_STEP, ROW_CHUNK);
}

// A weight matrix with what is applied to its product.
struct Operand {
    const Kernel* kernel;
    const uint8_t* data;
    int64_t cols;
    size_t row_bytes;
    const uint8_t* bias;   // F32[rows] or null
    const uint8_t* scale;  // F32 or null
};

inline Operand operand(const KernelTable& table, const uint8_t* base, const ExpertMatrix& m) {
    return {&find_kernel(table, m.matrix.format->qtype, m.matrix.layout),
            base + m.offset,
            m.matrix.cols,
            static_cast<size_t>(m.matrix.format->row_bytes(m.matrix.cols)),
            m.bias < 0 ? nullptr : base + m.bias,
            m.scale < 0 ? nullptr : base + m.scale};
}

// Rows [begin, end) of a product with n <= TILE activation rows, each stored from at on in its row of `out`.
inline void multiply_tile(const Operand& w, int64_t begin, int64_t end, const uint8_t* const* act, int n, float* const* out,
                   int64_t at) {
    w.kernel->dot(w.data + static_cast<size_t>(begin) * w.row_bytes, end - begin, w.cols, act, n, out, at);
    if (w.scale != nullptr) {
        const float scale = float_at(w.scale);
        for (int t = 0; t < n; ++t)
            for (int64_t r = 0; r < end - begin; ++r) out[t][at + r] *= scale;
    }
    if (w.bias != nullptr)
        for (int64_t r = 0; r < end - begin; ++r) {
            const float bias = float_at(w.bias + 4 * (begin + r));
            for (int t = 0; t < n; ++t) out[t][at + r] += bias;
        }
}

// Rows [begin, end) of a product with the activation rows act(t) of tokens [first, last), each stored from `at` on in
// its row out(t).
template <class ActOf, class OutOf>
void multiply_rows(const Operand& w, int64_t begin, int64_t end, int64_t first, int64_t last, int64_t at, ActOf&& act,
                   OutOf&& out) {
    const uint8_t* rows[TILE];
    float* to[TILE];
    for (; first < last; first += TILE) {
        const int n = static_cast<int>(std::min<int64_t>(TILE, last - first));
        for (int t = 0; t < n; ++t) {
            rows[t] = act(first + t);
            to[t] = out(first + t);
        }
        multiply_tile(w, begin, end, rows, n, to, at);
    }
}

}  // namespace lean
