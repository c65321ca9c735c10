// Products with strips of sixteen interleaved rows (strip.h), for AVX-512 with VNNI. Included by that unit alone.
#pragma once
#include "rows16_256.h"
#include "rows16_32.h"

namespace lean {
namespace {

template <int TYPE, int N>
LEAN_INLINE void strip(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    if constexpr (Block<TYPE>::size == 256)
        strip_256<TYPE, N>(w, cols, act, out, at);
    else
        strip_32<TYPE, N>(w, cols, act, out, at);
}

template <int TYPE>
void dot_rows16(const uint8_t* w, int64_t rows, int64_t cols, const uint8_t* const* act, int n, float* const* out,
                int64_t at) {
    for (int64_t r = 0; r < rows; r += STRIP, w += STRIP * row_bytes<TYPE>(cols), at += STRIP) {
        if (n > 16) {
            if constexpr (Block<TYPE>::size == 256)
                strip_256_many<TYPE>(w, cols, act, n, out, at);
            else
                strip_32_many<TYPE>(w, cols, act, n, out, at);
            continue;
        }
        for_tokens(n, [&](auto count, int t) { strip<TYPE, count.value>(w, cols, act + t, out + t, at); });
    }
}

}  // namespace
}  // namespace lean
