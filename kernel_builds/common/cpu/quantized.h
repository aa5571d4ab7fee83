// Weights of 8 and 4 bits (common/quantized.h): loads them widened, so that a product reads a
// quarter or an eighth of the bytes of fp32.
#pragma once
#include "common/cpu/load_store.h"
#include "common/quantized.h"

namespace flashcell::FLASHCELL_ISA {

// A weight in a product whose other operand is of type IO. The factor of an int8 row multiplies the
// sum, that of an int4 group its weights.
template <typename IO>
struct int8 {
  int8_t value;
};
template <typename IO>
struct int4 {
  uint8_t pair;
};
template <typename IO>
struct StateOf<int8<IO>> {
  using type = State<IO>;
};
template <typename IO>
struct StateOf<int4<IO>> {
  using type = State<IO>;
};

// A row of int4: its groups, and the bits of their factors.
struct Int4Row {
  const uint8_t* groups;
  const uint16_t* scales;
};

// Where a product reads a row of a matrix of W.
template <typename W>
struct RowOf {
  using Row = const W*;
  FN static Row first(const void* weight, const void*) { return (Row)weight; }
  FN static Row at(Row first, int64_t row, int64_t K) { return first + row * K; }
};
template <typename IO>
struct RowOf<int4<IO>> {
  using Row = Int4Row;
  FN static Row first(const void* weight, const void* scales) {
    return {(const uint8_t*)weight, (const uint16_t*)scales};
  }
  FN static Row at(Row first, int64_t row, int64_t K) {
    return {first.groups + row * (K / 2), first.scales + row * (K / kInt4Group)};
  }
};
template <typename W>
using Row = typename RowOf<W>::Row;
template <typename W>
constexpr bool kIsInt8 = false;
template <typename IO>
constexpr bool kIsInt8<int8<IO>> = true;
template <typename W>
constexpr bool kIsInt4 = false;
template <typename IO>
constexpr bool kIsInt4<int4<IO>> = true;

template <typename IO>
FN Vec<State<IO>> load_io(const int8<IO>* p) {
  using V = Vec<State<IO>>;
#if defined(__AVX512F__)  // GCC would convert four lanes at a time
  if constexpr (V::kWidth == 16) {
    return (typename V::Raw)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
#elif defined(__AVX2__)
  if constexpr (V::kWidth == 8) {
    return (typename V::Raw)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
#endif
  typedef int8_t Bytes __attribute__((vector_size(V::kWidth)));
  Bytes bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, typename V::Raw);
}

#if defined(__AVX512F__)
template <typename IO>
FN Vec<State<IO>> load_first(const int8<IO>* p, int count) {
  const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(count), p);
  return load_io((const int8<IO>*)&bytes);
}
#endif

// The weights of a group, times its factor.
template <typename T>
class Int4Group {
 public:
  using V = Vec<T>;
  static constexpr int kVectors = kInt4Group / V::kWidth;

  FN Int4Group(Int4Row row, int64_t group)
      : bytes_(row.groups + group * (kInt4Group / 2)), scale_(T(0)) {
    const uint32_t bits = uint32_t(row.scales[group]) << 16;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    scale_ = V(T(scale));
#if defined(__AVX512F__)
    if constexpr (V::kWidth == 16) {  // a table of all sixteen weights
      typedef float Raw __attribute__((vector_size(64)));
      scale_ = scale_ * V(Raw{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7});
    }
#endif
  }
  // Returns vector v of the group.
  FN V load(int v) const {
    const uint8_t* const from = bytes_ + v * V::kWidth % 16;
    const int shift = v * V::kWidth / 16 * 4;
#if defined(__AVX512F__)
    if constexpr (V::kWidth == 16) {  // an index is its lowest four bits
      const __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
      return (typename V::Raw)_mm512_permutexvar_ps(_mm512_srli_epi32(bits, shift),
                                                    (__m512)scale_.raw);
    }
#elif defined(__AVX2__)
    if constexpr (V::kWidth == 8) {
      const __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
      const __m256i low = _mm256_and_si256(_mm256_srli_epi32(bits, shift), _mm256_set1_epi32(15));
      const __m256i weights = _mm256_sub_epi32(low, _mm256_set1_epi32(8));
      return V((typename V::Raw)_mm256_cvtepi32_ps(weights)) * scale_;
    }
#endif
    typedef uint8_t Bytes __attribute__((vector_size(V::kWidth)));
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    bytes = (bytes >> uint8_t(shift)) & uint8_t(15);
    return (V(__builtin_convertvector(bytes, typename V::Raw)) - V(T(8))) * scale_;
  }

 private:
  const uint8_t* bytes_;
  V scale_;
};

// Adds the products of M rows of x [K] with R rows of int4 to acc.
template <int M, int R, typename T>
FN void multiply_int4(const Int4Row* weights, const T* const* x, int64_t K, Vec<T> (&acc)[M][R]) {
  using Group = Int4Group<T>;
  for (int64_t g = 0; g < K / kInt4Group; ++g) {
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) {
      const Group group(weights[j], g);
#pragma GCC unroll 16
      for (int v = 0; v < Group::kVectors; ++v) {
        const Vec<T> w = group.load(v);
#pragma GCC unroll 3
        for (int m = 0; m < M; ++m) {
          acc[m][j] += load(x[m] + g * kInt4Group + v * Vec<T>::kWidth) * w;
        }
      }
    }
  }
}

// Loads fp32 factors as the type T of sums.
template <bool Whole, typename T>
FN Vec<T> load_scales(const float* p, int count) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return load_part<Whole>(p, count);
  } else {
    T lanes[Vec<T>::kWidth] = {};
    for (int i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
  }
}

}  // namespace flashcell::FLASHCELL_ISA
