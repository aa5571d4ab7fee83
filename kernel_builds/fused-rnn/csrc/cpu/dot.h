// Products straight from row-major weights, for matrices that are used once: packing would read
// and write everything before the first multiplication. Rows are read along several strips at once,
// each strip from its first row to its last: a core fetches ahead along a few long streams, not
// along many short ones (1 MB from the L3 of a Zen 3, two threads: 90 GB/s, in their order 42).
#pragma once
#include "product.h"

namespace flashcell::FLASHCELL_ISA {

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

// sums[m * kStrips + j] = rows[m] . weights[j], of M rows and R of the strips.
template <typename IO, int kStrips, int R, int M>
__attribute__((noinline)) void dot_tile(const IO* const* weights, const Element<IO>* const* rows,
                                        int64_t depth, State<IO>* sums) {
  using V = Vec<State<IO>>;
  constexpr int kStep = kDotWidth<IO>;
  V acc[M][R];
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) acc[m][j] = V(0);
  }
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) {
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m) acc[m][j] = dot_step<IO>(acc[m][j], weights[j] + k, rows[m] + k);
    }
  }
  if (k < depth) {
    IO w[kStep] = {};
    Element<IO> a[kStep] = {};
    for (int m = 0; m < M; ++m) {
      memcpy(a, rows[m] + k, (depth - k) * sizeof *a);
      for (int j = 0; j < R; ++j) {
        memcpy(w, weights[j] + k, (depth - k) * sizeof *w);
        acc[m][j] = dot_step<IO>(acc[m][j], w, a);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < R; ++j) sums[m * kStrips + j] = sum(acc[m][j]);
  }
}

// The same of all `count` rows and all strips: two rows fill the registers with half of eight.
template <typename IO, int kStrips>
void dot_group(const IO* const* weights, const Element<IO>* const* rows, int count, int64_t depth,
               State<IO>* sums) {
  constexpr int kTogether = kStrips == 8 ? 4 : kStrips;
  int m = 0;
  for (; m + 2 <= count; m += 2) {
    for (int j = 0; j < kStrips; j += kTogether) {
      dot_tile<IO, kStrips, kTogether, 2>(weights + j, rows + m, depth, sums + m * kStrips + j);
    }
  }
  if (m < count) dot_tile<IO, kStrips, kStrips, 1>(weights, rows + m, depth, sums + m * kStrips);
}

// c[m * c_stride + j] = rows[m] . (weight row j) for j < columns; at most kMaxCount rows.
template <typename IO, int kMaxCount>
void dot_rows(const Element<IO>* const* rows, int count, const IO* weight, int64_t depth,
              int columns, State<IO>* c, int64_t c_stride) {
  constexpr int kStrips = 8;
  const int strip = (columns + kStrips - 1) / kStrips;
  for (int i = 0; i < strip; ++i) {
    const IO* weights[kStrips];
    int at[kStrips];
    for (int j = 0; j < kStrips; ++j) {  // behind the last one, the last one
      at[j] = j * strip + i < columns ? j * strip + i : columns - 1;
      weights[j] = weight + at[j] * depth;
    }
    State<IO> sums[kMaxCount * kStrips];
    dot_group<IO, kStrips>(weights, rows, count, depth, sums);
    for (int m = 0; m < count; ++m) {
      for (int j = 0; j < kStrips; ++j) c[m * c_stride + at[j]] = sums[m * kStrips + j];
    }
  }
}

// The same tile as panel_product: [count][kUnits][kGates][width]; weight is one head's, gates
// `gate_stride` apart. Its strips are the gates, and parts of the only gate.
template <typename IO, int kGates, int kUnits, int kMaxCount>
void dot_panel(const Element<IO>* const* rows, int count, const IO* weight, int64_t gate_stride,
               int64_t D, int64_t first_unit, State<IO>* c) {
  constexpr int kWidth = Vec<State<IO>>::kWidth, kStride = kGates * kUnits * kWidth;
  constexpr int kParts = kGates == 1 ? 4 : 2, kStrips = kGates * kParts;
  constexpr int kStrip = kUnits * kWidth / kParts;
  for (int i = 0; i < kStrip; ++i) {
    const IO* weights[kStrips];
    for (int j = 0; j < kStrips; ++j) {  // behind the last unit, the last one
      const int64_t unit = first_unit + j / kGates * kStrip + i;
      weights[j] = weight + j % kGates * gate_stride + (unit < D ? unit : D - 1) * D;
    }
    State<IO> sums[kMaxCount * kStrips];
    dot_group<IO, kStrips>(weights, rows, count, D, sums);
    for (int j = 0; j < kStrips; ++j) {
      const int unit = j / kGates * kStrip + i;
      State<IO>* to = c + (unit / kWidth * kGates + j % kGates) * kWidth + unit % kWidth;
      for (int m = 0; m < count; ++m) to[m * kStride] = sums[m * kStrips + j];
    }
  }
}

}  // namespace flashcell::FLASHCELL_ISA
