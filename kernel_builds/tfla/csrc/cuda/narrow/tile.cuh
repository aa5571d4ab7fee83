// Tiles of heads whose q, k and v have at most 64 columns: 64 rows of kWidth 16-bit elements. A
// thread block of four warps has one head; a row of 32 elements is 64 bytes, so tile.cuh's panels
// of 128 bytes would be half empty.
#pragma once
#include "../chunk/tile.cuh"
#include "../gates/rows.cuh"

namespace flashcell::cuda {

constexpr int kNarrowThreads = 128;
constexpr int kWidestNarrow = 64;

// 16-byte piece c of a row is stored as piece c ^ swizzle(row), so that eight rows lie in different
// banks.
template <int kWidth>
struct NarrowTile {
  static constexpr int kRowBytes = 2 * kWidth, kPieces = kWidth / 8;
  static constexpr int bytes(int rows) { return rows * kRowBytes; }
  uint32_t address;

  DEVICE static int swizzle(int row) { return kWidth == 64 ? row % 8 : row / 2 % 4; }
  DEVICE uint32_t piece(int row, int piece) const {
    return address + row * kRowBytes + (piece ^ swizzle(row)) * 16;
  }
  DEVICE uint32_t word(int row, int column) const {
    return piece(row, column / 8) + column % 8 * 2;
  }
};

// As Operand in tile.cuh. It starts at a row and a column that are multiples of 16.
template <Side kSide, Lies kLies, int kWidth>
struct NarrowOperand {
  static constexpr bool kAlong = kLies == Lies::kAlong;
  uint32_t lane;

  DEVICE NarrowOperand(NarrowTile<kWidth> tile, int row, int column) {
    const int l = threadIdx.x % 32;
    constexpr bool kColumnsFirst = (kSide == Side::kLeft) == kAlong;
    const int in_row = kColumnsFirst ? l % 16 : l / 16 * 8 + l % 8;
    const int in_piece = kColumnsFirst ? l / 16 : l / 8 % 2;
    lane = tile.piece(row + in_row, column / 8 + in_piece);
  }
  DEVICE void load(uint32_t (&words)[4], int outer, int depth) const {
    const int row = (kAlong ? outer : depth) * 16, piece = (kAlong ? depth : outer) * 2;
    const uint32_t at = (lane ^ piece * 16) + row * NarrowTile<kWidth>::kRowBytes;
    kAlong ? load_vectors(words, at) : load_transposed(words, at);
  }
};
template <Lies kLies, int kWidth>
using NarrowLeft = NarrowOperand<Side::kLeft, kLies, kWidth>;
template <Lies kLies, int kWidth>
using NarrowRight = NarrowOperand<Side::kRight, kLies, kWidth>;

// sums += left right at one step of the depth, with the left operand in registers; kBlocks blocks
// of 8 columns.
template <typename IO, int kBlocks, typename R>
DEVICE void multiply_row(float (&sums)[kBlocks][4], const uint32_t (&left)[4], const R& right,
                         int depth) {
#pragma unroll
  for (int j = 0; j < kBlocks; j += 2) {
    uint32_t b[4];
    right.load(b, j / 2, depth);
    mma<IO>(sums[j], left, b[0], b[1]);
    mma<IO>(sums[j + 1], left, b[2], b[3]);
  }
}

// Starts copying 64 rows, of which `rows` exist, and `columns` of their elements; the rest becomes
// 0.
template <int kWidth, typename IO>
DEVICE void copy_narrow(NarrowTile<kWidth> to, const IO* from, int64_t stride, int rows,
                        int columns) {
  constexpr int kPieces = kWidth / 8, kAtOnce = kNarrowThreads / kPieces;
  const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
  const IO* source = from + first * stride + piece * 8;
  const uint32_t start = to.piece(first, piece);  // a row's swizzle is the first row's
  static_assert(kAtOnce % 8 == 0);
  if (rows >= kTile && columns >= kWidth) {
#pragma unroll
    for (int row = 0; row < kTile; row += kAtOnce) {
      copy_async(start + row * NarrowTile<kWidth>::kRowBytes, source);
      source += kAtOnce * stride;
    }
    return;
  }
  const bool inside = piece * 8 < columns;
#pragma unroll 1
  for (int row = 0; row < kTile; row += kAtOnce) {
    const bool exists = inside && first + row < rows;
    copy_async_or_zero(start + row * NarrowTile<kWidth>::kRowBytes, exists ? source : from, exists);
    source += kAtOnce * stride;
  }
}

// Starts copying a value of each row, of two arrays: 64 to `to`, and 64 of the other behind them. A
// thread has one value; `at` is its place in the array, if it `exists`.
DEVICE void copy_halves(void* to, const void* first, const void* second, int64_t at, bool exists) {
  const void* from = threadIdx.x < kTile ? first : second;
  copy_word_or_zero(static_cast<float*>(to) + threadIdx.x, static_cast<const float*>(from) + at,
                    exists);
}

// A state in shared memory as an operand: C rounded, [K, V], and three pieces of n, whose sum is as
// exact as fp32, in the first rows of a tile of eight.
template <typename IO, int kWidth>
struct NarrowState {
  alignas(1024) char C[NarrowTile<kWidth>::bytes(kWidth)];
  char n[NarrowTile<kWidth>::bytes(8)];

  DEVICE NarrowTile<kWidth> C_tile() const { return {shared_address(C)}; }
  DEVICE NarrowTile<kWidth> n_tile() const { return {shared_address(n)}; }

  // Clears n; all threads call it.
  DEVICE void clear_n() {
    for (int i = threadIdx.x; i < int(sizeof n) / 4; i += kNarrowThreads) {
      reinterpret_cast<uint32_t*>(n)[i] = 0;
    }
  }
  // Stores a warp's 16 rows from `row` on.
  template <int kBlocks>
  DEVICE void store(const float (&sums)[kBlocks][4], int row) {
    const int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_words(C_tile().word(row + r + 8 * half, 8 * j + 2 * q),
                    Pair<IO>::of(sums[j][2 * half], sums[j][2 * half + 1]).word[0]);
      }
    }
  }
  DEVICE void store_n(int k, float x) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const IO piece = from_float<IO>(x);
      const int at = NarrowTile<kWidth>{0}.word(i, k);
      reinterpret_cast<IO&>(n[at]) = piece;
      x -= to_float(piece);
    }
  }
};

}  // namespace flashcell::cuda
