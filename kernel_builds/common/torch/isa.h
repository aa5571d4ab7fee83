// The choice of a CPU engine's instruction set.
#pragma once
#include <cpuid.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>

namespace flashcell {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// Clang's __builtin_cpu_supports does not know these two.
inline bool has_f16c_and_lzcnt() {
  unsigned a, b, c, d;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && c & 1u << 29;
  return has_f16c && __get_cpuid(0x80000001, &a, &b, &c, &d) && c & 1u << 5;
}

// Chooses the widest engine that this CPU runs; FLASHCELL_CPU_ISA=baseline|avx2|avx512 names one.
inline Isa select_isa() {
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                        has_f16c_and_lzcnt();
  const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
  const char* wanted = std::getenv("FLASHCELL_CPU_ISA");
  if (wanted == nullptr || *wanted == 0) {
    return has_avx512 ? Isa::kAvx512 : has_avx2 ? Isa::kAvx2 : Isa::kBaseline;
  }
  if (!std::strcmp(wanted, "baseline")) return Isa::kBaseline;
  if (!std::strcmp(wanted, "avx2")) {
    STD_TORCH_CHECK(has_avx2, "FLASHCELL_CPU_ISA=avx2: this CPU lacks AVX2, FMA or F16C");
    return Isa::kAvx2;
  }
  STD_TORCH_CHECK(!std::strcmp(wanted, "avx512"), "FLASHCELL_CPU_ISA=", wanted,
                  ": must be baseline, avx2 or avx512");
  STD_TORCH_CHECK(has_avx512, "FLASHCELL_CPU_ISA=avx512: this CPU lacks AVX-512 or AVX512-BF16");
  return Isa::kAvx512;
}

}  // namespace flashcell
