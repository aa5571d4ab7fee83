// The engine for -march=x86-64-v4 -mavx512bf16: AVX-512 with bf16 products (build.toml sets the
// flags).
#define FLASHCELL_ISA avx512_bf16
#include "backend.h"
