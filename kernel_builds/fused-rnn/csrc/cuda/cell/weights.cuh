// The backward kernel for few sequences, which also computes the gradients of the weights: the host
// takes longer to launch a product than the GPU to compute one of this size.
#pragma once
#include "backward.cuh"

namespace flashcell::cuda {

constexpr int kSumThreads = 256, kSumColumns = 2 * kSumThreads;

// A thread block has the weights' rows of kUnits units, and kSumColumns columns of one operand.
template <typename Cell>
struct SumTile {
  static constexpr int kUnits = Cell::kGates == 1 ? 8 : 4;
  // Gradients of gates: of each gate for all units, and then of the last gate's recurrent product.
  static constexpr int kRows = Cell::kGates * kUnits, kAll = Cell::kBias * kUnits;
  static_assert(kAll % 4 == 0 && (Cell::kBias == Cell::kGates || Cell::kSplitGrad));
};

// Sums a row of gradients over the batch, with the lanes of a warp side by side.
template <int kAll>
DEVICE float sum_of_row(const float (&gates)[kMostSummed][kAll], int B, int row) {
  float sum = 0;
  for (int b = int(threadIdx.x) % 32; b < B; b += 32) sum += gates[b][row];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

// The weights' columns lie in tiles of kSumColumns: `x_tiles` of W, then those of R. The thread
// blocks of tile 0 also write the gradients of biases, gates and states.
template <typename Cell, typename IO>
__global__ void __launch_bounds__(kSumThreads) weight_kernel(const __grid_constant__ CellBackward p,
                                                             int unit_blocks, int x_tiles) {
  using Tile = SumTile<Cell>;
  constexpr int kUnits = Tile::kUnits, kRows = Tile::kRows, kAll = Tile::kAll;
  __shared__ __align__(16) float gates[kMostSummed][kAll];
  pdl_wait();
  const int tile = int(blockIdx.x) / unit_blocks, warp = threadIdx.x / 32;
  const int64_t begin = int64_t(blockIdx.x % unit_blocks) * kUnits;
  const int B = int(p.B);
  const bool of_h = tile >= x_tiles;
  const StateView& operand = of_h ? p.weights.h : p.weights.x;
  const int64_t width = of_h ? p.D : p.weights.width;
  IO* const weight = static_cast<IO*>(of_h ? p.weights.dw_hh : p.weights.dw_ih);
  const int64_t first = int64_t(of_h ? tile - x_tiles : tile) * kSumColumns + threadIdx.x;
  const bool has_product = operand.data != nullptr;

  if (tile == 0 || has_product) {
    for (int i = threadIdx.x; i < B * kUnits; i += kSumThreads) {
      const int unit = i % kUnits, b = i / kUnits;
      float found[Cell::kBias] = {};
      if (begin + unit < p.D) {
        differentiate_cell<Cell, IO>(p, b, begin + unit, tile == 0, found);
      }
#pragma unroll
      for (int g = 0; g < Cell::kBias; ++g) gates[b][g * kUnits + unit] = found[g];
    }
    __syncthreads();
  }
  if (tile == 0 && p.db_ih != nullptr) {
    for (int row = warp; row < kAll; row += kSumThreads / 32) {
      const float sum = sum_of_row(gates, B, row);
      const int64_t d = begin + row % kUnits;
      if (threadIdx.x % 32 == 0 && d < p.D) write_bias<Cell, IO>(p, row / kUnits, d, sum);
    }
  }

  float sums[2][kRows] = {};
  if (has_product) {
    const IO* const from = static_cast<const IO*>(operand.data);
    const int64_t second = first + kSumThreads < width ? kSumThreads : 0;
    if (first >= width) return;
#pragma unroll 4
    for (int b = 0; b < B; ++b) {
      const IO* const row = from + b * operand.row + first;
      const float low = to_float(row[0]), high = to_float(row[second]);
      float all[kAll];
#pragma unroll
      for (int i = 0; i < kAll; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&gates[b][i]);
        all[i] = four.x, all[i + 1] = four.y, all[i + 2] = four.z, all[i + 3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // the last gate's recurrent product has gradients of its own
        const bool is_last = kAll > kRows && i >= kRows - kUnits;
        const float gate = is_last && of_h ? all[i + kAll - kRows] : all[i];
        sums[0][i] = fmaf(gate, low, sums[0][i]), sums[1][i] = fmaf(gate, high, sums[1][i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t d = begin + i % kUnits, row = (i / kUnits) * p.D + d;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = first + half * kSumThreads;
      if (d < p.D && at < width) weight[row * width + at] = from_float<IO>(sums[half][i]);
    }
  }
}

}  // namespace flashcell::cuda
