// Attention of a chunk with both products in 16-bit integers, of which AVX-512 VNNI multiplies twice as many as floats.
//
// A query and a key each become integers of their own unit, the smallest with which the product of two rows is sure to
// stay within 32 bits: it is the rows' lengths as vectors that say so, and what rounding costs is some 1e-5 of the product
// of both lengths, whatever the numbers are like. A value has a unit of its own too. Weights times the units of their
// values are rounded in a unit of the row and the block, such that they add up to no more than the mixed values may; the
// sums by which a row is divided in the end are those of weights not rounded.
//
// So a unit depends on one row, or on what one row sees in a block, and a row's bits depend on nothing more here either.
#pragma once
#include "attend512.h"
#include "attend_chunk.h"
#include "strips512.h"

namespace lean {
namespace {

// How long a row of integers is at most: the product of two is less than 2^31 (Cauchy and Schwarz) even if rounding makes
// both longer by half the root of ATTEND_MOST_DIM.
constexpr float LONGEST = 46320.0f;
constexpr float LARGEST = 32767.0f;
// A value, and the weights of a block together: their product is less than 2^31 even with half a unit for each weight.
// With a bit more for values and one less for weights, errors were up to twice as large where many keys weigh alike; with
// a bit less, in channels beside much larger ones.
constexpr float LARGEST_VALUE = 16383.0f, WEIGHTS_SUM = 131000.0f;
// A query of no larger numbers is zeros, as are weights that add up to no more.
constexpr float NOTHING = 1e-30f;
constexpr float LOG2_E = 1.44269504f;

// Numbers times `factor` are as many units of `unit`. A size that is not finite makes a unit of NaN, and so all results.
struct Unit16 {
    float unit, factor;
    explicit Unit16(float size) : unit(size + 0.0f * size), factor(size > 0 ? 1.0f / size : 0.0f * size) {}
};

LEAN_INLINE float larger(float a, float b) { return b > a ? b : a; }  // a NaN in `a` stays

// Integers of 16 bits in the lower halves of the lanes; the upper ones mean nothing.
LEAN_INLINE __m512i rounded(__m512 x, float factor) {
    return _mm512_castps_si512(_mm512_fmadd_ps(x, _mm512_set1_ps(factor), _mm512_set1_ps(ROUND_MAGIC)));
}
LEAN_INLINE void store16(__m512i x, void* to) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x));
}

// The largest magnitude of `n` halves, a multiple of sixteen.
LEAN_INLINE float largest_half(const uint16_t* x, int64_t n) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i high = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 16) high = _mm256_max_epu16(high, _mm256_and_si256(load256(x + i), magnitude));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    const int low = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))));
    return _cvtsh_ss(static_cast<uint16_t>(~low));
}

// Rounds a row times `scale`; its pairs of integers go to `to`, ROWS apart. Returns their unit.
inline float round_query(const float* from, int64_t dim, float scale, int32_t* to) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);  // a NaN has the largest of all
    const auto at = [=](int64_t d) LEAN_ALWAYS { return _mm512_mul_ps(_mm512_loadu_ps(from + d), _mm512_set1_ps(scale)); };
    __m512i high = _mm512_setzero_si512();
    for (int64_t d = 0; d < dim; d += 16)
        high = _mm512_max_epi32(high, _mm512_and_si512(_mm512_castps_si512(at(d)), magnitude));
    const float largest = bits_float(static_cast<uint32_t>(_mm512_reduce_max_epi32(high)));
    const bool nothing = largest < NOTHING;
    const __m512 share = _mm512_set1_ps(nothing ? 0.0f : 1.0f / largest);  // squares of small numbers would vanish
    __m512 squares = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 16) {
        const __m512 x = _mm512_mul_ps(at(d), share);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const float length = sqrtf(_mm512_reduce_add_ps(squares));
    const Unit16 by(nothing ? 1.0f : largest * larger(length * (1 / LONGEST), 1 / LARGEST));
    for (int64_t d = 0; d < dim; d += 16, to += 8 * ROWS) {
        alignas(32) int32_t pairs[8];
        store16(rounded(at(d), by.factor), pairs);
        for (int64_t i = 0; i < 8; ++i) to[i * ROWS] = pairs[i];
    }
    return by.unit;
}

inline float round_key(const uint16_t* from, int64_t dim, int16_t* to) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 16) {
        const __m512 x = AttendUnit::at(from + d);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const float length = sqrtf(_mm512_reduce_add_ps(squares));
    const Unit16 by(larger(length * (1 / LONGEST), largest_half(from, dim) * (1 / LARGEST)));
    for (int64_t d = 0; d < dim; d += 16) store16(rounded(AttendUnit::at(from + d), by.factor), to + d);
    return by.unit;
}

// As _mm512_dpwssd_epi32, with which GCC 12 keeps two dozen sums in memory, as it does in functions with more to do than
// one tile: 60 GMAC/s instead of 110.
LEAN_INLINE void add_pairs(__m512i& sum, __m512i a, __m512i b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// Calls put(n, c, sums) with the sums over `pairs` of pairs of integers: those of row n, which begin at a + n * ROW and lie
// STEP apart, times those of vector c, which begin at b + c * apart and lie `step` apart.
template <int C, int64_t ROW, int64_t STEP, class Put>
LEAN_INLINE void multiply_pairs(const int32_t* a, const int32_t* b, int64_t apart, int64_t step, int64_t pairs, Put put) {
    __m512i acc[ROWS][C];
#pragma GCC unroll 6
    for (int n = 0; n < ROWS; ++n)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[n][c] = _mm512_setzero_si512();
    for (int64_t i = 0; i < pairs; ++i, a += STEP, b += step) {
        __m512i v[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) v[c] = load512(b + c * apart);
#pragma GCC unroll 6
        for (int n = 0; n < ROWS; ++n) {
            const __m512i x = _mm512_set1_epi32(a[n * ROW]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) add_pairs(acc[n][c], v[c], x);
        }
    }
#pragma GCC unroll 6
    for (int n = 0; n < ROWS; ++n)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) put(n, c, _mm512_cvtepi32_ps(acc[n][c]));
}

// 2^x for x <= 0, a series of least relative error (9e-8) that is exactly 1 at 0; exactly zero from -126.5 down.
LEAN_INLINE __m512 power_of_two(__m512 x) {
    constexpr float MAGIC = ROUND_MAGIC + 127;  // its sum with n has the bits of 2^n in their place
    constexpr float SERIES[] = {0.009671513f, 0.055507336f, 0.24022242f, 0.693147f, 1.0f};
    x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);  // a NaN stays one
    const __m512 shifted = _mm512_add_ps(x, _mm512_set1_ps(MAGIC));
    const __m512 r = _mm512_sub_ps(x, _mm512_sub_ps(shifted, _mm512_set1_ps(MAGIC)));
    __m512 p = _mm512_set1_ps(0.0013264726f);
#pragma GCC unroll 5
    for (const float term : SERIES) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
    return _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// The floats that Chunk16 works in: fewer than there are, for one tile of the shortest rows, and each more adds fewer.
constexpr int64_t chunk16_scratch(int64_t rows, int64_t dim) {
    return CHUNK_KEYS * (dim + 2) + rows * (dim + dim / 2 + CHUNK_KEYS + LANES16 + 6);
}
static_assert(chunk16_scratch(CHUNK_TILE, ATTEND_DIM) <= chunk_scratch(CHUNK_TILE, ATTEND_DIM));

struct Chunk16 : ChunkTask {
    static constexpr int WIDE = 4;
    static constexpr int64_t VECTOR = 16, VECTORS = CHUNK_KEYS / VECTOR;
    int16_t* keys;     // [CHUNK_KEYS / 16][dim / 2][16][2]: of one block
    int16_t* values;   // [CHUNK_KEYS / 2][dim][2]
    float *key_units, *value_units;  // [CHUNK_KEYS]
    int32_t* q;        // [tiles][dim / 2][ROWS] pairs, times the scale
    float* q_units;    // [rows], never zero: times log2(e), so that scores times these are exponents of two
    float* mix_units;  // [rows]: of a block's weights times its values
    // A block's scores lack the queries' units. Weights take the first half of the place that their row's scores had.

    Chunk16(const ChunkCall& c, int64_t head, int64_t first, int64_t last, float* scratch)
        : ChunkTask(c, head, first, last) {
        const int64_t dim = c.dim, rows = padded();
        keys = reinterpret_cast<int16_t*>(scratch);
        values = keys + CHUNK_KEYS * dim;
        q = reinterpret_cast<int32_t*>(values + CHUNK_KEYS * dim);
        key_units = reinterpret_cast<float*>(q + rows * dim / 2);
        value_units = key_units + CHUNK_KEYS;
        q_units = start(value_units + CHUNK_KEYS, LOG2_E);
        mix_units = q_units + rows;
        for (int64_t i = 0; i < rows; ++i)
            q_units[i] = round_query(query(i), dim, c.scale, q + i / ROWS * ROWS * dim / 2 + i % ROWS) * LOG2_E;
    }

    LEAN_APART void unpack(int64_t block, int64_t count) {
        const int64_t dim = call.dim;
        const StripFormat words = {static_cast<int32_t>(dim / 2), 0, false};
        int16_t* rows = values;  // not in use yet
        for (int64_t key = 0; key < count; key += LANES16) {
            const uint16_t* from = attend_rows<uint16_t>(call.keys, call, kv_head, block + key);
            for (int64_t k = 0; k < LANES16; ++k)
                if (key + k < count) {
                    key_units[key + k] = round_key(from + k * dim, dim, rows + k * dim);
                } else {
                    key_units[key + k] = 0.0f;
                    memset(rows + k * dim, 0, static_cast<size_t>(dim) * sizeof(int16_t));
                }
            arrange_16x16(words, 1, reinterpret_cast<const uint8_t*>(rows),
                          reinterpret_cast<uint8_t*>(keys + key * dim));
        }
        const uint16_t* from = attend_rows<uint16_t>(call.values, call, kv_head, block);
        for (int64_t k = 0; k < CHUNK_KEYS; ++k) value_units[k] = 0.0f;
        for (int64_t k = 0; k < count; k += 2) {
            const bool two = k + 1 < count;
            const uint16_t *even = from + k * dim, *odd = two ? even + dim : even;
            const Unit16 e(largest_half(even, dim) * (1 / LARGEST_VALUE));
            const Unit16 o(two ? largest_half(odd, dim) * (1 / LARGEST_VALUE) : 0.0f);
            value_units[k] = e.unit;
            value_units[k + 1] = o.unit;
            for (int64_t d = 0; d < dim; d += VECTOR) {
                const __m512i low = rounded(AttendUnit::at(even + d), e.factor);
                const __m512i high = rounded(AttendUnit::at(odd + d), o.factor);
                _mm512_storeu_si512(values + k * dim + 2 * d,
                                    _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16)));
            }
        }
    }

    void score(int64_t i, int64_t block, int64_t count) {
        const int64_t needed = (seen(i, block, count) + VECTOR - 1) / VECTOR * VECTOR;
        by_vectors<WIDE, VECTOR>(needed, [&](auto c, int64_t key) { score_tile<c.value>(i, key); });
        hide(i, block);
        weigh(i);
    }

    template <int C> LEAN_APART void score_tile(int64_t i, int64_t key) {
        const int64_t pairs = call.dim / 2;
        const float* units = key_units + key;
        float* to = scores + i * CHUNK_KEYS + key;
        const auto put = [=](int n, int c, __m512 sums) LEAN_ALWAYS {
            const __m512 unit = _mm512_loadu_ps(units + c * VECTOR);
            _mm512_storeu_ps(to + n * CHUNK_KEYS + c * VECTOR, _mm512_mul_ps(sums, unit));
        };
        multiply_pairs<C, 1, ROWS>(q + i * pairs, reinterpret_cast<const int32_t*>(keys) + key * pairs, VECTOR * pairs,
                                   VECTOR, pairs, put);
    }

    // The scores of a tile become 2^(score - most) times the unit of the key's value, as integers.
    LEAN_APART void weigh(int64_t i) {
        constexpr __mmask8 ALL = (1 << ROWS) - 1;
        const auto greater = [](__m512 a, __m512 b) LEAN_ALWAYS { return _mm512_max_ps(a, b); };
        const auto plus = [](__m512 a, __m512 b) LEAN_ALWAYS { return _mm512_add_ps(a, b); };
        float* row = scores + i * CHUNK_KEYS;
        __m512 high[8], total[8];
        for (int n = 0; n < 8; ++n) {
            const float* from = row + (n < ROWS ? n : 0) * CHUNK_KEYS;
            high[n] = greater(greater(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)),
                              greater(_mm512_loadu_ps(from + 32), _mm512_loadu_ps(from + 48)));
        }
        const __m256 before = _mm256_maskz_loadu_ps(ALL, most + i);
        const __m256 units = _mm256_maskz_loadu_ps(ALL, q_units + i);
        const __m256 top = _mm256_max_ps(_mm256_mul_ps(over_lanes(high, greater), units), before);
        const __m512 drop = _mm512_castps256_ps512(_mm256_sub_ps(before, top));
        _mm256_mask_storeu_ps(most + i, ALL, top);
        _mm256_mask_storeu_ps(fade + i, ALL, _mm512_castps512_ps256(power_of_two(drop)));
        for (int n = 0; n < ROWS; ++n) {
            float *from = row + n * CHUNK_KEYS, *sum = sums + (i + n) * LANES16;
            const __m512 most_n = _mm512_set1_ps(most[i + n]), unit_n = _mm512_set1_ps(q_units[i + n]);
            __m512 weight[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {  // a fused product could exceed `most`, itself rounded, by a lot
                const __m512 score = _mm512_mul_ps(_mm512_loadu_ps(from + v * VECTOR), unit_n);
                weight[v] = power_of_two(_mm512_sub_ps(score, most_n));
            }
            const __m512 faded = _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(fade[i + n]));
            _mm512_storeu_ps(sum, plus(plus(plus(weight[0], weight[1]), plus(weight[2], weight[3])), faded));
            for (int v = 0; v < VECTORS; ++v) {
                weight[v] = _mm512_mul_ps(weight[v], _mm512_loadu_ps(value_units + v * VECTOR));
                _mm512_storeu_ps(from + v * VECTOR, weight[v]);
            }
            total[n] = plus(plus(weight[0], weight[1]), plus(weight[2], weight[3]));
        }
        for (int n = ROWS; n < 8; ++n) total[n] = total[0];
        // The largest sum of four is no less than the largest weight, and as good a bound.
        const __m256 sum = over_lanes(total, plus), largest = over_lanes(total, greater);
        const __m256 unit = _mm256_max_ps(_mm256_mul_ps(largest, _mm256_set1_ps(1 / LARGEST)),
                                          _mm256_mul_ps(sum, _mm256_set1_ps(1 / WEIGHTS_SUM)));  // a NaN stays one
        const __mmask8 some = _mm256_cmp_ps_mask(sum, _mm256_set1_ps(NOTHING), _CMP_NLT_UQ);
        alignas(32) float factor[8];
        _mm256_store_ps(factor, _mm256_maskz_div_ps(some, _mm256_set1_ps(1.0f), unit));
        _mm256_mask_storeu_ps(mix_units + i, ALL, _mm256_maskz_mov_ps(some, unit));
        for (int n = 0; n < ROWS; ++n) {
            float* from = row + n * CHUNK_KEYS;
            auto* to = reinterpret_cast<int16_t*>(from);
            for (int v = 0; v < VECTORS; ++v)
                store16(rounded(_mm512_loadu_ps(from + v * VECTOR), factor[n]), to + v * VECTOR);
        }
    }

    void mix(int64_t i, int64_t block, int64_t count) {
        const int64_t pairs = (seen(i, block, count) + 1) / 2;
        by_vectors<WIDE, VECTOR>(call.dim, [&](auto c, int64_t d) { mix_tile<c.value>(i, pairs, d); });
    }

    template <int C> LEAN_APART void mix_tile(int64_t i, int64_t pairs, int64_t first) {
        const int64_t dim = call.dim;
        const float *unit = mix_units + i, *keep = fade + i;
        float* to = mixed + i * dim + first;
        const auto put = [=](int n, int c, __m512 sums) LEAN_ALWAYS {
            float* at = to + n * dim + c * VECTOR;
            const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(keep[n]));
            _mm512_storeu_ps(at, _mm512_fmadd_ps(sums, _mm512_set1_ps(unit[n]), kept));
        };
        multiply_pairs<C, CHUNK_KEYS, 1>(reinterpret_cast<const int32_t*>(scores) + i * CHUNK_KEYS,
                                         reinterpret_cast<const int32_t*>(values) + first, VECTOR, dim, pairs, put);
    }
};

// Who keeps keys and values as floats is given products of floats.
inline void attend_chunk16(const ChunkCall& call, int64_t kv_head, int64_t begin, int64_t end, float* scratch) {
    if (call.halves)
        attend_task(Chunk16(call, kv_head, begin, end, scratch));
    else
        attend_task(FloatChunk<AttendUnit, float, arrange_16x16>(call, kv_head, begin, end, scratch));
}

}  // namespace
}  // namespace lean
