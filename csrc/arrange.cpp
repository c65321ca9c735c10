#include "arrange.h"

#include <cstring>

#include "kernels.h"

namespace lean {
namespace {

struct Entry {
    int32_t qtype;
    StripFormat format;
};

constexpr Entry ENTRIES[] = {
    {Q4_0, {4, 2, true}},  {Q4_1, {5, 0, false}},  {Q5_0, {5, 2, true}},    {Q5_1, {6, 0, false}},
    {Q8_0, {8, 2, true}},  {IQ4_NL, {4, 2, true}}, {MXFP4, {4, 1, true}},   {Q4_K, {36, 0, false}},
    {Q5_K, {44, 0, false}}, {Q6_K, {52, 2, false}},
};

}  // namespace

const StripFormat* find_strip_format(int32_t qtype) {
    for (const Entry& entry : ENTRIES)
        if (entry.qtype == qtype) return &entry.format;
    return nullptr;
}

void arrange_strip(const StripFormat& format, int64_t blocks, const uint8_t* from, uint8_t* to) {
    const int64_t row_bytes = blocks * format.block_bytes();
    uint8_t* rest = to + strip_words_bytes(format, blocks);
    for (int64_t b = 0; b < blocks; ++b, from += format.block_bytes()) {
        for (int64_t w = 0; w < format.words; ++w)
            for (int64_t r = 0; r < STRIP; ++r, to += 4)
                std::memcpy(to, from + r * row_bytes + format.words_at() + 4 * w, 4);
        for (int64_t r = 0; r < (format.rest ? STRIP : 0); ++r, rest += format.rest)
            for (int64_t i = 0; i < format.rest; ++i) rest[i] = from[r * row_bytes + format.rest_at() + i];
    }
}

void extract_row(const StripFormat& format, int64_t blocks, const uint8_t* strip, int64_t r, uint8_t* row) {
    const uint8_t* rest = strip + strip_words_bytes(format, blocks) + r * format.rest;
    strip += 4 * r;
    for (int64_t b = 0; b < blocks; ++b, row += format.block_bytes(), rest += STRIP * format.rest) {
        for (int64_t w = 0; w < format.words; ++w, strip += 4 * STRIP) std::memcpy(row + format.words_at() + 4 * w, strip, 4);
        for (int64_t i = 0; i < format.rest; ++i) row[format.rest_at() + i] = rest[i];
    }
}

}  // namespace lean
