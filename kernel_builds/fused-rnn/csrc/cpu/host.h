// What the engine needs of torch and of the machine: threads, memory, and the instruction set.
// Included by ops.cpp only; compiled for the oldest machine.
#pragma once
#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "engine.h"

namespace flashcell {

inline void run_parallel(int64_t count, void (*body)(void*, int64_t, int64_t), void* context) {
  torch::stable::parallel_for(0, count, 1,
                              [=](int64_t begin, int64_t end) { body(context, begin, end); });
}

// Asks for huge pages inside [pointer, pointer + bytes): a fresh mapping otherwise costs one fault
// per 4 KB at its first write. Only a hint: it may fail harmlessly.
inline void prefer_huge_pages(void* pointer, int64_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = ((uintptr_t)pointer + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = ((uintptr_t)pointer + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}

inline void* allocate(int64_t bytes) {
  constexpr int64_t kHugePage = 2 << 20;
  const int64_t alignment = bytes >= kHugePage ? kHugePage : 64;
  void* pointer = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (pointer == nullptr) throw std::bad_alloc();
  prefer_huge_pages(pointer, bytes);
  return pointer;
}

inline Host host() {
  return {run_parallel, allocate, std::free, int(torch::stable::get_num_threads())};
}

// The widest engine this CPU runs; FLASHCELL_CPU_ISA=baseline|avx2|avx512 asks for one by name.
inline const Backend& select_backend() {
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt");
  const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
  const char* wanted = std::getenv("FLASHCELL_CPU_ISA");
  if (wanted == nullptr || *wanted == 0) {
    return has_avx512 ? avx512::kBackend : has_avx2 ? avx2::kBackend : baseline::kBackend;
  }
  if (!std::strcmp(wanted, "baseline")) return baseline::kBackend;
  if (!std::strcmp(wanted, "avx2")) {
    STD_TORCH_CHECK(has_avx2, "FLASHCELL_CPU_ISA=avx2: this CPU lacks AVX2, FMA or F16C");
    return avx2::kBackend;
  }
  STD_TORCH_CHECK(!std::strcmp(wanted, "avx512"), "FLASHCELL_CPU_ISA=", wanted,
                  ": must be baseline, avx2 or avx512");
  STD_TORCH_CHECK(has_avx512, "FLASHCELL_CPU_ISA=avx512: this CPU lacks AVX-512 or AVX512-BF16");
  return avx512::kBackend;
}

inline const Backend& backend() {
  static const Backend& chosen = select_backend();
  return chosen;
}

}  // namespace flashcell
