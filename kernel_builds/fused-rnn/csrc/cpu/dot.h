// Matrix products straight from row-major weights, for weights that are used once: packing would
// read and write all of them before the first multiplication. Rows are read as several strips at
// once, each from its first row to its last, because a core prefetches along a few long streams
// better than along many short ones (1 MB from the L3 of a Zen 3, two threads: 90 GB/s, row after
// row 42).
#pragma once
#include "common/cpu/microkernel.h"
#include "common/cpu/quantized.h"

namespace flashcell::FLASHCELL_ISA {

// Returns up to how many rows dot products with the weights as they are take less time than packing
// them first; the more rows that is for weights that come from memory (2 threads of a Zen 4:
// 2,400 x 600 floats 8 to 12 rows, 4,096 x 1,024 more than 48).
constexpr int64_t kDotMaxRows = 48;
inline __attribute__((always_inline)) int64_t most_dot_rows(int64_t weight_bytes) {
  return weight_bytes >= (8 << 20) ? kDotMaxRows : 8;
}

// Loads a register of weights as an operand of the product.
template <typename IO>
FN auto load_weights(const IO* w) {
  if constexpr (Product<IO>::kDepth == 1) {
    return load_io(w);
  } else {
    return Product<IO>::load_columns(w);
  }
}
template <typename IO>
constexpr int kDotWidth = Vec<State<IO>>::kWidth * Product<IO>::kDepth;

// Adds rows[m] . weights[j] to acc, for M rows and R of the strips.
template <typename IO, int R, int M>
FN void multiply_rows(const IO* const* weights, const Element<IO>* const* rows, int64_t depth,
                      Vec<State<IO>> (&acc)[M][R]) {
  using P = Product<IO>;
  constexpr int kStep = kDotWidth<IO>;
  auto step = [&](auto weight, auto element) __attribute__((always_inline)) {
    decltype(P::load_columns(rows[0])) a[M];
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) a[m] = P::load_columns(element(m));
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) {
      const auto w = load_weights<IO>(weight(j));
#pragma GCC unroll 3
      for (int m = 0; m < M; ++m) acc[m][j] = P::multiply_add(acc[m][j], a[m], w);
    }
  };
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
    step([&](int j) __attribute__((always_inline)) { return weights[j] + k; },
         [&](int m) __attribute__((always_inline)) { return rows[m] + k; });
  }
  if (k < depth) {
    IO w[R][kStep] = {};
    Element<IO> a[M][kStep] = {};
    for (int j = 0; j < R; ++j) memcpy(w[j], weights[j] + k, (depth - k) * sizeof(IO));
    for (int m = 0; m < M; ++m) memcpy(a[m], rows[m] + k, (depth - k) * sizeof(Element<IO>));
    step([&](int j) __attribute__((always_inline)) { return w[j]; },
         [&](int m) __attribute__((always_inline)) { return a[m]; });
  }
}

// sums[m * kStrips + j] = rows[m] . weights[j], for M rows and R of the strips.
template <typename IO, int kStrips, int R, int M>
__attribute__((noinline)) void dot_tile(const Row<IO>* weights, const Element<IO>* const* rows,
                                        int64_t depth, State<IO>* sums) {
  using V = Vec<State<IO>>;
  V acc[M][R];
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) acc[m][j] = V(0);
  }
  if constexpr (kIsInt4<IO>) {
    multiply_int4(weights, rows, depth, acc);
  } else {
    multiply_rows<IO>(weights, rows, depth, acc);
  }
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) sums[m * kStrips + j] = sum(acc[m][j]);
  }
}

// The same for all `count` rows and all strips. Twelve sums fill the registers, so four strips meet
// three rows at a time (a Zen 3 with 8 rows of 256 does 4.3 multiply-adds a ns, 3.3 with two rows).
// All rows meet four strips before the next four are read: eight strips, a power of two apart,
// would evict each other from the first-level cache.
template <typename IO, int kStrips>
void dot_group(const Row<IO>* weights, const Element<IO>* const* rows, int count, int64_t depth,
               State<IO>* sums) {
  if (count == 1) return dot_tile<IO, kStrips, kStrips, 1>(weights, rows, depth, sums);
  constexpr int kTogether = kStrips == 8 ? 4 : kStrips, kRows = kTogether <= 4 ? 3 : 2;
  for (int j = 0; j < kStrips; j += kTogether) {
    for (int m = 0; m < count;) {
      const int left = count - m;
      State<IO>* const to = sums + m * kStrips + j;
      if (left >= kRows && left != kRows + 1) {
        dot_tile<IO, kStrips, kTogether, kRows>(weights + j, rows + m, depth, to), m += kRows;
      } else if (left >= 2) {
        dot_tile<IO, kStrips, kTogether, 2>(weights + j, rows + m, depth, to), m += 2;
      } else {
        dot_tile<IO, kStrips, kTogether, 1>(weights + j, rows + m, depth, to), ++m;
      }
    }
  }
}

// c[m * c_stride + g * c_matrix + j] = rows[m] . (row j of matrices[g]) for j < columns, for at
// most kMaxCount rows. The strips are parts of every matrix.
template <typename IO, int kMatrices, int kMaxCount>
void dot_rows(const Element<IO>* const* rows, int count, const Row<IO>* matrices, int64_t depth,
              int columns, State<IO>* c, int64_t c_stride, int64_t c_matrix = 0) {
  constexpr int kParts = kMatrices < 8 ? 8 / kMatrices : 1, kStrips = kMatrices * kParts;
  const int strip = (columns + kParts - 1) / kParts;
  for (int i = 0; i < strip; ++i) {
    Row<IO> weights[kStrips];
    int at[kStrips];
    for (int j = 0; j < kStrips; ++j) {  // strips past the last column repeat it
      const int row = j / kMatrices * strip + i;
      at[j] = row < columns ? row : columns - 1;
      weights[j] = RowOf<IO>::at(matrices[j % kMatrices], at[j], depth);
    }
    State<IO> sums[kMaxCount * kStrips];
    dot_group<IO, kStrips>(weights, rows, count, depth, sums);
    for (int m = 0; m < count; ++m) {
      for (int j = 0; j < kStrips; ++j) {
        c[m * c_stride + j % kMatrices * c_matrix + at[j]] = sums[m * kStrips + j];
      }
    }
  }
}

// Writes the same tile as panel_product, [count][kUnits][kGates][width]. `weight` is one head's,
// with gates `gate_stride` apart. The strips are the gates or, with one gate, parts of it.
template <typename IO, int kGates, int kUnits, int kMaxCount>
void dot_panel(const Element<IO>* const* rows, int count, const IO* weight, int64_t gate_stride,
               int64_t D, int64_t first_unit, State<IO>* c) {
  constexpr int kWidth = Vec<State<IO>>::kWidth, kStride = kGates * kUnits * kWidth;
  constexpr int kParts = kGates == 1 ? 4 : 2, kStrips = kGates * kParts;
  constexpr int kStrip = kUnits * kWidth / kParts;
  for (int i = 0; i < kStrip; ++i) {
    const IO* weights[kStrips];
    for (int j = 0; j < kStrips; ++j) {  // strips past the last unit repeat it
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
