// Tiles in shared memory, and a warp's products of them.
//
// A tile consists of panels of kRows rows of 128 bytes. 16-byte piece c of row r is at piece c ^ (r
// % 8), so that ldmatrix has no bank conflicts, whether it transposes or not. For 16-bit types that
// is also wgmma's 128-byte swizzle. fp32 is read in words across rows, which needs another order of
// rows (swizzle). Tiles start at multiples of 1024 bytes.
//
// An fp32 product is computed as three tf32 products: every operand is split into a rounded value
// and a rest, and the product of the two rests is left out, which is 2^-22 of a term. Tensor cores
// truncate the sums they add to, so that errors of a long sum would all have one sign: the product
// of one step is summed from 0, and added in fp32. Turing's product of fp32 is exact (mma.cuh).
#pragma once
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

constexpr int kPanelBytes = 128;
template <typename IO>
constexpr int kPanel = kPanelBytes / int(sizeof(IO));  // columns of a panel
template <typename IO>
constexpr int kDepth = 32 / int(sizeof(IO));  // depth of one matrix instruction

template <typename IO>
DEVICE int swizzle(int row) {
  return sizeof(IO) == 2 ? row % 8 : row % 4 * 2 + row / 4 % 2;
}

template <typename IO, int kRows>
struct Tile {
  uint32_t address;

  static constexpr int kStride = kRows * kPanelBytes;  // bytes from panel to panel
  static constexpr int bytes(int columns) {
    return (columns + kPanel<IO> - 1) / kPanel<IO> * kStride;
  }
  DEVICE uint32_t piece(int row, int piece) const {
    return address + piece / 8 * kStride + row * kPanelBytes + (piece % 8 ^ swizzle<IO>(row)) * 16;
  }
};

// Copies rows [0, kRows) of columns [0, kColumns) of a row-major matrix, of which `rows` and
// `columns` exist. The rest becomes 0 and is not read. The matrix's rows are 16-byte aligned.
template <int kThreads, int kColumns, typename IO, int kRows>
DEVICE void copy_tile(Tile<IO, kRows> to, const IO* from, int64_t stride, int rows, int columns) {
  constexpr int kPiece = 16 / sizeof(IO), kPieces = kColumns / kPiece;
  constexpr int kRowsAtOnce = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRows % kRowsAtOnce == 0 && kColumns % kPanel<IO> == 0);
  const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
  const IO* source = from + first * stride + piece * kPiece;
  // As rows at once are a power of two, a row's swizzle is the first row's combined with its own.
  const uint32_t start = to.piece(first, piece);
  const auto at = [&](int row) { return (start ^ swizzle<IO>(row) * 16) + row * kPanelBytes; };
  if (rows >= kRows && columns >= kColumns) {
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
      copy_async(at(row), source);
      source += kRowsAtOnce * stride;
    }
    return;
  }
  const bool inside = piece * kPiece < columns;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    const bool exists = inside && first + row < rows;
    copy_async_or_zero(at(row), exists ? source : from, exists);
    source += kRowsAtOnce * stride;
  }
}

// kAlong: rows of the operand in shared memory are rows of the product (for the right operand, its
// columns). kAcross: they are the depth.
enum class Lies { kAlong, kAcross };
enum class Side { kLeft, kRight };

// One operand as a lane of a warp reads it. A piece is kDepth of the depth by 16 rows of the
// product (for the right operand, 16 columns). Its words are a0..a3, or b0 and b1 of the first 8
// columns and of the next 8.
template <Side kSide, Lies kLies, typename IO, int kRows>
struct Operand {
  static constexpr bool kAlong = kLies == Lies::kAlong, kWords = sizeof(IO) == 4 && !kAlong;
  uint32_t lane;

  // Starts at row `row` and column `column` of the tile. `row` is a multiple of 16, and `column` a
  // multiple of what the warp takes or of a panel, whichever is smaller.
  DEVICE Operand(Tile<IO, kRows> tile, int row, int column) {
    const int l = threadIdx.x % 32;
    constexpr bool kColumnsFirst = (kSide == Side::kLeft) == kAlong;
    const int in_row = kColumnsFirst ? l % 16 : l / 16 * 8 + l % 8;
    const int in_piece = kColumnsFirst ? l / 16 : l / 8 % 2;
    const int first = column * int(sizeof(IO)) / 16;
    lane = kWords ? tile.piece(row + l % 4, first + l / 16) + l / 4 % 4 * 4
                  : tile.piece(row + in_row, first + in_piece);
  }

  // Loads piece `outer` of the product's rows (columns) at step `depth` of the depth.
  DEVICE void load(uint32_t (&words)[4], int outer, int depth) const {
    const int rows = kAlong ? outer * 16 : depth * kDepth<IO>;
    const int pieces = kAlong ? 2 * depth : outer * int(sizeof(IO));
    const uint32_t at = (lane ^ pieces % 8 * 16) + pieces / 8 * Tile<IO, kRows>::kStride;
    if constexpr (kWords) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Four elements further along the depth.
        const int down = kSide == Side::kLeft ? i / 2 : i % 2;
        // Eight rows further in the product.
        const int right = kSide == Side::kLeft ? i % 2 : i / 2;
        words[i] = load_word((at ^ right * 32 ^ down * 16) + (rows + down * 4) * kPanelBytes);
      }
    } else if constexpr (kAlong) {
      load_vectors(words, at + rows * kPanelBytes);
    } else {
      load_transposed(words, at + rows * kPanelBytes);
    }
  }
};
template <Lies kLies, typename IO, int kRows>
using Left = Operand<Side::kLeft, kLies, IO, kRows>;
template <Lies kLies, typename IO, int kRows>
using Right = Operand<Side::kRight, kLies, IO, kRows>;

// The sums of a warp's product: lane 4 r + q has in sums[i][j] row 16 i + r (and + 8) of columns 8
// j + 2 q and the next.
template <int kM, int kN>
using Sums = float[kM][kN][4];

template <int kM, int kN>
DEVICE void clear(Sums<kM, kN>& sums) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) sums[i / 4 / kN][i / 4 % kN][i % 4] = 0;
}

template <typename IO>
DEVICE void multiply_piece(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(IO) == 2 || kIsTuring) {
    mma<IO>(d, a, b0, b1);
  } else {
    const auto rest = [](uint32_t word, uint32_t rounded) {
      return operand<IO>(__float_as_uint(__uint_as_float(word) - __uint_as_float(rounded)));
    };
    uint32_t whole[4], rests[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) whole[i] = operand<IO>(a[i]), rests[i] = rest(a[i], whole[i]);
    const uint32_t c0 = operand<IO>(b0), c1 = operand<IO>(b1);
    float product[4] = {};
    mma<IO>(product, whole, rest(b0, c0), rest(b1, c1));
    mma<IO>(product, rests, c0, c1);
    mma<IO>(product, whole, c0, c1);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += product[i];
  }
}

// sums += left right at step `depth` of the depth; change(words, i, depth) may scale the left words
// of rows from 16 i on.
template <typename IO, int kM, int kN, typename L, typename R, typename Change>
DEVICE void multiply(Sums<kM, kN>& sums, const L& left, const R& right, int depth, Change change) {
  static_assert(kN % 2 == 0);
  uint32_t a[kM][4];
#pragma unroll
  for (int i = 0; i < kM; ++i) left.load(a[i], i, depth), change(a[i], i, depth);
#pragma unroll
  for (int j = 0; j < kN; j += 2) {
    uint32_t b[4];
    right.load(b, j / 2, depth);
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      multiply_piece<IO>(sums[i][j], a[i], b[0], b[1]);
      multiply_piece<IO>(sums[i][j + 1], a[i], b[2], b[3]);
    }
  }
}
template <typename IO, int kM, int kN, typename L, typename R>
DEVICE void multiply(Sums<kM, kN>& sums, const L& left, const R& right, int depth) {
  multiply<IO>(sums, left, right, depth, [](uint32_t (&)[4], int, int) {});
}

// Scales left words with Lies::kAcross by factors of the depth. The result is that of fp32, rounded
// once: k a = k a_hi + (k a_lo), where only the last rounding matters. A lane's words are for depth
// 2 q, 2 q + 1 (fp32: q) and 8 (fp32: 4) further.
template <typename IO>
struct DepthScale {
  // For the nearer and the farther depth: the factor's high part, low part and rest; or the fp32
  // factor.
  uint32_t word[2][3];

  // `factors` starts at the first depth of the step, and has `count` of them.
  DEVICE explicit DepthScale(const float* factors, int count = kDepth<IO>) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (sizeof(IO) == 4) {
        word[i][0] = q + 4 * i < count ? __float_as_uint(factors[q + 4 * i]) : 0;
      } else {
        const float2 zero{};
        const float2 x =
            2 * q + 8 * i < count ? reinterpret_cast<const float2*>(factors)[q + 4 * i] : zero;
        const Pair<IO> hi = Pair<IO>::of(x.x, x.y);
        const float2 back = hi.floats();
        word[i][0] = hi.word[0];
        const float2 low = {x.x - back.x, x.y - back.y};
        const Pair<IO> lo = Pair<IO>::of(low.x, low.y);
        word[i][1] = lo.word[0];
        const float2 left = lo.floats();
        word[i][2] = Pair<IO>::of(low.x - left.x, low.y - left.y).word[0];
      }
    }
  }
  // Adds left times the factors to `sums`, as exactly as fp32; the result is the sum of columns 0
  // and 1.
  DEVICE void multiply(float (&sums)[4], const uint32_t (&left)[4]) const {
    const int r = threadIdx.x % 32 / 4;
    const auto column = [&](int i, int piece) { return r == 0 ? word[i][piece] : 0; };
    multiply_piece<IO>(sums, left, column(0, 0), column(1, 0));
    if constexpr (sizeof(IO) == 2) {
      const auto rests = [&](int i) { return r == 0 ? word[i][1] : r == 1 ? word[i][2] : 0; };
      multiply_piece<IO>(sums, left, rests(0), rests(1));
    }
  }
  DEVICE void operator()(uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t (&by)[3] = word[i / 2];
      if constexpr (sizeof(IO) == 4) {
        words[i] = __float_as_uint(__uint_as_float(words[i]) * __uint_as_float(by[0]));
      } else {
        constexpr uint32_t kMinusZero = 0x80008000;
        words[i] = multiply_add<IO>(words[i], by[0], multiply_add<IO>(words[i], by[1], kMinusZero));
      }
    }
  }
};

// Stores two neighbouring sums, rounded, as an operand of a later product: row r, columns c and c +
// 1 (c even) of a tile.
template <typename IO, int kRows>
DEVICE void store_pair(Tile<IO, kRows> tile, int row, int column, float first, float second) {
  constexpr int kPiece = 16 / sizeof(IO);
  const uint32_t to = tile.piece(row, column / kPiece) + column % kPiece * int(sizeof(IO));
  const Pair<IO> pair = Pair<IO>::of(first, second);
  if constexpr (sizeof(IO) == 4) {
    store_words(to, pair.word[0], pair.word[1]);
  } else {
    store_words(to, pair.word[0]);
  }
}

template <typename IO, int kRows>
DEVICE float2 load_pair(Tile<IO, kRows> tile, int row, int column) {
  constexpr int kPiece = 16 / sizeof(IO);
  const uint32_t from = tile.piece(row, column / kPiece) + column % kPiece * int(sizeof(IO));
  Pair<IO> pair;
#pragma unroll
  for (int i = 0; i < int(sizeof pair) / 4; ++i) pair.word[i] = load_word(from + 4 * i);
  return pair.floats();
}

// Stores a row's sums of 32 columns to global memory, rounded; `first` and `second` have the lane's
// pairs of four blocks of 8 columns. With 16-bit types the four lanes of a row exchange words, so
// that each writes 16 bytes. `to` points to the first column, from which `columns` exist.
template <typename IO>
DEVICE void store_row(IO* to, const float (&first)[4], const float (&second)[4], bool exists,
                      int columns) {
  const int q = threadIdx.x % 4;
  if constexpr (sizeof(IO) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = i * 8 + 2 * q;
      if (exists && column < columns) {
        reinterpret_cast<float2&>(to[column]) = make_float2(first[i], second[i]);
      }
    }
  } else {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = Pair<IO>::of(first[i], second[i]).word[0];
    const bool odd = q % 2, high = q / 2;
    const uint32_t x = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
    const uint32_t y = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    const uint2 near = odd ? make_uint2(x, w[1]) : make_uint2(w[0], x);
    const uint2 far = odd ? make_uint2(y, w[3]) : make_uint2(w[2], y);
    const uint2 mine = high ? far : near, theirs = high ? near : far;
    const uint32_t got_x = __shfl_xor_sync(~0u, theirs.x, 2);
    const uint32_t got_y = __shfl_xor_sync(~0u, theirs.y, 2);
    const uint4 words =
        high ? make_uint4(got_x, got_y, mine.x, mine.y) : make_uint4(mine.x, mine.y, got_x, got_y);
    if (exists && q * 8 < columns) reinterpret_cast<uint4&>(to[q * 8]) = words;
  }
}

}  // namespace flashcell::cuda
