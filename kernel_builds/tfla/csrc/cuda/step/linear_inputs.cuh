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
template <typename IO>
DEVICE uint4 weigh(const uint4& x, const uint4& weight, float& squares) {
  return {weigh<IO>(x.x, weight.x, squares), weigh<IO>(x.y, weight.y, squares),
          weigh<IO>(x.z, weight.z, squares), weigh<IO>(x.w, weight.w, squares)};
}

// Asks for the norm's weights, which no kernel of the step writes, before the wait.
DEVICE void fetch_norm(const void* norm, int bytes) {
  for (int at = threadIdx.x * 128; at < bytes; at += int(blockDim.x) * 128) {
    fetch(static_cast<const char*>(norm) + at);
  }
}

// What 16 bytes of W are, and the values of x that they meet.
template <Format kFormat, int kSteps>
struct Values {
  static constexpr bool kInt4 = kFormat == Format::kInt4;
  static constexpr int kVectors = kFormat == Format::kPlain ? 1 : kInt4 ? 4 : 2;
  static constexpr int kCount = 8 * kVectors, kOfPiece = 4 * kSteps * kCount;
  // Returns which value of the piece is the first of the eight of x in a lane's vector j of step s.
  // A lane takes 16 bytes of W; of int4 it takes 4 bytes of each of four groups.
  static DEVICE int first(int s, int quarter, int j) {
    return kInt4 ? (4 * s + j) * kInt4Group + 4 * quarter : (4 * s + quarter) * kCount + 8 * j;
  }
  // Loads these eight: of int4 four, and the four that are 16 further, as a byte of W has them.
  static DEVICE uint4 load(const void* first) {
    if constexpr (!kInt4) return *static_cast<const uint4*>(first);
    const uint2* const fours = static_cast<const uint2*>(first);
    return {fours[0].x, fours[0].y, fours[4].x, fours[4].y};
  }
};
// The values of x that a lane takes in a step. The array is a class's member because nvcc 12.4
// aborts at an alias template of one.
template <Format kFormat, int kSteps, int kTiles>
struct StepVectors {
  using Array = uint4[Values<kFormat, kSteps>::kVectors][kTiles];
};
template <Format kFormat, int kSteps, int kTiles>
using Vectors = typename StepVectors<kFormat, kSteps, kTiles>::Array;

// Loads x of step s of the piece that begins at value k, times the norm's weight.
template <typename IO, Format kFormat, int kSteps, int kTiles, bool kNorm>
DEVICE void load_x(const LinearStepParams& p, int column, int B, int k, int s,
                   Vectors<kFormat, kSteps, kTiles>& v) {
  using Own = Values<kFormat, kSteps>;
  const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const IO* x = static_cast<const IO*>(p.x) + column * p.x_stride;
#pragma unroll
  for (int j = 0; j < Own::kVectors; ++j) {
    const int at = k + Own::first(s, quarter, j);
    const bool exists = at < int(p.K);
    uint4 weight{};
    if (kNorm && exists) weight = Own::load(static_cast<const IO*>(p.norm) + at);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int own = t * kColumns + row;
      uint4& word = v[j][t];
      word = {};
      if (own < B && exists) word = Own::load(x + own * p.x_stride + at);
      [[maybe_unused]] float squares = 0;
      if constexpr (kNorm) word = weigh<IO>(word, weight, squares);
      if constexpr (kFormat != Format::kPlain) word = every_other(word);
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
  DEVICE void write_zeros() const {
    if (threadIdx.x < kZeros / 16) reinterpret_cast<uint4*>(x)[threadIdx.x] = {};
  }
  DEVICE void load(int piece, int s, Vectors<kFormat, kSteps, kTiles>& v) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int own = t * kColumns + int(threadIdx.x) % 32 / 4;
      const bool exists = own < rows;
      const char* const first = x + (exists ? kZeros + own * 64 : 0) + threadIdx.x % 4 * 16;
      const int stride = exists ? rows * 64 : 0;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int vector = (piece * kSteps + s) * kVectors + j;
        v[j][t] = *reinterpret_cast<const uint4*>(first + vector * stride);
      }
    }
  }
  // Stores values 8 i to 8 i + 7 of a row where `load` finds them.
  DEVICE void store(int i, int own, uint4 values) const {
    char* const row = x + kZeros + own * 64;
    const int stride = rows * 64;
    if constexpr (kFormat != Format::kPlain) values = every_other(values);
    if constexpr (kFormat == Format::kInt4) {  // two lanes' halves of a vector
      char* const to = row + i / 4 * stride + i % 2 * 32 + i / 2 % 2 * 8;
      *reinterpret_cast<uint2*>(to) = {values.x, values.y};
      *reinterpret_cast<uint2*>(to + 16) = {values.z, values.w};
    } else {
      const int vector = i / (4 * kVectors) * kVectors + i % kVectors;
      const int quarter = i / kVectors % 4;
      *reinterpret_cast<uint4*>(row + vector * stride + quarter * 16) = values;
    }
  }
};

// Reads x with all warps of the thread block: keeps it if `keeps`, and writes the warp's sum of the
// squares of every row.
template <typename IO, typename Own, bool kNorm>
DEVICE void read_x(const LinearStepParams& p,
                   const Kept<Own::kFormat, Own::kSteps, Own::kTiles>& kept, bool keeps, int column,
                   int B, float* squares) {
  constexpr int kOfPiece = Values<Own::kFormat, Own::kSteps>::kOfPiece;
  const int K = int(p.K), end = (K + kOfPiece - 1) / kOfPiece * kOfPiece / 8;  // past K are zeros
  const IO* x = static_cast<const IO*>(p.x) + column * p.x_stride;
  float square[Own::kTiles][kColumns] = {};
  for (int i = threadIdx.x; i < end; i += Own::kThreads) {
    const bool exists = 8 * i < K;
    uint4 weight{};
    if (kNorm && exists) {
      weight = *reinterpret_cast<const uint4*>(static_cast<const IO*>(p.norm) + 8 * i);
    }
#pragma unroll
    for (int t = 0; t < Own::kTiles; ++t) {
      uint4 values[kColumns] = {};
#pragma unroll
      for (int r = 0; r < kColumns; ++r) {
        const int own = t * kColumns + r;
        if (own >= B || !exists) continue;
        values[r] = *reinterpret_cast<const uint4*>(x + own * p.x_stride + 8 * i);
      }
#pragma unroll
      for (int r = 0; r < kColumns; ++r) {
        const int own = t * kColumns + r;
        if (own >= kept.rows) break;
        if constexpr (kNorm) values[r] = weigh<IO>(values[r], weight, square[t][r]);
        if (keeps) kept.store(i, own, values[r]);
      }
    }
  }
  if constexpr (kNorm) {
#pragma unroll
    for (int own = 0; own < Own::kTiles * kColumns; ++own) {
      if (own >= B) break;
      float sum = square[own / kColumns][own % kColumns];
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (threadIdx.x % 32 == 0) squares[own] = sum;
    }
  }
}

}  // namespace
}  // namespace flashcell::cuda
