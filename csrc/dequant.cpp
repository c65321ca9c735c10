#include "dequant.h"

#include "unpack.h"

namespace lean {
namespace {

template <int TYPE> void dequantize_256(const uint8_t* w, int64_t cols, float* out) {
    Unpacked256 u;
    for (int64_t g = 0; g < cols / 256; ++g, w += Block<TYPE>::bytes) {
        Block<TYPE>::unpack(w, u);
        for (int e = 0; e < 256; ++e) {
            const float value = u.d * static_cast<float>(u.scale[e / 16]) * static_cast<float>(u.q[e]);
            *out++ = Block<TYPE>::has_min ? value - u.dmin * static_cast<float>(u.min[e / 16]) : value;
        }
    }
}

template <int TYPE> void dequantize_32(const uint8_t* w, int64_t cols, float* out) {
    Unpacked32 u;
    for (int64_t b = 0; b < cols / 32; ++b, w += Block<TYPE>::bytes) {
        Block<TYPE>::unpack(w, u);
        for (int e = 0; e < 32; ++e) {
            const float value = u.d * static_cast<float>(u.q[e]);
            *out++ = Block<TYPE>::has_min ? value + u.m : value;
        }
    }
}

void dequantize_f32(const uint8_t* w, int64_t cols, float* out) {
    memcpy(out, w, static_cast<size_t>(cols) * 4);
}

void dequantize_f16(const uint8_t* w, int64_t cols, float* out) {
    for (int64_t i = 0; i < cols; ++i) out[i] = half_at(w + 2 * i);
}

void dequantize_bf16(const uint8_t* w, int64_t cols, float* out) {
    for (int64_t i = 0; i < cols; ++i) out[i] = bits_float(static_cast<uint32_t>(load_u16(w + 2 * i)) << 16);
}

template <int TYPE> constexpr Format format_256() {
    return {TYPE, Block<TYPE>::size, Block<TYPE>::bytes, dequantize_256<TYPE>};
}

template <int TYPE> constexpr Format format_32() {
    return {TYPE, Block<TYPE>::size, Block<TYPE>::bytes, dequantize_32<TYPE>};
}

constexpr Format FORMATS[] = {
    {F32, 1, 4, dequantize_f32}, {F16, 1, 2, dequantize_f16},  {BF16, 1, 2, dequantize_bf16},
    format_32<Q4_0>(),           format_32<Q4_1>(),            format_32<Q5_0>(),
    format_32<Q5_1>(),           format_32<Q8_0>(),            format_32<IQ4_NL>(),
    format_32<MXFP4>(),          format_256<Q2_K>(),           format_256<Q3_K>(),
    format_256<Q4_K>(),          format_256<Q5_K>(),           format_256<Q6_K>(),
    format_256<IQ4_XS>(),
};

}  // namespace

const Format* find_format(int32_t qtype) {
    for (const Format& format : FORMATS)
        if (format.qtype == qtype) return &format;
    return nullptr;
}

}  // namespace lean
