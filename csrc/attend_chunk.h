// Causal attention of a chunk of tokens with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022): blocks of
// keys are unpacked once for many queries, and what a query has mixed so far is scaled down when a larger score comes.
// Included by every instruction-set unit, with the vectors of attend.h. The products here are of floats; those of
// attend_chunk16.h, of integers, take the same tiles and blocks.
//
// A row is one query head of one token; rows that share a key head are numbered token by token. A tile of rows meets a
// block of keys in two products, of which each number is added up by itself, from the first dimension or key to the last.
// Blocks begin at multiples of CHUNK_KEYS, and keys that a row does not see add exact zeros, so a row's bits depend
// neither on the rows beside it nor on where the chunk begins.
#pragma once
#include <float.h>

#include "attend.h"

namespace lean {
namespace {

constexpr int ROWS = static_cast<int>(CHUNK_TILE);
constexpr int64_t LANES16 = STRIP;  // keys that lie interleaved

// One thread's work: rows [begin, end) of a key head, and what is kept of them whatever the products are.
struct ChunkTask {
    const ChunkCall& call;
    int64_t kv_head, begin, end;
    float *mixed;   // [rows][dim]: values by e^(score - most)
    float *scores;  // [rows][CHUNK_KEYS]: of one block
    float *sums;    // [rows][16]: of e^(score - most), by the key's place modulo 16
    float *most;    // [rows]: the largest score so far
    float *fade;    // [rows]: what was mixed before this block is multiplied by it
    int64_t* position;  // [rows]

    ChunkTask(const ChunkCall& c, int64_t head, int64_t first, int64_t last)
        : call(c), kv_head(head), begin(first), end(last) {}
    // Begins, in the part of the scratch from `at` on, and returns what is left of it; `most` is to be of scores times
    // `unit`.
    float* start(float* at, float unit) {
        const int64_t rows = padded();
        mixed = at;
        scores = mixed + rows * call.dim;
        sums = scores + rows * CHUNK_KEYS;
        most = sums + rows * LANES16;
        fade = most + rows;
        position = reinterpret_cast<int64_t*>(fade + rows);
        memset(mixed, 0, static_cast<size_t>(rows * call.dim) * sizeof(float));
        for (int64_t i = 0; i < rows; ++i) {
            position[i] = call.start + row(i) / share();
            // A sink is a score whose value is zero.
            const float sink = call.sinks == nullptr ? -FLT_MAX : call.sinks[head(i)] * unit;
            most[i] = sink > -FLT_MAX ? sink : -FLT_MAX;
            for (int64_t l = 0; l < LANES16; ++l) sums[i * LANES16 + l] = 0.0f;
            sums[i * LANES16] = sink > -FLT_MAX ? 1.0f : 0.0f;
        }
        return reinterpret_cast<float*>(position + rows);
    }
    int64_t share() const { return call.heads / call.kv_heads; }
    int64_t padded() const { return (end - begin + ROWS - 1) / ROWS * ROWS; }
    // Row i of the task; the rows that fill the last tile up see what the last one sees.
    int64_t row(int64_t i) const { return begin + i < end ? begin + i : end - 1; }
    int64_t head(int64_t i) const { return kv_head * share() + row(i) % share(); }
    // The first key that it sees.
    int64_t first(int64_t i) const {
        const int64_t key = position[i] + 1 - call.window;
        return key > 0 ? key : 0;
    }
    // Whether a row of the tile that begins with row i sees one of the block's keys.
    bool meets(int64_t i, int64_t block) const {
        return block <= position[i + ROWS - 1] && block + CHUNK_KEYS > first(i);
    }
    // How many of the block's `count` keys the tile's last row, and so any of its rows, may see.
    int64_t seen(int64_t i, int64_t block, int64_t count) const {
        const int64_t upto = position[i + ROWS - 1] + 1 - block;
        return upto < count ? upto : count;
    }
    const float* query(int64_t i) const { return call.q + (row(i) / share() * call.heads + head(i)) * call.dim; }
    // The scores of the tile's keys that a row does not see become -inf.
    void hide(int64_t i, int64_t block) {
        if (block + CHUNK_KEYS - 1 <= position[i] && block >= first(i + ROWS - 1)) return;
        for (int64_t n = i; n < i + ROWS; ++n) {
            const int64_t low = first(n) - block, high = position[n] + 1 - block;
            for (int64_t k = 0; k < CHUNK_KEYS; ++k)
                if (k < low || k >= high) scores[n * CHUNK_KEYS + k] = -INFINITY;
        }
    }
    void finish() const {
        const int64_t dim = call.dim;
        for (int64_t i = 0; i < end - begin; ++i) {
            float total = 0;
            for (int64_t l = 0; l < LANES16; ++l) total += sums[i * LANES16 + l];
            float* out = call.out + (row(i) / share() * call.heads + head(i)) * dim;
            for (int64_t d = 0; d < dim; ++d) out[d] = mixed[i * dim + d] / total;
        }
    }
};

template <class U, class E> inline void widen(const E* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += U::LANES) U::put(U::at(from + i), to + i);
}

// scores[n][first ..] = q_n . key, for C vectors of keys
template <class U, int C>
inline void score_tile(const float* q, const float* keys, int64_t dim, int64_t first, float* scores) {
    using V = typename U::V;
    const float* from[C];
    for (int c = 0; c < C; ++c) {
        const int64_t key = first + c * U::LANES;
        from[c] = keys + key / LANES16 * LANES16 * dim + key % LANES16;
    }
    V acc[ROWS][C] = {};
    for (int64_t d = 0; d < dim; ++d, q += ROWS) {
        V k[C];
        for (int c = 0; c < C; ++c) k[c] = U::at(from[c] + d * LANES16);
        for (int n = 0; n < ROWS; ++n) {
            const V x = U::all(q[n]);
            for (int c = 0; c < C; ++c) acc[n][c] = U::fma(k[c], x, acc[n][c]);
        }
    }
    for (int n = 0; n < ROWS; ++n)
        for (int c = 0; c < C; ++c) U::put(acc[n][c], scores + n * CHUNK_KEYS + first + c * U::LANES);
}

// e^x for x <= 0, as exp_float but with fused operations, and exactly zero from about -87.7 down.
template <class U> inline typename U::V weights_of(typename U::V x) {
    using V = typename U::V;
    constexpr float SERIES[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    x = U::most(U::all(-88.0f), x);  // a NaN stays one
    const V shifted = U::fma(x, U::all(1.44269504f), U::all(ROUND_MAGIC));
    const V n = shifted - U::all(ROUND_MAGIC);
    const V r = U::fma(n, U::all(2.12194440e-4f), U::fma(n, U::all(-0.693359375f), x));
    V p = U::all(1.0f / 5040);
    for (const float term : SERIES) p = U::fma(p, r, U::all(term));
    return U::times_power(p, shifted);
}

// The scores of a tile become e^(score - most).
template <class U> inline void weigh_tile(float* scores, float* sums, float* most, float* fade) {
    using V = typename U::V;
    constexpr int64_t WIDE = (ROWS + U::LANES - 1) / U::LANES * U::LANES;
    float drop[WIDE] = {};
    for (int n = 0; n < ROWS; ++n) {
        V high = U::at(scores + n * CHUNK_KEYS);
        for (int64_t k = U::LANES; k < CHUNK_KEYS; k += U::LANES) high = U::most(high, U::at(scores + n * CHUNK_KEYS + k));
        const float before = most[n], top = U::highest(high);
        most[n] = top > before ? top : before;
        drop[n] = before - most[n];
    }
    for (int64_t n = 0; n < WIDE; n += U::LANES) U::put(weights_of<U>(U::at(drop + n)), drop + n);
    for (int n = 0; n < ROWS; ++n, scores += CHUNK_KEYS, sums += LANES16) {
        const V top = U::all(most[n]);
        fade[n] = drop[n];
        for (int64_t l = 0; l < LANES16; l += U::LANES) {
            V sum = U::at(sums + l) * U::all(fade[n]);
            for (int64_t k = l; k < CHUNK_KEYS; k += LANES16) {
                const V weight = weights_of<U>(U::at(scores + k) - top);
                U::put(weight, scores + k);
                sum = sum + weight;
            }
            U::put(sum, sums + l);
        }
    }
}

// mixed[n][first ..] = fade_n mixed[n][first ..] + the sum over keys of weights[n][key] values[key][first ..], for C
// vectors of dimensions
template <class U, int C>
inline void mix_tile(const float* weights, const float* fade, const float* values, int64_t dim, int64_t count,
                     int64_t first, float* mixed) {
    using V = typename U::V;
    V acc[ROWS][C];
    for (int n = 0; n < ROWS; ++n) {
        const V x = U::all(fade[n]);
        for (int c = 0; c < C; ++c) acc[n][c] = U::at(mixed + n * dim + first + c * U::LANES) * x;
    }
    values += first;
    for (int64_t key = 0; key < count; ++key, values += dim) {
        V v[C];
        for (int c = 0; c < C; ++c) v[c] = U::at(values + c * U::LANES);
        for (int n = 0; n < ROWS; ++n) {
            const V x = U::all(weights[n * CHUNK_KEYS + key]);
            for (int c = 0; c < C; ++c) acc[n][c] = U::fma(v[c], x, acc[n][c]);
        }
    }
    for (int n = 0; n < ROWS; ++n)
        for (int c = 0; c < C; ++c) U::put(acc[n][c], mixed + n * dim + first + c * U::LANES);
}

// Calls job(C, first) for every C vectors of LANES numbers out of `count`: WIDE at once as long as there are as many.
template <int WIDE, int64_t LANES, class Job> inline void by_vectors(int64_t count, Job job) {
    int64_t first = 0;
    for (; first + WIDE * LANES <= count; first += WIDE * LANES) job(Count<WIDE>{}, first);
    for (; first + 2 * LANES <= count; first += 2 * LANES) job(Count<2>{}, first);
    for (; first < count; first += LANES) job(Count<1>{}, first);
}

// Products of floats; keys and values are stored as E.
template <class U, class E, ArrangeFn ARRANGE> struct FloatChunk : ChunkTask {
    static constexpr int WIDE = U::LANES >= 16 ? 4 : 2;  // shorter vectors come with fewer registers
    float *keys;    // [CHUNK_KEYS / 16][dim][16]: of one block
    float *values;  // [CHUNK_KEYS][dim]
    float *q;       // [tiles][dim][ROWS], times the scale

    FloatChunk(const ChunkCall& c, int64_t head, int64_t first, int64_t last, float* scratch)
        : ChunkTask(c, head, first, last) {
        const int64_t dim = c.dim, rows = padded();
        keys = scratch;
        values = keys + CHUNK_KEYS * dim;
        q = values + CHUNK_KEYS * dim;
        start(q + rows * dim, 1.0f);
        for (int64_t i = 0; i < rows; ++i) {
            const float* from = query(i);
            float* to = q + i / ROWS * ROWS * dim + i % ROWS;
            for (int64_t d = 0; d < dim; ++d) to[d * ROWS] = from[d] * c.scale;
        }
    }
    // `count` keys and values from `block` on, as floats. The last sixteen keys are filled up with zeros.
    void unpack(int64_t block, int64_t count) {
        const int64_t dim = call.dim;
        const StripFormat words = {static_cast<int32_t>(dim), 0, false};
        float* rows = values;  // not in use yet
        for (int64_t key = 0; key < count; key += LANES16) {
            const int64_t some = count - key < LANES16 ? count - key : LANES16;
            widen<U>(attend_rows<E>(call.keys, call, kv_head, block + key), some * dim, rows);
            memset(rows + some * dim, 0, static_cast<size_t>((LANES16 - some) * dim) * sizeof(float));
            ARRANGE(words, 1, reinterpret_cast<const uint8_t*>(rows), reinterpret_cast<uint8_t*>(keys + key * dim));
        }
        widen<U>(attend_rows<E>(call.values, call, kv_head, block), count * dim, values);
    }
    void score(int64_t i, int64_t block, int64_t count) {
        const int64_t needed = (seen(i, block, count) + LANES16 - 1) / LANES16 * LANES16;
        by_vectors<WIDE, U::LANES>(needed, [&](auto c, int64_t key) {
            score_tile<U, c.value>(q + i * call.dim, keys, call.dim, key, scores + i * CHUNK_KEYS);
        });
        hide(i, block);
        weigh_tile<U>(scores + i * CHUNK_KEYS, sums + i * LANES16, most + i, fade + i);
    }
    void mix(int64_t i, int64_t block, int64_t count) {
        const int64_t dim = call.dim, some = seen(i, block, count);
        by_vectors<WIDE, U::LANES>(dim, [&](auto c, int64_t d) {
            mix_tile<U, c.value>(scores + i * CHUNK_KEYS, fade + i, values, dim, some, d, mixed + i * dim);
        });
    }
};

template <class Task> void attend_task(Task task) {
    const int64_t rows = task.end - task.begin, last = task.position[rows - 1];
    for (int64_t block = task.first(0) / CHUNK_KEYS * CHUNK_KEYS; block <= last; block += CHUNK_KEYS) {
        const int64_t count = last + 1 - block < CHUNK_KEYS ? last + 1 - block : CHUNK_KEYS;
        task.unpack(block, count);
        // All scores, then all values: one after the other stays in the first cache.
        for (int64_t i = 0; i < rows; i += ROWS)
            if (task.meets(i, block)) task.score(i, block, count);
        for (int64_t i = 0; i < rows; i += ROWS)
            if (task.meets(i, block)) task.mix(i, block, count);
    }
    task.finish();
}

template <class U, ArrangeFn ARRANGE>
void attend_chunk(const ChunkCall& call, int64_t kv_head, int64_t begin, int64_t end, float* scratch) {
    if (call.halves)
        attend_task(FloatChunk<U, uint16_t, ARRANGE>(call, kv_head, begin, end, scratch));
    else
        attend_task(FloatChunk<U, float, ARRANGE>(call, kv_head, begin, end, scratch));
}

template <class U, class E> inline void store_heads(const ChunkCall& call, int64_t token) {
    for (int64_t head = 0; head < call.kv_heads; ++head) {
        const int64_t row = (token * call.kv_heads + head) * call.dim;
        store_row<U>(call.k + row, call.dim, const_cast<E*>(attend_rows<E>(call.keys, call, head, call.start + token)));
        store_row<U>(call.v + row, call.dim, const_cast<E*>(attend_rows<E>(call.values, call, head, call.start + token)));
    }
}

template <class U> void store_chunk(const ChunkCall& call, int64_t token) {
    if (call.halves)
        store_heads<U, uint16_t>(call, token);
    else
        store_heads<U, float>(call, token);
}

}  // namespace
}  // namespace lean
