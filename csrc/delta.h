// The parts of a gated delta net that are no products of matrices. Included by every instruction-set unit. Channels
// and columns do not meet, so the bits are those of plain loops, whatever the width of a vector.
#pragma once
#include <string.h>

#include "kernels.h"
#include "quantize.h"

namespace lean {
namespace {

// One token of at most CONVOLUTION_CHANNELS channels.
inline void convolve(const ConvolutionCall& c, int64_t token, int64_t first, int64_t channels) {
    float sum[CONVOLUTION_CHANNELS] = {};
    for (int64_t tap = 0; tap < c.taps; ++tap) {
        const int64_t at = token - (c.taps - 1) + tap;
        const float* row = (at < 0 ? c.recent + (at + c.taps - 1) * c.channels : c.x + at * c.channels) + first;
        const float* weight = c.weight + tap * c.channels + first;
        for (int64_t i = 0; i < channels; ++i) sum[i] += weight[i] * row[i];
    }
    float* out = c.out + token * c.channels + first;
    for (int64_t i = 0; i < channels; ++i) out[i] = sum[i] * sigmoid(sum[i]);
}

template <class V> inline V load(const float* p) {
    V x;
    memcpy(&x, p, sizeof(V));
    return x;
}

// S = keep * S + k d^T for these columns. With READ also what the next token's q and k find in the new S.
template <class V, int N, bool READ>
inline void update(float* memory, int64_t rows, int64_t stride, float keep, const float* k, const V* written,
                   const float* next_q, const float* next_k, V* found_q, V* found_k) {
    V to_q[N] = {}, to_k[N] = {};
    for (int64_t i = 0; i < rows; ++i, memory += stride) {
        for (int n = 0; n < N; ++n) {
            float* at = memory + n * static_cast<int64_t>(sizeof(V) / sizeof(float));
            const V cell = load<V>(at) * keep + written[n] * k[i];
            memcpy(at, &cell, sizeof(V));
            if constexpr (READ) {
                to_q[n] += cell * next_q[i];
                to_k[n] += cell * next_k[i];
            }
        }
    }
    if constexpr (READ)
        for (int n = 0; n < N; ++n) found_q[n] = to_q[n], found_k[n] = to_k[n];
}

// Rows of `width` numbers at one distance, to rows at another.
inline void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                      int64_t width) {
    for (int64_t i = 0; i < rows; ++i)
        memcpy(to + i * to_stride, from + i * from_stride, static_cast<size_t>(width) * sizeof(float));
}

// The delta rule, one token after the other, for some columns of one head's memory.
template <class V, int N> void delta_columns(const DeltaCall& c, int64_t head, int64_t first) {
    constexpr int64_t LANES = sizeof(V) / sizeof(float), WIDTH = N * LANES;
    constexpr int64_t MOST_ROWS = 256;
    const int64_t key_head = c.grouped ? head / (c.heads / c.key_heads) : head % c.key_heads;
    float* home = c.memory + head * c.key_dim * c.value_dim + first;
    const int64_t key_stride = c.key_heads * c.key_dim, value_stride = c.heads * c.value_dim;
    const float *q = c.q + key_head * c.key_dim, *k = c.k + key_head * c.key_dim;
    const float* v = c.v + head * c.value_dim + first;
    float* out = c.out + head * c.value_dim + first;

    // Rows a power of two apart compete for a few sets of the cache, so many tokens work on a copy.
    alignas(64) float copy[MOST_ROWS * WIDTH];
    const bool away = c.tokens > 2 && c.key_dim <= MOST_ROWS;
    float* memory = away ? copy : home;
    const int64_t stride = away ? WIDTH : c.value_dim;
    if (away) copy_rows(home, c.value_dim, copy, WIDTH, c.key_dim, WIDTH);

    V found_q[N] = {}, found_k[N] = {}, written[N];
    for (int64_t i = 0; i < c.key_dim; ++i) {
        for (int n = 0; n < N; ++n) {
            const V cell = load<V>(memory + i * stride + n * LANES);
            found_q[n] += cell * q[i];
            found_k[n] += cell * k[i];
        }
    }
    for (int64_t t = 0; t < c.tokens; ++t) {
        const float keep = c.keep[t * c.heads + head], beta = c.beta[t * c.heads + head];
        float match = 0;
        for (int64_t i = 0; i < c.key_dim; ++i) match += q[i] * k[i];
        for (int n = 0; n < N; ++n) {
            written[n] = (load<V>(v + n * LANES) - found_k[n] * keep) * beta;
            const V seen = found_q[n] * keep + written[n] * match;
            memcpy(out + n * LANES, &seen, sizeof(V));
        }
        if (t + 1 < c.tokens)
            update<V, N, true>(memory, c.key_dim, stride, keep, k, written, q + key_stride, k + key_stride,
                               found_q, found_k);
        else
            update<V, N, false>(memory, c.key_dim, stride, keep, k, written, nullptr, nullptr, nullptr, nullptr);
        q += key_stride, k += key_stride, v += value_stride, out += value_stride;
    }
    if (away) copy_rows(copy, WIDTH, home, c.value_dim, c.key_dim, WIDTH);
}

template <class V, int N> void delta(const DeltaCall& c, int64_t head, int64_t first, int64_t columns) {
    constexpr int64_t WIDTH = N * static_cast<int64_t>(sizeof(V) / sizeof(float));
    const int64_t end = first + columns;
    for (; first + WIDTH <= end; first += WIDTH) delta_columns<V, N>(c, head, first);
    for (; first < end; ++first) delta_columns<float, 1>(c, head, first);
}

}  // namespace
}  // namespace lean
