// The engine for -march=x86-64-v4: AVX-512 (build.toml sets the flags).
#define FLASHCELL_ISA avx512
#include "backend.h"
