// Panels for the microkernel, packed from a matrix of either orientation.
#pragma once
#include "product.h"

namespace flashcell::FLASHCELL_ISA {

// `count` contiguous values, rounded to operands already, widened to elements; zeros up to a width.
template <typename IO>
FN void widen(Element<IO>* to, const IO* from, int count) {
  constexpr int kWidth = Vec<State<IO>>::kWidth;
  if constexpr (sizeof(Element<IO>) == sizeof(IO)) {
    memcpy(to, from, count * sizeof *to);
    memset(to + count, 0, (kWidth - count) * sizeof *to);
  } else {
    store_element(to, count == kWidth ? load_io(from) : load_part<false>(from, count));
  }
}

// Packs one vector of a panel. `from` has its columns n_stride and its k k_stride elements apart,
// one of which is 1; `to` is [depth / kDepth][panel_vectors][width][kDepth] at that vector.
// Columns from `columns` on and an odd last k become 0.
template <typename IO>
void pack_vector(Element<IO>* to, int panel_vectors, const IO* from, int64_t k_stride,
                 int64_t n_stride, int64_t depth, int columns) {
  constexpr int kWidth = Vec<State<IO>>::kWidth, kDepth = Product<IO>::kDepth;
  const int64_t step = int64_t(panel_vectors) * kWidth * kDepth;
  if (n_stride == 1) {
    for (int64_t k = 0; k < depth; k += kDepth, to += step) {
      const IO* source = from + k * k_stride;
      if constexpr (kDepth == 1) {
        widen(to, source, columns);
      } else {
        Element<IO> rows[kDepth][kWidth] = {};
        for (int d = 0; d < kDepth && k + d < depth; ++d) {
          widen(rows[d], source + d * k_stride, columns);
        }
        store_pairs(to, columns_of(rows[0]), columns_of(rows[1]));
      }
    }
    return;
  }
  Element<IO> tile[kWidth][kWidth] = {};  // [column][k]
  for (int64_t k0 = 0; k0 < depth; k0 += kWidth, to += kWidth / kDepth * step) {
    const int count = depth - k0 < kWidth ? depth - k0 : kWidth;
    for (int n = 0; n < columns; ++n) widen(tile[n], from + n * n_stride + k0, count);
    for (int k = 0; k < count; k += kDepth) {
      Element<IO>* row = to + k / kDepth * step;
      for (int n = 0; n < kWidth; ++n) {
        for (int d = 0; d < kDepth; ++d) row[n * kDepth + d] = tile[n][k + d];
      }
    }
  }
}

}  // namespace flashcell::FLASHCELL_ISA
