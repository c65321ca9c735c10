#define portable_table avx512_table
#include "portable.cpp"
