#define portable_table avx2_table
#include "portable.cpp"
