// Floats to quantised blocks. Plain vector arithmetic without contraction, eight lanes whatever the processor has:
// each unit compiles it with its own instruction set, and all of them write the same bytes.
//
// Types with one scale for 32 elements are rounded straight. For the types with 256 elements the scale (and the
// minimum) of each group is searched: rounding with each of a number of candidates leaves integers, for which the
// weighted least-squares scale is exact; the best pair is kept. Large elements weigh more, as they do in products.
#pragma once
#include "quantize.h"

namespace lean {
namespace {

typedef float F8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t I8 __attribute__((vector_size(32), aligned(4), may_alias));

inline F8 load8(const float* p) { return *reinterpret_cast<const F8*>(p); }
inline void store8(float* p, F8 v) { *reinterpret_cast<F8*>(p) = v; }
inline F8 all8(float x) { return F8{x, x, x, x, x, x, x, x}; }
inline F8 smaller(F8 a, F8 b) { return a < b ? a : b; }
inline F8 larger(F8 a, F8 b) { return a > b ? a : b; }
inline F8 magnitude(F8 v) { return (F8)((I8)v & 0x7fffffff); }
inline float total(F8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// Rounded to nearest and held within [low, high], which lies within the reach of the rounding.
inline F8 to_level(F8 v, float low, float high) {
    const F8 held = larger(smaller(v, all8(high)), all8(low));
    return (held + all8(ROUND_MAGIC)) - all8(ROUND_MAGIC);
}

inline uint8_t level(float v) { return static_cast<uint8_t>(static_cast<int32_t>(v)); }

inline void put_half(uint8_t* p, uint16_t h) {
    p[0] = static_cast<uint8_t>(h);
    p[1] = static_cast<uint8_t>(h >> 8);
}

// Stores `value` as half and returns what was stored.
inline float put_half(uint8_t* p, float value) {
    const uint16_t half = float_to_half(value);
    put_half(p, half);
    return half_to_float(half);
}

inline float safe_inverse(float x) { return x != 0.0f ? 1.0f / x : 0.0f; }

struct Extent {
    float low, high;
};

template <int N> Extent extent(const float* x) {
    F8 low = load8(x), high = low;
    for (int i = 8; i < N; i += 8) {
        low = smaller(low, load8(x + i));
        high = larger(high, load8(x + i));
    }
    Extent e{low[0], high[0]};
    for (int i = 1; i < 8; ++i) {
        e.low = low[i] < e.low ? low[i] : e.low;
        e.high = high[i] > e.high ? high[i] : e.high;
    }
    return e;
}

// ---- one scale for 32 elements --------------------------------------------------------------------------------

void encode_q8_0(const float* x, int64_t cols, uint8_t* out) {
    for (int64_t b = 0; b < cols / 32; ++b, x += 32, out += 34) {
        const float d = bits_float(max_abs_bits(x, 32)) / 127.0f, factor = safe_inverse(d);
        put_half(out, d);
        round_to_int8(x, 32, factor, 0, out + 2);
    }
}

// `BITS` wide signed levels around zero: the element furthest from it gets the lowest level. Q4_0, Q5_0.
template <int BITS> void encode_centred(const float* x, int64_t cols, uint8_t* out) {
    constexpr int HALF = 1 << (BITS - 1), BYTES = BITS == 4 ? 18 : 22;
    for (int64_t b = 0; b < cols / 32; ++b, x += 32, out += BYTES) {
        const Extent e = extent<32>(x);
        const float d = (-e.low > e.high ? e.low : e.high) / -static_cast<float>(HALF), factor = safe_inverse(d);
        put_half(out, d);
        uint8_t* low_bits = out + BYTES - 16;
        uint32_t high_bits = 0;
        float q[32];
        for (int i = 0; i < 32; i += 8)
            store8(q + i, to_level(load8(x + i) * all8(factor) + all8(HALF), 0, 2 * HALF - 1));
        for (int i = 0; i < 16; ++i) {
            const uint8_t a = level(q[i]), c = level(q[i + 16]);
            low_bits[i] = static_cast<uint8_t>((a & 15) | (c & 15) << 4);
            high_bits |= static_cast<uint32_t>(a >> 4) << i | static_cast<uint32_t>(c >> 4) << (i + 16);
        }
        if (BITS == 5) memcpy(out + 2, &high_bits, 4);
    }
}

// `BITS` wide levels from the smallest element up. Q4_1, Q5_1.
template <int BITS> void encode_from_minimum(const float* x, int64_t cols, uint8_t* out) {
    constexpr int TOP = (1 << BITS) - 1, BYTES = BITS == 4 ? 20 : 24;
    for (int64_t b = 0; b < cols / 32; ++b, x += 32, out += BYTES) {
        const Extent e = extent<32>(x);
        const float d = (e.high - e.low) / static_cast<float>(TOP), factor = safe_inverse(d);
        put_half(out, d);
        put_half(out + 2, e.low);
        uint8_t* low_bits = out + BYTES - 16;
        uint32_t high_bits = 0;
        float q[32];
        for (int i = 0; i < 32; i += 8)
            store8(q + i, to_level((load8(x + i) - all8(e.low)) * all8(factor), 0, TOP));
        for (int i = 0; i < 16; ++i) {
            const uint8_t a = level(q[i]), c = level(q[i + 16]);
            low_bits[i] = static_cast<uint8_t>((a & 15) | (c & 15) << 4);
            high_bits |= static_cast<uint32_t>(a >> 4) << i | static_cast<uint32_t>(c >> 4) << (i + 16);
        }
        if (BITS == 5) memcpy(out + 4, &high_bits, 4);
    }
}

// ---- groups of 32 with a scale and a minimum: Q4_K, Q5_K ----------------------------------------------------------

struct Affine {
    float scale, minimum;  // value = scale * level - minimum, both not negative
};

// 32 elements and what each weighs.
struct Weighted {
    F8 v[4], w[4];

    explicit Weighted(const float* x) {
        F8 squares = all8(0);
        for (int k = 0; k < 4; ++k) {
            v[k] = load8(x + 8 * k);
            squares += v[k] * v[k];
        }
        const float spread = __builtin_sqrtf(total(squares) / 32.0f);
        for (int k = 0; k < 4; ++k) w[k] = all8(spread) + magnitude(v[k]);
    }

    // The error that the nearest levels 0..top leave.
    float error(float scale, float minimum, float top) const {
        const F8 factor = all8(safe_inverse(scale));
        F8 squared = all8(0);
        for (int k = 0; k < 4; ++k) {
            const F8 q = to_level((v[k] + all8(minimum)) * factor, 0, top);
            const F8 miss = q * all8(scale) - all8(minimum) - v[k];
            squared += w[k] * miss * miss;
        }
        return total(squared);
    }
};

// The best scale and minimum of 32 elements for levels 0..TOP.
template <int TOP> Affine fit_affine(const float* x) {
    const Extent e = extent<32>(x);
    const float low = e.low < 0 ? e.low : 0.0f;
    if (!(e.high > low)) return {0.0f, -low};
    const Weighted of(x);
    const F8 *v = of.v, *w = of.w;
    F8 sw = all8(0), sx = all8(0);
    for (int k = 0; k < 4; ++k) {
        sw += w[k];
        sx += w[k] * v[k];
    }
    const double sum_w = total(sw), sum_x = total(sx);
    Affine best{(e.high - low) / TOP, -low};
    float least_error = 0x1p126f;
    for (int step = -10; step <= 10; ++step) {
        const F8 factor = all8((static_cast<float>(TOP) + 0.1f * static_cast<float>(step)) / (e.high - low));
        F8 q[4], sq = all8(0), sqq = all8(0), sxq = all8(0);
        for (int k = 0; k < 4; ++k) {
            q[k] = to_level((v[k] - all8(low)) * factor, 0, TOP);
            const F8 wq = w[k] * q[k];
            sq += wq;
            sqq += wq * q[k];
            sxq += wq * v[k];
        }
        const double sum_q = total(sq), sum_qq = total(sqq), sum_xq = total(sxq);
        const double determinant = sum_w * sum_qq - sum_q * sum_q;
        if (!(determinant > 0)) continue;
        double scale = (sum_w * sum_xq - sum_q * sum_x) / determinant;
        double minimum = (sum_q * sum_xq - sum_qq * sum_x) / determinant;
        if (minimum < 0) {
            minimum = 0;
            scale = sum_xq / sum_qq;
        }
        if (!(scale > 0)) continue;
        F8 squared = all8(0);
        for (int k = 0; k < 4; ++k) {
            const F8 miss = q[k] * all8(static_cast<float>(scale)) - all8(static_cast<float>(minimum)) - v[k];
            squared += w[k] * miss * miss;
        }
        const float error = total(squared);
        if (error < least_error) {
            least_error = error;
            best = {static_cast<float>(scale), static_cast<float>(minimum)};
        }
    }
    return best;
}

// The best of the whole numbers around `start`, which are to be multiplied by d and dmin: rounding both to six bits
// moved them from where they were best together.
template <int TOP> Affine nearby(const float* x, float d, float dmin, Affine start) {
    const Weighted of(x);
    Affine best = start;
    float least = of.error(d * start.scale, dmin * start.minimum, TOP);
    for (int i = -1; i <= 1; ++i)
        for (int j = -1; j <= 1; ++j) {
            const float scale = start.scale + static_cast<float>(i), minimum = start.minimum + static_cast<float>(j);
            if ((i == 0 && j == 0) || scale < 1 || scale > 63 || minimum < 0 || minimum > 63) continue;
            const float error = of.error(d * scale, dmin * minimum, TOP);
            if (error < least) {
                least = error;
                best = {scale, minimum};
            }
        }
    return best;
}

// Scales and minima, six bits each, in the twelve bytes of Q4_K and Q5_K.
inline void put_scales_k4(uint8_t* p, const uint8_t* scale, const uint8_t* minimum) {
    for (int j = 0; j < 4; ++j) {
        p[j] = static_cast<uint8_t>(scale[j] | (scale[j + 4] >> 4) << 6);
        p[j + 4] = static_cast<uint8_t>(minimum[j] | (minimum[j + 4] >> 4) << 6);
        p[j + 8] = static_cast<uint8_t>((scale[j + 4] & 15) | (minimum[j + 4] & 15) << 4);
    }
}

template <int BITS> void encode_k4(const float* x, int64_t cols, uint8_t* out) {
    constexpr int TOP = (1 << BITS) - 1, BYTES = BITS == 4 ? 144 : 176;
    for (int64_t b = 0; b < cols / 256; ++b, x += 256, out += BYTES) {
        Affine fit[8];
        float most_scale = 0, most_minimum = 0;
        for (int j = 0; j < 8; ++j) {
            fit[j] = fit_affine<TOP>(x + 32 * j);
            most_scale = fit[j].scale > most_scale ? fit[j].scale : most_scale;
            most_minimum = fit[j].minimum > most_minimum ? fit[j].minimum : most_minimum;
        }
        const float d = put_half(out, most_scale / 63.0f), dmin = put_half(out + 2, most_minimum / 63.0f);
        const float scale_factor = safe_inverse(d), minimum_factor = safe_inverse(dmin);
        uint8_t scale[8], minimum[8];
        float q[256];
        for (int j = 0; j < 8; ++j) {
            const F8 pair = {fit[j].scale * scale_factor, fit[j].minimum * minimum_factor};
            const F8 rounded = to_level(pair, 0, 63);
            const Affine best = nearby<TOP>(x + 32 * j, d, dmin, {rounded[0], rounded[1]});
            scale[j] = level(best.scale);
            minimum[j] = level(best.minimum);
            const F8 factor = all8(safe_inverse(d * best.scale)), low = all8(dmin * best.minimum);
            for (int i = 0; i < 32; i += 8)
                store8(q + 32 * j + i, to_level((load8(x + 32 * j + i) + low) * factor, 0, TOP));
        }
        put_scales_k4(out + 4, scale, minimum);
        uint8_t *high_bits = out + 16, *low_bits = out + BYTES - 128;
        if (BITS == 5) memset(high_bits, 0, 32);
        for (int j = 0; j < 8; j += 2)
            for (int i = 0; i < 32; ++i) {
                const uint8_t a = level(q[32 * j + i]), c = level(q[32 * j + 32 + i]);
                low_bits[16 * j + i] = static_cast<uint8_t>((a & 15) | (c & 15) << 4);
                if (BITS == 5) high_bits[i] = static_cast<uint8_t>(high_bits[i] | (a >> 4) << j | (c >> 4) << (j + 1));
            }
    }
}

// ---- groups of 16 with a signed scale: Q6_K -------------------------------------------------------------------------

// The best scale of 16 elements for levels -32..31.
inline float fit_scale(const float* x) {
    const Extent e = extent<16>(x);
    const float furthest = -e.low > e.high ? e.low : e.high;
    if (furthest == 0) return 0.0f;
    F8 v[2], w[2];
    for (int k = 0; k < 2; ++k) {
        v[k] = load8(x + 8 * k) * all8(1.0f / furthest);  // so that no square leaves the range of a float
        w[k] = v[k] * v[k];
    }
    double best = 0, best_gain = -1;
    for (int step = -9; step <= 9; ++step) {
        const F8 factor = all8(-32.0f - 0.1f * static_cast<float>(step));
        F8 sxq = all8(0), sqq = all8(0);
        for (int k = 0; k < 2; ++k) {
            const F8 q = to_level(v[k] * factor, -32, 31), wq = w[k] * q;
            sxq += wq * v[k];
            sqq += wq * q;
        }
        const double sum_xq = total(sxq), sum_qq = total(sqq);
        if (sum_qq > 0 && sum_xq * sum_xq > best_gain * sum_qq) {
            best = sum_xq / sum_qq;
            best_gain = sum_xq * best;
        }
    }
    return static_cast<float>(best) * furthest;
}

void encode_q6_k(const float* x, int64_t cols, uint8_t* out) {
    for (int64_t b = 0; b < cols / 256; ++b, x += 256, out += 210) {
        float fit[16], furthest = 0;
        for (int j = 0; j < 16; ++j) {
            fit[j] = fit_scale(x + 16 * j);
            if ((fit[j] < 0 ? -fit[j] : fit[j]) > (furthest < 0 ? -furthest : furthest)) furthest = fit[j];
        }
        const float d = put_half(out + 208, furthest / -128.0f), scale_factor = safe_inverse(d);
        float q[256];
        for (int j = 0; j < 16; j += 8) {
            const F8 rounded = to_level(load8(fit + j) * all8(scale_factor), -128, 127);
            for (int k = 0; k < 8; ++k) {
                out[192 + j + k] = level(rounded[k]);
                const F8 factor = all8(safe_inverse(d * rounded[k]));
                for (int i = 16 * (j + k); i < 16 * (j + k + 1); i += 8)
                    store8(q + i, to_level(load8(x + i) * factor, -32, 31) + all8(32));
            }
        }
        for (int h = 0; h < 2; ++h)
            for (int i = 0; i < 32; ++i) {
                uint8_t g[4];
                for (int k = 0; k < 4; ++k) g[k] = level(q[128 * h + 32 * k + i]);
                out[64 * h + i] = static_cast<uint8_t>((g[0] & 15) | (g[2] & 15) << 4);
                out[64 * h + 32 + i] = static_cast<uint8_t>((g[1] & 15) | (g[3] & 15) << 4);
                out[128 + 32 * h + i] =
                    static_cast<uint8_t>(g[0] >> 4 | (g[1] >> 4) << 2 | (g[2] >> 4) << 4 | (g[3] >> 4) << 6);
            }
    }
}

constexpr Encoder ENCODERS[] = {
    {Q8_0, encode_q8_0},
    {Q4_0, encode_centred<4>},
    {Q4_1, encode_from_minimum<4>},
    {Q5_0, encode_centred<5>},
    {Q5_1, encode_from_minimum<5>},
    {Q4_K, encode_k4<4>},
    {Q5_K, encode_k4<5>},
    {Q6_K, encode_q6_k},
};
constexpr int32_t ENCODER_COUNT = sizeof(ENCODERS) / sizeof(ENCODERS[0]);

}  // namespace
}  // namespace lean
