// What row by row and interleaved products with AVX-512 share.
#pragma once
#include "x86.h"

namespace lean {
namespace {

LEAN_INLINE __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
LEAN_INLINE __m512i bytes512(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

// (a & mask) | b
LEAN_INLINE __m512i mask_or(__m512i a, __m512i mask, __m512i b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xea); }

}  // namespace
}  // namespace lean
