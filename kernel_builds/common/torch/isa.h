// The choice of a CPU engine's instruction set.
#pragma once
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <string>
#include <vector>
#if defined(__aarch64__)
#include <sys/auxv.h>
#else
#include <cpuid.h>
#endif

namespace flashcell {

struct Level {
  std::string name;
  bool runs;         // on this CPU
  const char* lack;  // what a CPU that does not run it lacks
};

#if defined(__aarch64__)

// Returns FLASHCELL_LEVELS, in the same order.
inline std::vector<Level> levels() {
  constexpr unsigned long kBf16 = 1 << 14;  // HWCAP2_BF16: older system headers do not name it
  return {{"baseline", true, ""},
          {"neon_bf16", (getauxval(AT_HWCAP2) & kBf16) != 0, "BF16 instructions"}};
}

#else

// Clang's __builtin_cpu_supports does not know these two.
inline bool has_f16c_and_lzcnt() {
  unsigned a, b, c, d;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && c & 1u << 29;
  return has_f16c && __get_cpuid(0x80000001, &a, &b, &c, &d) && c & 1u << 5;
}

// Returns FLASHCELL_LEVELS, in the same order.
inline std::vector<Level> levels() {
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                        has_f16c_and_lzcnt();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512cd") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  return {{"baseline", true, ""},
          {"avx2", has_avx2, "AVX2, FMA or F16C"},
          {"avx512", has_avx512, "AVX-512 (F, CD, BW, DQ and VL)"},
          {"avx512_bf16", has_bf16, "AVX-512 or AVX512-BF16"}};
}

#endif

// Returns the index of the last level that this CPU runs, or of that which FLASHCELL_CPU_ISA names.
inline size_t select_level() {
  const std::vector<Level> all = levels();
  const char* wanted = std::getenv("FLASHCELL_CPU_ISA");
  size_t chosen = 0;
  std::string names;
  for (size_t i = 0; i < all.size(); ++i) {
    if (wanted == nullptr || *wanted == 0) {
      if (all[i].runs) chosen = i;
    } else if (all[i].name == wanted) {
      STD_TORCH_CHECK(all[i].runs, "FLASHCELL_CPU_ISA=", wanted, ": this CPU lacks ", all[i].lack);
      return i;
    }
    names += (i == 0 ? "" : i + 1 == all.size() ? " or " : ", ") + all[i].name;
  }
  STD_TORCH_CHECK(wanted == nullptr || *wanted == 0, "FLASHCELL_CPU_ISA=", wanted, ": must be ",
                  names);
  return chosen;
}

}  // namespace flashcell
