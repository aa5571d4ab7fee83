// The engine for armv8.2-a+bf16: the BF16 instructions, which multiply pairs of bf16 and round to
// bf16; empty elsewhere. The pragma is here because a flag in build.toml would be given to every
// machine's compiler.
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+bf16")
#define FLASHCELL_NEON_BF16  // g++ defines its own macro after it has read all of the file
#define FLASHCELL_ISA neon_bf16
#include "backend.h"
#endif
