// Hopper's matrix instruction: a warpgroup (128 threads, from a multiple of 128) multiplies 64 rows
// by up to 256 columns, in 16-bit types with fp32 sums. sm_90a only.
//
// Lane 4 r + q of warp w of the warpgroup holds, of rows 16 w + r (e < 2) and 16 w + r + 8, columns
// 8 j + 2 q + e % 2: sums[j][e]. A left operand in registers lies as mma.cuh says.
#pragma once
#include <type_traits>

#include "common/cuda/ptx/mma.cuh"
#include "common/cuda/ptx/shared_operand.cuh"

// Kernels have no body but a trap where their instructions do not exist.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define FLASHCELL_WGMMA_CODE 1
#endif

namespace flashcell::cuda {

// What is in shared memory as this thread sees it, its own stores and what barriers have told it
// of, is there for the wgmma that follows. A thread whose copies are in flight would wait for them
// here.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler moves no use of these registers across.
template <int kN>
DEVICE void pin(float (&sums)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[j][e])::"memory");
  }
}
template <int kN>
DEVICE void pin(uint32_t (&words)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(words[j][e])::"memory");
  }
}

// Before the first product of registers that anything else has written, with all of them.
template <typename... Registers>
DEVICE void wgmma_fence(Registers&... registers) {
  (pin(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until no more than `kPending` groups run; `registers` are those that are free again.
template <int kPending, typename... Registers>
DEVICE void wgmma_wait(Registers&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(registers), ...);
}

#define FLASHCELL_TEN(t) \
  "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define FLASHCELL_LIST_8 "%0, %1, %2, %3"
#define FLASHCELL_LIST_64 FLASHCELL_TEN("") FLASHCELL_TEN("1") FLASHCELL_TEN("2") "%30, %31"
#define FLASHCELL_SIXTY \
  FLASHCELL_TEN("")     \
  FLASHCELL_TEN("1") FLASHCELL_TEN("2") FLASHCELL_TEN("3") FLASHCELL_TEN("4") FLASHCELL_TEN("5")
#define FLASHCELL_LIST_128 FLASHCELL_SIXTY "%60, %61, %62, %63"
#define FLASHCELL_LIST_256                                                                    \
  FLASHCELL_SIXTY FLASHCELL_TEN("6") FLASHCELL_TEN("7") FLASHCELL_TEN("8") FLASHCELL_TEN("9") \
      FLASHCELL_TEN("10") FLASHCELL_TEN("11") "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASHCELL_SUMS_8(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FLASHCELL_SUMS_32(j) \
  FLASHCELL_SUMS_8(j), FLASHCELL_SUMS_8(j + 1), FLASHCELL_SUMS_8(j + 2), FLASHCELL_SUMS_8(j + 3)
#define FLASHCELL_SUMS_64(j) FLASHCELL_SUMS_32(j), FLASHCELL_SUMS_32(j + 4)
#define FLASHCELL_SUMS_128(j) FLASHCELL_SUMS_64(j), FLASHCELL_SUMS_64(j + 8)
#define FLASHCELL_SUMS_256(j) FLASHCELL_SUMS_128(j), FLASHCELL_SUMS_128(j + 16)
#define FLASHCELL_WGMMA(n, type, left, right, add, across, ...)                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add                                   \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type     \
               " {" FLASHCELL_LIST_##n "}, " left ", " right ", p, 1, 1, " across ";\n}" \
               : FLASHCELL_SUMS_##n(0)                                                   \
               : __VA_ARGS__)
#define FLASHCELL_WGMMA_SHARED(n, type, i0, i1, i2, i3, i4)                                        \
  FLASHCELL_WGMMA(n, type, i0, i1, i2, i3 ", " i4, "l"(left.bits), "l"(right.bits), "r"(int(add)), \
                  "n"(kLeft == Major::kWidth), "n"(kRight == Major::kWidth))
#define FLASHCELL_WGMMA_REGISTERS(n, type, i0, i1, i2, i3, i4, i5, i6)                      \
  FLASHCELL_WGMMA(n, type, "{" i0 ", " i1 ", " i2 ", " i3 "}", i4, i5, i6, "r"(left[0]),    \
                  "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right.bits), "r"(int(add)), \
                  "n"(kRight == Major::kWidth))
#define FLASHCELL_BY_TYPE(product, n, ...)    \
  if constexpr (kColumns == n) {              \
    if constexpr (std::is_same_v<IO, bf16>) { \
      product(n, "bf16", __VA_ARGS__);        \
    } else {                                  \
      product(n, "f16", __VA_ARGS__);         \
    }                                         \
  }

// sums += left right, over a depth of 16; without `add` what the sums were does not count. Runs on
// after the call: until wgmma_wait nobody reads or writes sums, left words or shared memory here.
template <typename IO, Major kLeft, Major kRight, int kN>
DEVICE void wgmma(float (&d)[kN][4], SharedOperand<kLeft> left, SharedOperand<kRight> right,
                  bool add = true) {
  constexpr int kColumns = 8 * kN;
  static_assert(kHasWgmma<kColumns> && sizeof(IO) == 2);
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 8, "%4", "%5", "%6", "%7", "%8")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 64, "%32", "%33", "%34", "%35", "%36")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 128, "%64", "%65", "%66", "%67", "%68")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 256, "%128", "%129", "%130", "%131", "%132")
}
template <typename IO, Major kRight, int kN>
DEVICE void wgmma(float (&d)[kN][4], const uint32_t (&left)[4], SharedOperand<kRight> right,
                  bool add = true) {
  constexpr int kColumns = 8 * kN;
  static_assert(kHasWgmma<kColumns> && sizeof(IO) == 2);
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_REGISTERS, 8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_REGISTERS, 64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_REGISTERS, 128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_REGISTERS, 256, "%128", "%129", "%130", "%131", "%132", "%133",
                    "%134")
}

#undef FLASHCELL_BY_TYPE
#undef FLASHCELL_WGMMA_REGISTERS
#undef FLASHCELL_WGMMA_SHARED
#undef FLASHCELL_WGMMA
#undef FLASHCELL_SUMS_256
#undef FLASHCELL_SUMS_128
#undef FLASHCELL_SUMS_64
#undef FLASHCELL_SUMS_32
#undef FLASHCELL_SUMS_8
#undef FLASHCELL_LIST_256
#undef FLASHCELL_LIST_128
#undef FLASHCELL_SIXTY
#undef FLASHCELL_LIST_64
#undef FLASHCELL_LIST_8
#undef FLASHCELL_TEN

}  // namespace flashcell::cuda
