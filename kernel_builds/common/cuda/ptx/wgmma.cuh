// Hopper's matrix instruction wgmma: a warpgroup (128 threads, the first a multiple of 128)
// multiplies 64 rows by up to 256 columns of 16-bit types, or of fp32 as TF32, with fp32 sums. It
// needs sm_90a.
//
// Lane 4 r + q of warp w of the warpgroup holds in sums[j][e] column 8 j + 2 q + e % 2 of row 16 w
// + r (e < 2) or 16 w + r + 8 (e >= 2). A left operand in registers has the layout described in
// mma.cuh.
#pragma once
#include <type_traits>

#include "common/cuda/ptx/mma.cuh"
#include "common/cuda/ptx/shared_operand.cuh"
#include "common/cuda/ptx/wgmma_order.cuh"

// Where these instructions do not exist, kernels that use them compile to a trap.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define FLASHCELL_WGMMA_CODE 1
#endif

namespace flashcell::cuda {

#define FLASHCELL_TEN(t) \
  "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define FLASHCELL_LIST_8 "%0, %1, %2, %3"
#define FLASHCELL_LIST_48 FLASHCELL_TEN("") FLASHCELL_TEN("1") "%20, %21, %22, %23"
#define FLASHCELL_LIST_64 FLASHCELL_TEN("") FLASHCELL_TEN("1") FLASHCELL_TEN("2") "%30, %31"
#define FLASHCELL_SIXTY \
  FLASHCELL_TEN("")     \
  FLASHCELL_TEN("1") FLASHCELL_TEN("2") FLASHCELL_TEN("3") FLASHCELL_TEN("4") FLASHCELL_TEN("5")
#define FLASHCELL_LIST_96 \
  FLASHCELL_TEN("")       \
  FLASHCELL_TEN("1") FLASHCELL_TEN("2") FLASHCELL_TEN("3") "%40, %41, %42, %43, %44, %45, %46, " \
                                                           "%47"
#define FLASHCELL_LIST_120 \
  FLASHCELL_TEN("")        \
  FLASHCELL_TEN("1")       \
  FLASHCELL_TEN("2")       \
  FLASHCELL_TEN("3") FLASHCELL_TEN("4") "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59"
#define FLASHCELL_LIST_128 FLASHCELL_SIXTY "%60, %61, %62, %63"
#define FLASHCELL_LIST_144 FLASHCELL_SIXTY FLASHCELL_TEN("6") "%70, %71"
#define FLASHCELL_LIST_160 \
  FLASHCELL_SIXTY FLASHCELL_TEN("6") "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHCELL_LIST_192                              \
  FLASHCELL_SIXTY FLASHCELL_TEN("6") FLASHCELL_TEN("7") \
      FLASHCELL_TEN("8") "%90, %91, %92, %93, %94, %95"
#define FLASHCELL_LIST_256                                                                    \
  FLASHCELL_SIXTY FLASHCELL_TEN("6") FLASHCELL_TEN("7") FLASHCELL_TEN("8") FLASHCELL_TEN("9") \
      FLASHCELL_TEN("10") FLASHCELL_TEN("11") "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASHCELL_SUMS_8(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define FLASHCELL_SUMS_32(j) \
  FLASHCELL_SUMS_8(j), FLASHCELL_SUMS_8(j + 1), FLASHCELL_SUMS_8(j + 2), FLASHCELL_SUMS_8(j + 3)
#define FLASHCELL_SUMS_48(j) FLASHCELL_SUMS_32(j), FLASHCELL_SUMS_8(j + 4), FLASHCELL_SUMS_8(j + 5)
#define FLASHCELL_SUMS_64(j) FLASHCELL_SUMS_32(j), FLASHCELL_SUMS_32(j + 4)
#define FLASHCELL_SUMS_96(j) FLASHCELL_SUMS_64(j), FLASHCELL_SUMS_32(j + 8)
#define FLASHCELL_SUMS_120(j) \
  FLASHCELL_SUMS_96(j), FLASHCELL_SUMS_8(j + 12), FLASHCELL_SUMS_8(j + 13), FLASHCELL_SUMS_8(j + 14)
#define FLASHCELL_SUMS_128(j) FLASHCELL_SUMS_64(j), FLASHCELL_SUMS_64(j + 8)
#define FLASHCELL_SUMS_144(j) \
  FLASHCELL_SUMS_128(j), FLASHCELL_SUMS_8(j + 16), FLASHCELL_SUMS_8(j + 17)
#define FLASHCELL_SUMS_160(j) FLASHCELL_SUMS_128(j), FLASHCELL_SUMS_32(j + 16)
#define FLASHCELL_SUMS_192(j) FLASHCELL_SUMS_128(j), FLASHCELL_SUMS_64(j + 16)
#define FLASHCELL_SUMS_256(j) FLASHCELL_SUMS_128(j), FLASHCELL_SUMS_128(j + 16)
#define FLASHCELL_WGMMA(n, shape, left, right, add, across, ...)                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add                                    \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n shape " {" FLASHCELL_LIST_##n \
               "}, " left ", " right ", p, 1, 1" across ";\n}"                            \
               : FLASHCELL_SUMS_##n(0)                                                    \
               : __VA_ARGS__)
#define FLASHCELL_16(type) "k16.f32." type "." type
#define FLASHCELL_TF32 "k8.f32.tf32.tf32"
#define FLASHCELL_WGMMA_SHARED(n, type, i0, i1, i2, i3, i4)                           \
  FLASHCELL_WGMMA(n, FLASHCELL_16(type), i0, i1, i2, ", " i3 ", " i4, "l"(left.bits), \
                  "l"(right.bits), "r"(int(add)), "n"(kLeft == Major::kWidth),        \
                  "n"(kRight == Major::kWidth))
#define FLASHCELL_WGMMA_REGISTERS(n, type, i0, i1, i2, i3, i4, i5, i6)                        \
  FLASHCELL_WGMMA(n, FLASHCELL_16(type), "{" i0 ", " i1 ", " i2 ", " i3 "}", i4, i5, ", " i6, \
                  "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right.bits),    \
                  "r"(int(add)), "n"(kRight == Major::kWidth))
#define FLASHCELL_WGMMA_TF32_SHARED(n, i0, i1, i2)                                      \
  if constexpr (kColumns == n) {                                                        \
    FLASHCELL_WGMMA(n, FLASHCELL_TF32, i0, i1, i2, "", "l"(left.bits), "l"(right.bits), \
                    "r"(int(add)));                                                     \
  }
#define FLASHCELL_WGMMA_TF32_REGISTERS(n, i0, i1, i2, i3, i4, i5)                            \
  if constexpr (kColumns == n) {                                                             \
    FLASHCELL_WGMMA(n, FLASHCELL_TF32, "{" i0 ", " i1 ", " i2 ", " i3 "}", i4, i5, "",       \
                    "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right.bits), \
                    "r"(int(add)));                                                          \
  }
#define FLASHCELL_BY_TYPE(product, n, ...)    \
  if constexpr (kColumns == n) {              \
    if constexpr (std::is_same_v<IO, bf16>) { \
      product(n, "bf16", __VA_ARGS__);        \
    } else {                                  \
      product(n, "f16", __VA_ARGS__);         \
    }                                         \
  }

// Starts sums += left right over a depth of 16 (sums = left right without `add`). It runs
// asynchronously: until wgmma_wait, nothing may read or write the sums, the left operand's
// registers or its shared memory.
template <typename IO, Major kLeft, Major kRight, int kN>
DEVICE void wgmma(float (&d)[kN][4], SharedOperand<kLeft> left, SharedOperand<kRight> right,
                  bool add = true) {
  constexpr int kColumns = 8 * kN;
  static_assert(kHasWgmma<kColumns> && sizeof(IO) == 2);
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 8, "%4", "%5", "%6", "%7", "%8")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 48, "%24", "%25", "%26", "%27", "%28")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 64, "%32", "%33", "%34", "%35", "%36")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 96, "%48", "%49", "%50", "%51", "%52")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 120, "%60", "%61", "%62", "%63", "%64")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 128, "%64", "%65", "%66", "%67", "%68")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 144, "%72", "%73", "%74", "%75", "%76")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 160, "%80", "%81", "%82", "%83", "%84")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 192, "%96", "%97", "%98", "%99", "%100")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_SHARED, 256, "%128", "%129", "%130", "%131", "%132")
}
template <typename IO, Major kRight, int kN>
DEVICE void wgmma(float (&d)[kN][4], const uint32_t (&left)[4], SharedOperand<kRight> right,
                  bool add = true) {
  constexpr int kColumns = 8 * kN;
  static_assert((kColumns == 8 || kColumns == 64 || kColumns == 128 || kColumns == 256) &&
                sizeof(IO) == 2);
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_REGISTERS, 8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_REGISTERS, 64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_REGISTERS, 128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
  FLASHCELL_BY_TYPE(FLASHCELL_WGMMA_REGISTERS, 256, "%128", "%129", "%130", "%131", "%132", "%133",
                    "%134")
}

// The same over a depth of 8 elements of fp32, of whose bits the instruction reads those of TF32. A
// row of 128 bytes in shared memory holds 32 of them. Lane 4 r + q of warp w holds of a left
// operand in registers rows 16 w + r and 16 w + r + 8 of column q, then those of column q + 4.
template <int kN>
DEVICE void wgmma_tf32(float (&d)[kN][4], SharedOperand<Major::kDepth> left,
                       SharedOperand<Major::kDepth> right, bool add = true) {
  constexpr int kColumns = 8 * kN;
  static_assert(kHasWgmma<kColumns> && 48 <= kColumns && kColumns <= 160 && kColumns != 144);
  FLASHCELL_WGMMA_TF32_SHARED(48, "%24", "%25", "%26")
  FLASHCELL_WGMMA_TF32_SHARED(64, "%32", "%33", "%34")
  FLASHCELL_WGMMA_TF32_SHARED(96, "%48", "%49", "%50")
  FLASHCELL_WGMMA_TF32_SHARED(120, "%60", "%61", "%62")
  FLASHCELL_WGMMA_TF32_SHARED(128, "%64", "%65", "%66")
  FLASHCELL_WGMMA_TF32_SHARED(160, "%80", "%81", "%82")
}
template <int kN>
DEVICE void wgmma_tf32(float (&d)[kN][4], const uint32_t (&left)[4],
                       SharedOperand<Major::kDepth> right, bool add = true) {
  constexpr int kColumns = 8 * kN;
  static_assert(kColumns == 64 || kColumns == 128);
  FLASHCELL_WGMMA_TF32_REGISTERS(64, "%32", "%33", "%34", "%35", "%36", "%37")
  FLASHCELL_WGMMA_TF32_REGISTERS(128, "%64", "%65", "%66", "%67", "%68", "%69")
}

#undef FLASHCELL_WGMMA_TF32_REGISTERS
#undef FLASHCELL_WGMMA_TF32_SHARED
#undef FLASHCELL_BY_TYPE
#undef FLASHCELL_WGMMA_REGISTERS
#undef FLASHCELL_WGMMA_SHARED
#undef FLASHCELL_TF32
#undef FLASHCELL_16
#undef FLASHCELL_WGMMA
#undef FLASHCELL_SUMS_256
#undef FLASHCELL_SUMS_192
#undef FLASHCELL_SUMS_160
#undef FLASHCELL_SUMS_144
#undef FLASHCELL_SUMS_128
#undef FLASHCELL_SUMS_120
#undef FLASHCELL_SUMS_96
#undef FLASHCELL_SUMS_64
#undef FLASHCELL_SUMS_48
#undef FLASHCELL_SUMS_32
#undef FLASHCELL_SUMS_8
#undef FLASHCELL_LIST_256
#undef FLASHCELL_LIST_192
#undef FLASHCELL_LIST_160
#undef FLASHCELL_LIST_144
#undef FLASHCELL_LIST_128
#undef FLASHCELL_LIST_120
#undef FLASHCELL_LIST_96
#undef FLASHCELL_SIXTY
#undef FLASHCELL_LIST_64
#undef FLASHCELL_LIST_48
#undef FLASHCELL_LIST_8
#undef FLASHCELL_TEN

}  // namespace flashcell::cuda
