// The vectors of attention with AVX-512.
#pragma once
#include "attend.h"
#include "x512.h"

namespace lean {
namespace {

// The lanes of each of eight vectors put together by `op`: one number of each.
template <class Op> LEAN_INLINE __m256 over_lanes(const __m512 (&v)[8], Op op) {
    const auto pairs = [op](__m512 a, __m512 b) LEAN_ALWAYS {
        return op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    };
    // Each 128 bits hold what theirs of a, b, c and d give.
    const auto fours = [op, pairs](__m512 a, __m512 b, __m512 c, __m512 d) LEAN_ALWAYS {
        const __m512d ab = _mm512_castps_pd(pairs(a, b)), cd = _mm512_castps_pd(pairs(c, d));
        return op(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    };
    const __m512 a = fours(v[0], v[1], v[2], v[3]), b = fours(v[4], v[5], v[6], v[7]);
    const __m512 half = op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 both = op(half, _mm512_shuffle_f32x4(half, half, 0xb1));
    return _mm512_castps512_ps256(_mm512_shuffle_f32x4(both, both, 0xd8));
}

struct AttendUnit {
    using V = __m512;
    static constexpr int64_t LANES = 16;
    static LEAN_INLINE V at(const float* p) { return _mm512_loadu_ps(p); }
    static LEAN_INLINE V at(const uint16_t* p) { return _mm512_cvtph_ps(load256(p)); }
    static LEAN_INLINE void put(V x, uint16_t* p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static LEAN_INLINE void put(V x, float* p) { _mm512_storeu_ps(p, x); }
    static LEAN_INLINE V all(float x) { return _mm512_set1_ps(x); }
    static LEAN_INLINE V most(V a, V b) { return _mm512_max_ps(a, b); }
    static LEAN_INLINE V times_power(V x, V shifted) {
        const __m512i power = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
        return _mm512_mul_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(power, 23)));
    }
    static LEAN_INLINE float highest(V x) { return _mm512_reduce_max_ps(x); }
    static LEAN_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static LEAN_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
    template <int N> static LEAN_INLINE void sums(const V (&acc)[N], float* out) {
        if constexpr (N == 8)
            _mm256_storeu_ps(out, over_lanes(acc, [](V a, V b) LEAN_ALWAYS { return _mm512_add_ps(a, b); }));
        else
            for (int n = 0; n < N; ++n) out[n] = _mm512_reduce_add_ps(acc[n]);
    }
};

}  // namespace
}  // namespace lean
