// The unit for AVX2 with FMA and F16C. Weights are unpacked 32 at a time into one register and multiplied with up
// to WIDE tokens, so decoding and prefill run the same additions in the same order.
#include "arrange.h"
#include "attend_chunk.h"
#include "delta.h"
#include "encode.h"
#include "x86.h"

namespace lean {
namespace {

constexpr int WIDE = 4;  // tokens whose sums fit the sixteen registers

LEAN_INLINE __m256i bytes256(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

// Shifts by a constant that is zero, positive (right) or negative (left); bits that cross bytes are masked after.
LEAN_INLINE __m256i shift(__m256i v, int right) {
    return right >= 0 ? _mm256_srli_epi16(v, right) : _mm256_slli_epi16(v, -right);
}

LEAN_INLINE __m256i masked(__m256i v, int right, int mask) {
    return _mm256_and_si256(shift(v, right), bytes256(mask));
}

LEAN_INLINE float sum_lanes(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

LEAN_INLINE const ActGroup* groups_of(const uint8_t* act) { return reinterpret_cast<const ActGroup*>(act); }

// ---- 256-element blocks, Q8_K activations -------------------------------------------------------------------

// What a block has besides its elements: per 16 elements a scale and a factor of the sum of the activations
// (with d: the negated zero point times the scale; with dmin: the minimum).
struct Head {
    alignas(32) int16_t scale[16];
    __m256i sums;
    float d;
    float dmin;
};

enum Extra { NONE, OFFSET, MIN };

template <int TYPE> struct Unit256;

LEAN_INLINE void spread_pairs(__m128i eight, __m256i& sixteen) {
    sixteen = _mm256_set_m128i(_mm_unpackhi_epi16(eight, eight), _mm_unpacklo_epi16(eight, eight));
}

LEAN_INLINE void header_k4(const uint8_t* p, Head& head) {
    const __m128i both = scales_k4(p);
    __m256i scale;
    spread_pairs(_mm_cvtepu8_epi16(both), scale);
    _mm256_store_si256(reinterpret_cast<__m256i*>(head.scale), scale);
    spread_pairs(_mm_cvtepu8_epi16(_mm_unpackhi_epi64(both, both)), head.sums);
    head.d = half_float(p);
    head.dmin = half_float(p + 2);
}

LEAN_INLINE void signed_scales(__m256i scale, int zero_point_bits, Head& head) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(head.scale), scale);
    head.sums = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(scale, zero_point_bits));
}

template <> struct Unit256<Q4_K> {
    static constexpr Extra extra = MIN;
    static constexpr bool is_signed = false;
    static LEAN_INLINE void head(const uint8_t* p, Head& h) { header_k4(p, h); }
    static LEAN_INLINE __m256i chunk(const uint8_t* p, int j) {
        return masked(load256(p + 16 + 32 * (j / 2)), 4 * (j % 2), 15);
    }
};

template <> struct Unit256<Q5_K> {
    static constexpr Extra extra = MIN;
    static constexpr bool is_signed = false;
    static LEAN_INLINE void head(const uint8_t* p, Head& h) { header_k4(p, h); }
    static LEAN_INLINE __m256i chunk(const uint8_t* p, int j) {
        return _mm256_or_si256(masked(load256(p + 48 + 32 * (j / 2)), 4 * (j % 2), 15),
                               masked(load256(p + 16), j - 4, 16));
    }
};

template <> struct Unit256<Q6_K> {
    static constexpr Extra extra = OFFSET;
    static constexpr bool is_signed = false;
    static LEAN_INLINE void head(const uint8_t* p, Head& h) {
        signed_scales(_mm256_cvtepi8_epi16(load128(p + 192)), 5, h);
        h.d = half_float(p + 208);
    }
    static LEAN_INLINE __m256i chunk(const uint8_t* p, int j) {
        const int half = j / 4, g = j % 4;
        return _mm256_or_si256(masked(load256(p + 64 * half + 32 * (g % 2)), 4 * (g / 2), 15),
                               masked(load256(p + 128 + 32 * half), 2 * g - 4, 0x30));
    }
};

template <> struct Unit256<Q3_K> {
    static constexpr Extra extra = OFFSET;
    static constexpr bool is_signed = false;
    static LEAN_INLINE void head(const uint8_t* p, Head& h) {
        signed_scales(_mm256_cvtepi8_epi16(scales_q3(p)), 2, h);
        h.d = half_float(p + 108);
    }
    static LEAN_INLINE __m256i chunk(const uint8_t* p, int j) {
        return _mm256_or_si256(masked(load256(p + 32 + 32 * (j / 4)), 2 * (j % 4), 3), masked(load256(p), j - 2, 4));
    }
};

template <> struct Unit256<Q2_K> {
    static constexpr Extra extra = MIN;
    static constexpr bool is_signed = false;
    static LEAN_INLINE void head(const uint8_t* p, Head& h) {
        const __m128i v = load128(p), mask = _mm_set1_epi8(15);
        _mm256_store_si256(reinterpret_cast<__m256i*>(h.scale), _mm256_cvtepu8_epi16(_mm_and_si128(v, mask)));
        h.sums = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(v, 4), mask));
        h.d = half_float(p + 80);
        h.dmin = half_float(p + 82);
    }
    static LEAN_INLINE __m256i chunk(const uint8_t* p, int j) {
        return masked(load256(p + 16 + 32 * (j / 4)), 2 * (j % 4), 3);
    }
};

LEAN_INLINE __m256i lookup(const int8_t* table, __m256i codes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load128(table)), codes);
}

// 16 bytes as 32 nibbles: the low ones, then the high ones
LEAN_INLINE __m256i nibbles(const uint8_t* p) {
    const __m128i v = load128(p);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), bytes256(15));
}

template <> struct Unit256<IQ4_XS> {
    static constexpr Extra extra = NONE;
    static constexpr bool is_signed = true;
    static LEAN_INLINE void head(const uint8_t* p, Head& h) {
        const uint32_t low = load_u32(p + 4), high = load_u16(p + 2);
        for (int j = 0; j < 8; ++j) {
            const uint32_t scale = (low >> 4 * j & 15) | (high >> 2 * j & 3) << 4;
            h.scale[2 * j] = h.scale[2 * j + 1] = static_cast<int16_t>(static_cast<int>(scale) - 32);
        }
        h.d = half_float(p);
    }
    static LEAN_INLINE __m256i chunk(const uint8_t* p, int j) { return lookup(IQ4_VALUES, nibbles(p + 8 + 16 * j)); }
};

template <int TYPE, int N>
LEAN_INLINE void row_256(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    using Unit = Unit256<TYPE>;
    const int64_t groups = cols / GROUP;
    __m256 acc[N];
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) acc[t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, w += Block<TYPE>::bytes) {
        prefetch<Block<TYPE>::bytes>(w);
        Head head;
        Unit::head(w, head);
        __m256i sum[N];
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t)
            sum[t] = Unit::extra == OFFSET ? _mm256_madd_epi16(head.sums, load256(groups_of(act[t])[g].sums))
                                           : _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m256i q = Unit::chunk(w, j);
            const __m128i low = _mm_set1_epi16(head.scale[2 * j]), high = _mm_set1_epi16(head.scale[2 * j + 1]);
            const __m256i scale = _mm256_set_m128i(high, low);
            const __m256i size = Unit::is_signed ? _mm256_abs_epi8(q) : q;
#pragma GCC unroll 4
            for (int t = 0; t < N; ++t) {
                __m256i x = load256(groups_of(act[t])[g].q + 32 * j);
                if (Unit::is_signed) x = _mm256_sign_epi8(x, q);
                sum[t] = _mm256_add_epi32(sum[t], _mm256_madd_epi16(scale, _mm256_maddubs_epi16(size, x)));
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) {
            const float d = reinterpret_cast<const float*>(groups_of(act[t]) + groups)[g];
            acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t]), _mm256_set1_ps(head.d * d), acc[t]);
            if (Unit::extra == MIN) {
                const __m256i mins = _mm256_madd_epi16(head.sums, load256(groups_of(act[t])[g].sums));
                acc[t] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(mins), _mm256_set1_ps(head.dmin * d), acc[t]);
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) out[t][at] = sum_lanes(acc[t]);
}

// ---- 32-element blocks, Q8_0 and Q8_1 activations -------------------------------------------------------------

template <int TYPE> struct Unit32;

template <> struct Unit32<Q8_0> {
    static LEAN_INLINE __m256i chunk(const uint8_t* p) { return load256(p + 2); }
};

template <> struct Unit32<Q4_0> {
    static LEAN_INLINE __m256i chunk(const uint8_t* p) { return _mm256_sub_epi8(nibbles(p + 2), bytes256(8)); }
};

template <> struct Unit32<Q4_1> {
    static LEAN_INLINE __m256i chunk(const uint8_t* p) { return nibbles(p + 4); }
};

// All ones in the bytes whose bit is set.
LEAN_INLINE __m256i spread_bits(const uint8_t* p) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(load_u32(p)));
    const __m256i byte = _mm256_shuffle_epi8(all, _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202,
                                                                    0x0101010101010101, 0));
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    return _mm256_cmpeq_epi8(_mm256_and_si256(byte, bit), bit);
}

template <> struct Unit32<Q5_0> {
    static LEAN_INLINE __m256i chunk(const uint8_t* p) {
        return _mm256_or_si256(nibbles(p + 6), _mm256_andnot_si256(spread_bits(p + 2), bytes256(0xf0)));
    }
};

template <> struct Unit32<Q5_1> {
    static LEAN_INLINE __m256i chunk(const uint8_t* p) {
        return _mm256_or_si256(nibbles(p + 8), _mm256_and_si256(spread_bits(p + 4), bytes256(16)));
    }
};

template <> struct Unit32<IQ4_NL> {
    static LEAN_INLINE __m256i chunk(const uint8_t* p) { return lookup(IQ4_VALUES, nibbles(p + 2)); }
};

template <> struct Unit32<MXFP4> {
    static LEAN_INLINE __m256i chunk(const uint8_t* p) { return lookup(FP4_VALUES, nibbles(p + 1)); }
};

template <int TYPE> LEAN_INLINE float scale_32(const uint8_t* p) {
    if (TYPE == MXFP4) return bits_float(p[0] < 2 ? 0x00200000u << p[0] : static_cast<uint32_t>(p[0] - 1) << 23);
    return half_float(p);
}

template <int TYPE, int N>
LEAN_INLINE void row_32(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    __m256 acc[N];
    float minimum[N];
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
        acc[t] = _mm256_setzero_ps();
        minimum[t] = 0;
    }
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t b = 0; b < cols / 32; ++b, w += Block<TYPE>::bytes) {
        prefetch<Block<TYPE>::bytes>(w);
        const __m256i q = Unit32<TYPE>::chunk(w);
        const __m256i size = Block<TYPE>::has_min ? q : _mm256_abs_epi8(q);
        const float d = scale_32<TYPE>(w), m = Block<TYPE>::has_min ? half_float(w + 2) : 0;
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) {
            const ActGroup& group = groups_of(act[t])[b / 8];
            __m256i x = load256(group.q + b % 8 * 32);
            if (!Block<TYPE>::has_min) x = _mm256_sign_epi8(x, q);
            const __m256i dot = _mm256_madd_epi16(ones, _mm256_maddubs_epi16(size, x));
            acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(d * group.d[b % 8]), acc[t]);
            if (Block<TYPE>::has_min) minimum[t] += m * group.s[b % 8];
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) out[t][at] = sum_lanes(acc[t]) + minimum[t];
}

// ---- floats -----------------------------------------------------------------------------------------------

template <int TYPE> LEAN_INLINE __m256 floats8(const uint8_t* p) {
    if (TYPE == F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    if (TYPE == F16) return _mm256_cvtph_ps(load128(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}

template <int TYPE, int N>
LEAN_INLINE void add_floats(const uint8_t* p, const uint8_t* const* act, int64_t i, __m256 (*acc)[N]) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
        const __m256 v = floats8<TYPE>(p + (TYPE == F32 ? 32 : 16) * part);
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) {
            const float* x = reinterpret_cast<const float*>(act[t]) + i + 8 * part;
            acc[part][t] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x), acc[part][t]);
        }
    }
}

template <int TYPE, int N>
LEAN_INLINE void row_float(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    constexpr int64_t size = TYPE == F32 ? 4 : 2;
    __m256 acc[2][N];
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= cols; i += 16) {
        prefetch<16 * size>(w + i * size);
        add_floats<TYPE, N>(w + i * size, act, i, acc);
    }
    if (i < cols) {
        uint8_t last[16 * size] = {};
        memcpy(last, w + i * size, static_cast<size_t>((cols - i) * size));
        add_floats<TYPE, N>(last, act, i, acc);
    }
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) out[t][at] = sum_lanes(_mm256_add_ps(acc[0][t], acc[1][t]));
}

// ---- tables -----------------------------------------------------------------------------------------------

struct Unit {
    template <int TYPE, int N>
    static LEAN_INLINE void row(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
        if constexpr (TYPE == F32 || TYPE == F16 || TYPE == BF16)
            row_float<TYPE, N>(w, cols, act, out, at);
        else if constexpr (Block<TYPE>::size == 256)
            row_256<TYPE, N>(w, cols, act, out, at);
        else
            row_32<TYPE, N>(w, cols, act, out, at);
    }
};

constexpr Kernel KERNELS[] = {
    {F32, CANONICAL, ACT_F32, 1, dot<Unit, WIDE, F32>},
    {F16, CANONICAL, ACT_F16, 1, dot<Unit, WIDE, F16>},
    {BF16, CANONICAL, ACT_BF16, 1, dot<Unit, WIDE, BF16>},
    {Q4_0, CANONICAL, ACT_Q8_0, 1, dot<Unit, WIDE, Q4_0>},
    {Q4_1, CANONICAL, ACT_Q8_1, 1, dot<Unit, WIDE, Q4_1>},
    {Q5_0, CANONICAL, ACT_Q8_0, 1, dot<Unit, WIDE, Q5_0>},
    {Q5_1, CANONICAL, ACT_Q8_1, 1, dot<Unit, WIDE, Q5_1>},
    {Q8_0, CANONICAL, ACT_Q8_0, 1, dot<Unit, WIDE, Q8_0>},
    {IQ4_NL, CANONICAL, ACT_Q8_0, 1, dot<Unit, WIDE, IQ4_NL>},
    {MXFP4, CANONICAL, ACT_Q8_0, 1, dot<Unit, WIDE, MXFP4>},
    {Q2_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, WIDE, Q2_K>},
    {Q3_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, WIDE, Q3_K>},
    {Q4_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, WIDE, Q4_K>},
    {Q5_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, WIDE, Q5_K>},
    {Q6_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, WIDE, Q6_K>},
    {IQ4_XS, CANONICAL, ACT_Q8_K, 1, dot<Unit, WIDE, IQ4_XS>},
};

using DeltaVector = float __attribute__((vector_size(32)));

struct AttendUnit {
    using V = __m256;
    static constexpr int64_t LANES = 8;
    static LEAN_INLINE V at(const float* p) { return _mm256_loadu_ps(p); }
    static LEAN_INLINE V at(const uint16_t* p) { return _mm256_cvtph_ps(load128(p)); }
    static LEAN_INLINE void put(V x, uint16_t* p) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static LEAN_INLINE void put(V x, float* p) { _mm256_storeu_ps(p, x); }
    static LEAN_INLINE V all(float x) { return _mm256_set1_ps(x); }
    static LEAN_INLINE V most(V a, V b) { return _mm256_max_ps(a, b); }
    static LEAN_INLINE V times_power(V x, V shifted) {
        const __m256i power = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
        return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
    }
    static LEAN_INLINE float highest(V x) {
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
    static LEAN_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static LEAN_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
    template <int N> static LEAN_INLINE void sums(const V (&acc)[N], float* out) {
        if constexpr (N % 4 == 0) {
            for (int n = 0; n < N; n += 4) {
                const __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(acc[n], acc[n + 1]),
                                                   _mm256_hadd_ps(acc[n + 2], acc[n + 3]));
                _mm_storeu_ps(out + n, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
            }
        } else {
            for (int n = 0; n < N; ++n) {
                const __m256 two = _mm256_hadd_ps(acc[n], acc[n]), one = _mm256_hadd_ps(two, two);
                out[n] = _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1)));
            }
        }
    }
};

constexpr KernelTable TABLE = {
    "avx2",
    {copy_floats<ACT_F32>, copy_floats<ACT_F16>, copy_floats<ACT_BF16>, quantize_q8_k, quantize_q8_32<0>,
     quantize_q8_32<0>},
    KERNELS,
    sizeof(KERNELS) / sizeof(KERNELS[0]),
    arrange_strip,
    glu,
    add_weighted,
    ENCODERS,
    ENCODER_COUNT,
    convolve,
    delta<DeltaVector, 4>,
    attend<AttendUnit>,
    store_chunk<AttendUnit>,
    attend_chunk<AttendUnit, arrange_strip>,
};

}  // namespace

const KernelTable& avx2_table() { return TABLE; }

}  // namespace lean
