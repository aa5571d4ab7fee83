// How a matrix product (gemm.h) brings blocks of its operands into the order in which the
// microkernel reads them, and the sizes of these blocks.
#pragma once
#include "common/cpu/pack.h"

namespace flashcell::FLASHCELL_ISA {

FN int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The microkernel for rows that lie as [depth][rows]: a matrix stored by columns needs no
// transpose.
template <typename IO, int NV, int MR>
__attribute__((noinline)) void column_kernel(const Element<IO>* columns, int64_t depth,
                                             const Element<IO>* panel, State<IO>* c, int64_t stride,
                                             State<IO> keep) {
  static_assert(Product<IO>::kDepth == 1);
  multiply_tile<IO, NV, 1, MR, Product<IO>>(
      [&](int m, int64_t k) __attribute__((always_inline)) { return columns + k * MR + m; }, depth,
      panel, 0, c, stride, keep);
}

template <typename IO, int NV, int MR = kMaxRows<NV>>
FN void column_kernel_rows(int rows_now, const Element<IO>* columns, int64_t depth,
                           const Element<IO>* panel, State<IO>* c, int64_t stride, State<IO> keep) {
  if constexpr (MR > 1) {
    if (rows_now < MR) {
      return column_kernel_rows<IO, NV, MR - 1>(rows_now, columns, depth, panel, c, stride, keep);
    }
  }
  column_kernel<IO, NV, MR>(columns, depth, panel, c, stride, keep);
}

template <typename IO>
struct GemmCopy {
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<IO>;
  static constexpr int kVectors = kMaxVectors, kStride = kVectors * V::kWidth;
  static constexpr int kTile = kMaxRows<kVectors>;
  // A block of B has 384 KB, and one of A 96 KB of floats.
  static constexpr int64_t kDepthBlock = 256, kRowBlock = 96;
  static constexpr int64_t kPanelBlock = 384 * 4 / int64_t(sizeof(T)) / kStride;
  // Between copied rows: a power of two would put the rows of a tile into one set of the cache.
  static constexpr int64_t kPitch = kDepthBlock + 16;
  static_assert(kRowBlock % kTile == 0);

  // Packs a whole panel whose columns are contiguous in each row of B.
  static void pack_rows(const IO* from, int64_t b_k, int64_t count, E* to) {
    constexpr int kAhead = 8;  // rows lie pages apart, so the CPU does not prefetch them by itself
    for (int64_t k = 0; k < count; ++k, from += b_k, to += kStride) {
      for (size_t at = 0; at < kStride; at += 64 / sizeof(IO)) {
        __builtin_prefetch(from + kAhead * b_k + at);
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        widen(to + v * V::kWidth, from + v * V::kWidth, V::kWidth);
      }
    }
  }

  // Copies rows that lie as [k][m] to [tile][k][rows of the tile].
  static void copy_columns(const IO* a, int64_t a_k, int rows, int64_t deep, E* to) {
    constexpr int kGroup = 16;
    alignas(kVectorBytes) E wide[kGroup][kRowBlock];
    for (int64_t k = 0; k < deep; k += kGroup, a += kGroup * a_k) {
      const int count = int(least(kGroup, deep - k));
      for (int i = 0; i < count; ++i) {
        for (int m = 0; m < rows; m += 64 / int(sizeof(IO))) {
          __builtin_prefetch(a + (kGroup + i) * a_k + m);
        }
        for (int m = 0; m < rows && sizeof(E) != sizeof(IO); m += V::kWidth) {
          widen(wide[i] + m, a + i * a_k + m, int(least(rows - m, V::kWidth)));
        }
      }
      const E* from = sizeof(E) == sizeof(IO) ? (const E*)a : wide[0];
      const int64_t next = sizeof(E) == sizeof(IO) ? a_k : kRowBlock;
      for (int m = 0; m < rows; m += kTile, from += kTile) {
        const int height = int(least(kTile, rows - m));
        E* const tile = to + m * deep + k * height;
        for (int i = 0; i < count && height == kTile; ++i) {
          memcpy(tile + i * kTile, from + i * next, kTile * sizeof(E));
        }
        for (int i = 0; i < count && height < kTile; ++i) {
          for (int j = 0; j < height; ++j) tile[i * height + j] = from[i * next + j];
        }
      }
    }
  }

  // Copies [rows][count] elements from rows or columns of a; an odd last k is padded with 0.
  static void copy_rows(const IO* a, int64_t a_m, int64_t a_k, int64_t rows, int64_t count, E* to) {
    constexpr int kWidth = V::kWidth;
    if (a_k == 1) {
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t k = 0; k < count; k += kWidth) {
          widen(to + m * kPitch + k, a + m * a_m + k, count - k < kWidth ? int(count - k) : kWidth);
        }
      }
      return;
    }
    for (int64_t k0 = 0; k0 < padded_depth<IO>(count); k0 += kWidth) {
      for (int64_t m0 = 0; m0 < rows; m0 += kWidth) {
        const int width = rows - m0 < kWidth ? int(rows - m0) : kWidth;
        transpose_tile(a + k0 * a_k + m0, a_k, count - k0, width, to + m0 * kPitch + k0);
      }
    }
  }

  // to[m][k] = a[k][m] for one register's width of k, of which the first `count` exist.
  static FN void transpose_tile(const IO* a, int64_t a_k, int64_t count, int width, E* to) {
    constexpr int kWidth = V::kWidth;
    if constexpr (sizeof(E) == sizeof(T)) {
      V block[kWidth];
      for (int k = 0; k < kWidth; ++k) {
        block[k] = k < count ? load_lanes(a + k * a_k, width) : V(0);
      }
      transpose(block);
      for (int m = 0; m < width; ++m) store_element(to + m * kPitch, block[m]);
    } else {
      E tile[kWidth][kWidth];  // [k][m]
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) {
          widen(tile[k], a + k * a_k, width);
        } else {
          memset(tile[k], 0, sizeof tile[k]);
        }
      }
      for (int m = 0; m < width; ++m) {
        for (int k = 0; k < kWidth; ++k) to[m * kPitch + k] = tile[k][m];
      }
    }
  }
};

}  // namespace flashcell::FLASHCELL_ISA
