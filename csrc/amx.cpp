// The unit for processors with AMX on 8-bit integers: AVX-512's, but for products of the K types with many tokens.
#include "kernels.h"
#include "tiles.h"

namespace lean {
namespace {

// The distance of the rows, if they are equally far apart; else 0.
int64_t stride_of(const uint8_t* const* rows, int n) {
    const int64_t stride = rows[1] - rows[0];
    for (int i = 2; i < n; ++i)
        if (rows[i] - rows[i - 1] != stride) return 0;
    return stride;
}

// AVX-512's product of the same type.
template <int TYPE> DotFn with_vectors = nullptr;

template <int TYPE, int BOTH>
void dot_lots(const uint8_t* w, int64_t rows, int64_t cols, const uint8_t* act, int64_t stride, int n, float* const* out,
              int64_t at) {
    const Tiles tiles(BOTH / 2);
    constexpr int64_t together = STRIPS * STRIP;
    for (int64_t r = 0; r < rows; r += together, w += together * row_bytes<TYPE>(cols), at += together) {
        const int strips = static_cast<int>(rows - r < together ? (rows - r) / STRIP : STRIPS);
        strips_tiles<TYPE, BOTH>(w, strips, cols, act, stride, n, out, at);
    }
}

// With tiles where these are faster.
template <int TYPE>
void dot_tiles(const uint8_t* w, int64_t rows, int64_t cols, const uint8_t* const* act, int n, float* const* out, int64_t at) {
    const int64_t stride = n < MANY ? 0 : stride_of(act, n);
    if (stride == 0) return with_vectors<TYPE>(w, rows, cols, act, n, out, at);
    const bool fewer = n < 32 || (n > 32 && n <= 48);  // so that fewest tokens are multiplied again
    const auto dot = fewer ? dot_lots<TYPE, 24> : dot_lots<TYPE, 32>;
    dot(w, rows, cols, act[0], stride, n, out, at);
}

struct Table {
    Kernel kernels[MOST_KERNELS];
    KernelTable table;

    explicit Table(const KernelTable& vectors) : table(vectors) {
        table.name = "amx";
        table.kernels = kernels;
        for (int32_t i = 0; i < vectors.kernel_count; ++i) {
            kernels[i] = vectors.kernels[i];
            if (kernels[i].layout != ROWS16) continue;
            switch (kernels[i].qtype) {
                case Q4_K: take<Q4_K>(kernels[i]); break;
                case Q5_K: take<Q5_K>(kernels[i]); break;
                case Q6_K: take<Q6_K>(kernels[i]); break;
                default: break;
            }
        }
    }

    template <int TYPE> static void take(Kernel& kernel) {
        with_vectors<TYPE> = kernel.dot;
        kernel.dot = dot_tiles<TYPE>;
    }
};

}  // namespace

const KernelTable& amx_table() {
    static const Table made(avx512_table());
    return made.table;
}

}  // namespace lean
