// Products with strips whose blocks have 256 elements (Q4_K, Q5_K, Q6_K), and Q8_K activations, as strips512.h says: four
// steps of 64 elements.
#pragma once
#include "strips512.h"

namespace lean {
namespace {

// A step has SUBS runs of 64 / SUBS elements, each with a scale of its own.
template <int TYPE> struct Strip256;

// d, dmin and twelve bytes of scales and minima, as Q4_K and Q5_K begin.
struct HeadK4 {
    __m512i scale[2], min[2];  // bytes: sub-blocks 0 to 3, 4 to 7
    __m512 d, dmin;
    LEAN_INLINE void read(const uint8_t* p) {
        const __m512i first = load512(p), a = load512(p + 64), b = load512(p + 128), c = load512(p + 192);
        d = low_half(first);
        dmin = high_half(first);
        const __m512i six = bytes512(0x3f), four = bytes512(0x0f), two = bytes512(0x30);
        scale[0] = _mm512_and_si512(a, six);
        min[0] = _mm512_and_si512(b, six);
        scale[1] = mask_or(c, four, _mm512_and_si512(_mm512_srli_epi32(a, 2), two));
        min[1] = mask_or(_mm512_srli_epi32(c, 4), four, _mm512_and_si512(_mm512_srli_epi32(b, 2), two));
    }
};

enum class Zero { MINIMA, OFFSET };

// What Q4_K and Q5_K share.
struct StripK4 {
    static constexpr int subs = 2;
    static constexpr Zero zero = Zero::MINIMA;
    HeadK4 head;
    LEAN_INLINE void read(const uint8_t* p, const uint8_t*) { head.read(p); }
    static constexpr int first(int step, int sub) { return 64 * step + 32 * sub; }
    template <int STEP> LEAN_INLINE __m512i scale(int sub) const {
        return low_byte(head.scale[STEP / 2], 2 * (STEP % 2) + sub);
    }
};

template <> struct Strip256<Q4_K> : StripK4 {
    static constexpr int words = 36;
    static constexpr Narrow narrow = NARROW_15;
    template <int STEP> static LEAN_INLINE __m512i word(const uint8_t* p, int i) {
        const __m512i q = load512(p + 64 * (4 + 8 * STEP + i % 8));
        return _mm512_and_si512(i < 8 ? q : _mm512_srli_epi32(q, 4), bytes512(15));
    }
};

template <> struct Strip256<Q5_K> : StripK4 {
    static constexpr int words = 44;
    static constexpr Narrow narrow = NARROW_31;
    template <int BIT> static LEAN_INLINE __m512i high(__m512i h) {  // bit BIT of each byte, as 16
        const __m512i at = BIT <= 4 ? _mm512_slli_epi32(h, static_cast<unsigned>(BIT <= 4 ? 4 - BIT : 0))
                                    : _mm512_srli_epi32(h, static_cast<unsigned>(BIT > 4 ? BIT - 4 : 0));
        return _mm512_and_si512(at, bytes512(16));
    }
    template <int STEP> static LEAN_INLINE __m512i word(const uint8_t* p, int i) {
        const __m512i q = load512(p + 64 * (12 + 8 * STEP + i % 8)), h = load512(p + 64 * (4 + i % 8));
        return i < 8 ? mask_or(q, bytes512(15), high<2 * STEP>(h))
                     : mask_or(_mm512_srli_epi32(q, 4), bytes512(15), high<2 * STEP + 1>(h));
    }
};

template <> struct Strip256<Q6_K> {
    static constexpr int words = 52, subs = 4;
    static constexpr Zero zero = Zero::OFFSET;
    static constexpr Narrow narrow = NARROW_32;
    struct {
        __m512i scale[4];  // signed bytes
        __m512 d;
    } head;
    LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) head.scale[i] = load512(p + 64 * (48 + i));
        head.d = halves16(rest);
    }
    static constexpr int first(int step, int sub) { return 128 * (step / 2) + 32 * sub + 16 * (step % 2); }
    template <int STEP> static LEAN_INLINE __m512i word(const uint8_t* p, int i) {
        constexpr int half = STEP / 2, part = 4 * (STEP % 2);
        const int pair = i / 4;  // 0 and 1: low nibbles, 2 and 3: high ones
        const __m512i q = load512(p + 64 * (16 * half + 8 * (pair % 2) + part + i % 4));
        const __m512i h = load512(p + 64 * (32 + 8 * half + part + i % 4));
        const __m512i at = pair == 0 ? _mm512_slli_epi32(h, 4) : pair == 1 ? _mm512_slli_epi32(h, 2)
                         : pair == 2 ? h : _mm512_srli_epi32(h, 2);
        return mask_or(pair < 2 ? q : _mm512_srli_epi32(q, 4), bytes512(15), _mm512_and_si512(at, bytes512(0x30)));
    }
    template <int STEP> LEAN_INLINE __m512i scale(int sub) const {
        return low_signed_byte(head.scale[2 * (STEP / 2) + sub / 2], 2 * (sub % 2) + STEP % 2);
    }
};

// A run of a step for N tokens: totals[t] += scale * dot. With `offset`, the bytes from a group to its offsets, dots begin
// with what Q6_K's unsigned words have too much. Each dot must fit 16 bits (`narrow`), so that one instruction scales and
// adds it: its upper half, and what the offset of the next run leaves there, counts for nothing.
template <class S, int STEP, int SUB, int N>
LEAN_INLINE void run_256(const S& s, const uint8_t* p, const ActGroup* const* group, int64_t offset, __m512i* totals) {
    constexpr int per = 16 / S::subs, first = S::first(STEP, SUB);
    __m512i w[per], dot[N];
#pragma GCC unroll 8
    for (int i = 0; i < per; ++i) w[i] = S::template word<STEP>(p, per * SUB + i);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t)
        dot[t] = S::zero == Zero::OFFSET ? broadcast4(group[t]->q + offset + first / 8) : _mm512_setzero_si512();
    add_words<add_unsigned, per, N>(w, [&](int t) { return group[t]->q + first; }, dot);
    const __m512i scale = s.template scale<STEP>(SUB);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) totals[t] = _mm512_dpwssd_epi32(totals[t], dot[t], scale);
}

// The same for a token with dots of any size.
template <class S, int STEP, int SUB>
LEAN_INLINE void wide_run_256(const S& s, const uint8_t* p, const ActGroup* group, __m512i& total) {
    constexpr int per = 16 / S::subs, first = S::first(STEP, SUB);
    const bool offset = S::zero == Zero::OFFSET;
    __m512i dot = _mm512_set1_epi32(offset ? -32 * group->sums[first / 16] : 0);
    for (int i = 0; i < per; ++i) dot = add_unsigned(dot, S::template word<STEP>(p, per * SUB + i), group->q + first + 4 * i);
    const __m512i scale = _mm512_srai_epi32(_mm512_slli_epi32(s.template scale<STEP>(SUB), 16), 16);
    total = _mm512_add_epi32(total, _mm512_mullo_epi32(dot, scale));
}

// body(step, sub) for each run of a block.
template <class S, class F> LEAN_INLINE void for_runs(F&& body) {
    const auto step = [&](auto at) LEAN_ALWAYS {
        body(at, Count<0>());
        body(at, Count<1>());
        if constexpr (S::subs == 4) {
            body(at, Count<2>());
            body(at, Count<3>());
        }
    };
    step(Count<0>());
    step(Count<1>());
    step(Count<2>());
    step(Count<3>());
}

template <class S> LEAN_APART __m512i wide_total_256(const S& s, const uint8_t* p, const ActGroup* group) {
    __m512i total = _mm512_setzero_si512();
    for_runs<S>([&](auto step, auto sub) { wide_run_256<S, step.value, sub.value>(s, p, group, total); });
    return total;
}

// The minima of a block's runs in pairs, as halves of 16 bits: of runs 0 and 1, 2 and 3, ...
LEAN_INLINE void min_pairs(const __m512i* min, __m512i* wide) {
    const __m512i pairs[2] = {_mm512_broadcast_i32x4(_mm_set_epi32(0x800d800c, 0x80098008, 0x80058004, 0x80018000)),
                              _mm512_broadcast_i32x4(_mm_set_epi32(0x800f800e, 0x800b800a, 0x80078006, 0x80038002))};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) wide[i] = _mm512_shuffle_epi8(min[i / 2], pairs[i % 2]);
}

// The sum of minimum * (sum of the activations, 16 bits at `of_32`) over a block's runs.
LEAN_INLINE __m512i less_minima(const __m512i* wide, const uint8_t* of_32) {
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)  // written out as `add_unsigned` is
        asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(wide[i]), "m"(*reinterpret_cast<const int32_t*>(of_32 + 4 * i)));
    return sum;
}

// acc[t] += what block g of a strip, whose words are S's at `p`, adds for N tokens.
template <class S, int N>
LEAN_INLINE void block_256(const S& s, const uint8_t* p, int64_t g, const ActGroup* const* row, int64_t groups,
                           const Fetch& fetch, __m512* acc) {
    const ActGroup* group[N];
    __m512i totals[N], less[N];
    uint32_t narrow = S::narrow;
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        group[t] = row[t] + g;
        narrow &= group[t]->narrow;
    }
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) totals[t] = _mm512_setzero_si512();
    if (__builtin_expect(narrow != 0, true)) {
        constexpr auto size = static_cast<int64_t>(sizeof(ActGroup));
        const int64_t offset = (groups - g) * size + groups * static_cast<int64_t>(sizeof(float)) + 32 * g;
        for_runs<S>([&](auto step, auto sub) LEAN_ALWAYS {
            if constexpr (sub.value == 0) fetch.some(step.value, 4);
            run_256<S, step.value, sub.value, N>(s, p, group, offset, totals);
        });
    } else {
        for (int t = 0; t < N; ++t) totals[t] = wide_total_256(s, p, group[t]);
    }
    if constexpr (S::zero == Zero::MINIMA) {
        __m512i wide[4];
        min_pairs(s.head.min, wide);
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) less[t] = less_minima(wide, reinterpret_cast<const uint8_t*>(group[t]->sums32));
    }
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        const __m512 total = _mm512_cvtepi32_ps(totals[t]);
        __m512 sum;
        if constexpr (S::zero == Zero::OFFSET)
            sum = _mm512_mul_ps(s.head.d, total);
        else
            sum = _mm512_fmsub_ps(s.head.d, total, _mm512_mul_ps(s.head.dmin, _mm512_cvtepi32_ps(less[t])));
        const float scale = reinterpret_cast<const float*>(row[t] + groups)[g];
        acc[t] = _mm512_fmadd_ps(sum, _mm512_set1_ps(scale), acc[t]);
    }
}

template <int TYPE, int N>
LEAN_INLINE void strip_256(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    using S = Strip256<TYPE>;
    const int64_t groups = cols / GROUP;
    const uint8_t* rest = w + groups * S::words * 64;
    const ActGroup* row[N];
    __m512 acc[N];
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        row[t] = reinterpret_cast<const ActGroup*>(act[t]);
        acc[t] = _mm512_setzero_ps();
    }
    for (int64_t g = 0; g < groups; ++g, w += S::words * 64, rest += 2 * STRIP) {
        S s;
        s.read(w, rest);
        block_256<S, N>(s, w, g, row, groups, Fetch{w + AHEAD, S::words}, acc);
    }
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) _mm512_storeu_ps(out[t] + at, acc[t]);
}

// A block unpacked, for more tokens than the registers have sums for.
template <class S> struct Ready256 {
    static constexpr int subs = S::subs;
    static constexpr Zero zero = S::zero;
    static constexpr int first(int step, int sub) { return S::first(step, sub); }
    static constexpr Narrow narrow = S::narrow;
    alignas(64) uint8_t words[64 * 64];
    __m512i scales[4 * subs];
    decltype(S::head) head;

    template <int STEP> LEAN_INLINE void unpack_step(const S& s, const uint8_t* p) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_store_si512(words + 64 * (16 * STEP + i), S::template word<STEP>(p, i));
#pragma GCC unroll 4
        for (int sub = 0; sub < subs; ++sub) scales[STEP * subs + sub] = s.template scale<STEP>(sub);
    }
    LEAN_INLINE void unpack(const S& s, const uint8_t* p) {
        head = s.head;
        unpack_step<0>(s, p);
        unpack_step<1>(s, p);
        unpack_step<2>(s, p);
        unpack_step<3>(s, p);
    }
    template <int STEP> static LEAN_INLINE __m512i word(const uint8_t* p, int i) { return load512(p + 64 * (16 * STEP + i)); }
    template <int STEP> LEAN_INLINE __m512i scale(int sub) const { return scales[STEP * subs + sub]; }
};

// to[t] = from[t] + what block g adds for N tokens.
template <class S, int N>
LEAN_APART void ready_block(const Ready256<S>& s, int64_t g, const uint8_t* const* act, int64_t groups, const Fetch& fetch,
                            const float* from, float* to) {
    const ActGroup* row[N];
    __m512 acc[N];
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        row[t] = reinterpret_cast<const ActGroup*>(act[t]);
        acc[t] = _mm512_load_ps(from + STRIP * t);
    }
    block_256<Ready256<S>, N>(s, s.words, g, row, groups, fetch, acc);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) _mm512_store_ps(to + STRIP * t, acc[t]);
}

// As strip_256 for any number of tokens up to TILE: each block is unpacked once.
template <int TYPE>
void strip_256_many(const uint8_t* w, int64_t cols, const uint8_t* const* act, int n, float* const* out, int64_t at) {
    using S = Strip256<TYPE>;
    const int64_t groups = cols / GROUP;
    const uint8_t* rest = w + groups * S::words * 64;
    alignas(64) float sums[TILE * STRIP];
    Ready256<S> ready;
    for (int64_t g = 0; g < groups; ++g, w += S::words * 64, rest += 2 * STRIP) {
        S s;
        s.read(w, rest);
        ready.unpack(s, w);
        const Fetch fetch = {w + AHEAD, S::words};
        for_tokens(n, [&](auto count, int t) {
            float* to = sums + STRIP * t;
            ready_block<S, count.value>(ready, g, act + t, groups, fetch.part(t, count.value, n), g == 0 ? ZEROS : to, to);
        });
    }
    for (int t = 0; t < n; ++t) _mm512_storeu_ps(out[t] + at, _mm512_load_ps(sums + STRIP * t));
}

}  // namespace
}  // namespace lean
