// The word of a row that a thread processes: one channel, several neighbouring channels, or the n x
// n block of one channel. Conversions, loads and stores of words.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/cuda/device.cuh"
#include "common/cuda/ptx/copy_async.cuh"

namespace flashcell::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

__host__ __device__ constexpr int alignment_of(
    int bytes) {  // the largest alignment that every element of an array of this size has
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2;
}

template <typename IO, int kN>
struct alignas(alignment_of(sizeof(IO) * kN)) Word {
  IO value[kN];
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
DEVICE float to_float(fp16 x) { return __half2float(x); }

template <typename IO>
DEVICE IO from_float(float x) {
  if constexpr (std::is_same_v<IO, float>) {
    return x;
  } else if constexpr (std::is_same_v<IO, bf16>) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

template <typename IO, int kN>
DEVICE Word<IO, kN> narrow(const float (&x)[kN]) {
  Word<IO, kN> word;
  if constexpr (kN == 2 && std::is_same_v<IO, bf16>) {  // one instruction converts both
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    word.value[0] = pair.x, word.value[1] = pair.y;
  } else if constexpr (kN == 2 && std::is_same_v<IO, fp16>) {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    word.value[0] = pair.x, word.value[1] = pair.y;
  } else {
#pragma unroll
    for (int n = 0; n < kN; ++n) word.value[n] = from_float<IO>(x[n]);
  }
  return word;
}

// Converts a word to fp32 values.
template <typename IO, int kN>
DEVICE void widen(const Word<IO, kN>& word, float (&x)[kN]) {
  if constexpr (kN == 2 && std::is_same_v<IO, bf16>) {
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(&word);
    x[0] = __uint_as_float(bits << 16), x[1] = __uint_as_float(bits & 0xffff0000u);
  } else {
#pragma unroll
    for (int n = 0; n < kN; ++n) x[n] = to_float(word.value[n]);
  }
}

// Stores write-through (st.wt), for outputs that this kernel does not read again. That leaves L2 to
// the inputs still to be read (fp32 backward of 8x2048x4096 and 32x2048x1024: 0.469 and 0.494 ms;
// with evict-first stores 0.470 and 0.500; 16-bit types gain nothing).
template <typename IO, int kN>
DEVICE void store_away(IO* to, const Word<IO, kN>& word) {
  if constexpr (std::is_same_v<IO, float> && kN == 2) {
    __stwt(reinterpret_cast<float2*>(to), make_float2(word.value[0], word.value[1]));
  } else {
    *reinterpret_cast<Word<IO, kN>*>(to) = word;
  }
}

// The L2 eviction policy of loads: normal (kInTurn), or evict_last (kLast). Lines loaded with
// evict_last are returned to normal priority by give_back once they have been read.
enum class Leaves { kInTurn, kLast };
template <Leaves kLeaves>
DEVICE uint64_t cache_policy() {
  return kLeaves == Leaves::kLast ? evict_last_policy() : 0;
}
constexpr int kCacheLine = 128;
constexpr int64_t kCacheBytes = 50 << 20;
DEVICE void give_back(const void* of_line) {
  evict_in_turn(reinterpret_cast<uintptr_t>(of_line) / kCacheLine * kCacheLine);
}

// Starts an asynchronous copy of a word to shared memory. Two-byte words are copied synchronously,
// because cp.async takes at least 4 bytes.
template <int kBytes, Leaves kLeaves = Leaves::kInTurn>
DEVICE void copy_word(void* shared, const void* global, uint64_t policy = 0) {
  constexpr int kPiece = alignment_of(kBytes);
#pragma unroll
  for (int i = 0; i < kBytes; i += kPiece) {
    char* to = static_cast<char*>(shared) + i;
    const char* from = static_cast<const char*>(global) + i;
    if constexpr (kLeaves == Leaves::kLast) {
      static_assert(kPiece == 16, "what leaves last comes past L1");
      copy_async_evicted_last(to, from, policy);
    } else if constexpr (kPiece == 2) {
      *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(from);
    } else if constexpr (kPiece == 16) {
      copy_async(to, from);
    } else {
      copy_short_async<kPiece>(to, from);
    }
  }
}

}  // namespace flashcell::cuda
