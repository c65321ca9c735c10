// Attention of one token over the keys of its sequence, read once from first to last. Included by every
// instruction-set unit, each of which says in a struct how it loads, multiplies and adds up vectors.
#pragma once
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "quantize.h"

namespace lean {
namespace {

// A unit of plain vectors; others replace what their instructions do better.
template <class Vector> struct PlainAttend {
    using V = Vector;
    static constexpr int64_t LANES = sizeof(V) / sizeof(float);
    static V at(const float* p) {
        V x;
        memcpy(&x, p, sizeof(V));
        return x;
    }
    static V at(const uint16_t* p) {
        V x;
        for (int64_t i = 0; i < LANES; ++i) x[i] = half_to_float(p[i]);
        return x;
    }
    static void put(V x, uint16_t* p) {
        for (int64_t i = 0; i < LANES; ++i) p[i] = float_to_half(x[i]);
    }
    static void put(V x, float* p) { memcpy(p, &x, sizeof(V)); }
    static V all(float x) { return V{} + x; }
    static V most(V a, V b) { return a > b ? a : b; }
    // x * 2^n, where ROUND_MAGIC + n has the bits of `shifted`; n is -127 at the least, which gives 0.
    static V times_power(V x, V shifted) {
        for (int64_t i = 0; i < LANES; ++i) x[i] *= bits_float((float_bits(shifted[i]) + 127) << 23);
        return x;
    }
    static float highest(V x) {
        float high = x[0];
        for (int64_t i = 1; i < LANES; ++i) high = x[i] > high ? x[i] : high;
        return high;
    }
    static V fma(V a, V b, V c) { return a * b + c; }
    static void prefetch(const void*) {}
    // out[n] = the sum of the lanes of acc[n]
    template <int N> static void sums(const V (&acc)[N], float* out) {
        for (int n = 0; n < N; ++n) {
            float sum = 0;
            for (int64_t i = 0; i < LANES; ++i) sum += acc[n][i];
            out[n] = sum;
        }
    }
};

constexpr int64_t ATTEND_BLOCK = 64;  // keys whose values stay in the first cache while all dimensions are gone through
constexpr int64_t ATTEND_AHEAD = 4096;  // bytes: as far as the products look

template <class E, class Call>
inline const E* attend_rows(const uint8_t* cache, const Call& c, int64_t head, int64_t key) {
    return reinterpret_cast<const E*>(cache) + (head * c.capacity + key) * c.dim;
}

template <class U> inline void store_row(const float* from, int64_t dim, float* to) {
    memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
}
template <class U> inline void store_row(const float* from, int64_t dim, uint16_t* to) {
    for (int64_t i = 0; i < dim; i += U::LANES) U::put(U::at(from + i), to + i);
}

// scores[key][n] = q_n . key, for `count` keys
template <class U, int N, class E>
inline void score_keys(const float* q, int64_t dim, const E* keys, int64_t count, float* scores) {
    using V = typename U::V;
    for (int64_t key = 0; key < count; ++key, keys += dim, scores += N) {
        V acc[N] = {};
        for (int64_t i = 0; i < dim; i += U::LANES) {
            const V k = U::at(keys + i);
            for (int n = 0; n < N; ++n) acc[n] = U::fma(k, U::at(q + n * dim + i), acc[n]);
        }
        for (int64_t i = 0; i < dim; i += 64 / static_cast<int64_t>(sizeof(E)))
            U::prefetch(reinterpret_cast<const char*>(keys + i) + ATTEND_AHEAD);
        U::template sums<N>(acc, scores);
    }
}

// scores become e^(score - most) of their head; `most` and `sum` [N] of each.
template <int N> inline void weigh_keys(float* scores, int64_t count, float* most, float* sum) {
    constexpr int64_t WIDE = 16;  // a multiple of N
    float high[WIDE], part[WIDE] = {};
    for (float& each : high) each = -INFINITY;
    const int64_t all = count * N;
    int64_t i = 0;
    for (; i + WIDE <= all; i += WIDE)
        for (int64_t l = 0; l < WIDE; ++l) high[l] = scores[i + l] > high[l] ? scores[i + l] : high[l];
    for (int64_t l = 0; i + l < all; ++l) high[l] = scores[i + l] > high[l] ? scores[i + l] : high[l];
    for (int64_t l = N; l < WIDE; ++l) high[l % N] = high[l] > high[l % N] ? high[l] : high[l % N];
    for (int64_t l = N; l < WIDE; ++l) high[l] = high[l % N];
    for (i = 0; i + WIDE <= all; i += WIDE)
        for (int64_t l = 0; l < WIDE; ++l) {
            scores[i + l] = exp_float(scores[i + l] - high[l]);
            part[l] += scores[i + l];
        }
    for (int64_t l = 0; i + l < all; ++l) {
        scores[i + l] = exp_float(scores[i + l] - high[l]);
        part[l] += scores[i + l];
    }
    for (int n = 0; n < N; ++n) {
        most[n] = high[n];
        sum[n] = 0;
        for (int64_t l = n; l < WIDE; l += N) sum[n] += part[l];
    }
}

// out[n][first ..] += sum over keys of weights[key][n] * values[key][first ..], for C vectors of dimensions
template <class U, int N, int C, class E>
inline void add_values(const float* weights, const E* values, int64_t dim, int64_t count, int64_t first, float* out,
                       int64_t stride) {
    using V = typename U::V;
    V acc[N][C];
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) acc[n][c] = U::at(out + n * stride + first + c * U::LANES);
    for (int64_t key = 0; key < count; ++key) {
        const E* row = values + key * dim + first;
        V v[C];
        for (int c = 0; c < C; ++c) v[c] = U::at(row + c * U::LANES);
        U::prefetch(reinterpret_cast<const char*>(row) + ATTEND_AHEAD * 4);
        for (int n = 0; n < N; ++n) {
            const V weight = U::all(weights[key * N + n]);
            for (int c = 0; c < C; ++c) acc[n][c] = U::fma(v[c], weight, acc[n][c]);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) memcpy(out + n * stride + first + c * U::LANES, &acc[n][c], sizeof(V));
}

// The part of N query heads, from `head` on, of one key head.
template <class U, int N, class E>
void attend_heads(const AttendCall& call, int64_t head, int64_t kv_head, int64_t begin, int64_t end, float* part) {
    constexpr int C = N >= 8 ? 2 : 4;
    constexpr int WIDE = U::LANES >= 16 ? C : C / 2;  // shorter vectors come with fewer registers
    const int64_t dim = call.dim, count = end - begin, stride = attend_part(dim);
    alignas(64) float q[N * ATTEND_MOST_DIM], scores[N * ATTEND_SPAN];
    for (int64_t i = 0; i < N * dim; ++i) q[i] = call.q[head * dim + i] * call.scale;
    float most[N], sum[N];
    score_keys<U, N>(q, dim, attend_rows<E>(call.keys, call, kv_head, begin), count, scores);
    weigh_keys<N>(scores, count, most, sum);
    for (int n = 0; n < N; ++n) memset(part + n * stride, 0, static_cast<size_t>(dim) * sizeof(float));
    for (int64_t key = 0; key < count; key += ATTEND_BLOCK) {
        const int64_t some = count - key < ATTEND_BLOCK ? count - key : ATTEND_BLOCK;
        const E* values = attend_rows<E>(call.values, call, kv_head, begin + key);
        int64_t i = 0;
        for (; i + WIDE * U::LANES <= dim; i += WIDE * U::LANES)
            add_values<U, N, WIDE>(scores + key * N, values, dim, some, i, part, stride);
        for (; i < dim; i += U::LANES) add_values<U, N, 1>(scores + key * N, values, dim, some, i, part, stride);
    }
    for (int n = 0; n < N; ++n) {
        part[n * stride + dim] = sum[n];
        part[n * stride + dim + 1] = most[n];
    }
}

template <class U, class E>
void attend_span(const AttendCall& call, int64_t kv_head, int64_t begin, int64_t end, float* part) {
    if (end == call.end) {
        const int64_t row = kv_head * call.dim;
        store_row<U>(call.k + row, call.dim, const_cast<E*>(attend_rows<E>(call.keys, call, kv_head, end - 1)));
        store_row<U>(call.v + row, call.dim, const_cast<E*>(attend_rows<E>(call.values, call, kv_head, end - 1)));
    }
    const int64_t share = call.heads / call.kv_heads, stride = attend_part(call.dim);
    int64_t n = 0;
    const auto take = [&](auto heads, auto kernel) {
        for (; share - n >= heads; n += heads) kernel(call, kv_head * share + n, kv_head, begin, end, part + n * stride);
    };
    take(int64_t{8}, attend_heads<U, 8, E>);
    take(int64_t{4}, attend_heads<U, 4, E>);
    take(int64_t{2}, attend_heads<U, 2, E>);
    take(int64_t{1}, attend_heads<U, 1, E>);
}

template <class U> void attend(const AttendCall& call, int64_t kv_head, int64_t begin, int64_t end, float* parts) {
    if (call.halves)
        attend_span<U, uint16_t>(call, kv_head, begin, end, parts);
    else
        attend_span<U, float>(call, kv_head, begin, end, parts);
}

}  // namespace
}  // namespace lean
