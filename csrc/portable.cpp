// The unit for any processor: blocks are unpacked to bytes once and multiplied with each token's.
#include "arrange.h"
#include "attend_chunk.h"
#include "delta.h"
#include "encode.h"
#include "quantize.h"

namespace lean {
namespace {

inline int dot_int8(const int8_t* a, const uint8_t* b, int n) {
    int sum = 0;
    for (int i = 0; i < n; ++i) sum += static_cast<int16_t>(a[i]) * static_cast<int16_t>(static_cast<int8_t>(b[i]));
    return sum;
}

template <int TYPE> void row_256(const uint8_t* w, int64_t cols, const uint8_t* const* act, int n, float* sums) {
    float acc[TILE] = {};
    const int64_t groups = cols / GROUP;
    Unpacked256 u;
    for (int64_t g = 0; g < groups; ++g, w += Block<TYPE>::bytes) {
        Block<TYPE>::unpack(w, u);
        for (int t = 0; t < n; ++t) {
            const auto* row = reinterpret_cast<const ActGroup*>(act[t]);
            const float d = reinterpret_cast<const float*>(row + groups)[g];
            int sum = 0, min_sum = 0;
            for (int j = 0; j < 16; ++j) sum += u.scale[j] * dot_int8(u.q + 16 * j, row[g].q + 16 * j, 16);
            acc[t] += u.d * d * static_cast<float>(sum);
            if (Block<TYPE>::has_min) {
                for (int j = 0; j < 16; ++j) min_sum += u.min[j] * row[g].sums[j];
                acc[t] -= u.dmin * d * static_cast<float>(min_sum);
            }
        }
    }
    for (int t = 0; t < n; ++t) sums[t] = acc[t];
}

template <int TYPE> void row_32(const uint8_t* w, int64_t cols, const uint8_t* const* act, int n, float* sums) {
    float acc[TILE] = {};
    Unpacked32 u;
    for (int64_t b = 0; b < cols / 32; ++b, w += Block<TYPE>::bytes) {
        Block<TYPE>::unpack(w, u);
        for (int t = 0; t < n; ++t) {
            const ActGroup& group = reinterpret_cast<const ActGroup*>(act[t])[b / 8];
            const int sum = dot_int8(u.q, group.q + b % 8 * 32, 32);
            acc[t] += u.d * group.d[b % 8] * static_cast<float>(sum);
            if (Block<TYPE>::has_min) acc[t] += u.m * group.s[b % 8];
        }
    }
    for (int t = 0; t < n; ++t) sums[t] = acc[t];
}

template <int TYPE> inline float float_weight(const uint8_t* w, int64_t i) {
    if (TYPE == F32) return bits_float(load_u32(w + 4 * i));
    if (TYPE == F16) return half_at(w + 2 * i);
    return bits_float(static_cast<uint32_t>(load_u16(w + 2 * i)) << 16);
}

template <int TYPE> void row_float(const uint8_t* w, int64_t cols, const uint8_t* const* act, int n, float* sums) {
    constexpr int LANES = 8;
    float acc[TILE][LANES] = {};
    for (int64_t i = 0; i < cols; i += LANES) {
        float weight[LANES] = {};
        for (int j = 0; j < LANES && i + j < cols; ++j) weight[j] = float_weight<TYPE>(w, i + j);
        for (int t = 0; t < n; ++t) {
            const float* x = reinterpret_cast<const float*>(act[t]) + i;
            for (int j = 0; j < LANES; ++j) acc[t][j] += weight[j] * x[j];
        }
    }
    for (int t = 0; t < n; ++t) {
        float sum = 0;
        for (int j = 0; j < LANES; ++j) sum += acc[t][j];
        sums[t] = sum;
    }
}

template <int TYPE> void dot(const uint8_t* w, int64_t rows, int64_t cols, const uint8_t* const* act, int n, float* const* out,
                             int64_t at) {
    float sums[TILE];
    for (int64_t r = 0; r < rows; ++r, w += row_bytes<TYPE>(cols)) {
        if constexpr (TYPE == F32 || TYPE == F16 || TYPE == BF16)
            row_float<TYPE>(w, cols, act, n, sums);
        else if constexpr (Block<TYPE>::size == 256)
            row_256<TYPE>(w, cols, act, n, sums);
        else
            row_32<TYPE>(w, cols, act, n, sums);
        for (int t = 0; t < n; ++t) out[t][at + r] = sums[t];
    }
}

constexpr Kernel KERNELS[] = {
    {F32, CANONICAL, ACT_F32, 1, dot<F32>},
    {F16, CANONICAL, ACT_F16, 1, dot<F16>},
    {BF16, CANONICAL, ACT_BF16, 1, dot<BF16>},
    {Q4_0, CANONICAL, ACT_Q8_0, 1, dot<Q4_0>},
    {Q4_1, CANONICAL, ACT_Q8_1, 1, dot<Q4_1>},
    {Q5_0, CANONICAL, ACT_Q8_0, 1, dot<Q5_0>},
    {Q5_1, CANONICAL, ACT_Q8_1, 1, dot<Q5_1>},
    {Q8_0, CANONICAL, ACT_Q8_0, 1, dot<Q8_0>},
    {IQ4_NL, CANONICAL, ACT_Q8_0, 1, dot<IQ4_NL>},
    {MXFP4, CANONICAL, ACT_Q8_0, 1, dot<MXFP4>},
    {Q2_K, CANONICAL, ACT_Q8_K, 1, dot<Q2_K>},
    {Q3_K, CANONICAL, ACT_Q8_K, 1, dot<Q3_K>},
    {Q4_K, CANONICAL, ACT_Q8_K, 1, dot<Q4_K>},
    {Q5_K, CANONICAL, ACT_Q8_K, 1, dot<Q5_K>},
    {Q6_K, CANONICAL, ACT_Q8_K, 1, dot<Q6_K>},
    {IQ4_XS, CANONICAL, ACT_Q8_K, 1, dot<IQ4_XS>},
};

using DeltaVector = float __attribute__((vector_size(16)));
using AttendUnit = PlainAttend<DeltaVector>;

constexpr KernelTable TABLE = {
    "portable",
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

const KernelTable& portable_table() { return TABLE; }

}  // namespace lean
