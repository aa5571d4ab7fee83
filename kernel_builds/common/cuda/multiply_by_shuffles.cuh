// The product of mma.cuh in fp32, for GPUs without a matrix instruction for the operands: lanes
// hand each other their words. It takes half as long again as its multiply-adds.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// d = a b + c, where a word holds two elements of bf16, or one of fp32. All lanes of the warp call
// it.
template <int kElements>
DEVICE void multiply_by_shuffles(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                 const float (&c)[4]) {
  static_assert(kElements == 1 || kElements == 2);
  const int lane = threadIdx.x % 32, row = lane / 4 * 4, columns = lane % 4 * 8;
  const auto element = [](uint32_t word, int e) {
    if constexpr (kElements == 1) return __uint_as_float(word);
    return __uint_as_float(e == 0 ? word << 16 : word & 0xffff0000u);
  };
  float sums[4] = {c[0], c[1], c[2], c[3]};
  // Lane q of a row's or column's four lanes has its words q. Unrolled, this would be too much code
  // for kernels with many products.
#pragma unroll 1
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t b = half == 0 ? b0 : b1;
      const uint32_t left[2] = {__shfl_sync(~0u, a[2 * half], row + q),
                                __shfl_sync(~0u, a[2 * half + 1], row + q)};
      const uint32_t right[2] = {__shfl_sync(~0u, b, columns + q),
                                 __shfl_sync(~0u, b, columns + 4 + q)};
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[i] = fmaf(element(left[i / 2], e), element(right[i % 2], e), sums[i]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = sums[i];
}

}  // namespace flashcell::cuda
