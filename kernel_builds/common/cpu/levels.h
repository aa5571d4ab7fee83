// The instruction sets ("levels") that a CPU library has code for, the plainest first. Each is one
// source file of a kernel, csrc/cpu/isa/<level>.cpp, and a namespace.
#pragma once

#if defined(__aarch64__)
#define FLASHCELL_LEVELS(USE) USE(baseline) USE(neon_bf16)
#else
#define FLASHCELL_LEVELS(USE) USE(baseline) USE(avx2) USE(avx512) USE(avx512_bf16)
#endif
