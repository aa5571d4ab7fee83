// Packs a matrix, row-major or column-major, into panels for the microkernel.
#pragma once
#include <utility>

#include "common/cpu/microkernel.h"

namespace flashcell::FLASHCELL_ISA {

// Widens `count` contiguous values, rounded already, to operand elements, and fills the rest of the
// width with zeros.
template <typename IO>
FN void widen(Element<IO>* to, const IO* from, int count) {
  constexpr int kWidth = Vec<State<IO>>::kWidth;
  if constexpr (Product<IO>::kDepth == 2) {
    // A constant size: compiled to moves, not to a call.
    if (count == kWidth) return (void)memcpy(to, from, kWidth * sizeof *to);
    memcpy(to, from, count * sizeof *to);
    memset(to + count, 0, (kWidth - count) * sizeof *to);
  } else {
    store_element(to, count == kWidth ? load_io(from) : load_part<false>(from, count));
  }
}

// Swaps the off-diagonal blocks of kSize x kSize, in rows kSize apart. The indices are compile-time
// constants: a shuffle by variable indices takes three instructions on AVX2.
template <int kSize, typename T, int... kLane>
FN void swap_blocks(Vec<T>& first, Vec<T>& second, std::integer_sequence<int, kLane...>) {
  constexpr int kWidth = Vec<T>::kWidth;
  const auto a = first.raw, b = second.raw;
#ifdef __clang__
  first = __builtin_shufflevector(a, b, (kLane & kSize ? kLane - kSize + kWidth : kLane)...);
  second = __builtin_shufflevector(a, b, (kLane & kSize ? kLane + kWidth : kLane + kSize)...);
#else
  using Int = typename Lane<T>::Int;
  first = __builtin_shuffle(a, b, Int{(kLane & kSize ? kLane - kSize + kWidth : kLane)...});
  second = __builtin_shuffle(a, b, Int{(kLane & kSize ? kLane + kWidth : kLane + kSize)...});
#endif
}

// Transposes a block in place by swapping off-diagonal blocks of doubling size.
template <typename T, int kSize = 1>
FN void transpose(Vec<T>* block) {
  constexpr int kWidth = Vec<T>::kWidth;
  constexpr std::make_integer_sequence<int, kWidth> kLanes;
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r) {
    if (!(r & kSize)) swap_blocks<kSize>(block[r], block[r + kSize], kLanes);
  }
  if constexpr (2 * kSize < kWidth) transpose<T, 2 * kSize>(block);
}

// Loads `count` elements into a register, as they are in memory or widened, followed by zeros.
template <typename IO>
FN Vec<State<IO>> load_lanes(const IO* from, int count) {
  using V = Vec<State<IO>>;
  if constexpr (Product<IO>::kDepth == 2) {
    typename V::Raw raw{};
    // A constant size: compiled to moves, not to a call.
    if (count * sizeof(IO) == sizeof raw) return load((const State<IO>*)from);
    memcpy(&raw, from, count * sizeof(IO));
    return raw;
  } else {
    return count == V::kWidth ? load_io(from) : load_part<false>(from, count);
  }
}

// Returns where vector v begins in a panel of `depth` rows whose parts have `part` vectors.
template <typename IO>
FN Element<IO>* panel_vector(Element<IO>* panel, int64_t depth, int v, int part) {
  constexpr int kWidth = Vec<State<IO>>::kWidth;
  return panel + v / part * depth * part * kWidth + v % part * kWidth * Product<IO>::kDepth;
}

// Packs one register's width of columns that are contiguous along k, to the depth one register
// holds; the whole block is transposed in registers.
template <typename IO>
FN void pack_tile(Element<IO>* to, int64_t step, const IO* from, int64_t n_stride) {
  constexpr int kWidth = Vec<State<IO>>::kWidth;
  Vec<State<IO>> block[kWidth];
#pragma GCC unroll 16
  for (int n = 0; n < kWidth; ++n) {
    block[n] = load_lanes(from + n * n_stride, kWidth * Product<IO>::kDepth);
  }
  transpose(block);
#pragma GCC unroll 16
  for (int k = 0; k < kWidth; ++k) memcpy(to + k * step, &block[k].raw, sizeof block->raw);
}

// Packs one vector of columns of a panel. In `from`, columns are n_stride and rows k_stride
// elements apart, and one of the two strides is 1. `to` is [depth / kDepth][panel_vectors][width]
// [kDepth], from that vector on. Missing columns (from `columns` on) and an odd last row become 0.
template <typename IO>
void pack_vector(Element<IO>* to, int panel_vectors, const IO* from, int64_t k_stride,
                 int64_t n_stride, int64_t depth, int columns) {
  constexpr int kWidth = Vec<State<IO>>::kWidth, kDepth = Product<IO>::kDepth;
  const int64_t step = int64_t(panel_vectors) * kWidth * kDepth;
  if (n_stride == 1) {
    // Rows lie pages apart, so the CPU does not prefetch them by itself.
    constexpr int kAhead = 16;
    for (int64_t k = 0; k < depth; k += kDepth, to += step) {
      const IO* source = from + k * k_stride;
      for (int d = 0; d < kDepth; ++d) __builtin_prefetch(source + (kAhead + d) * k_stride);
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
  // Columns are contiguous along k. The kDepth elements of a column that one multiplication takes
  // are moved as one lane.
  constexpr int kTile = kWidth * kDepth;
  for (int64_t k0 = 0; k0 < depth; k0 += kTile, to += kWidth * step) {
    const int count = depth - k0 < kTile ? int(depth - k0) : kTile;
    if (count == kTile && columns == kWidth) {
      pack_tile<IO>(to, step, from + k0, n_stride);
      continue;
    }
    Vec<State<IO>> block[kWidth];
    for (int n = 0; n < kWidth; ++n) {
      block[n] = n < columns ? load_lanes(from + n * n_stride + k0, count) : Vec<State<IO>>(0);
    }
    transpose(block);
    for (int k = 0; k < count; k += kDepth) {
      memcpy(to + k / kDepth * step, &block[k / kDepth].raw, sizeof block->raw);
    }
  }
}

}  // namespace flashcell::FLASHCELL_ISA
