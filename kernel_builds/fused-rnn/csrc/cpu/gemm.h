// A batch of strided matrix products, for the projections and weight gradients around the time
// loop. B is packed once, as a whole. Every task then multiplies one block of rows by its share of
// the panels, with its tile of C in the second-level cache and unrounded until the end.
#pragma once
#include "common/cpu/pack.h"
#include "common/cpu/scratch.h"
#include "dot.h"
#include "plan.h"

namespace flashcell::FLASHCELL_ISA {

template <typename IO>
struct Gemm {
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<IO>;
  static constexpr int kVectors = kMaxVectors, kStride = kVectors * V::kWidth;
  static constexpr int64_t kRowBlock = 96;               // rows of a task
  static constexpr int64_t kPanelBlock = 768 / kStride;  // panels of a task: a tile of C, 288 KB
  // Depth of a block of A: 96 rows are 288 KB of floats.
  static constexpr int64_t kDepthBlock = 768;
  // For dot products: 8 strips of 32 rows.
  static constexpr int64_t kDotPanels = (256 + kStride - 1) / kStride;

  const GemmParams& p;
  const Host& caller;
  const Host host = fitting(caller, multiply_adds());
  const int64_t depth = padded_depth<IO>(p.K);
  const int64_t panels = (p.N + kStride - 1) / kStride;
  // The last panel has only the vectors that it needs: of 96 columns a quarter would be padding.
  const int last_vectors = int((p.N - (panels - 1) * kStride + V::kWidth - 1) / V::kWidth);

  int vectors_of(int64_t panel) const { return panel + 1 == panels ? last_vectors : kVectors; }

  int64_t multiply_adds() const { return p.batch * p.M * p.N * p.K; }

  void run() const {
    if (p.M == 0 || p.N == 0) return;
    if (p.M <= most_dot_rows(p.N * p.K * sizeof(IO)) && p.batch == 1 && p.a_k == 1 && p.b_k == 1)
      return few_rows();
    Scratch<E> packed(host, p.batch_b * panels * depth * kStride);
    parallel_for(host, p.batch_b * panels, [&](int64_t i) {
      const IO* b = (const IO*)p.b + i / panels * p.b_batch;
      const int vectors = vectors_of(i % panels);
      for (int v = 0; v < vectors; ++v) {
        const int64_t n = i % panels * kStride + v * V::kWidth;
        const int64_t left = p.N - n < V::kWidth ? p.N - n : V::kWidth;
        pack_vector<IO>(packed + i * depth * kStride + v * V::kWidth * Product<IO>::kDepth, vectors,
                        b + n * p.b_n, p.b_k, p.b_n, p.K, int(left));
      }
    });
    const int64_t row_blocks = (p.M + kRowBlock - 1) / kRowBlock;
    const int64_t panel_blocks = (panels + kPanelBlock - 1) / kPanelBlock;
    const int64_t tasks = row_blocks * panel_blocks;
    parallel_for(host, p.batch * tasks, [&](int64_t i) {
      const int64_t batch = i / tasks, m = i % tasks / panel_blocks * kRowBlock;
      const int64_t panel = i % panel_blocks * kPanelBlock;
      block(batch, packed + batch % p.batch_b * panels * depth * kStride, m,
            p.M - m < kRowBlock ? p.M - m : kRowBlock, panel,
            panels - panel < kPanelBlock ? panels - panel : kPanelBlock);
    });
  }

  void block(int64_t batch, const E* packed, int64_t m0, int64_t rows, int64_t panel0,
             int64_t count) const {
    Scratch<T> c(host, kRowBlock * count * kStride);  // [count][rows][kStride]
    Scratch<E> copy(host, kRowBlock * (kDepthBlock + V::kWidth));
    const IO* a = (const IO*)p.a + batch * p.a_batch + m0 * p.a_m;
    // Rows that can be operands where they are need no copy.
    const bool direct = sizeof(E) == sizeof(IO) && p.a_k == 1 && p.K == depth;
    if (depth == 0) memset(c, 0, rows * count * kStride * sizeof(T));
    for (int64_t k = 0; k < depth || k == 0; k += kDepthBlock) {
      const int64_t end = k + kDepthBlock < depth ? k + kDepthBlock : depth;
      const E* pointers[kRowBlock];
      if (!direct) copy_rows(a + k * p.a_k, rows, (end < p.K ? end : p.K) - k, copy);
      for (int64_t m = 0; m < rows; ++m) {
        pointers[m] = direct ? (const E*)a + m * p.a_m : copy + m * kDepthBlock - k;
      }
      for (int64_t i = 0; i < count; ++i) {
        multiply<kVectors>(vectors_of(panel0 + i), pointers, int(rows), k, end,
                           packed + (panel0 + i) * depth * kStride, c + i * rows * kStride);
        if (end < depth) continue;
        for (int64_t m = 0; m < rows; ++m) {
          write(batch, m0 + m, (panel0 + i) * kStride, c + (i * rows + m) * kStride);
        }
      }
    }
  }

  template <int NV>
  static FN void multiply(int vectors, const E* const* rows, int count, int64_t k_begin,
                          int64_t k_end, const E* panel, T* c) {
    if constexpr (NV > 1) {
      if (vectors < NV) return multiply<NV - 1>(vectors, rows, count, k_begin, k_end, panel, c);
    }
    panel_product<IO, NV, kStride>(rows, count, k_begin, k_end, panel, c);
  }

  // Copies [rows][kDepthBlock] elements from rows or columns of a; an odd last k is padded with 0.
  void copy_rows(const IO* a, int64_t rows, int64_t count, E* to) const {
    constexpr int kWidth = V::kWidth;
    if (p.a_k == 1) {
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t k = 0; k < count; k += kWidth) {
          widen(to + m * kDepthBlock + k, a + m * p.a_m + k,
                count - k < kWidth ? int(count - k) : kWidth);
        }
      }
      return;
    }
    for (int64_t k0 = 0; k0 < padded_depth<IO>(count); k0 += kWidth) {
      for (int64_t m0 = 0; m0 < rows; m0 += kWidth) {
        const int width = rows - m0 < kWidth ? int(rows - m0) : kWidth;
        transpose_tile(a + k0 * p.a_k + m0, count - k0, width, to + m0 * kDepthBlock + k0);
      }
    }
  }

  // to[m][k] = a[k][m] for one register's width of k, of which the first `count` exist.
  FN void transpose_tile(const IO* a, int64_t count, int width, E* to) const {
    constexpr int kWidth = V::kWidth;
    if constexpr (sizeof(E) == sizeof(T)) {
      V block[kWidth];
      for (int k = 0; k < kWidth; ++k) {
        block[k] = k < count ? load_lanes(a + k * p.a_k, width) : V(0);
      }
      transpose(block);
      for (int m = 0; m < width; ++m) store_element(to + m * kDepthBlock, block[m]);
    } else {
      E tile[kWidth][kWidth];  // [k][m]
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) {
          widen(tile[k], a + k * p.a_k, width);
        } else {
          memset(tile[k], 0, sizeof tile[k]);
        }
      }
      for (int m = 0; m < width; ++m) {
        for (int k = 0; k < kWidth; ++k) to[m * kDepthBlock + k] = tile[k][m];
      }
    }
  }

  // Stores a row of C. The lines that the next panel will write are prefetched: in a large C each
  // of them is a cache miss.
  void write(int64_t batch, int64_t m, int64_t n, const T* c) const {
    IO* to = (IO*)p.c + batch * p.c_batch + m * p.c_m + n;
    for (size_t at = 0; at < kStride; at += 64 / sizeof(IO)) {
      __builtin_prefetch(to + kStride + at, 1);
    }
    for (int v = 0; v < kVectors && n < p.N; ++v, n += V::kWidth, to += V::kWidth) {
      const int count = p.N - n < V::kWidth ? int(p.N - n) : V::kWidth;
      if (count == V::kWidth) {
        write_vector<true>(to, n, c + v * V::kWidth, count);
      } else {
        write_vector<false>(to, n, c + v * V::kWidth, count);
      }
    }
  }

  template <bool Whole>
  FN void write_vector(IO* to, int64_t n, const T* c, int count) const {
    const V bias = p.bias ? load_part<Whole>((const IO*)p.bias + n, count) : V(0);
    store_part<Whole>(to, load(c) + bias, count);
  }

  void few_rows() const {
    Scratch<E> operands(host, p.M * (depth + V::kWidth));
    const E* rows[kDotMaxRows];
    for (int64_t m = 0; m < p.M; ++m) {
      E* to = operands + m * (depth + V::kWidth);
      rows[m] = to;
      for (int64_t k = 0; k < p.K; k += V::kWidth) {
        widen(to + k, (const IO*)p.a + m * p.a_m + k,
              p.K - k < V::kWidth ? int(p.K - k) : V::kWidth);
      }
    }
    parallel_ranges(host, panels, [&](int64_t begin, int64_t end) {
      alignas(kVectorBytes) T c[kDotMaxRows * kDotPanels * kStride];
      for (int64_t panel = begin; panel < end; panel += kDotPanels) {
        const int64_t n = panel * kStride,
                      count = end - panel < kDotPanels ? end - panel : kDotPanels;
        const int64_t left = p.N - n < count * kStride ? p.N - n : count * kStride;
        const IO* const weight = (const IO*)p.b + n * p.b_n;
        dot_rows<IO, 1, kDotMaxRows>(rows, int(p.M), &weight, p.K, int(left), c,
                                     kDotPanels * kStride);
        for (int64_t m = 0; m < p.M; ++m) {
          for (int64_t i = 0; i < count; ++i) {
            write(0, m, n + i * kStride, c + (m * kDotPanels + i) * kStride);
          }
        }
      }
    });
  }
};

// out[n] = sum_m a[m, n], summed in blocks of rows: the sum then does not depend on the threads,
// and its error grows only with the square root of the number of rows.
template <typename IO>
void column_sum(const ColumnSumParams& p, const Host& host) {
  using T = State<IO>;
  using V = Vec<T>;
  constexpr int64_t kRows = 64;
  parallel_for(host, (p.N + V::kWidth - 1) / V::kWidth, [&](int64_t i) {
    const int64_t n = i * V::kWidth;
    const int count = p.N - n < V::kWidth ? int(p.N - n) : V::kWidth;
    V total = V(0);
    for (int64_t m0 = 0; m0 < p.M; m0 += kRows) {
      V part = V(0);
      for (int64_t m = m0; m < p.M && m < m0 + kRows; ++m) {
        const IO* from = (const IO*)p.a + m * p.N + n;
        part += count == V::kWidth ? load_io(from) : load_part<false>(from, count);
      }
      total += part;
    }
    store_part<false>((IO*)p.out + n, total, count);
  });
}

}  // namespace flashcell::FLASHCELL_ISA
