// The matrices of a chunk. A tile holds sums in the state dtype, [panels][rows][kStride], the
// layout that the microkernel reads and writes. A packed matrix is the microkernel's right operand,
// [panels][depth][kStride].
#pragma once
#include "../params.h"
#include "common/cpu/pack.h"
#include "common/cpu/scratch.h"

namespace flashcell::FLASHCELL_ISA {

constexpr int64_t kTile = 64;  // rows of a tile of a chunk

// Whether to prefetch in software what is read next. A Zen 3 gains by it; a Zen 5 lost when tried.
constexpr bool kAsks = kVectorBytes < 64;

template <typename IO>
struct Matrix {
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<IO>;
  static constexpr int kWidth = V::kWidth, kStride = kMaxVectors * kWidth;
  static constexpr int kDepth = Product<IO>::kDepth;

  static int64_t panels(int64_t width) { return (width + kStride - 1) / kStride; }
  static int64_t padded(int64_t depth) { return padded_depth<IO>(depth); }
  static int64_t tile_size(int64_t rows, int64_t width) { return panels(width) * rows * kStride; }
  static int64_t packed_size(int64_t depth, int64_t width) {
    return panels(width) * padded(depth) * kStride;
  }

  // Returns the offset of column c of row r in a tile of `rows` rows.
  FN static int64_t at(int64_t rows, int64_t r, int64_t c) {
    return (c / kStride * rows + r) * kStride + c % kStride;
  }

  // Calls body(column, lanes, whole) for every vector of `width` columns.
  template <typename Body>
  FN static void for_columns(int64_t width, const Body& body) {
    int64_t c = 0;
    for (; c + kWidth <= width; c += kWidth) body(c, kWidth, std_true());
    if (c < width) body(c, int(width - c), std_false());
  }

  // Packs B[k, n] = from[k stride + n]. If a cache line holds several vectors, only as many rows
  // are packed at once as a cache set has lines: with a stride of a power of two, more rows of a
  // column would evict each other.
  static void pack(E* to, const IO* from, int64_t stride, int64_t depth, int64_t width) {
    const int64_t rows = kVectorBytes < 64 ? 8 : depth;
    for (int64_t k = 0; k < depth; k += rows, from += rows * stride) {
      const int64_t now = depth - k < rows ? depth - k : rows;
      for (int64_t n = 0; n < panels(width) * kStride; n += kWidth) {
        const int64_t left = width - n < kWidth ? width - n : kWidth;
        E* panel = to + (n / kStride * padded(depth) + k) * kStride;
        pack_vector<IO>(panel + n % kStride * kDepth, kMaxVectors, from + (left > 0 ? n : 0),
                        stride, 1, now, left > 0 ? int(left) : 0);
      }
    }
  }

  // Packs rows that are contiguous along k: B[k, n] = from[k + n stride].
  static void pack_rows(E* to, const IO* from, int64_t stride, int64_t depth, int64_t width) {
    for (int64_t n = 0; n < panels(width) * kStride; n += kWidth) {
      const int64_t left = width - n < kWidth ? width - n : kWidth;
      pack_vector<IO>(to + n / kStride * padded(depth) * kStride + n % kStride * kDepth,
                      kMaxVectors, from + (left > 0 ? n : 0) * stride, 1, stride, depth,
                      left > 0 ? int(left) : 0);
    }
  }

  // Returns a tile as right operand: the tile itself, if operands have the type of sums.
  static const E* pack_tile(E* to, const T* tile, int64_t depth, int64_t width) {
    if constexpr (kDepth == 1) {
      return tile;
    } else {
      const int64_t vectors = panels(width) * kMaxVectors;
      for (int64_t i = 0; i < vectors; ++i) {
        const int64_t panel = i / kMaxVectors * depth * kStride, v = i % kMaxVectors * kWidth;
        for (int64_t k = 0; k < depth; k += kDepth) {
          V rows[kDepth];
          for (int d = 0; d < kDepth; ++d) rows[d] = load(tile + panel + (k + d) * kStride + v);
          store_depth(to + panel + k * kStride + v * kDepth, rows);
        }
      }
      return to;
    }
  }

  // Packs the transpose of a tile [rows, width] as right operand: depth `width`, `rows` columns.
  // Both are multiples of 8, which may be half a vector.
  static void pack_transposed(E* to, const T* tile, int64_t rows, int64_t width) {
    for (int64_t n = 0; n < panels(rows) * kStride; n += kWidth) {
      E* column = to + n / kStride * width * kStride + n % kStride * kDepth;
      const int count = n < rows ? (rows - n < kWidth ? int(rows - n) : kWidth) : 0;
      for (int64_t k = 0; k < width; k += kWidth) {
        V block[kWidth];
        transpose(tile + at(rows, n, k), kStride, count, block);
        for (int d = 0; d < kWidth && k + d < width; d += kDepth) {
          store_depth(column + (k + d) * kStride, block + d);
        }
      }
    }
  }

  // to[c][t] = from[t][c] scale[t], as left operand: rows of `pitch` elements, padded with zeros
  // from `count` to the end of a vector.
  static void transpose_rows(E* to, int64_t pitch, const IO* from, int64_t stride, const T* scale,
                             int64_t count, int64_t width) {
    for (int64_t t0 = 0; t0 < count; t0 += kWidth) {
      const int now = count - t0 < kWidth ? int(count - t0) : kWidth;
      for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
        V block[kWidth];
#pragma GCC unroll 16
        for (int t = 0; t < kWidth; ++t) {
          block[t] = V(0);
          if (t >= now) continue;
          block[t] = load_part<decltype(whole)::value>(from + (t0 + t) * stride + c, lanes) *
                     V(scale[t0 + t]);
        }
        flashcell::FLASHCELL_ISA::transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
          if (i < lanes) store_element(to + (c + i) * pitch + t0, block[i]);
        }
      });
    }
  }

  // to[c] = keep to[c] + sum over t of from[t][c] scale[t]; if keep is 0, `to` is not read.
  static void add_rows(T* to, const IO* from, int64_t stride, const T* scale, int64_t count,
                       int64_t width, T keep) {
    for_columns(width, [&](int64_t c, int, auto) __attribute__((always_inline)) {
      store(to + c, keep != 0 ? V(keep) * load(to + c) : V(0));
    });
    for (int64_t t = 0; t < count; ++t, from += stride) {
      for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
        store(to + c,
              load(to + c) + load_part<decltype(whole)::value>(from + c, lanes) * V(scale[t]));
      });
    }
  }

  // to[c][r] = tile[r][c], as left operand, for columns [begin, end) of a tile of `rows` rows.
  static void transpose_tile(E* to, int64_t pitch, const T* tile, int64_t rows, int64_t begin,
                             int64_t end) {
    for (int64_t c = begin / kWidth * kWidth; c < end; c += kWidth) {
      for (int64_t r = 0; r < rows; r += kWidth) {
        V block[kWidth];
        transpose(tile + at(rows, r, c), kStride, rows - r < kWidth ? int(rows - r) : kWidth,
                  block);
        for (int i = 0; i < kWidth && c + i < end; ++i) {
          store_element(to + (c + i) * pitch + r, block[i]);
        }
      }
    }
  }

  // Returns rows as left operands: in place if operands have the type in memory, else widened
  // copies.
  static void rows(const E** pointers, E* copies, const IO* from, int64_t stride, int64_t count,
                   int64_t width) {
    for (int64_t r = 0; r < count; ++r) {
      if constexpr (sizeof(E) == sizeof(IO)) {
        pointers[r] = (const E*)(from + r * stride);
      } else {
        E* to = copies + r * width;
        for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
          store_part<decltype(whole)::value>(
              to + c, load_part<decltype(whole)::value>(from + r * stride + c, lanes), lanes);
        });
        pointers[r] = to;
      }
    }
  }

  // tile = keep tile + rows[count, k_begin..k_end) packed[k_begin..k_end), over `width` columns,
  // count <= kTile. The packed matrix has `depth` rows, and the tile `tile_rows` rows from `tile`
  // on.
  static void product(const E* const* rows, int64_t count, int64_t k_begin, int64_t k_end,
                      const E* packed, int64_t depth, T* tile, int64_t tile_rows, int64_t width,
                      T keep) {
    for (int64_t panel = 0; panel < panels(width); ++panel) {
      panel_product<IO, kMaxVectors>(rows, int(count), k_begin, k_end,
                                     packed + panel * padded(depth) * kStride,
                                     tile + panel * tile_rows * kStride, keep);
    }
  }

  // tile = rows packed, where row r is needed only up to column `first` + r: panels after that are
  // not written.
  static void product_to_lower(const E* const* rows, int64_t count, const E* packed, int64_t depth,
                               T* tile, int64_t width, int64_t first) {
    for (int64_t n = 0; n < width; n += kStride, packed += padded(depth) * kStride) {
      const int64_t r = n > first ? n - first : 0;
      panel_product<IO, kMaxVectors>(rows + r, int(count - r), 0, depth, packed,
                                     tile + (n / kStride * count + r) * kStride);
    }
  }

  // Adds rows[count, begin..) packed to a panel of `tile`, where row r has only `first` + r + 1
  // elements and zeros after them. Rows are taken in groups, so that most zeros are not multiplied.
  static void product_of_lower(const E* const* rows, int64_t count, int64_t begin, int64_t first,
                               const E* packed, T* panel) {
    constexpr int64_t kRows = 16;
    for (int64_t r = 0; r < count; r += kRows) {
      const int64_t now = count - r < kRows ? count - r : kRows;
      panel_product<IO, kMaxVectors>(rows + r, int(now), begin, padded(first + r + now), packed,
                                     panel + r * kStride, 1);
    }
  }

  // The same product for any number of rows, `pitch` elements apart from `left` on, over the whole
  // depth.
  static void product(const E* left, int64_t pitch, int64_t count, const E* packed, int64_t depth,
                      T* tile, int64_t width, T keep) {
    for (int64_t r0 = 0; r0 < count; r0 += kTile) {
      const E* rows[kTile];
      const int64_t now = count - r0 < kTile ? count - r0 : kTile;
      for (int64_t r = 0; r < now; ++r) rows[r] = left + (r0 + r) * pitch;
      product(rows, now, 0, padded(depth), packed, depth, tile + r0 * kStride, count, width, keep);
    }
  }

 private:
  struct std_true {
    static constexpr bool value = true;
  };
  struct std_false {
    static constexpr bool value = false;
  };

  // block[c][r] = from[r stride + c] for r < rows, else 0.
  FN static void transpose(const T* from, int64_t stride, int rows, V* block) {
    for (int r = 0; r < kWidth; ++r) block[r] = r < rows ? load(from + r * stride) : V(0);
    flashcell::FLASHCELL_ISA::transpose(block);
  }

  // Stores kDepth rows of a vector of columns, interleaved.
  FN static void store_depth(E* to, const V* rows) {
    if constexpr (kDepth == 1) {
      store_element(to, rows[0]);
    } else {
      store_pairs(to, to_bf16(rows[0]), to_bf16(rows[1]));
    }
  }
};

}  // namespace flashcell::FLASHCELL_ISA
