// Products with strips of sixteen interleaved rows (strip.h), for AVX-512 with VNNI. A lane belongs to one row from
// the first byte to the last sum, so nothing is added across lanes; four activations at a time are broadcast to all
// of them. Included by that unit alone.
#pragma once
#include "strip.h"
#include "x512.h"

namespace lean {
namespace {

// As x86.h's, but into the second cache and further ahead: a strip's words take long enough to multiply that the way
// from there to the first is hidden (0.89 of the rate of plain reading; into the first cache, 4096 ahead: 0.80).
template <int BYTES> LEAN_INLINE void prefetch_strip(const uint8_t* w) {
    constexpr int AHEAD = 8192;
#pragma GCC unroll 64
    for (int i = 0; i < BYTES; i += 64) _mm_prefetch(reinterpret_cast<const char*>(w + AHEAD + i), _MM_HINT_T1);
}

LEAN_INLINE __m512i broadcast4(const uint8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
LEAN_INLINE __m512 halves16(const uint8_t* p) { return _mm512_cvtph_ps(load256(p)); }
LEAN_INLINE __m512 low_half(__m512i v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }
LEAN_INLINE __m512 high_half(__m512i v) { return low_half(_mm512_srli_epi32(v, 16)); }

// Byte `i` of each lane in its lower half, zero in the upper one.
LEAN_INLINE __m512i low_byte(__m512i v, int i) {
    return _mm512_and_si512(_mm512_srli_epi32(v, static_cast<unsigned>(8 * i)), _mm512_set1_epi32(255));
}
LEAN_INLINE __m512i low_signed_byte(__m512i v, int i) {
    return _mm512_srli_epi32(_mm512_srai_epi32(_mm512_slli_epi32(v, static_cast<unsigned>(24 - 8 * i)), 8), 16);
}

// ---- from the canonical order ------------------------------------------------------------------------------------

// v[i] lane j <-> v[j] lane i
LEAN_INLINE void transpose_16x16(__m512i* v) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // b[4 i + k]: rows 4 i to 4 i + 3 of columns k, k + 4, k + 8, k + 12
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const __m512i low0 = _mm512_shuffle_i32x4(b[k], b[4 + k], 0x44), high0 = _mm512_shuffle_i32x4(b[k], b[4 + k], 0xee);
        const __m512i low1 = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0x44);
        const __m512i high1 = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0xee);
        v[k] = _mm512_shuffle_i32x4(low0, low1, 0x88);
        v[4 + k] = _mm512_shuffle_i32x4(low0, low1, 0xdd);
        v[8 + k] = _mm512_shuffle_i32x4(high0, high1, 0x88);
        v[12 + k] = _mm512_shuffle_i32x4(high0, high1, 0xdd);
    }
}

inline void arrange_16x16(const StripFormat& format, int64_t blocks, const uint8_t* from, uint8_t* to) {
    const int64_t block_bytes = format.block_bytes(), row_bytes = blocks * block_bytes;
    const uint8_t* words = from + format.words_at();
    const uint8_t* rest = from + format.rest_at();
    uint8_t* rest_to = to + strip_words_bytes(format, blocks);
    for (int64_t b = 0; b < blocks; ++b, words += block_bytes, rest += block_bytes) {
        for (int64_t w = 0; w < format.words; w += 16) {
            const int64_t some = format.words - w < 16 ? format.words - w : 16;
            const auto mask = static_cast<__mmask16>((1 << some) - 1);
            __m512i v[16];
#pragma GCC unroll 16
            for (int r = 0; r < 16; ++r) v[r] = _mm512_maskz_loadu_epi32(mask, words + r * row_bytes + 4 * w);
            transpose_16x16(v);
#pragma GCC unroll 16
            for (int k = 0; k < 16; ++k)
                if (k < some) _mm512_storeu_si512(to + 64 * k, v[k]);
            to += 64 * some;
        }
        if (format.rest == 2)
            for (int r = 0; r < 16; ++r, rest_to += 2) memcpy(rest_to, rest + r * row_bytes, 2);
        else if (format.rest == 1)
            for (int r = 0; r < 16; ++r) *rest_to++ = rest[r * row_bytes];
    }
}

// body(count, t) for runs of 16, 8, 4, 2 and 1 tokens from t on that make n.
template <class F> LEAN_INLINE void for_tokens(int n, F&& body) {
    int t = 0;
    for (; n - t >= 16; t += 16) body(Count<16>(), t);
    const auto rest = [&](auto count) {
        if (((n - t) & count.value) == 0) return;
        body(count, t);
        t += count.value;
    };
    rest(Count<8>());
    rest(Count<4>());
    rest(Count<2>());
    rest(Count<1>());
}

// ---- the products of words with activations ------------------------------------------------------------------------

// dot + unsigned bytes of `w` times four signed bytes at p. Written out because GCC 12 loads the broadcast into a
// register first, which costs a tenth of the rate.
LEAN_INLINE __m512i add_unsigned(__m512i dot, __m512i w, const uint8_t* p) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dot) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(p)));
    return dot;
}
// dot + signed bytes of `w` times four unsigned bytes at p.
LEAN_INLINE __m512i add_signed(__m512i dot, __m512i w, const uint8_t* p) {
    return _mm512_dpbusd_epi32(dot, broadcast4(p), w);
}

// dot[t] += words times the activations from q(t) on, with ADD one of the above. A product takes five cycles and two
// start in each, so the tokens take turns: each one's next word waits for its last. A token alone has two sums.
template <auto ADD, int WORDS, int N, class Q> LEAN_INLINE void add_words(const __m512i* w, Q&& q, __m512i* dot) {
    constexpr int sums = N == 1 ? 2 : 1;
    __m512i second[N];
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) second[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < WORDS; ++i)
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) {
            __m512i& sum = i % sums == 0 ? dot[t] : second[t];
            sum = ADD(sum, w[i], q(t) + 4 * i);
        }
    if constexpr (sums == 2)
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) dot[t] = _mm512_add_epi32(dot[t], second[t]);
}

// ---- blocks of 256 elements, Q8_K activations: four steps of 64 elements -----------------------------------------

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

template <> struct Strip256<Q4_K> {
    static constexpr int words = 36, subs = 2;
    static constexpr bool has_rest = false;
    static constexpr Zero zero = Zero::MINIMA;
    static constexpr Narrow narrow = NARROW_15;
    HeadK4 head;
    LEAN_INLINE void read(const uint8_t* p, const uint8_t*) { head.read(p); }
    static constexpr int first(int step, int sub) { return 64 * step + 32 * sub; }
    template <int STEP> static LEAN_INLINE __m512i word(const uint8_t* p, int i) {
        const __m512i q = load512(p + 64 * (4 + 8 * STEP + i % 8));
        return _mm512_and_si512(i < 8 ? q : _mm512_srli_epi32(q, 4), bytes512(15));
    }
    template <int STEP> LEAN_INLINE __m512i scale(int sub) const {
        return low_byte(head.scale[STEP / 2], 2 * (STEP % 2) + sub);
    }
};

template <> struct Strip256<Q5_K> {
    static constexpr int words = 44, subs = 2;
    static constexpr bool has_rest = false;
    static constexpr Zero zero = Zero::MINIMA;
    static constexpr Narrow narrow = NARROW_31;
    HeadK4 head;
    LEAN_INLINE void read(const uint8_t* p, const uint8_t*) { head.read(p); }
    static constexpr int first(int step, int sub) { return 64 * step + 32 * sub; }
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
    template <int STEP> LEAN_INLINE __m512i scale(int sub) const {
        return low_byte(head.scale[STEP / 2], 2 * (STEP % 2) + sub);
    }
};

template <> struct Strip256<Q6_K> {
    static constexpr int words = 52, subs = 4;
    static constexpr bool has_rest = true;
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

// sums[t] = sum of minimum * (sum of the activations)
template <int N> LEAN_INLINE void minima(const __m512i* min, const ActGroup* const* group, __m512i* sums) {
    const __m512i pairs[2] = {_mm512_broadcast_i32x4(_mm_set_epi32(0x800d800c, 0x80098008, 0x80058004, 0x80018000)),
                              _mm512_broadcast_i32x4(_mm_set_epi32(0x800f800e, 0x800b800a, 0x80078006, 0x80038002))};
    __m512i wide[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) wide[i] = _mm512_shuffle_epi8(min[i / 2], pairs[i % 2]);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        sums[t] = _mm512_setzero_si512();
        const auto* of_32 = reinterpret_cast<const uint8_t*>(group[t]->sums32);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[t] = _mm512_dpwssd_epi32(sums[t], wide[i], broadcast4(of_32 + 4 * i));
    }
}

// acc[t] += what block g of a strip, whose words are S's at `p`, adds for N tokens.
template <class S, int N>
LEAN_INLINE void block_256(const S& s, const uint8_t* p, int64_t g, const ActGroup* const* row, int64_t groups,
                           __m512* acc) {
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
            run_256<S, step.value, sub.value, N>(s, p, group, offset, totals);
        });
    } else {
        for (int t = 0; t < N; ++t) totals[t] = wide_total_256(s, p, group[t]);
    }
    if constexpr (S::zero == Zero::MINIMA) minima<N>(s.head.min, group, less);
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
        prefetch_strip<S::words * 64>(w);
        S s;
        s.read(w, rest);
        block_256<S, N>(s, w, g, row, groups, acc);
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
LEAN_APART void ready_block(const Ready256<S>& s, int64_t g, const uint8_t* const* act, int64_t groups, const float* from,
                            float* to) {
    const ActGroup* row[N];
    __m512 acc[N];
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        row[t] = reinterpret_cast<const ActGroup*>(act[t]);
        acc[t] = _mm512_load_ps(from + STRIP * t);
    }
    block_256<Ready256<S>, N>(s, s.words, g, row, groups, acc);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) _mm512_store_ps(to + STRIP * t, acc[t]);
}

// As strip_256 for any number of tokens up to TILE: each block is unpacked once.
template <int TYPE>
void strip_256_many(const uint8_t* w, int64_t cols, const uint8_t* const* act, int n, float* const* out, int64_t at) {
    using S = Strip256<TYPE>;
    const int64_t groups = cols / GROUP;
    const uint8_t* rest = w + groups * S::words * 64;
    alignas(64) static constexpr float ZEROS[16 * STRIP] = {};  // cheaper than to clear the sums
    alignas(64) float sums[TILE * STRIP];
    Ready256<S> ready;
    for (int64_t g = 0; g < groups; ++g, w += S::words * 64, rest += 2 * STRIP) {
        prefetch_strip<S::words * 64>(w);
        S s;
        s.read(w, rest);
        ready.unpack(s, w);
        for_tokens(n, [&](auto count, int t) {
            float* to = sums + STRIP * t;
            ready_block<S, count.value>(ready, g, act + t, groups, g == 0 ? ZEROS : to, to);
        });
    }
    for (int t = 0; t < n; ++t) _mm512_storeu_ps(out[t] + at, _mm512_load_ps(sums + STRIP * t));
}

// ---- blocks of 32 elements, Q8_0 and Q8_1 activations -------------------------------------------------------------

// Eight signed words of a block, its scale and (has_min) its minimum.
struct Block16 {
    __m512i w[8];
    __m512 d, m;
};
template <int TYPE> struct Strip32;

// Sixteen bytes of each row: low nibbles are elements 0 to 15, high ones 16 to 31.
LEAN_INLINE void nibbles16(const uint8_t* p, __m512i* w) {
    const __m512i mask = bytes512(15);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i q = load512(p + 64 * i);
        w[i] = _mm512_and_si512(q, mask);
        w[4 + i] = _mm512_and_si512(_mm512_srli_epi32(q, 4), mask);
    }
}

LEAN_INLINE void look_up(const int8_t* values, __m512i* w) {
    const __m512i table = _mm512_broadcast_i32x4(load128(values));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = _mm512_shuffle_epi8(table, w[i]);
}

// The fifth bits of elements 4 i to 4 i + 3, from a word of 32 bits for each row, as 16 in each byte.
LEAN_INLINE __m512i fifth_bits(__m512i high, int i) {
    const __m512i four = _mm512_and_si512(_mm512_srli_epi32(high, static_cast<unsigned>(4 * i)), _mm512_set1_epi32(15));
    const __m512i bytes = _mm512_shuffle_epi8(four, _mm512_broadcast_i32x4(_mm_set_epi32(
        0x0c0c0c0c, 0x08080808, 0x04040404, 0x00000000)));
    const __mmask64 set = _mm512_test_epi8_mask(bytes, _mm512_set1_epi32(0x08040201));
    return _mm512_maskz_mov_epi8(set, bytes512(16));
}

template <> struct Strip32<Q8_0> {
    static constexpr int words = 8, rest = 2;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) b.w[i] = load512(p + 64 * i);
        b.d = halves16(rest_at);
    }
};

template <> struct Strip32<Q4_0> {
    static constexpr int words = 4, rest = 2;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
        nibbles16(p, b.w);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) b.w[i] = _mm512_sub_epi8(b.w[i], bytes512(8));
        b.d = halves16(rest_at);
    }
};

template <> struct Strip32<IQ4_NL> {
    static constexpr int words = 4, rest = 2;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
        nibbles16(p, b.w);
        look_up(IQ4_VALUES, b.w);
        b.d = halves16(rest_at);
    }
};

template <> struct Strip32<MXFP4> {
    static constexpr int words = 4, rest = 1;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
        nibbles16(p, b.w);
        look_up(FP4_VALUES, b.w);
        // 2^(E - 128); the two smallest exponents are subnormal.
        const __m512i e = _mm512_cvtepu8_epi32(load128(rest_at));
        const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
        const __mmask16 is_tiny = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
        b.d = _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_tiny, normal, tiny));
    }
};

template <> struct Strip32<Q4_1> {
    static constexpr int words = 5, rest = 0;
    static constexpr bool has_min = true;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t*, Block16& b) {
        const __m512i head = load512(p);
        b.d = low_half(head);
        b.m = high_half(head);
        nibbles16(p + 64, b.w);
    }
};

template <> struct Strip32<Q5_0> {
    static constexpr int words = 5, rest = 2;
    static constexpr bool has_min = false;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t* rest_at, Block16& b) {
        const __m512i high = load512(p);
        nibbles16(p + 64, b.w);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
            b.w[i] = _mm512_sub_epi8(_mm512_or_si512(b.w[i], fifth_bits(high, i)), bytes512(16));
        b.d = halves16(rest_at);
    }
};

template <> struct Strip32<Q5_1> {
    static constexpr int words = 6, rest = 0;
    static constexpr bool has_min = true;
    static LEAN_INLINE void read(const uint8_t* p, const uint8_t*, Block16& b) {
        const __m512i head = load512(p), high = load512(p + 64);
        b.d = low_half(head);
        b.m = high_half(head);
        nibbles16(p + 128, b.w);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) b.w[i] = _mm512_or_si512(b.w[i], fifth_bits(high, i));
    }
};

// acc[t] += a block's scale * dot, and its minimum, for N tokens: block j of the group. The activations are stored
// with 128 added, the unsigned operand, so that the weights may be signed.
template <bool HAS_MIN, int N>
LEAN_INLINE void block_32(const Block16& b, const ActGroup* const* group, int64_t j, __m512* acc) {
    __m512i bias[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, dot[N];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) bias[i / 4] = _mm512_dpbusd_epi32(bias[i / 4], bytes512(128), b.w[i]);
    const __m512i too_much = _mm512_add_epi32(bias[0], bias[1]);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) dot[t] = _mm512_setzero_si512();
    add_words<add_signed, 8, N>(b.w, [&](int t) { return group[t]->q + 32 * j; }, dot);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(dot[t], too_much));
        acc[t] = _mm512_fmadd_ps(sum, _mm512_mul_ps(b.d, _mm512_set1_ps(group[t]->d[j])), acc[t]);
        if constexpr (HAS_MIN) acc[t] = _mm512_fmadd_ps(b.m, _mm512_set1_ps(group[t]->s[j]), acc[t]);
    }
}

template <int TYPE, int N>
LEAN_INLINE void strip_32(const uint8_t* w, int64_t cols, const uint8_t* const* act, float* const* out, int64_t at) {
    using S = Strip32<TYPE>;
    const uint8_t* rest = w + cols / 32 * S::words * 64;
    const ActGroup* group[N];
    __m512 acc[N];
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
        group[t] = reinterpret_cast<const ActGroup*>(act[t]);
        acc[t] = _mm512_setzero_ps();
    }
    for (int64_t left = cols / 32; left > 0; left -= 8) {
        const int64_t blocks = left < 8 ? left : 8;
        for (int64_t j = 0; j < blocks; ++j, w += S::words * 64, rest += S::rest * STRIP) {
            prefetch_strip<S::words * 64>(w);
            Block16 b;
            S::read(w, rest, b);
            block_32<S::has_min, N>(b, group, j, acc);
        }
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) ++group[t];
    }
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) _mm512_storeu_ps(out[t] + at, acc[t]);
}

// ---- strips ---------------------------------------------------------------------------------------------------------

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
        if constexpr (Block<TYPE>::size == 256) {
            if (n > 16) {
                strip_256_many<TYPE>(w, cols, act, n, out, at);
                continue;
            }
        }
        for_tokens(n, [&](auto count, int t) { strip<TYPE, count.value>(w, cols, act + t, out + t, at); });
    }
}

}  // namespace
}  // namespace lean
