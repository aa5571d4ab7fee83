// Accesses of several elements in global memory at once.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/cuda/device.cuh"

namespace flashcell::cuda::batch {

// A type of kBytes, for one access of several elements.
template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<4> {
  using type = uint32_t;
};
template <>
struct WordsOf<8> {
  using type = uint2;
};
template <>
struct WordsOf<16> {
  using type = uint4;
};
template <typename T, int kCount>
DEVICE void store_global(void* to, const T (&values)[kCount]) {
  using Words = typename WordsOf<int(sizeof(T)) * kCount>::type;
  Words words;
  static_assert(sizeof words == sizeof values);
  memcpy(&words, values, sizeof words);
  *static_cast<Words*>(to) = words;
}
template <typename T, int kCount>
DEVICE void load_global(T (&values)[kCount], const void* from) {
  using Words = typename WordsOf<int(sizeof(T)) * kCount>::type;
  const Words words = *static_cast<const Words*>(from);
  memcpy(&values, &words, sizeof words);
}

}  // namespace flashcell::cuda::batch
