// Products with strips whose blocks have 32 elements, and Q8_0 and Q8_1 activations, as strips512.h says.
#pragma once
#include "strips512.h"

namespace lean {
namespace {

// Eight signed words of a block, its scale and (has_min) its minimum.
struct Block16 {
    __m512i w[8];
    __m512 d, m;
};
template <int TYPE> struct Strip32;

// Sixteen bytes of each row: low nibbles are elements 0 to 15, high ones 16 to 31.
LEAN_INLINE void nibbles16(const uint8_t* p, __m512i* w) {
    const __m512i mask = bytes512(15);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i q = load512(p + 64 * i);
        w[i] = _mm512_and_si512(q, mask);
        w[4 + i] = _mm512_and_si512(_mm512_srli_epi32(q, 4), mask);
    }
}

LEAN_INLINE void look_up(const int8_t* values, __m512i* w) {
    const __m512i table = _mm512_broadcast_i32x4(load128(values));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = _mm512_shuffle_epi8(table, w[i]);
}

// The fifth bits of elements 4 i to 4 i + 3, from a word of 32 bits for each row, as 16 in each byte.
LEAN_INLINE __m512i fifth_bits(__m512i high, int i) {
    const __m512i four = _mm512_and_si512(_mm512_srli_epi32(high, static_cast<unsigned>(4 * i)), _mm512_set1_epi32(15));
    const __m512i bytes = _mm512_shuffle_epi8(four, _mm512_broadcast_i32x4(_mm_set_epi32(
        0x0c0c0c0c, 0x08080808, 0x04040404, 0x00000000)));
    const __mmask64 set = _mm512_test_epi8_mask(bytes, _mm512_set1_epi32(0x08040201));
    return _mm512_maskz_mov_epi8(set, bytes512(16));
}

template <> struct Strip32<Q8_0> {
    static constexpr int words = 8, rest = 2;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) b.w[i] = load512(p + 64 * i);
        b.d = halves16(rest_at);
    }
};

template <> struct Strip32<Q4_0> {
    static constexpr int words = 4, rest = 2;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
        nibbles16(p, b.w);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) b.w[i] = _mm512_sub_epi8(b.w[i], bytes512(8));
        b.d = halves16(rest_at);
    }
};

template <> struct Strip32<IQ4_NL> {
    static constexpr int words = 4, rest = 2;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
        nibbles16(p, b.w);
        look_up(IQ4_VALUES, b.w);
        b.d = halves16(rest_at);
    }
};

template <> struct Strip32<MXFP4> {
    static constexpr int words = 4, rest = 1;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
        nibbles16(p, b.w);
        look_up(FP4_VALUES, b.w);
        // 2^(E - 128); the two smallest exponents are subnormal.
        const __m512i e = _mm512_cvtepu8_epi32(load128(rest_at));
        const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
        const __mmask16 is_tiny = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
        b.d = _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_tiny, normal, tiny));
    }
};

template <> struct Strip32<Q4_1> {
    static constexpr int words = 5, rest = 0;
    static constexpr bool has_min = true;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t*, Block16& b) {
        const __m512i head = load512(p);
        b.d = low_half(head);
        b.m = high_half(head);
        nibbles16(p + 64, b.w);
    }
};

template <> struct Strip32<Q5_0> {
    static constexpr int words = 5, rest = 2;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
        const __m512i high = load512(p);
        nibbles16(p + 64, b.w);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
            b.w[i] = _mm512_sub_epi8(_mm512_or_si512(b.w[i], fifth_bits(high, i)), bytes512(16));
        b.d = halves16(rest_at);
    }
};

template <> struct Strip32<Q5_1> {
    static constexpr int words = 6, rest = 0;
    static constexpr bool has_min = true;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t*, Block16& b) {
        const __m512i head = load512(p), high = load512(p + 64);
        b.d = low_half(head);
        b.m = high_half(head);
        nibbles16(p + 128, b.w);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) b.w[i] = _mm512_or_si512(b.w[i], fifth_bits(high, i));
    }
};

// What a dot with the block has too little: the activations are stored with 128 added, the unsigned operand, so that the
// weights may be signed.
LEAN_INLINE __m512i correction_32(const Block16& b) {
    __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i / 4] = _mm512_dpbusd_epi32(sum[i / 4], bytes512(128), b.w[i]);
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_add_epi32(sum[0], sum[1]));
}

// acc[t] += a block's scale * dot, and its minimum, for N tokens: block j of the group. Dots begin with a correction that
// is READY; else it comes last, so that they need not wait for it.
template <bool HAS_MIN, bool READY, int N>
LEAN_INLINE void block_32(const Block16& b, __m512i correction, const ActGroup* const* group, int64_t j, __m512* acc) {
    __m512i dot[N];
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) dot[t] = READY ? correction : _mm512_setzero_si512();
    add_words<add_signed, 8, N>(b.w, [&](int t) { return group[t]->q + 32 * j; }, dot);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        const __m512 sum = _mm512_cvtepi32_ps(READY ? dot[t] : _mm512_add_epi32(dot[t], correction));
        acc[t] = _mm512_fmadd_ps(sum, _mm512_mul_ps(b.d, _mm512_set1_ps(group[t]->d[j])), acc[t]);
        if constexpr (HAS_MIN) acc[t] = _mm512_fmadd_ps(b.m, _mm512_set1_ps(group[t]->s[j]), acc[t]);
    }
}

template <int TYPE, int N>
LEAN_INLINE void strip_32(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    using S = Strip32<TYPE>;
    const uint8_t* rest = w + cols / 32 * S::words * 64;
    const ActGroup* group[N];
    __m512 acc[N];
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        group[t] = reinterpret_cast<const ActGroup*>(act[t]);
        acc[t] = _mm512_setzero_ps();
    }
    for (int64_t left = cols / 32; left > 0; left -= 8) {
        const int64_t blocks = left < 8 ? left : 8;
        for (int64_t j = 0; j < blocks; ++j, w += S::words * 64, rest += S::rest * STRIP) {
            prefetch_strip<S::words * 64>(w);
            Block16 b;
            S::read(w, rest, b);
            block_32<S::has_min, false, N>(b, correction_32(b), group, j, acc);
        }
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) ++group[t];
    }
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) _mm512_storeu_ps(out[t] + at, acc[t]);
}

// A group's blocks unpacked, for more tokens than the registers have sums for.
struct Ready32 {
    Block16 block[8];
    __m512i correction[8];
};

// to[t] = from[t] + what `blocks` blocks, of group g, add for N tokens.
template <bool HAS_MIN, int N>
LEAN_APART void ready_32(const Ready32& ready, int64_t g, int blocks, const uint8_t* const* act, const Fetch& fetch,
                         const float* from, float* to) {
    const ActGroup* group[N];
    __m512 acc[N];
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        group[t] = reinterpret_cast<const ActGroup*>(act[t]) + g;
        acc[t] = _mm512_load_ps(from + STRIP * t);
    }
    for (int j = 0; j < blocks; ++j) {
        fetch.some(j, blocks);
        block_32<HAS_MIN, true, N>(ready.block[j], ready.correction[j], group, j, acc);
    }
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) _mm512_store_ps(to + STRIP * t, acc[t]);
}

// As strip_32 for any number of tokens up to TILE: each block is unpacked once.
template <int TYPE>
void strip_32_many(const uint8_t* w, int64_t cols, const uint8_t* const* act, int n, float* const* out, int64_t at) {
    using S = Strip32<TYPE>;
    const uint8_t* rest = w + cols / 32 * S::words * 64;
    alignas(64) float sums[TILE * STRIP];
    Ready32 ready;
    for (int64_t g = 0, left = cols / 32; left > 0; ++g, left -= 8) {
        const int blocks = left < 8 ? static_cast<int>(left) : 8;
        const Fetch fetch = {w + AHEAD, blocks * S::words};
        for (int j = 0; j < blocks; ++j, w += S::words * 64, rest += S::rest * STRIP) {
            S::read(w, rest, ready.block[j]);
            ready.correction[j] = correction_32(ready.block[j]);
        }
        for_tokens(n, [&](auto count, int t) {
            float* to = sums + STRIP * t;
            ready_32<S::has_min, count.value>(ready, g, blocks, act + t, fetch.part(t, count.value, n),
                                              g == 0 ? ZEROS : to, to);
        });
    }
    for (int t = 0; t < n; ++t) _mm512_storeu_ps(out[t] + at, _mm512_load_ps(sums + STRIP * t));
}

}  // namespace
}  // namespace lean
