// The exchange between thread blocks, through L2 and without flags. The data pass through an output
// of the op itself, the exchange tensor, `medium` in the code (h forward, dr backward). It is
// filled beforehand with a bit pattern that no result has, and readers poll the data until that
// pattern is gone. Every word is written once per launch and is its own flag, so relaxed accesses
// suffice: no fence, no atomic, no epoch.
#pragma once
#include "../sequence.cuh"
#include "common/cuda/ptx/prefetch.cuh"

namespace flashcell::cuda {

// The pattern is a NaN that no result has: cvt makes every 16-bit NaN 0x7fff, and min() keeps fp32
// results below the pattern.
constexpr uint32_t kUnwritten = 0xffffffffu;

// Fills the rows of steps that run; the other rows are never polled. A row has `gates` parts of N
// heads each.
template <typename IO>
__global__ void __launch_bounds__(256) fill_kernel(const SequenceParams p, IO* medium, int gates) {
  const Column column(p, blockIdx.x);
  const bool all = p.heads == p.N;  // then the rows of all gates follow each other without gaps
  const int64_t whole = p.N * p.D / IoTraits<IO>::kVector;  // vectors of a part
  const int64_t vectors = p.heads * p.D / IoTraits<IO>::kVector * (all ? gates : 1);
  const int64_t first = p.first_head * p.D / IoTraits<IO>::kVector;
  uint4* to = reinterpret_cast<uint4*>(medium) + column.row * gates * whole + first;
  const int64_t count = column.length * (all ? 1 : gates) * vectors;
  for (int64_t i = blockIdx.y * 256 + threadIdx.x; i < count; i += gridDim.y * 256) {
    to[all ? i : i / vectors * whole + i % vectors] =
        make_uint4(kUnwritten, kUnwritten, kUnwritten, kUnwritten);
  }
}

// Rounds the initial states to [count] io, the first operand, and keeps them from the pattern.
template <typename IO>
__global__ void __launch_bounds__(256) round_kernel(const float* from, IO* to, int64_t pairs) {
  const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
  if (i >= pairs) return;
  auto pair = Pair<IO>::of(from[2 * i], from[2 * i + 1]);
  for (uint32_t& word : pair.word) word = min(word, kUnwritten - 1);
  reinterpret_cast<Pair<IO>*>(to)[i] = pair;
}

// Loads into `words` if wanted. Relaxed loads at gpu scope bypass the L1 cache.
DEVICE void request(uint32_t (&words)[4], const void* from, bool wanted) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n"
      " @p ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(from), "r"(int(wanted)));
}

DEVICE bool unwritten(const uint32_t (&words)[4]) {
  return words[0] == kUnwritten || words[1] == kUnwritten || words[2] == kUnwritten ||
         words[3] == kUnwritten;
}

DEVICE void store_relaxed(void* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word));
}

// Publishes values; neighbouring lanes hold neighbouring units. 16-bit rows are handled in pairs,
// so that each lane of a pair stores one word: the even lane of the first row, the odd lane of the
// second. `to` is the unit's place in row 0. All lanes of the warp must call it.
template <typename IO, int kRows>
DEVICE void publish(IO* to, int64_t row_stride, const float (&values)[kRows], bool valid) {
  if constexpr (sizeof(IO) == 4) {
#pragma unroll
    for (int row = 0; row < kRows; ++row, to += row_stride) {
      if (valid) store_relaxed(to, min(__float_as_uint(values[row]), kUnwritten - 1));
    }
  } else {
    const bool odd = threadIdx.x & 1;
    IO* pair = to - odd;
#pragma unroll
    for (int row = 0; row < kRows; row += 2, pair += 2 * row_stride) {
      const float first = values[row], second = values[row + 1 < kRows ? row + 1 : row];
      const float other = __shfl_xor_sync(~0u, odd ? first : second, 1);
      const uint32_t word = Pair<IO>::of(odd ? other : first, odd ? second : other).word[0];
      if (valid && (!odd || row + 1 < kRows)) store_relaxed(pair + (odd ? row_stride : 0), word);
    }
  }
}

}  // namespace flashcell::cuda
