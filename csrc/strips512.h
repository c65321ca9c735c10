// What products with strips of sixteen interleaved rows (strip.h) share, for AVX-512 with VNNI. A lane belongs to one row
// from the first byte to the last sum, so nothing is added across lanes; four activations at a time are broadcast to all
// of them. Included by that unit alone.
#pragma once
#include "strip.h"
#include "x512.h"

namespace lean {
namespace {

// As x86.h's, but into the second cache and further ahead: a strip's words take long enough to multiply that the way
// from there to the first is hidden (0.89 of the rate of plain reading; into the first cache, 4096 ahead: 0.80).
constexpr int AHEAD = 8192;
template <int BYTES> LEAN_INLINE void prefetch_strip(const uint8_t* w) {
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

// What the sums of a strip begin with: cheaper than to clear them.
alignas(64) constexpr float ZEROS[16 * STRIP] = {};

// Lines of memory that a block of products fetches ahead, a few with each run: at once they would wait for each other.
struct Fetch {
    const uint8_t* from;
    int lines;
    // Those of run `run` of `runs`.
    LEAN_INLINE void some(int run, int runs) const {
        for (int i = lines * run / runs; i < lines * (run + 1) / runs; ++i)
            _mm_prefetch(reinterpret_cast<const char*>(from + 64 * i), _MM_HINT_T1);
    }
    // What tokens [t, t + count) of n fetch of it.
    LEAN_INLINE Fetch part(int t, int count, int n) const {
        const int each = ((lines << 10) + n - 1) / n;  // in 1024ths
        const int first = each * t >> 10;
        return {from + 64 * first, (each * (t + count) >> 10) - first};
    }
};

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

}  // namespace
}  // namespace lean
