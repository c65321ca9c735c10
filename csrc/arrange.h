// Between the canonical order of a matrix and ROWS16 (strip.h).
#pragma once
#include "dequant.h"
#include "strip.h"

namespace lean {

// Null for a type that has no such order.
const StripFormat* find_strip_format(int32_t qtype);

// Rearranges sixteen rows of `blocks` blocks each, `from` and `to` apart.
void arrange_strip(const StripFormat& format, int64_t blocks, const uint8_t* from, uint8_t* to);

// Row r (0 to 15) of a strip in canonical order.
void extract_row(const StripFormat& format, int64_t blocks, const uint8_t* strip, int64_t r, uint8_t* row);

}  // namespace lean
