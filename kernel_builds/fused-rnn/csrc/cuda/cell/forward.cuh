// The forward kernels: one runs the cells after cuBLAS's products, the other also multiplies, for
// few sequences, whose products take as long as reading the weights once.
#pragma once
#include "../lanes.cuh"
#include "cell.cuh"

namespace flashcell::cuda {

constexpr int kCellThreads = 128;

// A thread runs one cell; `blocks` thread blocks share a sequence.
template <typename Cell, typename IO>
__global__ void __launch_bounds__(kCellThreads) cells_kernel(const __grid_constant__ CellForward p,
                                                             int blocks) {
  pdl_wait();
  const int64_t b = blockIdx.x / blocks;
  const int64_t d = int64_t(blockIdx.x % blocks) * kCellThreads + threadIdx.x;
  if (d >= p.D) return;
  float x[Cell::kGates], r[Cell::kGates] = {};
  const int64_t first = b * Cell::kGates * p.D + d;
#pragma unroll
  for (int g = 0; g < Cell::kGates; ++g) {
    const int64_t at = first + g * p.D;
    x[g] = p.gates_are_io ? to_float(static_cast<const IO*>(p.gates)[at])
                          : static_cast<const float*>(p.gates)[at];
    if (p.sums != nullptr) r[g] = p.sums[at];
  }
  run_cell<Cell, IO>(p, b, d, x, r);
}

// Consecutive elements of a row, as floats: a vector of 16 bytes, or one element where rows are not
// aligned to vectors.
template <typename IO, bool kVectors>
struct RowPiece {
  static constexpr int kCount = kVectors ? 16 / sizeof(IO) : 1;
  struct alignas(kVectors ? 16 : sizeof(IO)) Elements {
    IO of[kCount];
  };
  Elements elements;

  DEVICE void load(const IO* from) { elements = *reinterpret_cast<const Elements*>(from); }
  DEVICE float operator[](int i) const { return to_float(elements.of[i]); }
};

// One element of every operand, as io rounds it; zeros past the last one.
template <typename IO, int kWidth>
DEVICE void load_elements(float (&values)[kWidth], const StateView& view, int64_t first,
                          int columns, int64_t at) {
  const int64_t from = first * view.row + at * view.unit;
  const auto load_all = [&](const auto* data) {
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      values[c] = c < columns ? to_float(from_float<IO>(to_float(data[from + c * view.row]))) : 0;
    }
  };
  view.is_io ? load_all(static_cast<const IO*>(view.data))
             : load_all(static_cast<const float*>(view.data));
}

// Multiplies the rows of one unit, one for each gate, by `columns` operands from row `first` on,
// with the lanes of a warp side by side along the depth. Lane l gets the sum of gate l % kSlots and
// column l / kSlots.
template <int kGates, typename IO, int kWidth, bool kVectors>
DEVICE float multiply_unit(const CellProduct& product, int64_t D, int64_t unit, int64_t first,
                           int columns) {
  using Piece = RowPiece<IO, kVectors>;
  constexpr int kSlots = kGates == 3 ? 4 : kGates;  // a power of two
  constexpr int kCount = Piece::kCount, kStep = 32 * kCount;
  constexpr int kAhead =
      (kVectors ? 8 : 16) / kSlots;  // pieces of each row that are loaded at once
  const IO* row = static_cast<const IO*>(product.weight) + unit * product.depth;
  const int64_t gate = D * product.depth, depth = product.depth;
  float sums[kWidth * kSlots] = {};
  const auto load = [&](Piece(&rows)[kGates], int64_t at) {
#pragma unroll
    for (int g = 0; g < kGates; ++g) rows[g].load(row + g * gate + at);
  };
  const auto add = [&](const Piece(&rows)[kGates], int64_t at) {
    if constexpr (kVectors) {  // the launcher has checked that operands are io and aligned
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        if (c >= columns) continue;
        const StateView& view = product.operand;
        Piece values;
        values.load(static_cast<const IO*>(view.data) + (first + c) * view.row + at);
#pragma unroll
        for (int g = 0; g < kGates; ++g) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) sums[c * kSlots + g] += rows[g][i] * values[i];
        }
      }
    } else {
      float values[kWidth];
      load_elements<IO>(values, product.operand, first, columns, at);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
#pragma unroll
        for (int g = 0; g < kGates; ++g) sums[c * kSlots + g] += rows[g][0] * values[c];
      }
    }
  };
  int64_t at = threadIdx.x % 32 * kCount;
  if constexpr (kVectors) {
    for (; at + (kAhead - 1) * kStep < depth; at += kAhead * kStep) {
      Piece rows[kAhead][kGates];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(rows[i], at + i * kStep);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) add(rows[i], at + i * kStep);
    }
    for (; at < depth; at += kStep) {
      Piece rows[kGates];
      load(rows, at), add(rows, at);
    }
  } else {
    // In the loop above, lanes near the end of the rows leave early, and the warp reads what is
    // left one piece after the other. Here all lanes take every round and skip the pieces past the
    // end.
    for (int64_t start = 0; start < depth; start += kAhead * kStep, at += kAhead * kStep) {
      Piece rows[kAhead][kGates];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at + i * kStep < depth) load(rows[i], at + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at + i * kStep < depth) add(rows[i], at + i * kStep);
      }
    }
  }
  return sum_over_lanes<kWidth * kSlots>(sums);
}

constexpr int kDotWarps = 8;

// A warp multiplies one unit's rows of the input's weight or, in every other warp if there is a
// state, of the recurrent weight. The lanes of the former then run the cells of the unit.
template <typename Cell, typename IO, int kWidth, bool kVectors>
__global__ void __launch_bounds__(32 * kDotWarps) dot_kernel(const __grid_constant__ CellForward p,
                                                             int unit_blocks) {
  constexpr int kGates = Cell::kGates, kSlots = kGates == 3 ? 4 : kGates;
  __shared__ float recurrent[kDotWarps][32];
  pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sides = p.recurrent.weight != nullptr ? 2 : 1, side = warp % sides;
  const int64_t unit = int64_t(blockIdx.x % unit_blocks) * (kDotWarps / sides) + warp / sides;
  const int64_t first = int64_t(blockIdx.x / unit_blocks) * kWidth;
  const int columns = int(p.B - first < kWidth ? p.B - first : kWidth);
  float sum = 0;
  if (unit < p.D) {
    sum = multiply_unit<kGates, IO, kWidth, kVectors>(side == 0 ? p.input : p.recurrent, p.D, unit,
                                                      first, columns);
  }
  if (sides == 2) {
    if (side == 1) recurrent[warp][lane] = sum;
    __syncthreads();
  }
  if (side == 1 || unit >= p.D) return;
  float x[kGates], r[kGates] = {};
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    const int from = (lane * kSlots + g) % 32;
    x[g] = __shfl_sync(~0u, sum, from);
    if (sides == 2) r[g] = recurrent[warp + 1][from];
  }
  if (lane < columns) run_cell<Cell, IO>(p, first + lane, unit, x, r);
}

}  // namespace flashcell::cuda
