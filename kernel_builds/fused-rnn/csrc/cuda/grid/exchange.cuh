// The exchange between thread blocks, through L2 and without flags. The data pass through an output
// of the op itself, the exchange tensor, `medium` in the code (h forward, dr backward). It is
// filled beforehand with a bit pattern that no result has, and readers poll the data until that
// pattern is gone. Every word is written once per launch and is its own flag, so relaxed accesses
// suffice: no fence, no atomic, no epoch.
#pragma once
#include "../engine.h"
#include "../sequence.cuh"
#include "common/cuda/ptx/prefetch.cuh"

namespace flashcell::cuda {

// The pattern is a NaN that no result has: cvt makes every 16-bit NaN 0x7fff, and min() keeps fp32
// results below the pattern.
constexpr uint32_t kUnwritten = 0xffffffffu;

// Fills the rows of the steps that run, in the tensor that thread blocks exchange; a row has
// `gates` parts of N heads each. The other rows are never polled.
template <typename IO>
void fill_exchanged(const SequenceParams& p, void* tensor, int gates, const Launch& launch);

// Rounds `count` values of the initial states to io, the first operand, and keeps them from the
// pattern.
template <typename IO>
void round_states(const float* from, void* to, int64_t count, cudaStream_t stream);

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
