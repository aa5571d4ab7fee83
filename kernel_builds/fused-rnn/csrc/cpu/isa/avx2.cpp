// The engine for -march=x86-64-v3: AVX2, FMA, F16C (build.toml sets the flags).
#define FLASHCELL_ISA avx2
#include "backend.h"
