// The layouts of the quantised blocks in plain C++: signed integers with their scales and minima.
// Source: section 14.1b of the project's format reference (ggml's block formats).
// Used by dequantisation and by the portable products; the vector units have register forms of the same.
#pragma once
#include <stdint.h>
#include <string.h>

#include "kernels.h"

namespace lean {
namespace {

inline uint16_t load_u16(const uint8_t* p) {
    return static_cast<uint16_t>(p[0] | p[1] << 8);
}

inline uint32_t load_u32(const uint8_t* p) {
    return load_u16(p) | static_cast<uint32_t>(load_u16(p + 2)) << 16;
}

inline float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x0400) return bits_float(sign | ((rest << 13) + (112u << 23)));
    return bits_float(sign | float_bits(static_cast<float>(rest) * 0x1p-24f));
}

// Rounds to nearest even, as F16C does.
inline uint16_t float_to_half(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((rest >> 13) & 0x3ff));
    if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (rest < 0x38800000) {
        // The addition aligns the mantissa to the subnormal's last place and rounds it.
        const uint32_t shifted = float_bits(bits_float(rest) + 0.5f) - float_bits(0.5f);
        return static_cast<uint16_t>(sign | shifted);
    }
    return static_cast<uint16_t>(sign | ((rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13));
}

inline float half_at(const uint8_t* p) { return half_to_float(load_u16(p)); }

// 256 elements: value = d * scale[e / 16] * q[e] - dmin * min[e / 16]
struct Unpacked256 {
    int8_t q[256];
    int16_t scale[16];
    int16_t min[16];
    float d;
    float dmin;
};

// 32 elements: value = d * q[e] + m
struct Unpacked32 {
    int8_t q[32];
    float d;
    float m;
};

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t FP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

template <int TYPE> struct Block;

// Six-bit scales and minima of Q4_K and Q5_K, each for 32 elements.
inline void unpack_scales_k4(const uint8_t* s, Unpacked256& u) {
    for (int j = 0; j < 8; ++j) {
        const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        const int min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
        u.scale[2 * j] = u.scale[2 * j + 1] = static_cast<int16_t>(scale);
        u.min[2 * j] = u.min[2 * j + 1] = static_cast<int16_t>(min);
    }
}

template <> struct Block<Q4_K> {
    static constexpr int size = 256, bytes = 144;
    static constexpr bool has_min = true;
    static void unpack(const uint8_t* p, Unpacked256& u) {
        u.d = half_at(p);
        u.dmin = half_at(p + 2);
        unpack_scales_k4(p + 4, u);
        for (int e = 0; e < 256; ++e)
            u.q[e] = static_cast<int8_t>(p[16 + 32 * (e / 64) + e % 32] >> 4 * (e / 32 % 2) & 15);
    }
};

template <> struct Block<Q5_K> {
    static constexpr int size = 256, bytes = 176;
    static constexpr bool has_min = true;
    static void unpack(const uint8_t* p, Unpacked256& u) {
        u.d = half_at(p);
        u.dmin = half_at(p + 2);
        unpack_scales_k4(p + 4, u);
        for (int e = 0; e < 256; ++e) {
            const int low = p[48 + 32 * (e / 64) + e % 32] >> 4 * (e / 32 % 2) & 15;
            u.q[e] = static_cast<int8_t>(low | (p[16 + e % 32] >> e / 32 & 1) << 4);
        }
    }
};

template <> struct Block<Q6_K> {
    static constexpr int size = 256, bytes = 210;
    static constexpr bool has_min = false;
    static void unpack(const uint8_t* p, Unpacked256& u) {
        u.d = half_at(p + 208);
        for (int j = 0; j < 16; ++j) u.scale[j] = static_cast<int8_t>(p[192 + j]);
        for (int e = 0; e < 256; ++e) {
            const int half = e / 128, g = e % 128 / 32, l = e % 32;
            const int low = p[64 * half + 32 * (g % 2) + l] >> 4 * (g / 2) & 15;
            const int high = p[128 + 32 * half + l] >> 2 * g & 3;
            u.q[e] = static_cast<int8_t>((low | high << 4) - 32);
        }
    }
};

template <> struct Block<Q3_K> {
    static constexpr int size = 256, bytes = 110;
    static constexpr bool has_min = false;
    static void unpack(const uint8_t* p, Unpacked256& u) {
        u.d = half_at(p + 108);
        const uint8_t* s = p + 96;
        for (int j = 0; j < 16; ++j)
            u.scale[j] = static_cast<int16_t>(
                ((s[j % 8] >> 4 * (j / 8) & 15) | (s[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32);
        for (int e = 0; e < 256; ++e) {
            const int low = p[32 + 32 * (e / 128) + e % 32] >> 2 * (e % 128 / 32) & 3;
            u.q[e] = static_cast<int8_t>((low | (p[e % 32] >> e / 32 & 1) << 2) - 4);
        }
    }
};

template <> struct Block<Q2_K> {
    static constexpr int size = 256, bytes = 84;
    static constexpr bool has_min = true;
    static void unpack(const uint8_t* p, Unpacked256& u) {
        u.d = half_at(p + 80);
        u.dmin = half_at(p + 82);
        for (int j = 0; j < 16; ++j) {
            u.scale[j] = p[j] & 15;
            u.min[j] = p[j] >> 4;
        }
        for (int e = 0; e < 256; ++e)
            u.q[e] = static_cast<int8_t>(p[16 + 32 * (e / 128) + e % 32] >> 2 * (e % 128 / 32) & 3);
    }
};

template <> struct Block<IQ4_XS> {
    static constexpr int size = 256, bytes = 136;
    static constexpr bool has_min = false;
    static void unpack(const uint8_t* p, Unpacked256& u) {
        u.d = half_at(p);
        const int high = load_u16(p + 2);
        for (int j = 0; j < 8; ++j) {
            const int scale = ((p[4 + j / 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4) - 32;
            u.scale[2 * j] = u.scale[2 * j + 1] = static_cast<int16_t>(scale);
        }
        for (int e = 0; e < 256; ++e)
            u.q[e] = IQ4_VALUES[p[8 + 16 * (e / 32) + e % 16] >> 4 * (e % 32 / 16) & 15];
    }
};

inline int nibble32(const uint8_t* q, int e) { return q[e % 16] >> 4 * (e / 16) & 15; }

template <> struct Block<Q8_0> {
    static constexpr int size = 32, bytes = 34;
    static constexpr bool has_min = false;
    static void unpack(const uint8_t* p, Unpacked32& u) {
        u.d = half_at(p);
        memcpy(u.q, p + 2, 32);
    }
};

template <> struct Block<Q4_0> {
    static constexpr int size = 32, bytes = 18;
    static constexpr bool has_min = false;
    static void unpack(const uint8_t* p, Unpacked32& u) {
        u.d = half_at(p);
        for (int e = 0; e < 32; ++e) u.q[e] = static_cast<int8_t>(nibble32(p + 2, e) - 8);
    }
};

template <> struct Block<Q4_1> {
    static constexpr int size = 32, bytes = 20;
    static constexpr bool has_min = true;
    static void unpack(const uint8_t* p, Unpacked32& u) {
        u.d = half_at(p);
        u.m = half_at(p + 2);
        for (int e = 0; e < 32; ++e) u.q[e] = static_cast<int8_t>(nibble32(p + 4, e));
    }
};

template <> struct Block<Q5_0> {
    static constexpr int size = 32, bytes = 22;
    static constexpr bool has_min = false;
    static void unpack(const uint8_t* p, Unpacked32& u) {
        u.d = half_at(p);
        const uint32_t high = load_u32(p + 2);
        for (int e = 0; e < 32; ++e)
            u.q[e] = static_cast<int8_t>((nibble32(p + 6, e) | static_cast<int>(high >> e & 1) << 4) - 16);
    }
};

template <> struct Block<Q5_1> {
    static constexpr int size = 32, bytes = 24;
    static constexpr bool has_min = true;
    static void unpack(const uint8_t* p, Unpacked32& u) {
        u.d = half_at(p);
        u.m = half_at(p + 2);
        const uint32_t high = load_u32(p + 4);
        for (int e = 0; e < 32; ++e)
            u.q[e] = static_cast<int8_t>(nibble32(p + 8, e) | static_cast<int>(high >> e & 1) << 4);
    }
};

template <> struct Block<IQ4_NL> {
    static constexpr int size = 32, bytes = 18;
    static constexpr bool has_min = false;
    static void unpack(const uint8_t* p, Unpacked32& u) {
        u.d = half_at(p);
        for (int e = 0; e < 32; ++e) u.q[e] = IQ4_VALUES[nibble32(p + 2, e)];
    }
};

template <> struct Block<MXFP4> {
    static constexpr int size = 32, bytes = 17;
    static constexpr bool has_min = false;
    static void unpack(const uint8_t* p, Unpacked32& u) {
        // 2^(E - 128); the two smallest exponents are subnormal in float32
        u.d = bits_float(p[0] < 2 ? 0x00200000u << p[0] : static_cast<uint32_t>(p[0] - 1) << 23);
        for (int e = 0; e < 32; ++e) u.q[e] = FP4_VALUES[nibble32(p + 1, e)];
    }
};

// Bytes of a row of `cols` elements.
template <int TYPE> constexpr int64_t row_bytes(int64_t cols) {
    if constexpr (TYPE == F32) return cols * 4;
    else if constexpr (TYPE == F16 || TYPE == BF16) return cols * 2;
    else return cols / Block<TYPE>::size * Block<TYPE>::bytes;
}

}  // namespace
}  // namespace lean
