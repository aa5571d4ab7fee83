// The backward kernels: the gradients of the gates and of the states before the step, and the sums
// over the batch that are the gradients of the biases.
#pragma once
#include "cell.cuh"

namespace flashcell::cuda {

// Threads of a block. With few units to a block, most GPUs have a block for each multiprocessor.
constexpr int kGradientUnits = 8, kGradientRows = 128;
constexpr int kGradientThreads = kGradientUnits * kGradientRows;
constexpr int kZeroVectors = 4;  // that a thread of a block which fills memory with zeros writes
constexpr int64_t kZeroBytes = int64_t(kGradientThreads) * kZeroVectors * sizeof(float4);

// Writes a row of the bias gradient to both biases, which share those of all gates but, if the cell
// has one bias row more than gates, the last.
template <typename Cell, typename IO>
DEVICE void write_bias(const CellBackward& p, int row, int64_t d, float sum) {
  constexpr int kGates = Cell::kGates, kSummed = 2 * kGates - Cell::kBias;
  if (row < kGates) store<IO>(p.db_ih, row * p.D + d, sum);
  if (row < kSummed) store<IO>(p.db_hh, row * p.D + d, sum);
  if (row >= kGates) store<IO>(p.db_hh, (row - kGates + kSummed) * p.D + d, sum);
}

// Computes the gradients of a cell's gates, and of the last gate's recurrent product if the cell
// keeps that apart; writes them and those of the states if `writes`.
template <typename Cell, typename IO>
DEVICE void differentiate_cell(const CellBackward& p, int64_t b, int64_t d, bool writes,
                               float (&found)[Cell::kBias]) {
  using V = CellValue<IO>;
  constexpr int kGates = Cell::kGates, kStates = Cell::kStates;
  V d_state[kStates], saved[Cell::kSaved], dx[kGates], dr[kGates];
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    d_state[k] = V(k < Cell::kGradStates ? load_view<IO>(p.dlast[k], b, d) : 0);
  }
  d_state[0] += V(load_view<IO>(p.dh, b, d));
#pragma unroll
  for (int v = 0; v < Cell::kSaved; ++v) {
    const int64_t at = (b * Cell::kSaved + v) * p.D + d;
    saved[v] = V(to_float(static_cast<const IO*>(p.saved)[at]));
  }
  Cell::backward(saved, d_state, dx, dr);
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    const int64_t at = (b * kGates + g) * p.D + d;
    if (writes && p.dx != nullptr) store<IO>(p.dx, at, to_float(dx[g]));
    if (writes && p.dr != nullptr) store<IO>(p.dr, at, to_float(dr[g]));
    found[g] = to_float(dx[g]);
  }
  if (Cell::kBias > kGates) found[Cell::kBias - 1] = to_float(dr[kGates - 1]);
  if (!writes) return;
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (p.dstate[k] != nullptr) p.dstate[k][b * p.D + d] = to_float(d_state[k]);
  }
}

// Fills the block's part of the memory. It begins at a multiple of 16 bytes, as torch's tensors do.
DEVICE void write_zeros(const CellBackward& p, int64_t block) {
  char* memory = static_cast<char*>(p.zeros);
#pragma unroll
  for (int i = 0; i < kZeroVectors; ++i) {
    const int64_t at = block * kZeroBytes + (i * kGradientThreads + threadIdx.x) * sizeof(float4);
    if (at + int64_t(sizeof(float4)) <= p.zero_bytes) {
      *reinterpret_cast<float4*>(memory + at) = {};
    } else {
      for (int64_t byte = at; byte < p.zero_bytes; ++byte) memory[byte] = 0;
    }
  }
}

// A thread runs the cells of one unit for every kGradientRows-th row of a chunk of the batch.
// Blocks from `gradient_blocks` on fill memory with zeros.
template <typename Cell, typename IO>
__global__ void __launch_bounds__(kGradientThreads) gradient_kernel(
    const __grid_constant__ CellBackward p, int unit_blocks, int64_t gradient_blocks) {
  constexpr int kBias = Cell::kBias;
  __shared__ float parts[kBias][kGradientRows][kGradientUnits];
  pdl_wait();
  if (blockIdx.x >= gradient_blocks) return write_zeros(p, blockIdx.x - gradient_blocks);
  const int lane = threadIdx.x % kGradientUnits, first = threadIdx.x / kGradientUnits;
  const int64_t d = int64_t(blockIdx.x % unit_blocks) * kGradientUnits + lane;
  const int64_t chunk = blockIdx.x / unit_blocks, begin = chunk * kCellChunk;
  const int64_t end = p.B < begin + kCellChunk ? p.B : begin + kCellChunk;
  float sums[kBias] = {};
  if (d < p.D) {
    for (int64_t b = begin + first; b < end; b += kGradientRows) {
      float found[kBias];
      differentiate_cell<Cell, IO>(p, b, d, true, found);
#pragma unroll
      for (int row = 0; row < kBias; ++row) sums[row] += found[row];
    }
  }
  if (p.db_ih == nullptr) return;
#pragma unroll
  for (int row = 0; row < kBias; ++row) parts[row][first][lane] = sums[row];
  __syncthreads();
  if (d >= p.D) return;
  for (int row = first; row < kBias; row += kGradientRows) {
    float sum = 0;
#pragma unroll 16
    for (int i = 0; i < kGradientRows; ++i) sum += parts[row][i][lane];
    if (p.B <= kCellChunk) {
      write_bias<Cell, IO>(p, row, d, sum);
    } else {
      p.partial[(chunk * kBias + row) * p.D + d] = sum;
    }
  }
}

// Adds up the chunks' rows of the bias gradient.
template <typename Cell, typename IO>
__global__ void __launch_bounds__(kGradientThreads) bias_sums_kernel(
    const __grid_constant__ CellBackward p, int64_t chunks) {
  pdl_wait();
  const int64_t count = Cell::kBias * p.D;
  const int64_t at = int64_t(blockIdx.x) * kGradientThreads + threadIdx.x;
  if (at >= count) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += p.partial[chunk * count + at];
  write_bias<Cell, IO>(p, int(at / p.D), at % p.D, sum);
}

}  // namespace flashcell::cuda
