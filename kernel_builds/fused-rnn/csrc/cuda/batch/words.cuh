// Accesses of several elements at once.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/cuda/ptx/global_memory.cuh"
#include "common/cuda/ptx/shared_address.cuh"

namespace flashcell::cuda::batch {

// A type of kBytes, for one access of several elements.
template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<2> {
  using type = uint16_t;
};
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
// Stores the first kBytes of `words`.
template <int kBytes, int kCount>
DEVICE void store_bytes(void* to, const uint32_t (&words)[kCount]) {
  static_assert(kBytes <= 4 * kCount);
  using Words = typename WordsOf<kBytes>::type;
  Words stored;
  memcpy(&stored, words, kBytes);
  *static_cast<Words*>(to) = stored;
}
// Loads the first kCount of four floats.
template <int kCount>
DEVICE void load_first(float (&values)[4], uint32_t from) {  // in shared memory
  if constexpr (kCount == 4) load_shared(values, from);
  if constexpr (kCount == 2) load_shared(values[0], values[1], from);
  if constexpr (kCount == 1) load_shared(values[0], from);
}
template <int kCount>
DEVICE void load_first_if(float (&values)[4], const void* from, bool wanted) {
  if constexpr (kCount == 4) load_if(values, from, wanted);
  if constexpr (kCount == 2) load_if(values[0], values[1], from, wanted);
  if constexpr (kCount == 1) load_if(values[0], from, wanted);
}
template <typename T, int kCount>
DEVICE void load_global(T (&values)[kCount], const void* from) {
  using Words = typename WordsOf<int(sizeof(T)) * kCount>::type;
  const Words words = *static_cast<const Words*>(from);
  memcpy(&values, &words, sizeof words);
}

}  // namespace flashcell::cuda::batch
