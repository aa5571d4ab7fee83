// x of linear.cuh: from memory, with the norm's weight, or kept in shared memory for all tiles.
#pragma once
#include "linear_shape.cuh"
#include "widen.cuh"

namespace flashcell::cuda {

namespace {

// Returns word * weight, and adds the squares of the word's elements to `squares`.
template <typename IO>
DEVICE uint32_t weigh(uint32_t word, uint32_t weight, float& squares) {
  const float2 x = Pair<IO>{{word}}.floats(), w = Pair<IO>{{weight}}.floats();
  squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
  return Pair<IO>::of(x.x * w.x, x.y * w.y).word[0];
}

// Asks for the norm's weights, which no kernel of the step writes, before the wait.
DEVICE void fetch_norm([[maybe_unused]] const void* norm, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  for (int at = threadIdx.x * 128; at < bytes; at += int(blockDim.x) * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(norm) + at));
  }
#endif
}

// What 16 bytes of W are, and the values of x that they meet.
template <Format kFormat, int kSteps>
struct Values {
  static constexpr bool kInt4 = kFormat == Format::kInt4;
  static constexpr int kVectors = kFormat == Format::kPlain ? 1 : kInt4 ? 4 : 2;
  static constexpr int kCount = 8 * kVectors, kOfPiece = 4 * kSteps * kCount;
  // The 16 bytes that a lane takes in step s: the factors of a lane's groups are neighbours.
  static DEVICE int part(int s, int quarter) {
    return kInt4 ? kSteps * quarter + s : 4 * s + quarter;
  }
};
// The values of x that a lane takes in a step.
template <Format kFormat, int kSteps, int kTiles>
using Vectors = uint4[Values<kFormat, kSteps>::kVectors][kTiles];

// Loads x of step s of the piece that begins at value k, times the norm's weight, and adds the
// squares of x.
template <typename IO, Format kFormat, int kSteps, int kTiles, bool kNorm>
DEVICE void load_x(const LinearStepParams& p, int column, int B, int k, int s,
                   Vectors<kFormat, kSteps, kTiles>& v, float (&square)[kTiles]) {
  using Own = Values<kFormat, kSteps>;
  const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const IO* x = static_cast<const IO*>(p.x) + column * p.x_stride;
#pragma unroll
  for (int j = 0; j < Own::kVectors; ++j) {
    const int at = k + Own::part(s, quarter) * Own::kCount + 8 * j;
    const bool exists = at < int(p.K);
    uint4 scale{};
    if (kNorm && exists) {
      scale = *reinterpret_cast<const uint4*>(static_cast<const IO*>(p.norm) + at);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int own = t * kColumns + row;
      uint4& word = v[j][t];
      word = {};
      if (own < B && exists) word = *reinterpret_cast<const uint4*>(x + own * p.x_stride + at);
      if constexpr (kNorm) {
        word.x = weigh<IO>(word.x, scale.x, square[t]);
        word.y = weigh<IO>(word.y, scale.y, square[t]);
        word.z = weigh<IO>(word.z, scale.z, square[t]);
        word.w = weigh<IO>(word.w, scale.w, square[t]);
      }
      if constexpr (kFormat == Format::kInt8 || kFormat == Format::kFp8) {
        word = every_other(word);
      }
    }
  }
}

// x of all pieces in shared memory as lanes take it, `rows` rows of it, and zeros for the lanes of
// others.
template <Format kFormat, int kSteps, int kTiles>
struct Kept {
  using Own = Values<kFormat, kSteps>;
  static constexpr int kVectors = Own::kVectors, kZeros = 64;
  char* x;
  int rows;

  static constexpr int64_t bytes(int64_t K, int64_t rows) {
    return kZeros + (K + Own::kOfPiece - 1) / Own::kOfPiece * Own::kOfPiece * 2 * rows;
  }
  DEVICE char* row(int own) const {
    return x + (own < rows ? kZeros + own * 64 : 0) + threadIdx.x % 4 * 16;
  }
  DEVICE int stride(int own) const { return own < rows ? rows * 64 : 0; }

  DEVICE void write_zeros() const {
    if (threadIdx.x < kZeros / 16) reinterpret_cast<uint4*>(x)[threadIdx.x] = {};
  }
  DEVICE void store(int piece, int s, const Vectors<kFormat, kSteps, kTiles>& v) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int own = t * kColumns + int(threadIdx.x) % 32 / 4;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int vector = (piece * kSteps + s) * kVectors + j;
        if (own < rows) *reinterpret_cast<uint4*>(row(own) + vector * stride(own)) = v[j][t];
      }
    }
  }
  DEVICE void load(int piece, int s, Vectors<kFormat, kSteps, kTiles>& v) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int own = t * kColumns + int(threadIdx.x) % 32 / 4;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int vector = (piece * kSteps + s) * kVectors + j;
        v[j][t] = *reinterpret_cast<const uint4*>(row(own) + vector * stride(own));
      }
    }
  }
};

// Keeps x of all pieces, which all warps of the thread block load, and adds its squares.
template <typename IO, Format kFormat, typename Own, bool kNorm>
DEVICE void keep_x(const LinearStepParams& p, const Kept<kFormat, Own::kSteps, Own::kTiles>& kept,
                   int column, int B, float (&square)[Own::kTiles]) {
  constexpr int kSteps = Own::kSteps, kWarps = Own::kTeams * Own::kWarps;
  constexpr int kValues = Values<kFormat, kSteps>::kOfPiece;
  constexpr int kAtOnce = kWarps == 8 && Own::kTiles == 1 ? 2 : 1;  // pieces
  const int pieces = (int(p.K) + kValues - 1) / kValues;
  for (int piece = threadIdx.x / 32; piece < pieces; piece += kAtOnce * kWarps) {
    Vectors<kFormat, kSteps, Own::kTiles> v[kAtOnce * kSteps];
#pragma unroll
    for (int i = 0; i < kAtOnce * kSteps; ++i) {
      const int k = (piece + i / kSteps * kWarps) * kValues;
      load_x<IO, kFormat, kSteps, Own::kTiles, kNorm>(p, column, B, k, i % kSteps, v[i], square);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce * kSteps; ++i) {
      const int own = piece + i / kSteps * kWarps;
      if (own < pieces) kept.store(own, i % kSteps, v[i]);
    }
  }
}

// Writes a warp's sums of squares, one for each row of x.
template <int kTiles>
DEVICE void write_squares(float (&square)[kTiles], float* to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    square[t] += __shfl_xor_sync(~0u, square[t], 1);
    square[t] += __shfl_xor_sync(~0u, square[t], 2);
    if (lane % 4 == 0) to[t * kColumns + lane / 4] = square[t];
  }
}

}  // namespace
}  // namespace flashcell::cuda
