// The product of the fma engine: weights in registers times an operand in shared memory, in exact
// fp32.
#pragma once
#include "../sequence.cuh"
#include "plan.h"

namespace flashcell::cuda {

// kLanes neighbouring lanes compute kUnits units of kSequences sequences. An item is a unit of a
// sequence; it has kValues sums.
//
// The lanes add up their shares by halves: in every exchange a lane gives away one half of its
// items and receives the other lane's share of the half it keeps. A lane numbers the items so that
// it always keeps the lower half: its item i is item i ^ first() of the group.
template <int kValues, int kUnits, int kLanes, int kChunks, int kSequences>
struct FmaProduct {
  static constexpr int kItems = kSequences * kUnits;
  static constexpr int kOwned = kItems > kLanes ? kItems / kLanes : 1;    // items left to a lane
  static constexpr int kSharers = kLanes > kItems ? kLanes / kItems : 1;  // lanes with the same one
  static constexpr int kVectors = 4 * kLanes;  // floats from chunk to chunk
  using Sums = float[kItems][kValues];

  float4 weight[kChunks][kUnits][kValues];
  int rows[kSequences];  // offsets of the sequences' operands, for the lane's first chunk

  static DEVICE int lane() { return threadIdx.x % kLanes; }
  static DEVICE int first() { return lane() / kSharers * kOwned; }
  // The item that is left to the lane after the exchanges, as a sequence and a unit of the group.
  static DEVICE int sequence(int owned) { return (first() + owned) / kUnits; }
  static DEVICE int unit(int owned) { return (first() + owned) % kUnits; }
  // Of the lanes with the same item, the first stores its results.
  static DEVICE int sharer() { return lane() % kSharers; }
  static DEVICE bool leads() { return sharer() == 0; }

  // element(depth, unit, value) returns a weight.
  template <typename Element>
  DEVICE FmaProduct(int operand, int row, Element element) {
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      rows[s] = operand + (s ^ first() / kUnits) * row + 4 * lane();
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          const auto at = [&](int i) {
            const float w = element((c * kLanes + lane()) * 4 + i, u ^ first() % kUnits, v);
            return __uint_as_float(keep(__float_as_uint(w)));
          };
          weight[c][u][v] = {at(0), at(1), at(2), at(3)};
        }
      }
    }
  }

  // Multiplies the operands `offset` floats after those of the first sequences. Afterwards the
  // sums of the first kOwned items are complete. meanwhile() is other work, which hides latencies:
  // between the loads and the multiplications, or, with kLate, at the end, which takes fewer
  // registers.
  template <bool kLate, typename Meanwhile>
  DEVICE void run(const float* memory, int offset, Sums& sums, Meanwhile meanwhile) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) sums[i][v] = 0;
    }
    if constexpr (kSequences == 1) {  // loads everything first
      float4 x[kChunks];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) x[c] = load(memory, offset, c, 0);
      meanwhile();
#pragma unroll
      for (int c = 0; c < kChunks; ++c) multiply(sums, c, 0, x[c]);
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int s = 0; s < kSequences; ++s) multiply(sums, c, s, load(memory, offset, c, s));
      }
    }
    if constexpr (kSequences > 1 && !kLate) meanwhile();
    reduce<kItems, kLanes / 2>(sums);
    if constexpr (kSequences > 1 && kLate) meanwhile();
  }

 private:
  DEVICE float4 load(const float* memory, int offset, int c, int s) const {
    return *reinterpret_cast<const float4*>(memory + rows[s] + offset + c * kVectors);
  }
  DEVICE void multiply(Sums& sums, int c, int s, float4 x) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        float& sum = sums[s * kUnits + u][v];
        const float4 w = weight[c][u][v];
        sum = fmaf(w.x, x.x, sum), sum = fmaf(w.y, x.y, sum);
        sum = fmaf(w.z, x.z, sum), sum = fmaf(w.w, x.w, sum);
      }
    }
  }

  // Adds up the shares of lanes that differ in the bits of kMask and below.
  template <int kLeft, int kMask>
  static DEVICE void reduce(Sums& sums) {
    if constexpr (kMask > 0) {
      constexpr int kHalf = kLeft / 2, kKept = kLeft > 1 ? kHalf : 1;  // a last item stays in both
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          sums[i][v] += __shfl_xor_sync(~0u, sums[i + kHalf][v], kMask);
        }
      }
      reduce<kKept, kMask / 2>(sums);
    }
  }
};

}  // namespace flashcell::cuda
