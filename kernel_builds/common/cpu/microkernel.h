// The matrix product's microkernel, which keeps a tile of C in registers:
//
//   C[m, col] = keep C[m, col] + sum_k rows[m][k] B[k, col]
//
// over one panel of NV vectors of columns. Where keep is 0, C is not read; blocks after the first
// use keep = 1. A panel stores B as [k / kDepth][NV][width][kDepth], so that the kernel streams it
// once, front to back.
#pragma once
#include "common/cpu/operand.h"

namespace flashcell::FLASHCELL_ISA {

// kMaxVectors is the width of a panel, and kMaxRows the number of rows of C in registers. MR * NV
// sums, NV columns and one broadcast value must fit in 32 (AVX-512, NEON) or 16 registers. Of a
// Zen 3's peak, 6 x 2 and 4 x 3 reach 97 %, 3 x 4 reaches 83 %.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kFewRegisters = false;
#else
constexpr bool kFewRegisters = true;
#endif
constexpr int kMaxVectors = kFewRegisters ? 2 : 4;
template <int NV>
constexpr int kMaxRows = kFewRegisters ? (NV == 3   ? 4
                                          : NV == 2 ? 6
                                                    : 8)
                                       : (NV == 4 ? 6 : 8);
// A panel wider than the registers allow is stored as several narrower panels, its parts.
template <int NV>
constexpr int kPartVectors = !kFewRegisters && NV % 4 == 0 ? 4
                             : NV % 3 == 0                 ? 3
                             : NV % 2 == 0                 ? 2
                                                           : 1;

// Prefetch distance for panels larger than the second-level cache: hardware prefetch stops at page
// boundaries.
constexpr int kPrefetchBytes = 4096;

// Multiplies kParts parts of NV vectors, `part` elements apart, by the rows whose element (m, k)
// is at element(m, k); rows of C are `stride` apart.
template <typename IO, int NV, int kParts, int MR, typename P, typename At>
FN void multiply_tile(const At& element, int64_t depth, const Element<IO>* b, int64_t part,
                      State<IO>* c, int64_t stride, State<IO> keep) {
  using V = Vec<State<IO>>;
  constexpr int kAll = NV * kParts, kStep = NV * V::kWidth * P::kDepth;
  V acc[MR][kAll];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) {
      acc[m][v] = keep != 0 ? V(keep) * load(c + m * stride + v * V::kWidth) : V(0);
    }
  }
  for (int64_t k = 0; k < depth; k += P::kDepth, b += kStep) {
#pragma GCC unroll 2
    for (int turn = 0; turn < P::kTurns; ++turn) {
      decltype(P::load_columns(b, turn)) columns[kAll];
#pragma GCC unroll 8
      for (int v = 0; v < kAll; ++v) {
        const Element<IO>* from = b + v / NV * part + v % NV * V::kWidth * P::kDepth;
        columns[v] = P::load_columns(from, turn);
        if (turn == 0 && v % NV * kVectorBytes % 64 == 0) {
          __builtin_prefetch((const char*)from + kPrefetchBytes);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        const auto value = P::broadcast(element(m, k), turn);
#pragma GCC unroll 8
        for (int v = 0; v < kAll; ++v) acc[m][v] = P::multiply_add(acc[m][v], value, columns[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kAll; ++v) store(c + m * stride + v * V::kWidth, acc[m][v]);
  }
}

template <typename IO, int NV, int kParts, int MR, typename P = Product<IO>>
__attribute__((noinline)) void microkernel(const Element<IO>* const* rows, int64_t k_begin,
                                           int64_t k_end, const Element<IO>* panel, int64_t part,
                                           State<IO>* c, int64_t stride, State<IO> keep) {
  const Element<IO>* a[MR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) a[m] = rows[m] + k_begin;
  multiply_tile<IO, NV, kParts, MR, P>(
      [&](int m, int64_t k) __attribute__((always_inline)) { return a[m] + k; }, k_end - k_begin,
      panel + k_begin * NV * Vec<State<IO>>::kWidth, part, c, stride, keep);
}

template <typename IO, int NV, int MR = kMaxRows<NV>>
FN void microkernel_rows(int rows_now, const Element<IO>* const* rows, int64_t k_begin,
                         int64_t k_end, const Element<IO>* panel, State<IO>* c, int64_t stride,
                         State<IO> keep) {
  if constexpr (MR > 1) {
    if (rows_now < MR) {
      return microkernel_rows<IO, NV, MR - 1>(rows_now, rows, k_begin, k_end, panel, c, stride,
                                              keep);
    }
  }
#if defined(__AVX512BF16__)
  if constexpr (Product<IO>::kDepth == 2) {
    if (__builtin_cpu_is("intel")) {
      return microkernel<IO, NV, 1, MR, WidenedPairs>(rows, k_begin, k_end, panel, 0, c, stride,
                                                      keep);
    }
  }
#endif
  microkernel<IO, NV, 1, MR>(rows, k_begin, k_end, panel, 0, c, stride, keep);
}

// Splits the rows into tiles of nearly equal height. All of them read the same k block of the panel
// while it is in the first-level cache. The result of a row does not depend on the other rows.
constexpr int64_t kPanelBlockBytes = 24 * 1024;

template <typename IO, int NV, int kStride = NV * Vec<State<IO>>::kWidth>
void panel_product(const Element<IO>* const* rows, int count, int64_t k_begin, int64_t k_end,
                   const Element<IO>* panel, State<IO>* c, State<IO> keep = 0) {
  constexpr int kRows = kMaxRows<NV>;
  // A multiple of kDepth: a pair of bf16 must not straddle two blocks.
  constexpr int64_t kColumns = NV * Vec<State<IO>>::kWidth;
  constexpr int64_t kBlock = kPanelBlockBytes / (kColumns * sizeof(Element<IO>)) / 16 * 16;
  const int tiles = (count + kRows - 1) / kRows;
  const int64_t block = tiles > 1 ? kBlock : k_end - k_begin;
  for (int64_t k = k_begin; k < k_end; k += block) {
    const int64_t end = k + block < k_end ? k + block : k_end;
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = tile * count / tiles, next = (tile + 1) * count / tiles;
      microkernel_rows<IO, NV>(next - first, rows + first, k, end, panel, c + first * kStride,
                               kStride, k > 0 ? 1 : keep);
    }
  }
}

// Multiplies a panel that is stored in parts, over its whole depth.
template <typename IO, int NV, int kStride = NV * Vec<State<IO>>::kWidth>
FN void parts_product(const Element<IO>* const* rows, int count, int64_t depth,
                      const Element<IO>* panel, State<IO>* c) {
  constexpr int kPart = kPartVectors<NV>, kColumns = kPart * Vec<State<IO>>::kWidth;
  constexpr int kParts = NV / kPart;
  const int64_t part = depth * kColumns;
  // With one or two rows, the sums of one part are too few to hide the latency of a multiply-add,
  // so several parts are multiplied together.
  if constexpr (kParts > 1) {
    constexpr int kTwo = kParts % 2 == 0 ? 2 : 1, kOne = kParts % 4 == 0 ? 4 : kTwo;
    if (count == 1) {
      for (int i = 0; i < kParts; i += kOne, panel += kOne * part, c += kOne * kColumns) {
        microkernel<IO, kPart, kOne, 1>(rows, 0, depth, panel, part, c, kStride, 0);
      }
      return;
    }
    if (count == 2) {
      for (int i = 0; i < kParts; i += kTwo, panel += kTwo * part, c += kTwo * kColumns) {
        microkernel<IO, kPart, kTwo, 2>(rows, 0, depth, panel, part, c, kStride, 0);
      }
      return;
    }
  }
  for (int i = 0; i < kParts; ++i, panel += part, c += kColumns) {
    panel_product<IO, kPart, kStride>(rows, count, 0, depth, panel, c);
  }
}

// The last panel of a matrix has only the vectors that it needs, at most four: padding to whole
// panels would double the products of a head of 32 units.
constexpr int part_of(int vectors) {
  constexpr int kParts[] = {1, 1, kPartVectors<2>, kPartVectors<3>, kPartVectors<4>};
  return kParts[vectors];
}
template <typename IO, int kStride, int NV = 4>
FN void narrow_product(int vectors, const Element<IO>* const* rows, int count, int64_t depth,
                       const Element<IO>* panel, State<IO>* c) {
  if constexpr (NV > 1) {
    if (vectors < NV) {
      return narrow_product<IO, kStride, NV - 1>(vectors, rows, count, depth, panel, c);
    }
  }
  parts_product<IO, NV, kStride>(rows, count, depth, panel, c);
}

}  // namespace flashcell::FLASHCELL_ISA
