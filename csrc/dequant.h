// Exact dequantisation to float32.
#pragma once
#include <stdint.h>

namespace lean {

// Writes `cols` values of one row (whole blocks) to `out`.
using DequantFn = void (*)(const uint8_t* w, int64_t cols, float* out);

struct Format {
    int32_t qtype;
    int32_t block;        // elements
    int32_t block_bytes;
    DequantFn dequantize;
    int64_t row_bytes(int64_t cols) const { return cols / block * block_bytes; }
};

// The format of a ggml type id, or null for one that has none here.
const Format* find_format(int32_t qtype);

}  // namespace lean
