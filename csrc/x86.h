// What the AVX2 and the AVX-512 units share. Included by units of both, so everything here stays in each unit.
#pragma once
#include <immintrin.h>

#include "quantize.h"

#define LEAN_INLINE inline __attribute__((always_inline))
#define LEAN_ALWAYS __attribute__((always_inline))  // of a lambda
#define LEAN_APART __attribute__((noinline))      // of a function that wants all registers

namespace lean {
namespace {

LEAN_INLINE __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
LEAN_INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
LEAN_INLINE float half_float(const uint8_t* p) { return _cvtsh_ss(load_u16(p)); }

// The processor's own prefetching stops at every page, while a matrix is read straight through: asking for the
// bytes one page ahead made products of one token 1.4 to 1.6 times faster (512 to 8192 tried). A prefetch beyond
// the end of the buffer is harmless.
template <int BYTES> LEAN_INLINE void prefetch(const uint8_t* w) {
    constexpr int AHEAD = 4096;
#pragma GCC unroll 16
    for (int i = 0; i < BYTES; i += 64) _mm_prefetch(reinterpret_cast<const char*>(w + AHEAD + i), _MM_HINT_T0);
}

// Q4_K and Q5_K: 8 scales, then 8 minima, as bytes, of a block that begins with d, dmin and 12 packed bytes.
LEAN_INLINE __m128i scales_k4(const uint8_t* p) {
    const __m128i head = load128(p);
    const __m128i low = _mm_shuffle_epi8(head, _mm_set_epi8(15, 14, 13, 12, 11, 10, 9, 8, 15, 14, 13, 12, 7, 6, 5, 4));
    const __m128i high = _mm_shuffle_epi8(head, _mm_set_epi8(11, 10, 9, 8, -1, -1, -1, -1, 7, 6, 5, 4, -1, -1, -1, -1));
    const __m128i low_bits = _mm_and_si128(_mm_srlv_epi32(low, _mm_set_epi32(4, 0, 0, 0)),
                                           _mm_set_epi32(0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f));
    return _mm_or_si128(low_bits, _mm_and_si128(_mm_srli_epi32(high, 2), _mm_set1_epi8(0x30)));
}

// Q3_K: 16 signed scales as bytes, of a block that ends with 12 packed bytes and d.
LEAN_INLINE __m128i scales_q3(const uint8_t* p) {
    const __m128i tail = load128(p + 94);
    const __m128i low = _mm_shuffle_epi8(tail, _mm_set1_epi64x(0x0908070605040302));
    const __m128i high = _mm_shuffle_epi8(tail, _mm_set1_epi32(0x0d0c0b0a));
    const __m128i low_bits = _mm_and_si128(_mm_blend_epi16(low, _mm_srli_epi16(low, 4), 0xf0), _mm_set1_epi8(15));
    const __m128i high_bits = _mm_and_si128(_mm_srlv_epi32(high, _mm_set_epi32(6, 4, 2, 0)), _mm_set1_epi8(3));
    return _mm_sub_epi8(_mm_or_si128(low_bits, _mm_slli_epi32(high_bits, 4)), _mm_set1_epi8(32));
}

template <class Unit, int TYPE, int N>
LEAN_INLINE void dot_rows(const uint8_t* w, int64_t rows, int64_t cols, const uint8_t* const* act, float* const* out,
                          int64_t at) {
    for (int64_t r = 0; r < rows; ++r, w += row_bytes<TYPE>(cols))
        Unit::template row<TYPE, N>(w, cols, act, out, at + r);
}

// A unit's DotFn from its template for one row and N tokens, N a power of two up to WIDE.
template <class Unit, int WIDE, int TYPE>
void dot(const uint8_t* w, int64_t rows, int64_t cols, const uint8_t* const* act, int n, float* const* out, int64_t at) {
    constexpr int64_t STEP = 8;  // rows that stay in the first cache while the tokens are gone through
    for (int64_t r = 0; r < rows; r += STEP, w += STEP * row_bytes<TYPE>(cols)) {
        const int64_t some = rows - r < STEP ? rows - r : STEP;
        int t = 0;
        for (; n - t >= WIDE; t += WIDE)
            dot_rows<Unit, TYPE, WIDE>(w, some, cols, act + t, out + t, at + r);
        if (WIDE > 4 && (n - t) & 4) {
            dot_rows<Unit, TYPE, 4>(w, some, cols, act + t, out + t, at + r);
            t += 4;
        }
        if ((n - t) & 2) {
            dot_rows<Unit, TYPE, 2>(w, some, cols, act + t, out + t, at + r);
            t += 2;
        }
        if ((n - t) & 1) dot_rows<Unit, TYPE, 1>(w, some, cols, act + t, out + t, at + r);
    }
}

}  // namespace
}  // namespace lean
