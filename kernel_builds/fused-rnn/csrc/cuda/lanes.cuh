// Sums over the lanes of a warp.
#pragma once
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// Sums every value over the lanes of a warp: lane l gets the total of values[l % kCount]. At every
// exchange a lane passes on half of its values.
template <int kCount, int kSize>
DEVICE float sum_over_lanes(float (&values)[kSize]) {
  if constexpr (kCount == 1) {
#pragma unroll
    for (int offset = kSize; offset < 32; offset *= 2) {
      values[0] += __shfl_xor_sync(~0u, values[0], offset);
    }
    return values[0];
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = threadIdx.x & kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float keep = upper ? values[i + kHalf] : values[i];
      const float give = upper ? values[i] : values[i + kHalf];
      values[i] = keep + __shfl_xor_sync(~0u, give, kHalf);
    }
    return sum_over_lanes<kHalf>(values);
  }
}

}  // namespace flashcell::cuda
