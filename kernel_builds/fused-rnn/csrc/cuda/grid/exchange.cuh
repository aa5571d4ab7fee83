// The exchange between thread blocks, through L2 and without flags: the medium is an output of the
// op itself, filled beforehand with a word no rounding of ours produces. A reader polls the data
// until no such word is left. Every word is written once a launch and carries its own flag, so
// relaxed accesses suffice: no fence, no atomic, no epoch.
#pragma once
#include "../sequence.cuh"

namespace flashcell::cuda {

// A NaN: cvt makes 0x7fff of every 16-bit NaN, and min() keeps fp32 from it.
constexpr uint32_t kUnwritten = 0xffffffffu;

// Rows of the steps that run; the rest of the medium is never polled.
template <typename IO>
__global__ void __launch_bounds__(256) fill_kernel(const SequenceParams p, IO* medium,
                                                   int64_t row_elements) {
  const Column column(p, blockIdx.x);
  const int64_t vectors = row_elements / IoTraits<IO>::kVector;
  uint4* to = reinterpret_cast<uint4*>(medium) + column.row * vectors;
  for (int64_t i = blockIdx.y * 256 + threadIdx.x; i < column.length * vectors;
       i += gridDim.y * 256) {
    to[i] = make_uint4(kUnwritten, kUnwritten, kUnwritten, kUnwritten);
  }
}

// The first operand as a reader polls it: [count] io of the state h.
template <typename IO>
__global__ void __launch_bounds__(256) round_kernel(const float* from, IO* to, int64_t pairs) {
  const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
  if (i >= pairs) return;
  auto pair = Pair<IO>::of(from[2 * i], from[2 * i + 1]);
  for (uint32_t& word : pair.word) word = min(word, kUnwritten - 1);
  reinterpret_cast<Pair<IO>*>(to)[i] = pair;
}

// Overwrites the words when wanted; relaxed loads of gpu scope pass the L1 cache by.
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

// The readers would wait for DRAM if the line of a step had left L2 since the fill.
DEVICE void prefetch_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// Neighbouring lanes hold neighbouring units. Two rows at a time, so that each lane of a pair
// stores one word: the even lane of the first row, the odd one of the second. `to` is the unit's
// place in row 0. Every lane of the warp calls it.
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
