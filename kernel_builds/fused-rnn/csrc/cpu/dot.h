// Products straight from row-major weights, for matrices that are used once: packing would read
// and write everything before the first multiplication.
#pragma once
#include "product.h"

namespace flashcell::FLASHCELL_ISA {

constexpr int kDotRows = 4;  // weight rows, and rows of C, whose sums are in registers together

// A register of IO values against a register of elements.
template <typename IO>
FN Vec<State<IO>> dot_step(Vec<State<IO>> acc, const IO* w, const Element<IO>* a) {
  return acc + load_io(w) * load(a);
}
template <typename IO>
constexpr int kDotWidth = Vec<State<IO>>::kWidth * Product<IO>::kDepth;
#if defined(__AVX512BF16__)
template <>
FN Vec<float> dot_step<bf16>(Vec<float> acc, const bf16* w, const bf16* a) {
  return Product<bf16>::multiply_add(acc, Product<bf16>::load_columns(a),
                                     Product<bf16>::load_columns(w));
}
#endif

template <typename IO, int M>
__attribute__((noinline)) void dot_tile(const IO* const* weights, const Element<IO>* const* rows,
                                        int64_t depth, State<IO>* sums) {  // [M][kDotRows]
  using V = Vec<State<IO>>;
  constexpr int kStep = kDotWidth<IO>;
  V acc[M][kDotRows];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int j = 0; j < kDotRows; ++j) acc[m][j] = V(0);
  }
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
#pragma GCC unroll 4
    for (int j = 0; j < kDotRows; ++j) {
      __builtin_prefetch(weights[j] + kDotRows * depth + k);  // the rows after these
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) acc[m][j] = dot_step<IO>(acc[m][j], weights[j] + k, rows[m] + k);
    }
  }
  if (k < depth) {
    IO w[kStep] = {};
    Element<IO> a[kStep] = {};
    for (int m = 0; m < M; ++m) {
      memcpy(a, rows[m] + k, (depth - k) * sizeof *a);
      for (int j = 0; j < kDotRows; ++j) {
        memcpy(w, weights[j] + k, (depth - k) * sizeof *w);
        acc[m][j] = dot_step<IO>(acc[m][j], w, a);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < kDotRows; ++j) sums[m * kDotRows + j] = sum(acc[m][j]);
  }
}

// c[m * c_stride + j] = rows[m] . (weight row j) for j < columns; rows of depth elements.
template <typename IO>
void dot_rows(const Element<IO>* const* rows, int count, const IO* weight, int64_t depth,
              int columns, State<IO>* c, int64_t c_stride) {
  for (int j0 = 0; j0 < columns; j0 += kDotRows) {
    const IO* w[kDotRows];
    for (int j = 0; j < kDotRows; ++j) {
      w[j] = weight + (j0 + j < columns ? j0 + j : columns - 1) * depth;
    }
    for (int m0 = 0; m0 < count; m0 += kDotRows) {
      State<IO> sums[kDotRows * kDotRows];
      const int m_count = count - m0 < kDotRows ? count - m0 : kDotRows;
      switch (m_count) {
        case 1:
          dot_tile<IO, 1>(w, rows + m0, depth, sums);
          break;
        case 2:
          dot_tile<IO, 2>(w, rows + m0, depth, sums);
          break;
        case 3:
          dot_tile<IO, 3>(w, rows + m0, depth, sums);
          break;
        default:
          dot_tile<IO, 4>(w, rows + m0, depth, sums);
      }
      for (int m = 0; m < m_count; ++m) {
        for (int j = 0; j < kDotRows && j0 + j < columns; ++j) {
          c[(m0 + m) * c_stride + j0 + j] = sums[m * kDotRows + j];
        }
      }
    }
  }
}

// The same tile as panel_product: [count][kUnits][kGates][width]; weight is one head's, gates
// `gate_stride` apart.
template <typename IO, int kGates, int kUnits>
void dot_panel(const Element<IO>* const* rows, int count, const IO* weight, int64_t gate_stride,
               int64_t D, int64_t first_unit, State<IO>* c) {
  constexpr int kWidth = Vec<State<IO>>::kWidth, kStride = kGates * kUnits * kWidth;
  memset(c, 0, count * kStride * sizeof *c);
  for (int v = 0; v < kGates * kUnits; ++v) {
    const int64_t unit = first_unit + v / kGates * kWidth;
    const int64_t left = D - unit < kWidth ? D - unit : kWidth;
    if (left <= 0) continue;
    dot_rows(rows, count, weight + v % kGates * gate_stride + unit * D, D, int(left),
             c + v * kWidth, kStride);
  }
}

}  // namespace flashcell::FLASHCELL_ISA
