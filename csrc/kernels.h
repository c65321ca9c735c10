// What an instruction-set unit offers to the rest of the extension. Plain C types only: this header is compiled
// with different instruction sets, so it must not emit anything the linker could share between them.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "strip.h"

namespace lean {

// ggml type ids, for the types that have a product of their own.
enum QType : int32_t {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
    Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39,
};

// A number as a type, for what is called with several of them.
template <int N> struct Count {
    static constexpr int value = N;
};

// How the bytes of a matrix are arranged: in the file's order, or as strip.h says. A unit's table has rows for those
// that it multiplies.
enum Layout : int32_t { CANONICAL = 0, ROWS16 = 1 };

// What the activations are rounded to before the product.
enum Partner : int32_t { ACT_F32, ACT_F16, ACT_BF16, ACT_Q8_K, ACT_Q8_0, ACT_Q8_1, ACT_COUNT };

// Products for which every sum over a run of a Q8_K group fits 16 bits: with weights of 0 to 15 or to 31 over 32 elements,
// and of -32 to 31 over 16.
enum Narrow : uint32_t { NARROW_15 = 1, NARROW_31 = 2, NARROW_32 = 4 };

// One rounded activation row is private to the unit that made it. Eight-bit partners hold groups of 256
// elements, the last one padded with zeros. A Q8_K row has its scales behind the groups, and behind them room for 16
// numbers of each group, with AVX-512 -32 * sum(q) per 16 elements, modulo 2^16. Float partners hold the rounded
// values as float32, padded with zeros to whole groups.
struct ActGroup {
    uint8_t q[256];  // int8, or int8 + 128 where the unit multiplies biased activations
    union {
        int16_t sums[16];  // Q8_K: sum(q) per 16 elements
        float d[8];        // Q8_0, Q8_1: scale per 32 elements
    };
    union {
        struct {
            int16_t sums32[8];  // Q8_K: sum(q) per 32 elements
            uint32_t narrow;    // Q8_K of AVX-512: bits of Narrow
        };
        float s[8];  // Q8_1: scale * sum(q) per 32 elements, rounded to half
    };
};
constexpr int64_t GROUP = 256;
constexpr int TILE = 64;           // activation rows that one call of a product takes at most
constexpr int MANY = 24;           // activation rows from which on a unit may use instructions of its own for them
constexpr int64_t ROW_CHUNK = 128;  // weight rows of one task at most

constexpr int64_t act_groups(int64_t cols) { return (cols + GROUP - 1) / GROUP; }

// Bytes between activation rows: an odd number of cache lines, so that rows do not compete for cache sets.
constexpr size_t act_stride(Partner partner, int64_t cols) {
    const size_t groups = static_cast<size_t>(act_groups(cols));
    const size_t bytes = partner <= ACT_BF16   ? groups * GROUP * sizeof(float)
                         : partner == ACT_Q8_K ? groups * (sizeof(ActGroup) + sizeof(float) + 32) + 2
                                               : groups * sizeof(ActGroup);
    const size_t lines = (bytes + 63) / 64;
    return (lines | 1) * 64;
}

// Rounds x[cols] into one activation row.
using QuantizeFn = void (*)(const float* x, int64_t cols, uint8_t* act);

// Products of `rows` consecutive weight rows (of `cols` elements, starting at `w`) with n <= TILE activation
// rows: out[t][at + r]. The order of additions of one (row, token) pair depends on nothing else.
using DotFn = void (*)(const uint8_t* w, int64_t rows, int64_t cols, const uint8_t* const* act, int n, float* const* out,
                       int64_t at);

struct Kernel {
    int32_t qtype;
    Layout layout;
    Partner partner;
    int32_t rows;  // rows that the layout keeps together: a call takes a multiple of it
    DotFn dot;
};

struct Activation {
    enum Kind : int32_t { SILU, GELU_TANH, SWIGLU_OAI } kind;
    float limit;  // SWIGLU_OAI: gate is clamped to at most this, up to both signs of it
    float alpha;  // SWIGLU_OAI: factor inside the sigmoid
};

// gate[i] = act(gate[i]) * up[i]
using GluFn = void (*)(const Activation& act, float* gate, const float* up, int64_t n);

// sum[i] += weight * row[i], each product rounded before it is added
using AddFn = void (*)(float* sum, const float* row, float weight, int64_t n);

// Rounds the floats x[cols], finite and whole blocks, to one row of a quantised type.
using EncodeFn = void (*)(const float* x, int64_t cols, uint8_t* out);

struct Encoder {
    int32_t qtype;
    EncodeFn encode;
};

// A short causal convolution of each channel by itself, and silu of it.
struct ConvolutionCall {
    float* recent;        // [taps - 1, channels]: what came before the first token; afterwards, before the next
    const float* x;       // [tokens, channels]
    const float* weight;  // [taps, channels]: the last one meets the token itself
    float* out;           // [tokens, channels]
    int64_t tokens, channels, taps;
};
constexpr int64_t CONVOLUTION_CHANNELS = 512;  // of one token, at once

using ConvolveFn = void (*)(const ConvolutionCall& call, int64_t token, int64_t first, int64_t channels);

// Tokens of one sequence for a gated delta net, with the memories that they read and write.
struct DeltaCall {
    float* memory;      // [heads, key_dim, value_dim]
    const float *q, *k;  // [tokens, key_heads, key_dim]
    const float* v;     // [tokens, heads, value_dim]
    const float *beta, *keep;  // [tokens, heads]: share that is written anew; share of the memory that stays
    float* out;         // [tokens, heads, value_dim]
    int64_t tokens, key_heads, heads, key_dim, value_dim;
    bool grouped;  // head h reads key head h / (heads / key_heads); else h % key_heads
};
constexpr int64_t DELTA_COLUMNS = 32;  // of a memory, for one task: they stay in the first cache

using DeltaFn = void (*)(const DeltaCall& call, int64_t head, int64_t first, int64_t columns);

// The attention of a sequence's newest token to itself and those before it. Stores its key and value first.
struct AttendCall {
    const float* q;     // [heads][dim]
    const float *k, *v;  // [kv_heads][dim] of the token itself
    uint8_t *keys, *values;  // [kv_heads][capacity][dim] of halves or floats
    const float* sinks;  // [heads]: scores of a key without a value; or null
    float* out;          // [heads][dim]
    int64_t heads, kv_heads, dim, capacity;
    int64_t first, end;  // the keys that the token sees; its own is the last
    float scale;
    bool halves;
};
constexpr int64_t ATTEND_SPAN = 1024;     // keys of one task
constexpr int64_t ATTEND_MOST_DIM = 576;  // and a multiple of ATTEND_DIM
constexpr int64_t ATTEND_DIM = 16;

// What the keys [begin, end) add, for each head that shares a key head: the sum of values by e^(score - most), then
// the sum of those factors, then `most`, the largest score.
constexpr int64_t attend_part(int64_t dim) { return dim + 16; }
using AttendFn = void (*)(const AttendCall& call, int64_t kv_head, int64_t begin, int64_t end, float* parts);

// The attention of consecutive tokens of a sequence to themselves and those before them.
struct ChunkCall {
    const float* q;          // [tokens][heads][dim]
    const float *k, *v;      // [tokens][kv_heads][dim]
    uint8_t *keys, *values;  // [kv_heads][capacity][dim] of halves or floats
    const float* sinks;      // [heads]: scores of a key without a value; or null
    float* out;              // [tokens][heads][dim]
    int64_t tokens, heads, kv_heads, dim, capacity;
    int64_t start;   // the position of the first token
    int64_t window;  // keys that a token sees at most, its own included
    float scale;
    bool halves;
};
constexpr int64_t CHUNK_TILE = 6;   // rows (heads of tokens) that are multiplied at once
constexpr int64_t CHUNK_KEYS = 64;  // of one block

// The floats that a task of `rows` rows, whole tiles, works in at most.
constexpr int64_t chunk_scratch(int64_t rows, int64_t dim) {
    return 2 * CHUNK_KEYS * dim + rows * (2 * dim + CHUNK_KEYS + 20);
}
// Stores one token's keys and values in the cache.
using StoreChunkFn = void (*)(const ChunkCall& call, int64_t token);
// Rows [begin, end) of a key head, of which each token has heads / kv_heads.
using AttendChunkFn = void (*)(const ChunkCall& call, int64_t kv_head, int64_t begin, int64_t end, float* scratch);

struct KernelTable {
    const char* name;
    QuantizeFn quantize[ACT_COUNT];
    const Kernel* kernels;
    int32_t kernel_count;
    ArrangeFn arrange;
    GluFn glu;
    AddFn add;
    const Encoder* encoders;
    int32_t encoder_count;
    ConvolveFn convolve;
    DeltaFn delta;
    AttendFn attend;
    StoreChunkFn store_chunk;
    AttendChunkFn attend_chunk;
};

constexpr int32_t MOST_KERNELS = 64;  // of a table

const KernelTable& portable_table();
const KernelTable& avx2_table();
const KernelTable& avx512_table();
const KernelTable& amx_table();

}  // namespace lean
