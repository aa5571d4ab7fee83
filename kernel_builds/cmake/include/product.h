// The matrix product: operand formats, and the microkernel that keeps a tile of C in registers.
//
// C[m, col] = keep C[m, col] + sum_k rows[m][k] B[k, col] over one panel: NV vectors of columns.
// Where keep is 0, C is not read; from k > 0 on it is 1. A panel stores B as
// [k / kDepth][NV][width][kDepth], so that the kernel streams it once, front to back.
#pragma once
#include "io.h"

namespace flashcell::FLASHCELL_ISA {

// Elements are what the microkernel multiplies. 16-bit dtypes are widened, after rounding, except
// where the hardware multiplies pairs of bf16 itself.
template <typename IO>
struct Product {
  using Element = State<IO>;
  static constexpr int kDepth = 1;
  using Raw = typename Vec<Element>::Raw;
  static FN Vec<Element> broadcast(const Element* p) { return Vec<Element>(*p); }
  static FN Vec<Element> load_columns(const Element* p) { return load(p); }
  static FN Vec<Element> multiply_add(Vec<Element> acc, Vec<Element> a, Vec<Element> b) {
    return acc + a * b;
  }
};

#if defined(__AVX512BF16__)
template <>
struct Product<bf16> {
  using Element = bf16;
  static constexpr int kDepth = 2;
  static FN __m512i broadcast(const bf16* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static FN __m512i load_columns(const bf16* p) { return _mm512_loadu_si512(p); }
  static FN Vec<float> multiply_add(Vec<float> acc, __m512i a, __m512i b) {
    return (Vec<float>::Raw)_mm512_dpbf16_ps((__m512)acc.raw, (__m512bh)a, (__m512bh)b);
  }
};
#endif

template <typename IO>
using Element = typename Product<IO>::Element;

// Two rows of columns as the pairs that the hardware multiplies.
FN void store_pairs(bf16* to, Word first, Word second) {
  const Word pairs = first | second << 16;
  memcpy(to, &pairs, sizeof pairs);
}
FN Word columns_of(const bf16* p) {
  Short bits;
  memcpy(&bits, p, sizeof bits);
  return __builtin_convertvector(bits, Word);
}

FN void store_element(float* p, Vec<float> v) { store(p, v); }
FN void store_element(double* p, Vec<double> v) { store(p, v); }
FN void store_element(bf16* p, Vec<float> v) { store_io(p, v); }

// Rounds to IO and stores as operand.
template <typename IO>
FN void store_operand(Element<IO>* p, Vec<State<IO>> v) {
  if constexpr (sizeof(IO) == sizeof(Element<IO>)) {
    store_io(p, v);
  } else {
    IO rounded[Vec<State<IO>>::kWidth];
    store_io(rounded, v);
    store_element(p, load_io(rounded));
  }
}

template <typename IO>
constexpr int64_t padded_depth(int64_t k) {
  return (k + Product<IO>::kDepth - 1) / Product<IO>::kDepth * Product<IO>::kDepth;
}

// Columns a panel holds, and rows of C the registers hold: MR * NV accumulators, NV columns and a
// broadcast must fit 32 (AVX-512) or 16 registers.
constexpr int kMaxVectors = 4;
template <int NV>
constexpr int kMaxRows = kVectorBytes == 64 ? (NV == 4 ? 6 : 8) : (NV == 4 ? 3 : 4);

// Panels beyond the second-level cache arrive this far ahead: hardware prefetch stops at page ends.
constexpr int kPrefetchBytes = 4096;

template <typename IO, int NV, int MR>
__attribute__((noinline)) void microkernel(const Element<IO>* const* rows, int64_t k_begin,
                                           int64_t k_end, const Element<IO>* panel, State<IO>* c,
                                           State<IO> keep) {
  using P = Product<IO>;
  using V = Vec<State<IO>>;
  constexpr int kStride = NV * V::kWidth;
  const Element<IO>* a[MR];
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    a[m] = rows[m];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      acc[m][v] = keep != 0 ? V(keep) * load(c + m * kStride + v * V::kWidth) : V(0);
    }
  }
  const Element<IO>* b = panel + k_begin * kStride;
  for (int64_t k = k_begin; k < k_end; k += P::kDepth, b += kStride * P::kDepth) {
    decltype(P::load_columns(b)) columns[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      columns[v] = P::load_columns(b + v * V::kWidth * P::kDepth);
      __builtin_prefetch((const char*)(b + v * V::kWidth * P::kDepth) + kPrefetchBytes);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const auto value = P::broadcast(a[m] + k);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[m][v] = P::multiply_add(acc[m][v], value, columns[v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(c + m * kStride + v * V::kWidth, acc[m][v]);
  }
}

template <typename IO, int NV, int MR>
FN void microkernel_rows(int rows_now, const Element<IO>* const* rows, int64_t k_begin,
                         int64_t k_end, const Element<IO>* panel, State<IO>* c, State<IO> keep) {
  if constexpr (MR > 1) {
    if (rows_now < MR) {
      return microkernel_rows<IO, NV, MR - 1>(rows_now, rows, k_begin, k_end, panel, c, keep);
    }
  }
  microkernel<IO, NV, MR>(rows, k_begin, k_end, panel, c, keep);
}

// Row tiles of nearly equal height; every one reads the same k block of the panel while it is in
// the first-level cache. The result of a row does not depend on the rows beside it.
constexpr int64_t kPanelBlockBytes = 24 * 1024;

template <typename IO, int NV>
void panel_product(const Element<IO>* const* rows, int count, int64_t k_begin, int64_t k_end,
                   const Element<IO>* panel, State<IO>* c, State<IO> keep = 0) {
  constexpr int kRows = kMaxRows<NV>, kStride = NV * Vec<State<IO>>::kWidth;
  // A multiple of kDepth: a pair of bf16 must not straddle two blocks.
  constexpr int64_t kBlock = kPanelBlockBytes / (kStride * sizeof(Element<IO>)) / 16 * 16;
  const int tiles = (count + kRows - 1) / kRows;
  const int64_t block = tiles > 1 ? kBlock : k_end - k_begin;
  for (int64_t k = k_begin; k < k_end; k += block) {
    const int64_t end = k + block < k_end ? k + block : k_end;
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = tile * count / tiles, next = (tile + 1) * count / tiles;
      microkernel_rows<IO, NV, kRows>(next - first, rows + first, k, end, panel,
                                      c + first * kStride, k > 0 ? 1 : keep);
    }
  }
}

}  // namespace flashcell::FLASHCELL_ISA
