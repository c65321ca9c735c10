// quantize_q8_k of quantize.h written out for AVX-512 with VNNI, with the same bits: twice as fast as what the compiler
// makes of the plain loops, reading x included. It also stores what only this unit's products want: `narrow`, and the
// offsets. Included by that unit alone.
#pragma once
#include "quantize.h"
#include "x512.h"

namespace lean {
namespace {

// What `ActGroup::narrow` says where no 16 elements have a larger sum of absolute values than `size16`, and no 32 a larger
// sum of those of one sign than `one_sign32`.
inline uint32_t narrow_bits(int size16, int one_sign32) {
    constexpr int limit = 1 << 15;
    return (15 * one_sign32 < limit ? NARROW_15 : 0u) | (31 * one_sign32 < limit ? NARROW_31 : 0u) |
           (32 * size16 < limit ? NARROW_32 : 0u);
}

inline void quantize_q8_k_512(const float* x, int64_t cols, uint8_t* act) {
    auto* group = reinterpret_cast<ActGroup*>(act);
    const int64_t groups = act_groups(cols);
    auto* scale = reinterpret_cast<float*>(group + groups);
    auto* offsets = reinterpret_cast<int16_t*>(scale + groups);
    for (int64_t g = 0; g < groups; ++g, ++group, x += GROUP, offsets += 16) {
        prefetch<4 * GROUP>(reinterpret_cast<const uint8_t*>(x));
        __m512i most[4] = {}, v[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            v[i] = load512(x + 16 * i);
            most[i % 4] = _mm512_max_epi32(most[i % 4], _mm512_and_si512(v[i], _mm512_set1_epi32(0x7fffffff)));
        }
        const __m512i all = _mm512_max_epi32(_mm512_max_epi32(most[0], most[1]), _mm512_max_epi32(most[2], most[3]));
        const auto amax = static_cast<uint32_t>(_mm512_reduce_max_epi32(all));
        if (amax == 0 || amax >= INF_BITS) {
            memset(group, 0, sizeof(ActGroup));
            group->narrow = narrow_bits(0, 0);
            memset(offsets, 0, 16 * sizeof(int16_t));
            scale[g] = amax == 0 ? 0.0f : bits_float(0x7fc00000);
            continue;
        }
        const __m512i largest = _mm512_set1_epi32(static_cast<int32_t>(amax));
        uint32_t positive = 0;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) positive |= _mm512_cmpeq_epi32_mask(v[i], largest);
        const float factor = -127.0f / (positive != 0 ? bits_float(amax) : -bits_float(amax));
        scale[g] = 1.0f / factor;
        const __m512 factors = _mm512_set1_ps(factor), magic = _mm512_set1_ps(ROUND_MAGIC);
        const auto rounded = [&](__m512i bits) LEAN_ALWAYS {
            const __m512 shifted = _mm512_add_ps(_mm512_mul_ps(_mm512_castsi512_ps(bits), factors), magic);
            return _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(magic));
        };
        const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        __m512i fours[4], sizes[4];  // sums of four, and of their absolute values
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512i packed =
                _mm512_packs_epi16(_mm512_packs_epi32(rounded(v[4 * i]), rounded(v[4 * i + 1])),
                                   _mm512_packs_epi32(rounded(v[4 * i + 2]), rounded(v[4 * i + 3])));
            const __m512i q = _mm512_permutexvar_epi32(order, packed);
            _mm512_storeu_si512(group->q + 64 * i, q);
            fours[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes512(1), q);
            sizes[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_abs_epi8(q), bytes512(1));
        }
        const auto pairs = [](__m512i a, __m512i b) LEAN_ALWAYS {
            return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        };
        const auto of_sixteen = [&](const __m512i* of_4) LEAN_ALWAYS {
            const __m512i low = pairs(of_4[0], of_4[1]), high = pairs(of_4[2], of_4[3]);
            const __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
            return _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, sums));
        };
        const auto of_two = [](__m256i v16) LEAN_ALWAYS { return _mm256_madd_epi16(v16, _mm256_set1_epi16(1)); };
        const __m256i of_16 = of_sixteen(fours), size_16 = of_sixteen(sizes), of_32 = of_two(of_16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(group->sums), of_16);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(group->sums32), _mm256_cvtepi32_epi16(of_32));
        const __m256i offset = _mm256_slli_epi16(_mm256_sub_epi16(_mm256_setzero_si256(), of_16), 5);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(offsets), offset);
        const __m256i one_sign = _mm256_srli_epi32(_mm256_add_epi32(of_two(size_16), _mm256_abs_epi32(of_32)), 1);
        group->narrow = narrow_bits(_mm512_reduce_max_epi32(_mm512_cvtepi16_epi32(size_16)),
                                    _mm512_reduce_max_epi32(_mm512_zextsi256_si512(one_sign)));
    }
}

}  // namespace
}  // namespace lean
