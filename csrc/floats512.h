// Rows of floats times tokens, for AVX-512. Included by that unit alone.
#pragma once
#include "unpack.h"
#include "x512.h"

namespace lean {
namespace {

LEAN_INLINE float sum_lanes(__m512 v) { return _mm512_reduce_add_ps(v); }

template <int TYPE> LEAN_INLINE __m512 floats16(const uint8_t* p) {
    if (TYPE == F32) return _mm512_loadu_ps(p);
    if (TYPE == F16) return _mm512_cvtph_ps(load256(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16));
}

// ROWS rows times N tokens. The order of additions is the same for all numbers of both.
template <int TYPE, int ROWS, int N>
LEAN_INLINE void rows_float(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    constexpr int64_t size = TYPE == F32 ? 4 : 2;
    const int64_t stride = cols * size;
    __m512 acc[2][ROWS][N];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) acc[0][r][t] = acc[1][r][t] = _mm512_setzero_ps();
    int64_t i = 0;
    const auto add = [&](const uint8_t* p, int64_t apart) LEAN_ALWAYS {
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            __m512 v[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                v[r] = floats16<TYPE>(p + r * apart + 16 * size * part);
                if (ROWS > 1) asm("" : "+v"(v[r]));  // else GCC 12 loads it anew for each token
            }
#pragma GCC unroll 8
            for (int t = 0; t < N; ++t) {
                const __m512 x = _mm512_loadu_ps(reinterpret_cast<const float*>(act[t]) + i + 16 * part);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) acc[part][r][t] = _mm512_fmadd_ps(v[r], x, acc[part][r][t]);
            }
        }
    };
    for (; i + 32 <= cols; i += 32) {
        if (ROWS == 1) prefetch<32 * size>(w + i * size);
        add(w + i * size, stride);
    }
    if (i < cols) {
        uint8_t last[ROWS][32 * size] = {};
        for (int r = 0; r < ROWS; ++r) memcpy(last[r], w + r * stride + i * size, static_cast<size_t>((cols - i) * size));
        add(last[0], 32 * size);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) out[t][at + r] = sum_lanes(_mm512_add_ps(acc[0][r][t], acc[1][r][t]));
}

void copy_f16(const float* x, int64_t cols, uint8_t* act) {
    auto* to = reinterpret_cast<float*>(act);
    memset(to, 0, static_cast<size_t>(act_groups(cols) * GROUP) * sizeof(float));
    for (int64_t i = 0; i < cols; i += 16) {
        const auto mask = static_cast<__mmask16>(cols - i < 16 ? (1 << (cols - i)) - 1 : 0xffff);
        const __m512 v = _mm512_maskz_loadu_ps(mask, x + i);
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)));
    }
}

}  // namespace
}  // namespace lean
