// Rounding of activations to a weight type's partner, and the gated activations. Plain loops: each unit compiles
// them with its own instruction set. A group that holds a NaN or an infinity gets the scale NaN, so that the
// products it takes part in are NaN.
#pragma once
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "unpack.h"

namespace lean {
namespace {

constexpr uint32_t INF_BITS = 0x7f800000;
constexpr float ROUND_MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits

inline uint32_t max_abs_bits(const float* x, int n) {
    int32_t largest = 0;
    for (int i = 0; i < n; ++i) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return static_cast<uint32_t>(largest);
}

inline void round_to_int8(const float* x, int n, float factor, int bias, uint8_t* q) {
    for (int i = 0; i < n; ++i) {
        const float shifted = x[i] * factor + ROUND_MAGIC;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        q[i] = static_cast<uint8_t>((bits & 0x007fffff) - 0x00400000 + bias);
    }
}

inline int sum_int8(const uint8_t* q, int n) {
    int sum = 0;
    for (int i = 0; i < n; ++i) sum += static_cast<int8_t>(q[i]);
    return sum;
}

inline void quantize_q8_k(const float* x, int64_t cols, uint8_t* act) {
    auto* group = reinterpret_cast<ActGroup*>(act);
    const int64_t groups = act_groups(cols);
    auto* scale = reinterpret_cast<float*>(group + groups);
    for (int64_t g = 0; g < groups; ++g, ++group, x += GROUP) {
        const uint32_t amax = max_abs_bits(x, GROUP);
        if (amax == 0 || amax >= INF_BITS) {
            memset(group, 0, sizeof(ActGroup));
            scale[g] = amax == 0 ? 0.0f : bits_float(0x7fc00000);
            continue;
        }
        // The sign of the largest element only flips q and the scale together, so any of several largest will do.
        int positive = 0;
        for (int i = 0; i < GROUP; ++i) positive |= float_bits(x[i]) == amax;
        const float largest = positive ? bits_float(amax) : -bits_float(amax);
        const float factor = -127.0f / largest;
        const float d = 1.0f / factor;
        round_to_int8(x, GROUP, factor, 0, group->q);
        for (int j = 0; j < 16; ++j) group->sums[j] = static_cast<int16_t>(sum_int8(group->q + 16 * j, 16));
        for (int j = 0; j < 8; ++j)
            group->sums32[j] = static_cast<int16_t>(group->sums[2 * j] + group->sums[2 * j + 1]);
        scale[g] = d;
    }
}

// Q8_0 and Q8_1: both have the scale max/127 stored as half; Q8_1 also stores scale * sum as half.
template <int BIAS> void quantize_q8_32(const float* x, int64_t cols, uint8_t* act) {
    auto* group = reinterpret_cast<ActGroup*>(act);
    const int64_t blocks = cols / 32;
    for (int64_t b = 0; b < act_groups(cols) * 8; ++b, x += 32) {
        ActGroup& to = group[b / 8];
        const int64_t j = b % 8;
        uint8_t* q = to.q + 32 * j;
        const uint32_t amax = b < blocks ? max_abs_bits(x, 32) : 0;
        if (amax == 0 || amax >= INF_BITS) {
            memset(q, BIAS, 32);
            to.d[j] = to.s[j] = amax == 0 ? 0.0f : bits_float(0x7fc00000);
            continue;
        }
        const float largest = bits_float(amax);
        const float d = largest / 127.0f;
        round_to_int8(x, 32, 127.0f / largest, 0, q);
        const int sum = sum_int8(q, 32);
        if (BIAS != 0)
            for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(q[i] + BIAS);
        to.d[j] = half_to_float(float_to_half(d));
        to.s[j] = half_to_float(float_to_half(d * static_cast<float>(sum)));
    }
}

inline float round_to_bf16(float value) {
    const uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffff) > INF_BITS) return bits_float((bits | 0x00400000) & 0xffff0000);
    return bits_float((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}

template <Partner PARTNER> void copy_floats(const float* x, int64_t cols, uint8_t* act) {
    auto* to = reinterpret_cast<float*>(act);
    for (int64_t i = 0; i < cols; ++i)
        to[i] = PARTNER == ACT_F16 ? half_to_float(float_to_half(x[i]))
              : PARTNER == ACT_BF16 ? round_to_bf16(x[i]) : x[i];
    memset(to + cols, 0, static_cast<size_t>(act_groups(cols) * GROUP - cols) * sizeof(float));
}

// exp(x) to about 2 ulp, in operations that vectorise: 2^n * e^r with |r| <= ln(2)/2 and a Taylor series in r.
inline float exp_float(float x) {
    const float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;  // a NaN stays one
    const float shifted = clamped * 1.44269504f + ROUND_MAGIC;
    const float n = shifted - ROUND_MAGIC;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const uint32_t power = (float_bits(shifted) + 127) << 23;
    return p * bits_float(power);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_float(-x)); }

inline void add_weighted(float* sum, const float* row, float weight, int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum[i] += weight * row[i];
}

inline void glu(const Activation& act, float* gate, const float* up, int64_t n) {
    switch (act.kind) {
    case Activation::SILU:
        for (int64_t i = 0; i < n; ++i) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
        return;
    case Activation::GELU_TANH:  // 0.5 (1 + tanh z) = sigmoid(2 z)
        for (int64_t i = 0; i < n; ++i) {
            const float g = gate[i];
            gate[i] = g * sigmoid(1.59576912f * (g + 0.044715f * g * g * g)) * up[i];
        }
        return;
    case Activation::SWIGLU_OAI:
        for (int64_t i = 0; i < n; ++i) {
            const float g = gate[i] > act.limit ? act.limit : gate[i];
            const float u = up[i] > act.limit ? act.limit : up[i] < -act.limit ? -act.limit : up[i];
            gate[i] = g * sigmoid(act.alpha * g) * (u + 1.0f);
        }
        return;
    }
}

}  // namespace
}  // namespace lean
