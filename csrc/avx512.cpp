// The unit for AVX-512 with VNNI. Weights are unpacked into registers once and multiplied with up to eight tokens
// (sixteen, where rows are interleaved), so decoding and prefill run the same additions in the same order.
#include "attend_chunk16.h"
#include "delta.h"
#include "encode.h"
#include "floats512.h"
#include "quantize512.h"
#include "rows16.h"
#include "x512.h"

namespace lean {
namespace {

// Q8_0 and Q8_1 activations are stored with 128 added: they are the unsigned operand of the dot product, which
// lets the weights be signed.
constexpr int BIAS = 128;

LEAN_INLINE __m512i twice(const void* p) { return _mm512_broadcast_i64x4(load256(p)); }

// Shift counts: the lower and the upper 256 bits, or each 128 bits, have their own.
LEAN_INLINE __m512i halves(int a, int b) {
    return _mm512_set_epi32(b, b, b, b, b, b, b, b, a, a, a, a, a, a, a, a);
}
LEAN_INLINE __m512i nibble_counts() { return _mm512_set_epi32(4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0); }

LEAN_INLINE __m512 scale512(const uint8_t* p) { return _mm512_set1_ps(half_float(p)); }

LEAN_INLINE const float* group_scales(const uint8_t* act, int64_t groups) {
    return reinterpret_cast<const float*>(act + groups * static_cast<int64_t>(sizeof(ActGroup)));
}

// ---- 256-element blocks, Q8_K activations -------------------------------------------------------------------

struct Weights256 {
    __m512i w[4];      // unsigned bytes in element order
    __m512i scale[2];  // int16, arranged as packs() leaves the dot products of w[0], w[1] and of w[2], w[3]
    __m256i offset;    // int16 per 16 elements: what a byte's zero point adds, times the scale, negated
    __m512 d;
    __m256i min;       // int16 per 16 elements
    __m512 dmin;
};

// packs() of two dot products: each 128 bits hold four sums of the first, then four of the second.
template <int RUN> LEAN_INLINE void arrange_scales(__m256i scale16, Weights256& u) {
    const __m512i wide = _mm512_zextsi256_si512(scale16);
    constexpr int S = RUN / 16;  // scales are numbered by runs of RUN elements; a quarter register is 16
#define LEAN_QUARTER(p, l) (p * 8 + 4 + l) / S * 0x00010001, (p * 8 + 4 + l) / S * 0x00010001, \
                           (p * 8 + l) / S * 0x00010001, (p * 8 + l) / S * 0x00010001
    u.scale[0] = _mm512_permutexvar_epi16(
        _mm512_set_epi32(LEAN_QUARTER(0, 3), LEAN_QUARTER(0, 2), LEAN_QUARTER(0, 1), LEAN_QUARTER(0, 0)), wide);
    u.scale[1] = _mm512_permutexvar_epi16(
        _mm512_set_epi32(LEAN_QUARTER(1, 3), LEAN_QUARTER(1, 2), LEAN_QUARTER(1, 1), LEAN_QUARTER(1, 0)), wide);
#undef LEAN_QUARTER
}

enum Extra { NONE, OFFSET, MIN };

template <Extra EXTRA>
LEAN_INLINE __m512 step_256(const Weights256& u, const ActGroup* group, const float* act_scale, __m512 acc) {
    const __m512i zero = _mm512_setzero_si512();
    __m512i sum = zero;
    if (EXTRA == OFFSET)
        sum = _mm512_zextsi256_si512(_mm256_dpwssd_epi32(_mm256_setzero_si256(), u.offset, load256(group->sums)));
    const __m512i a = _mm512_packs_epi32(_mm512_dpbusd_epi32(zero, u.w[0], load512(group->q)),
                                         _mm512_dpbusd_epi32(zero, u.w[1], load512(group->q + 64)));
    const __m512i b = _mm512_packs_epi32(_mm512_dpbusd_epi32(zero, u.w[2], load512(group->q + 128)),
                                         _mm512_dpbusd_epi32(zero, u.w[3], load512(group->q + 192)));
    sum = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum, u.scale[0], a), u.scale[1], b);
    const __m512 d = _mm512_set1_ps(*act_scale);
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(u.d, d), acc);
    if (EXTRA == MIN) {
        const __m256i mins = _mm256_dpwssd_epi32(_mm256_setzero_si256(), u.min, load256(group->sums));
        acc = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(_mm512_zextsi256_si512(mins)), _mm512_mul_ps(u.dmin, d), acc);
    }
    return acc;
}

template <int TYPE> struct Unit256;

// d, dmin and twelve bytes of scales and minima, as Q4_K and Q5_K begin.
LEAN_INLINE void header_k4(const uint8_t* p, Weights256& u) {
    const __m128i both = scales_k4(p);
    arrange_scales<32>(_mm256_cvtepu8_epi16(both), u);
    const __m128 d = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(load_u32(p))));
    u.d = _mm512_broadcastss_ps(d);
    u.dmin = _mm512_broadcastss_ps(_mm_movehdup_ps(d));
    const __m128i minima = _mm_unpackhi_epi64(both, both);
    u.min = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(minima, minima));  // each for both halves of its 32 elements
}

template <> struct Unit256<Q4_K> {
    static constexpr int bytes = 144;
    static constexpr Extra extra = MIN;
    static LEAN_INLINE void load(const uint8_t* p, Weights256& u) {
        header_k4(p, u);
        const __m512i counts = halves(0, 4), mask = bytes512(15);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
            u.w[c] = _mm512_and_si512(_mm512_srlv_epi32(twice(p + 16 + 32 * c), counts), mask);
    }
};

template <> struct Unit256<Q5_K> {
    static constexpr int bytes = 176;
    static constexpr Extra extra = MIN;
    static LEAN_INLINE void load(const uint8_t* p, Weights256& u) {
        header_k4(p, u);
        const __m512i high = twice(p + 16), counts = halves(0, 4), mask = bytes512(15), bit = bytes512(16);
        const __m512i h[4] = {_mm512_sllv_epi32(high, halves(4, 3)), _mm512_sllv_epi32(high, halves(2, 1)),
                              _mm512_srlv_epi32(high, halves(0, 1)), _mm512_srlv_epi32(high, halves(2, 3))};
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
            u.w[c] = mask_or(_mm512_srlv_epi32(twice(p + 48 + 32 * c), counts), mask, _mm512_and_si512(h[c], bit));
    }
};

template <> struct Unit256<Q6_K> {
    static constexpr int bytes = 210;
    static constexpr Extra extra = OFFSET;
    static LEAN_INLINE void load(const uint8_t* p, Weights256& u) {
        const __m256i scale = _mm256_cvtepi8_epi16(load128(p + 192));
        arrange_scales<16>(scale, u);
        u.offset = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(scale, 5));
        u.d = scale512(p + 208);
        const __m512i mask = bytes512(15), high_mask = bytes512(0x30);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512i low = load512(p + 64 * half), high = twice(p + 128 + 32 * half);
            const __m512i h0 = _mm512_and_si512(_mm512_sllv_epi32(high, halves(4, 2)), high_mask);
            const __m512i h1 = _mm512_and_si512(_mm512_srlv_epi32(high, halves(0, 2)), high_mask);
            u.w[2 * half] = mask_or(low, mask, h0);
            u.w[2 * half + 1] = mask_or(_mm512_srli_epi32(low, 4), mask, h1);
        }
    }
};

template <> struct Unit256<Q3_K> {
    static constexpr int bytes = 110;
    static constexpr Extra extra = OFFSET;
    static LEAN_INLINE void load(const uint8_t* p, Weights256& u) {
        const __m256i scale = _mm256_cvtepi8_epi16(scales_q3(p));
        arrange_scales<16>(scale, u);
        u.offset = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(scale, 2));
        u.d = scale512(p + 108);
        const __m512i top = twice(p), mask = bytes512(3), bit = bytes512(4);
        const __m512i h[4] = {_mm512_sllv_epi32(top, halves(2, 1)), _mm512_srlv_epi32(top, halves(0, 1)),
                              _mm512_srlv_epi32(top, halves(2, 3)), _mm512_srlv_epi32(top, halves(4, 5))};
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m512i v = _mm512_srlv_epi32(twice(p + 32 + 32 * (c / 2)), c % 2 ? halves(4, 6) : halves(0, 2));
            u.w[c] = mask_or(v, mask, _mm512_and_si512(h[c], bit));
        }
    }
};

template <> struct Unit256<Q2_K> {
    static constexpr int bytes = 84;
    static constexpr Extra extra = MIN;
    static LEAN_INLINE void load(const uint8_t* p, Weights256& u) {
        const __m128i head = load128(p), mask4 = _mm_set1_epi8(15);
        arrange_scales<16>(_mm256_cvtepu8_epi16(_mm_and_si128(head, mask4)), u);
        u.min = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi32(head, 4), mask4));
        u.d = scale512(p + 80);
        u.dmin = scale512(p + 82);
        const __m512i mask = bytes512(3);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m512i v = _mm512_srlv_epi32(twice(p + 16 + 32 * (c / 2)), c % 2 ? halves(4, 6) : halves(0, 2));
            u.w[c] = _mm512_and_si512(v, mask);
        }
    }
};

template <int TYPE, int N>
LEAN_INLINE void row_256(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    using Unit = Unit256<TYPE>;
    const int64_t groups = cols / GROUP;
    const ActGroup* group[N];
    const float* scale[N];
    __m512 acc[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) {
        group[t] = reinterpret_cast<const ActGroup*>(act[t]);
        scale[t] = group_scales(act[t], groups);
        acc[t] = _mm512_setzero_ps();
    }
    for (int64_t g = 0; g < groups; ++g, w += Unit::bytes) {
        Weights256 u;
        prefetch<Unit::bytes>(w);
        Unit::load(w, u);
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) acc[t] = step_256<Unit::extra>(u, group[t] + g, scale[t] + g, acc[t]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) out[t][at] = sum_lanes(acc[t]);
}

// IQ4_XS: the values span a whole signed byte, so the dot products do not fit packs(); they are scaled as floats,
// which hold them exactly.
template <int N>
LEAN_INLINE void row_iq4_xs(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    const int64_t groups = cols / GROUP;
    __m512 acc[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) acc[t] = _mm512_setzero_ps();
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_xor_si128(load128(IQ4_VALUES), _mm_set1_epi8(static_cast<char>(0x80))));  // value + 128
    const __m512i pairs = _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0);
    for (int64_t g = 0; g < groups; ++g, w += 136) {
        prefetch<136>(w);
        const __m256i by_four = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0), by_two = _mm256_srli_epi32(by_four, 1);
        const __m256i low = _mm256_and_si256(
            _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(load_u32(w + 4))), by_four), _mm256_set1_epi32(15));
        const __m256i high = _mm256_and_si256(
            _mm256_srlv_epi32(_mm256_set1_epi32(load_u16(w + 2)), by_two), _mm256_set1_epi32(3));
        const __m256i scale = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
        const __m512 scales = _mm512_zextps256_ps512(_mm256_cvtepi32_ps(scale));
        const __m256i negated = _mm256_slli_epi32(_mm256_sub_epi32(_mm256_setzero_si256(), scale), 7);
        const __m256i offset = _mm256_or_si256(_mm256_and_si256(negated, _mm256_set1_epi32(0xffff)),
                                               _mm256_slli_epi32(negated, 16));
        const __m512 d = scale512(w);
        __m512i q[4];
        __m512 s[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m512i v = _mm512_permutexvar_epi64(pairs, _mm512_castsi256_si512(load256(w + 8 + 32 * c)));
            q[c] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srlv_epi32(v, nibble_counts()), bytes512(15)));
            s[c] = _mm512_permutexvar_ps(halves(2 * c, 2 * c + 1), scales);
        }
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) {
            const auto* group = reinterpret_cast<const ActGroup*>(act[t]) + g;
            __m512 sum = _mm512_cvtepi32_ps(_mm512_zextsi256_si512(
                _mm256_dpwssd_epi32(_mm256_setzero_si256(), offset, load256(group->sums))));
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) {
                const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q[c], load512(group->q + 64 * c));
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), s[c], sum);
            }
            const __m512 scale_t = _mm512_set1_ps(group_scales(act[t], groups)[g]);
            acc[t] = _mm512_fmadd_ps(sum, _mm512_mul_ps(d, scale_t), acc[t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) out[t][at] = sum_lanes(acc[t]);
}

// ---- 32-element blocks, Q8_0 and Q8_1 activations: eight blocks at a time -------------------------------------

struct Weights32 {
    __m512i w[4];     // signed bytes, two blocks each
    __m512i bias[4];  // what the bias of the activations adds, negated
    __m256 d;         // per block
    __m256 m;         // per block (Q4_1, Q5_1)
};

// Eight halves, `stride` bytes apart.
LEAN_INLINE __m256 halves8(const uint8_t* p, int stride) {
    const auto four = [stride](const uint8_t* at) {
        return static_cast<int64_t>(load_u16(at) | static_cast<uint64_t>(load_u16(at + stride)) << 16 |
                                    static_cast<uint64_t>(load_u16(at + 2 * stride)) << 32 |
                                    static_cast<uint64_t>(load_u16(at + 3 * stride)) << 48);
    };
    return _mm256_cvtph_ps(_mm_set_epi64x(four(p + 4 * stride), four(p)));
}

// The nibbles of two blocks whose 16 bytes begin at `a` and `b`.
LEAN_INLINE __m512i nibbles(const uint8_t* a, const uint8_t* b) {
    const __m512i both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load128(a)), 0xff00, load128(b));
    return _mm512_and_si512(_mm512_srlv_epi32(both, nibble_counts()), bytes512(15));
}

template <int TYPE> struct Unit32;

template <> struct Unit32<Q8_0> {
    static LEAN_INLINE void load(const uint8_t* p, Weights32& u) {
        u.d = halves8(p, 34);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
            u.w[c] = _mm512_inserti64x4(_mm512_castsi256_si512(load256(p + 68 * c + 2)), load256(p + 68 * c + 36), 1);
    }
};

template <> struct Unit32<Q4_0> {
    static LEAN_INLINE void load(const uint8_t* p, Weights32& u) {
        u.d = halves8(p, 18);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
            u.w[c] = _mm512_sub_epi8(nibbles(p + 36 * c + 2, p + 36 * c + 20), bytes512(8));
    }
};

template <> struct Unit32<Q4_1> {
    static LEAN_INLINE void load(const uint8_t* p, Weights32& u) {
        u.d = halves8(p, 20);
        u.m = halves8(p + 2, 20);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) u.w[c] = nibbles(p + 40 * c + 4, p + 40 * c + 24);
    }
};

LEAN_INLINE __mmask64 bits64(const uint8_t* a, const uint8_t* b) {
    return load_u32(a) | static_cast<uint64_t>(load_u32(b)) << 32;
}

template <> struct Unit32<Q5_0> {
    static LEAN_INLINE void load(const uint8_t* p, Weights32& u) {
        u.d = halves8(p, 22);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const uint8_t *a = p + 44 * c, *b = a + 22;
            const __m512i q = nibbles(a + 6, b + 6);
            u.w[c] = _mm512_mask_sub_epi8(q, ~bits64(a + 2, b + 2), q, bytes512(16));
        }
    }
};

template <> struct Unit32<Q5_1> {
    static LEAN_INLINE void load(const uint8_t* p, Weights32& u) {
        u.d = halves8(p, 24);
        u.m = halves8(p + 2, 24);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const uint8_t *a = p + 48 * c, *b = a + 24;
            const __m512i q = nibbles(a + 8, b + 8);
            u.w[c] = _mm512_mask_add_epi8(q, bits64(a + 4, b + 4), q, bytes512(16));
        }
    }
};

template <> struct Unit32<IQ4_NL> {
    static LEAN_INLINE void load(const uint8_t* p, Weights32& u) {
        u.d = halves8(p, 18);
        const __m512i table = _mm512_broadcast_i32x4(load128(IQ4_VALUES));
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
            u.w[c] = _mm512_shuffle_epi8(table, nibbles(p + 36 * c + 2, p + 36 * c + 20));
    }
};

template <> struct Unit32<MXFP4> {
    static LEAN_INLINE void load(const uint8_t* p, Weights32& u) {
        uint64_t packed = 0;
        for (int b = 0; b < 8; ++b) packed |= static_cast<uint64_t>(p[17 * b]) << 8 * b;
        const __m256i e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(packed)));
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        u.d = _mm256_castsi256_ps(
            _mm256_mask_blend_epi32(_mm256_cmplt_epu32_mask(e, _mm256_set1_epi32(2)), normal, tiny));
        const __m512i table = _mm512_broadcast_i32x4(load128(FP4_VALUES));
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
            u.w[c] = _mm512_shuffle_epi8(table, nibbles(p + 34 * c + 1, p + 34 * c + 18));
    }
};

template <int TYPE, int N>
LEAN_INLINE void group_32(const uint8_t* w, const uint8_t* const* act, int64_t g, __m512* acc) {
    Weights32 u;
    Unit32<TYPE>::load(w, u);
    const __m512i zero = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c)
        u.bias[c] = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, bytes512(BIAS), u.w[c]));
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) {
        const auto* group = reinterpret_cast<const ActGroup*>(act[t]) + g;
        const __m512 d = _mm512_zextps256_ps512(_mm256_mul_ps(u.d, _mm256_loadu_ps(group->d)));
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m512i dot = _mm512_dpbusd_epi32(u.bias[c], load512(group->q + 64 * c), u.w[c]);
            const __m512 scale = _mm512_permutexvar_ps(halves(2 * c, 2 * c + 1), d);
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, acc[t]);
        }
        if (Block<TYPE>::has_min)
            acc[t] = _mm512_fmadd_ps(_mm512_zextps256_ps512(u.m), _mm512_zextps256_ps512(_mm256_loadu_ps(group->s)),
                                     acc[t]);
    }
}

template <int TYPE, int N>
LEAN_INLINE void row_32(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    constexpr int64_t bytes = Block<TYPE>::bytes;
    const int64_t whole = cols / GROUP;
    __m512 acc[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) acc[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < whole; ++g) {
        prefetch<8 * bytes>(w + g * 8 * bytes);
        group_32<TYPE, N>(w + g * 8 * bytes, act, g, acc);
    }
    if (cols % GROUP != 0) {
        uint8_t last[8 * bytes] = {};
        memcpy(last, w + whole * 8 * bytes, static_cast<size_t>(cols % GROUP / 32 * bytes));
        group_32<TYPE, N>(last, act, whole, acc);
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) out[t][at] = sum_lanes(acc[t]);
}

// ---- tables -----------------------------------------------------------------------------------------------

struct Unit {
    template <int TYPE, int N>
    static LEAN_INLINE void row(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
        if constexpr (TYPE == F32 || TYPE == F16 || TYPE == BF16)
            rows_float<TYPE, 1, N>(w, cols, act, out, at);
        else if constexpr (TYPE == IQ4_XS)
            row_iq4_xs<N>(w, cols, act, out, at);
        else if constexpr (Block<TYPE>::size == 256)
            row_256<TYPE, N>(w, cols, act, out, at);
        else
            row_32<TYPE, N>(w, cols, act, out, at);
    }
};

// From three tokens on, four rows at once: a token's floats are loaded a quarter as often, and the sums fill the registers.
template <int TYPE>
void dot_floats(const uint8_t* w, int64_t rows, int64_t cols, const uint8_t* const* act, int n, float* const* out,
                int64_t at) {
    constexpr int64_t ROWS = 4;
    const int64_t together = n < 3 ? 0 : rows / ROWS * ROWS;
    for (int64_t r = 0; r < together; r += ROWS) {
        const uint8_t* four = w + r * row_bytes<TYPE>(cols);
        int t = 0;
        for (; n - t == 3 || n - t > 4; t += 3) rows_float<TYPE, ROWS, 3>(four, cols, act + t, out + t, at + r);
        for (; n - t >= 2; t += 2) rows_float<TYPE, ROWS, 2>(four, cols, act + t, out + t, at + r);
    }
    if (together < rows)
        dot<Unit, 8, TYPE>(w + together * row_bytes<TYPE>(cols), rows - together, cols, act, n, out, at + together);
}

constexpr Kernel KERNELS[] = {
    {F32, CANONICAL, ACT_F32, 1, dot_floats<F32>},
    {F16, CANONICAL, ACT_F16, 1, dot_floats<F16>},
    {BF16, CANONICAL, ACT_BF16, 1, dot_floats<BF16>},
    {Q4_0, CANONICAL, ACT_Q8_0, 1, dot<Unit, 8, Q4_0>},
    {Q4_1, CANONICAL, ACT_Q8_1, 1, dot<Unit, 8, Q4_1>},
    {Q5_0, CANONICAL, ACT_Q8_0, 1, dot<Unit, 8, Q5_0>},
    {Q5_1, CANONICAL, ACT_Q8_1, 1, dot<Unit, 8, Q5_1>},
    {Q8_0, CANONICAL, ACT_Q8_0, 1, dot<Unit, 8, Q8_0>},
    {IQ4_NL, CANONICAL, ACT_Q8_0, 1, dot<Unit, 8, IQ4_NL>},
    {MXFP4, CANONICAL, ACT_Q8_0, 1, dot<Unit, 8, MXFP4>},
    {Q2_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, 8, Q2_K>},
    {Q3_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, 8, Q3_K>},
    {Q4_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, 8, Q4_K>},
    {Q5_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, 8, Q5_K>},
    {Q6_K, CANONICAL, ACT_Q8_K, 1, dot<Unit, 8, Q6_K>},
    {IQ4_XS, CANONICAL, ACT_Q8_K, 1, dot<Unit, 8, IQ4_XS>},
    {Q4_0, ROWS16, ACT_Q8_0, 16, dot_rows16<Q4_0>},
    {Q4_1, ROWS16, ACT_Q8_1, 16, dot_rows16<Q4_1>},
    {Q5_0, ROWS16, ACT_Q8_0, 16, dot_rows16<Q5_0>},
    {Q5_1, ROWS16, ACT_Q8_1, 16, dot_rows16<Q5_1>},
    {Q8_0, ROWS16, ACT_Q8_0, 16, dot_rows16<Q8_0>},
    {IQ4_NL, ROWS16, ACT_Q8_0, 16, dot_rows16<IQ4_NL>},
    {MXFP4, ROWS16, ACT_Q8_0, 16, dot_rows16<MXFP4>},
    {Q4_K, ROWS16, ACT_Q8_K, 16, dot_rows16<Q4_K>},
    {Q5_K, ROWS16, ACT_Q8_K, 16, dot_rows16<Q5_K>},
    {Q6_K, ROWS16, ACT_Q8_K, 16, dot_rows16<Q6_K>},
};

static_assert(sizeof(KERNELS) / sizeof(KERNELS[0]) <= MOST_KERNELS);

using DeltaVector = float __attribute__((vector_size(64)));

constexpr KernelTable TABLE = {
    "avx512",
    {copy_floats<ACT_F32>, copy_f16, copy_floats<ACT_BF16>, quantize_q8_k_512, quantize_q8_32<BIAS>,
     quantize_q8_32<BIAS>},
    KERNELS,
    sizeof(KERNELS) / sizeof(KERNELS[0]),
    arrange_16x16,
    glu,
    add_weighted,
    ENCODERS,
    ENCODER_COUNT,
    convolve,
    delta<DeltaVector, 2>,
    attend<AttendUnit>,
    store_chunk<AttendUnit>,
    attend_chunk16,
};

}  // namespace

const KernelTable& avx512_table() { return TABLE; }

}  // namespace lean
