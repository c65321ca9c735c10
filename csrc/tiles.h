// Products of a block of tokens with strips (strip.h) on the tile registers of AMX, whose one instruction multiplies 16
// tokens by 16 rows over 64 elements: 16,384 multiply-adds, eight times what a vector register's does in the same time.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter "Programming with Intel AMX".
//
// A tile of weights is 16 of a strip's words, as they lie: row k of it holds elements 4 k to 4 k + 3 of the sixteen rows.
// A tile of activations has a token in each row.
//
// What is added up in a tile stays in it for a whole block, so that the integers of its runs must be scaled before they are
// multiplied. A scaled weight has more than eight bits: it is cut in two, which have tiles and sums of their own.
//
// The instructions are written out, since the compilers' own functions do not say that they read memory. Included by the
// unit of AMX alone.
#pragma once
#include "rows16_256.h"

namespace lean {
namespace {

#define LEAN_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define LEAN_TILE_LOAD(tile, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define LEAN_TILE_STORE(tile, to) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(64)) : "memory")
// sums += rows * columns, whose bytes are signed or not: tdpb, `s` or `u` for the rows, then for the columns, d
#define LEAN_TILE_ADD(product, sums, rows, columns) \
    asm volatile(#product " %%tmm" #columns ", %%tmm" #rows ", %%tmm" #sums ::)

// The shape of the eight tiles: sums of the low and the high halves of a lot of tokens (0 and 1) and of another (2 and 3),
// the two lots' activations (4 and 5), and the two halves of the weights (6 and 7). They are this thread's until they are
// let go of.
class Tiles {
public:
    explicit Tiles(int lot) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        const int rows[8] = {lot, lot, lot, lot, lot, lot, 16, 16};
        for (int tile = 0; tile < 8; ++tile) {
            shape.row_bytes[tile] = 64;
            shape.rows[tile] = static_cast<uint8_t>(rows[tile]);
        }
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Tiles() { asm volatile("tilerelease" ::); }
};

// A block's weights times their scales, in halves: scaled = low + high * 2^SHIFT.
template <int TYPE> struct Halves;

struct HalvesK4 {
    static constexpr unsigned shift = 3;
    static constexpr bool high_signed = false;
    // Bytes of at most 31 times the lower and the upper three bits of a scale of six: neither product leaves its byte.
    static LEAN_INLINE void cut(__m512i w, __m512i scale, __m512i& low, __m512i& high) {
        low = _mm512_mullo_epi16(w, _mm512_and_si512(scale, _mm512_set1_epi16(7)));
        high = _mm512_mullo_epi16(w, _mm512_srli_epi16(scale, 3));
    }
};
template <> struct Halves<Q4_K> : HalvesK4 {};
template <> struct Halves<Q5_K> : HalvesK4 {};

template <> struct Halves<Q6_K> {
    static constexpr unsigned shift = 8;
    static constexpr bool high_signed = true;
    // The bytes of (w - 32) * scale.
    static LEAN_INLINE void cut(__m512i w, __m512i scale, __m512i& low, __m512i& high) {
        const __m512i byte = _mm512_set1_epi16(255), offset = _mm512_set1_epi16(32);
        const __m512i even = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_and_si512(w, byte), offset), scale);
        const __m512i odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16(w, 8), offset), scale);
        low = mask_or(even, byte, _mm512_slli_epi16(odd, 8));
        high = mask_or(odd, _mm512_set1_epi16(static_cast<short>(0xff00)), _mm512_srli_epi16(even, 8));
    }
};

// What a block's sums are multiplied by, and its minima.
struct TileHead {
    __m512 d, dmin;
    __m512i minima[4];  // of runs 0 and 1, 2 and 3, ...
};

// A block's scaled weights, in the order of the activations.
template <int TYPE> struct TileWords {
    using S = Strip256<TYPE>;
    alignas(64) uint8_t low[64 * 64], high[64 * 64];

    // A sixteenth of it: four words.
    template <int PART> LEAN_INLINE void unpack(const S& s, const uint8_t* p) {
        constexpr int STEP = PART / 4, per = 16 / S::subs, begin = PART % 4 * 4, SUB = begin / per;
        constexpr int first = S::first(STEP, SUB) / 4;
        const __m512i one = s.template scale<STEP>(SUB);
        const __m512i scale = _mm512_or_si512(one, _mm512_slli_epi32(one, 16));
#pragma GCC unroll 4
        for (int i = begin; i < begin + 4; ++i) {
            __m512i l, h;
            Halves<TYPE>::cut(S::template word<STEP>(p, i), scale, l, h);
            _mm512_store_si512(low + 64 * (first + i % per), l);
            _mm512_store_si512(high + 64 * (first + i % per), h);
        }
    }
};

// What a token's sums of a block want, beside those.
struct alignas(32) Beside {
    uint8_t sums32[16];
    float scale;
};

// What the tiles have added up of a block, for some tokens.
struct Added {
    alignas(64) int32_t low[32 * STRIP], high[32 * STRIP];
};

// Where some tokens' sums of a block go: with what they are finished, and what is added to them. Rows `from` lie together.
struct Finish {
    const TileHead* head;
    const Beside* beside;
    const float* from;
    float* const* to;  // rows, from `at` on
    int64_t at;

    // Of tokens [FIRST, LAST), with the bits of `block_256`. `of` is what `head` has, in registers.
    template <int TYPE, int FIRST, int LAST> LEAN_INLINE void tokens(const Added& added, const TileHead& of) const {
#pragma GCC unroll 32
        for (int t = FIRST; t < LAST; ++t) {
            const __m512i scaled = _mm512_slli_epi32(_mm512_load_si512(added.high + STRIP * t), Halves<TYPE>::shift);
            __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(added.low + STRIP * t), scaled));
            if constexpr (Strip256<TYPE>::zero == Zero::MINIMA) {
                const __m512i less = less_minima(of.minima, beside[t].sums32);
                sum = _mm512_fmsub_ps(of.d, sum, _mm512_mul_ps(of.dmin, _mm512_cvtepi32_ps(less)));
            } else {
                sum = _mm512_mul_ps(of.d, sum);
            }
            sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(beside[t].scale), _mm512_load_ps(from + STRIP * t));
            _mm512_storeu_ps(to[t] + at, sum);
        }
    }
};

// Adds up a block for two lots of tokens, from their activations a and b on. `meanwhile` is done by the vector units, a
// sixteenth of it after each product of tiles: a processor does not look far ahead.
template <int TYPE, class F>
LEAN_INLINE void add_up(const TileWords<TYPE>& words, const uint8_t* a, const uint8_t* b, int64_t stride, int lot, Added& to,
                        F&& meanwhile) {
    LEAN_TILE_ZERO(0);
    LEAN_TILE_ZERO(1);
    LEAN_TILE_ZERO(2);
    LEAN_TILE_ZERO(3);
    const auto step = [&](auto at) LEAN_ALWAYS {
        constexpr int i = at.value;
        LEAN_TILE_LOAD(6, words.low + 1024 * i, 64);
        LEAN_TILE_LOAD(4, a + 64 * i, stride);
        LEAN_TILE_ADD(tdpbsud, 0, 4, 6);
        meanwhile(Count<4 * i>());
        LEAN_TILE_LOAD(5, b + 64 * i, stride);
        LEAN_TILE_ADD(tdpbsud, 2, 5, 6);
        meanwhile(Count<4 * i + 1>());
        LEAN_TILE_LOAD(7, words.high + 1024 * i, 64);
        if constexpr (Halves<TYPE>::high_signed) {
            LEAN_TILE_ADD(tdpbssd, 1, 4, 7);
            meanwhile(Count<4 * i + 2>());
            LEAN_TILE_ADD(tdpbssd, 3, 5, 7);
        } else {
            LEAN_TILE_ADD(tdpbsud, 1, 4, 7);
            meanwhile(Count<4 * i + 2>());
            LEAN_TILE_ADD(tdpbsud, 3, 5, 7);
        }
        meanwhile(Count<4 * i + 3>());
    };
    step(Count<0>());
    step(Count<1>());
    step(Count<2>());
    step(Count<3>());
    LEAN_TILE_STORE(0, to.low);
    LEAN_TILE_STORE(1, to.high);
    LEAN_TILE_STORE(2, to.low + STRIP * lot);
    LEAN_TILE_STORE(3, to.high + STRIP * lot);
}

// body(part) for parts FIRST to LAST of the sixteen of a block.
template <int FIRST, int LAST, class F> LEAN_INLINE void for_parts(F&& body) {
    body(Count<FIRST>());
    if constexpr (FIRST < LAST) for_parts<FIRST + 1, LAST>(body);
}

constexpr int64_t GROUPS_AHEAD = 3;  // that weights are fetched into the second cache
constexpr int STRIPS = ROW_CHUNK / STRIP;  // at most, that share a block's activations: all of a task

// As strip_256_many, for some strips and n tokens whose activations are `stride` bytes apart: each time BOTH of them in two
// lots, the last time some that have been before. While the tiles add up, vectors finish what was added before and unpack the
// next block.
template <int TYPE, int BOTH>
LEAN_INLINE void strips_tiles(const uint8_t* w, int strips, int64_t cols, const uint8_t* act, int64_t stride, int n,
                              float* const* out, int64_t at) {
    using S = Strip256<TYPE>;
    constexpr int LOT = BOTH / 2;
    const int64_t groups = cols / GROUP, strip_bytes = STRIP * row_bytes<TYPE>(cols), blocks = groups * strips;
    const int times = (n + BOTH - 1) / BOTH;
    alignas(64) static const float zeros[BOTH * STRIP] = {};
    alignas(64) float acc[STRIPS][TILE * STRIP];  // until the last blocks, which add to it and store where all belongs
    float* acc_rows[TILE];
    for (int t = 0; t < TILE; ++t) acc_rows[t] = acc[0] + STRIP * t;
    Added added;
    TileHead heads[3];  // of the block that is finished, the present one and the next
    TileWords<TYPE> words;
    Beside beside[2][TILE];

    S s;  // the block that is unpacked
    const uint8_t* p = nullptr;
    const auto take = [&](int64_t b) LEAN_ALWAYS {
        const uint8_t* strip = w + b % strips * strip_bytes;
        p = strip + b / strips * S::words * 64;
        s.read(p, strip + groups * S::words * 64 + b / strips * 2 * STRIP);
        TileHead& head = heads[b % 3];
        head.d = s.head.d;
        if constexpr (S::zero == Zero::MINIMA) {
            head.dmin = s.head.dmin;
            min_pairs(s.head.min, head.minima);
        }
    };
    const auto start_of = [&](int i) LEAN_ALWAYS { return i == times - 1 ? n - BOTH : i * BOTH; };

    // Before the first block nothing has been added, and it goes where nothing is read from.
    memset(&added, 0, sizeof(added));
    memset(beside, 0, sizeof(beside));
    take(0);
    for_parts<0, 15>([&](auto part) LEAN_ALWAYS { words.template unpack<part.value>(s, p); });
    memset(&heads[2], 0, sizeof(heads[2]));
    Finish before = {&heads[2], beside[1], zeros, acc_rows, 0};
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t g = b / strips, strip = b % strips;
        if (strip == 0)
            for (int i = 0; i < times; ++i)
                for (int t = 0; t < BOTH; ++t) {
                    const auto* row = reinterpret_cast<const ActGroup*>(act + (start_of(i) + t) * stride);
                    Beside& mine = beside[g % 2][i * BOTH + t];
                    memcpy(mine.sums32, row[g].sums32, sizeof(mine.sums32));
                    mine.scale = reinterpret_cast<const float*>(row + groups)[g];
                }
        take(b + 1 < blocks ? b + 1 : b);
        // Some blocks on in each strip, and then in those of the next call.
        const int64_t later = g + GROUPS_AHEAD < groups ? g + GROUPS_AHEAD : strips * groups + g + GROUPS_AHEAD - groups;
        const Fetch fetch = {w + strip * strip_bytes + later * S::words * 64, S::words};
        for (int i = 0; i < times; ++i) {
            const uint8_t* a = act + start_of(i) * stride + g * static_cast<int64_t>(sizeof(ActGroup));
            const Finish finish = before;
            const TileHead of = *finish.head;
            const auto finish_part = [&](auto part) LEAN_ALWAYS {
                finish.template tokens<TYPE, BOTH * part.value / 16, BOTH * (part.value + 1) / 16>(added, of);
            };
            if (i == times - 1)
                add_up<TYPE>(words, a, a + LOT * stride, stride, LOT, added, [&](auto part) LEAN_ALWAYS {
                    finish_part(part);
                    // Over words that have been multiplied: Q6_K's steps lie across two tiles.
                    constexpr int together = S::subs == 4 ? 8 : 4;
                    if constexpr ((part.value + 1) % together == 0)
                        for_parts<part.value + 1 - together, part.value>(
                            [&](auto each) LEAN_ALWAYS { words.template unpack<each.value>(s, p); });
                });
            else
                add_up<TYPE>(words, a, a + LOT * stride, stride, LOT, added, finish_part);
            fetch.some(i, times);
            const bool last = g == groups - 1;
            before = {.head = &heads[b % 3],
                      .beside = beside[g % 2] + i * BOTH,
                      .from = g == 0 ? zeros : acc[strip] + STRIP * i * BOTH,
                      .to = last ? out + start_of(i) : acc_rows + i * BOTH,
                      .at = last ? at + STRIP * strip : TILE * STRIP * strip};
        }
    }
    before.template tokens<TYPE, 0, BOTH>(added, *before.head);
}

}  // namespace
}  // namespace lean
