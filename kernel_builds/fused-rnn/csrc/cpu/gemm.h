// A batch of strided matrix products, for the projections and weight gradients around the time
// loop. Every task multiplies a share of the rows by a share of the columns. It packs one block of
// B after the other, which stays in the second-level cache while all of its rows meet it, so that a
// deep or wide B never goes through memory a second time.
#pragma once
#include "common/cpu/scratch.h"
#include "dot.h"
#include "engine.h"
#include "gemm_copy.h"

namespace flashcell::FLASHCELL_ISA {

// The rows and columns of a task.
struct GemmShare {
  int64_t rows, panels;
};

template <typename IO>
struct Gemm {
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<IO>;
  using Copy = GemmCopy<IO>;
  static constexpr int kVectors = Copy::kVectors, kStride = Copy::kStride, kTile = Copy::kTile;
  static constexpr int64_t kDepthBlock = Copy::kDepthBlock, kRowBlock = Copy::kRowBlock;
  static constexpr int64_t kPanelBlock = Copy::kPanelBlock, kPitch = Copy::kPitch;
  // Sums are kept in C itself, or unrounded in scratch memory for so many rows at a time.
  static constexpr bool kSumsInC = sizeof(IO) == sizeof(T);
  static constexpr int64_t kSumRows = 768;
  // Up to so many rows, dot products with B as it is take less time than packing it (2 threads of
  // a Cascade Lake, 4,096 x 1,024 floats: 4 rows 47 instead of 27 GFLOP/s, 12 rows 66 instead of
  // 74). They take 256 columns at a time, as 8 strips of 32 (dot.h).
  static constexpr int64_t kFewRows = 6;
  static constexpr int64_t kDotPanels = (256 + kStride - 1) / kStride;

  const GemmParams& p;
  const Host& caller;
  const Host host = fitting(caller, multiply_adds());
  const int64_t depth = padded_depth<IO>(p.K);
  const int64_t panels = (p.N + kStride - 1) / kStride;
  // The last panel has only the vectors that it needs: of 96 columns a quarter would be padding.
  const int last_vectors = int((p.N - (panels - 1) * kStride + V::kWidth - 1) / V::kWidth);
  // Rows that can be operands where they are need no copy.
  const bool direct = sizeof(E) == sizeof(IO) && p.a_k == 1 && p.K == depth;
  // Copied rows of an A that is stored by columns stay so, tile by tile.
  static constexpr bool kHasColumns = Product<IO>::kDepth == 1;
  const bool by_columns = kHasColumns && p.a_k != 1;

  int vectors_of(int64_t panel) const { return panel + 1 == panels ? last_vectors : kVectors; }

  int64_t multiply_adds() const { return p.batch * p.M * p.N * p.K; }

  void run() const {
    if (p.M == 0 || p.N == 0) return;
    if (p.M <= kFewRows && p.batch == 1 && p.a_k == 1 && p.b_k == 1) return few_rows();
    const GemmShare share = make_share();
    const int64_t down = (p.M + share.rows - 1) / share.rows;
    const int64_t across = (panels + share.panels - 1) / share.panels;
    parallel_for(host, p.batch * down * across, [&](int64_t i) {
      const int64_t m = i / across % down * share.rows, panel = i % across * share.panels;
      task(i / across / down, m, least(share.rows, p.M - m), panel,
           least(share.panels, panels - panel));
    });
  }

  // Divides C so that the busiest thread has the least to do. Tasks of the same rows copy these
  // rows each for itself, and tasks of the same columns pack these. The sums do not depend on it.
  GemmShare make_share() const {
    constexpr int64_t kPackCost = 8, kCopyCost = 10;  // multiply-adds of the time of an element
    const int64_t most = host.threads > 1 ? 2 * host.threads : 1;
    GemmShare best{p.M, panels};
    int64_t best_cost = -1;
    for (int64_t down = 1; down <= most; ++down) {
      const int64_t rows = ((p.M + down - 1) / down + kTile - 1) / kTile * kTile;
      for (int64_t across = 1; down * across <= most && across <= panels; ++across) {
        const int64_t wide = (panels + across - 1) / across;
        const int64_t columns = least(wide * kStride, p.N);
        const int64_t blocks = (wide + kPanelBlock - 1) / kPanelBlock;
        const int64_t rounds = (p.batch * down * across + host.threads - 1) / host.threads;
        const int64_t cost = rounds * (rows * columns + kPackCost * columns +
                                       (direct ? 0 : kCopyCost * blocks * rows));
        if (best_cost < 0 || cost < best_cost) best = {rows, wide}, best_cost = cost;
      }
    }
    return best;
  }

  void task(int64_t batch, int64_t m0, int64_t rows, int64_t panel0, int64_t count) const {
    const int64_t wide = least(count, kPanelBlock);
    const bool has_sums = !kSumsInC && depth > kDepthBlock;
    const int64_t chunk = has_sums ? least(rows, kSumRows) : rows;
    Scratch<E> b(host, wide * least(depth, kDepthBlock) * kStride);
    Scratch<E> a(host, direct ? 0 : least(rows, kRowBlock) * kPitch + V::kWidth);
    Scratch<T> sums(host, has_sums ? chunk * wide * kStride : 0);
    for (int64_t m = m0; m < m0 + rows; m += chunk) {
      const int64_t end = least(m + chunk, m0 + rows);
      for (int64_t panel = panel0; panel < panel0 + count; panel += wide) {
        const int64_t now = least(wide, panel0 + count - panel);
        for (int64_t k = 0; k < depth || k == 0; k += kDepthBlock) {
          const int64_t deep = least(kDepthBlock, depth - k);
          pack(batch, panel, now, k, deep, b);
          for (int64_t row = m; row < end; row += kRowBlock) {
            block(batch, row, least(kRowBlock, end - row), panel, now, k, deep, b, a,
                  has_sums ? sums + (row - m) * wide * kStride : nullptr, wide * kStride);
          }
        }
      }
    }
  }

  // Packs the block of B of depth [k, k + deep), whose panels lie one after the other.
  void pack(int64_t batch, int64_t panel, int64_t count, int64_t k, int64_t deep, E* to) const {
    const IO* const b = (const IO*)p.b + batch % p.batch_b * p.b_batch + k * p.b_k;
    const int64_t exist = least(deep, p.K - k);
    for (int64_t i = 0; i < count; ++i, to += deep * kStride) {
      const int64_t n = (panel + i) * kStride;
      const int vectors = vectors_of(panel + i);
      if (Product<IO>::kDepth == 1 && p.b_n == 1 && vectors == kVectors && n + kStride <= p.N) {
        Copy::pack_rows(b + n, p.b_k, exist, to);
        continue;
      }
      for (int v = 0; v < vectors; ++v) {
        const int64_t at = n + v * V::kWidth;
        pack_vector<IO>(to + v * V::kWidth * Product<IO>::kDepth, vectors, b + at * p.b_n, p.b_k,
                        p.b_n, exist, int(least(p.N - at, V::kWidth)));
      }
    }
  }

  // Multiplies rows by a packed block. `sums` has the rows' sums so far, `pitch` apart, if they are
  // kept there.
  void block(int64_t batch, int64_t m0, int64_t rows, int64_t panel, int64_t count, int64_t k,
             int64_t deep, const E* b, E* copy, T* sums, int64_t pitch) const {
    const IO* const a = (const IO*)p.a + batch * p.a_batch + m0 * p.a_m + k * p.a_k;
    const E* pointers[kRowBlock];
    if (by_columns) {
      Copy::copy_columns(a, p.a_k, int(rows), deep, copy);
    } else if (!direct) {
      Copy::copy_rows(a, p.a_m, p.a_k, rows, least(deep, p.K - k), copy);
    }
    for (int64_t m = 0; m < rows; ++m) {
      pointers[m] = by_columns ? copy + m * deep
                    : direct   ? (const E*)a + m * p.a_m
                               : copy + m * kPitch;
    }
    for (int64_t m = 0; m < rows; m += kTile) {
      const int height = int(least(kTile, rows - m));
      for (int64_t i = 0; i < count; ++i) {
        T* const kept = sums ? sums + m * pitch + i * kStride : nullptr;
        multiply<kVectors>(vectors_of(panel + i), pointers + m, height, batch, m0 + m, panel + i, k,
                           deep, b + i * deep * kStride, kept, pitch);
      }
    }
  }

  template <int NV>
  FN void kernel(const E* const* rows, int count, int64_t deep, const E* b, T* c, int64_t stride,
                 bool keep) const {
    if constexpr (kHasColumns) {
      if (by_columns) {
        return column_kernel_rows<IO, NV, kTile>(count, rows[0], deep, b, c, stride, keep);
      }
    }
    microkernel_rows<IO, NV, kTile>(count, rows, 0, deep, b, c, stride, keep);
  }

  template <int NV>
  FN void multiply(int vectors, const E* const* rows, int count, int64_t batch, int64_t m,
                   int64_t panel, int64_t k, int64_t deep, const E* b, T* sums,
                   int64_t pitch) const {
    if constexpr (NV > 1) {
      if (vectors < NV) {
        return multiply<NV - 1>(vectors, rows, count, batch, m, panel, k, deep, b, sums, pitch);
      }
    }
    constexpr int kColumns = NV * V::kWidth;
    const int64_t n = panel * kStride;
    const bool is_last = k + deep == depth;
    IO* const c = (IO*)p.c + batch * p.c_batch + m * p.c_m + n;
    for (int r = 0; r < count; ++r) {  // in a large C each line is a cache miss
      for (size_t at = 0; at < kColumns; at += 64 / sizeof(IO)) {
        __builtin_prefetch(c + r * p.c_m + at, 1);
      }
    }
    alignas(kVectorBytes) T tile[kTile * kColumns];
    if constexpr (kSumsInC) {
      if (n + kColumns <= p.N) {
        kernel<NV>(rows, count, deep, b, c, p.c_m, k > 0);
        if (is_last && p.bias) write<NV>(c, n, count, c, p.c_m);
        return;
      }
      for (int r = 0; r < count && k > 0; ++r) {
        for (int v = 0; v < NV; ++v) {
          const int left = int(least(p.N - n - v * V::kWidth, V::kWidth));
          const IO* const from = c + r * p.c_m + v * V::kWidth;
          store(tile + r * kColumns + v * V::kWidth,
                left == V::kWidth ? load_io(from) : load_part<false>(from, left));
        }
      }
    }
    T* const to = sums ? sums : tile;
    const int64_t stride = sums ? pitch : kColumns;
    kernel<NV>(rows, count, deep, b, to, stride, k > 0);
    if (is_last || !sums) write<NV>(c, n, count, to, stride, is_last);
  }

  // Stores rows of sums, from column n on, and adds the bias to the last ones.
  template <int NV>
  FN void write(IO* c, int64_t n, int count, const T* sums, int64_t stride,
                bool is_last = true) const {
    for (int v = 0; v < NV && n < p.N; ++v, n += V::kWidth, c += V::kWidth, sums += V::kWidth) {
      const int left = int(least(p.N - n, V::kWidth));
      const V bias = is_last && p.bias ? load_part<false>((const IO*)p.bias + n, left) : V(0);
      for (int r = 0; r < count; ++r) {
        const V value = load(sums + r * stride) + bias;
        if (left == V::kWidth) {
          store_io(c + r * p.c_m, value);
        } else {
          store_part<false>(c + r * p.c_m, value, left);
        }
      }
    }
  }

  void few_rows() const {
    Scratch<E> operands(host, p.M * (depth + V::kWidth));
    const E* rows[kFewRows];
    for (int64_t m = 0; m < p.M; ++m) {
      E* to = operands + m * (depth + V::kWidth);
      rows[m] = to;
      for (int64_t k = 0; k < p.K; k += V::kWidth) {
        widen(to + k, (const IO*)p.a + m * p.a_m + k,
              p.K - k < V::kWidth ? int(p.K - k) : V::kWidth);
      }
    }
    parallel_ranges(host, panels, [&](int64_t begin, int64_t end) {
      alignas(kVectorBytes) T c[kFewRows * kDotPanels * kStride];
      for (int64_t panel = begin; panel < end; panel += kDotPanels) {
        const int64_t n = panel * kStride,
                      count = end - panel < kDotPanels ? end - panel : kDotPanels;
        const int64_t left = p.N - n < count * kStride ? p.N - n : count * kStride;
        const IO* const weight = (const IO*)p.b + n * p.b_n;
        dot_rows<IO, 1, kFewRows>(rows, int(p.M), &weight, p.K, int(left), c, kDotPanels * kStride);
        for (int64_t m = 0; m < p.M; ++m) {
          for (int64_t i = 0; i < count; ++i) {
            write<kVectors>((IO*)p.c + m * p.c_m + n + i * kStride, n + i * kStride, 1,
                            c + (m * kDotPanels + i) * kStride, kStride);
          }
        }
      }
    });
  }
};

}  // namespace flashcell::FLASHCELL_ISA
