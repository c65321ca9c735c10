// The rearranged order ROWS16: sixteen rows interleaved, so that a vector register holds the same bytes of sixteen
// rows, one row in each lane, and scales are unpacked for all of them at once.
//
// A strip is sixteen consecutive rows and takes the bytes of sixteen rows. Of each block it first holds the
// four-byte words: word 0 of rows 0 to 15, then word 1 of all rows, and so on, block after block. Where a block is
// not a whole number of words, the one or two bytes left over (its scale) follow behind the words of all blocks:
// those of block 0 of rows 0 to 15, then of block 1.
#pragma once
#include <stdint.h>

namespace lean {

struct StripFormat {
    int32_t words;      // four-byte words of a block
    int32_t rest;       // bytes left over: 0, 1 or 2
    bool rest_first;    // they are the block's first bytes, else its last

    constexpr int64_t words_at() const { return rest_first ? rest : 0; }  // in a canonical block
    constexpr int64_t rest_at() const { return rest_first ? 0 : 4 * words; }
    constexpr int64_t block_bytes() const { return 4 * words + rest; }
};
constexpr int64_t STRIP = 16;  // rows

// Rearranges sixteen rows of `blocks` blocks each; `from` and `to` do not overlap.
using ArrangeFn = void (*)(const StripFormat& format, int64_t blocks, const uint8_t* from, uint8_t* to);

constexpr int64_t strip_words_bytes(const StripFormat& f, int64_t blocks) { return blocks * f.words * 4 * STRIP; }

}  // namespace lean
