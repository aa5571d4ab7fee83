// Emulated functions of common/cuda/ptx/mma.cuh. That file describes what they do. The layouts of
// operands across lanes are those of PTX ISA 8 (mma.m16n8k16, mma.m16n8k8, ldmatrix).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/cuda/device.cuh"
#include "common/cuda/multiply_by_shuffles.cuh"
#include "common/cuda/ptx/copy_async.cuh"

namespace flashcell::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

template <typename IO>
float to_float(IO x) {
  return float(x);
}
template <typename IO>
IO from_float(float x) {
  return IO(x);
}

// Returns element `e` of a word of IO.
template <typename IO>
float element(uint32_t word, int e) {
  if constexpr (sizeof(IO) == 4) {
    return __uint_as_float(word);
  } else {
    const uint16_t bits = uint16_t(word >> (16 * e));
    IO x;
    std::memcpy(&x, &bits, sizeof x);
    return float(x);
  }
}

template <typename IO>
struct Pair {
  uint32_t word[sizeof(IO) / 2];

  static Pair of(float low, float high) {
    const IO both[2] = {IO(low), IO(high)};
    Pair pair;
    std::memcpy(pair.word, both, sizeof both);
    return pair;
  }
  float2 floats() const {
    return {element<IO>(word[0], 0), element<IO>(word[sizeof(IO) / 2 - 1], 1)};
  }
};

// tf32 has 10 bits of mantissa; cvt.rna rounds halves away from zero.
template <typename IO>
uint32_t operand(uint32_t word) {
  return sizeof(IO) == 4 && !kIsTuring ? (word + 0x1000) & ~0x1fffu : word;
}

template <typename IO>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  if constexpr (kIsTuring && !std::is_same_v<IO, fp16>) {
    return multiply_by_shuffles<4 / int(sizeof(IO))>(d, a, b0, b1, c);
  }
  uint32_t given[10] = {a[0], a[1], a[2], a[3], b0, b1}, answer[4];
  std::memcpy(given + 6, c, sizeof c);
  emulator::collective(given, answer, [](emulator::Warp& warp) {
    constexpr int kElements = 4 / sizeof(IO), kDepth = 8 * kElements;
    // Operands that were not rounded with cvt.rna are truncated.
    const auto value = [](uint32_t word, int e) {
      return element<IO>(sizeof(IO) == 4 ? word & ~0x1fffu : word, e);
    };
    float left[16][kDepth], right[kDepth][8];
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t* words = warp.given[lane];
      const int r = lane / 4, q = lane % 4;
      for (int e = 0; e < kElements; ++e) {
        for (int half = 0; half < 2; ++half) {
          const int k = half * kDepth / 2 + q * kElements + e;
          left[r][k] = value(words[2 * half], e), left[r + 8][k] = value(words[2 * half + 1], e);
          right[k][r] = value(words[4 + half], e);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float sum = __uint_as_float(warp.given[lane][6 + i]);
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < kDepth; ++k) sum += left[row][k] * right[k][column];
        warp.answer[lane][i] = __float_as_uint(sum);
      }
    }
  });
  std::memcpy(d, answer, sizeof d);
}
template <typename IO>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma<IO>(d, a, b0, b1, d);
}

inline void mma_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     const int (&c)[4]) {
  uint32_t given[10] = {a[0], a[1], a[2], a[3], b0, b1}, answer[4];
  std::memcpy(given + 6, c, sizeof c);
  emulator::collective(given, answer, [](emulator::Warp& warp) {
    const auto value = [](uint32_t word, int e) { return int(int8_t(word >> (8 * e))); };
    int left[16][32], right[32][8];
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t* words = warp.given[lane];
      const int r = lane / 4, q = lane % 4;
      for (int e = 0; e < 8; ++e) {
        const int half = e / 4, k = half * 16 + q * 4 + e % 4;
        left[r][k] = value(words[2 * half], e % 4);
        left[r + 8][k] = value(words[2 * half + 1], e % 4);
        right[k][r] = value(words[4 + half], e % 4);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        int sum = int(warp.given[lane][6 + i]);
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) sum += left[row][k] * right[k][column];
        warp.answer[lane][i] = uint32_t(sum);
      }
    }
  });
  std::memcpy(d, answer, sizeof d);
}

inline uint32_t keep(uint32_t value) { return value; }
inline float keep_float(float value) { return value; }

template <bool kTransposed>
void load_matrices(uint32_t (&words)[4], uint32_t row_address) {
  const uint32_t given[1] = {row_address};
  emulator::collective(given, words, [](emulator::Warp& warp) {
    for (int i = 0; i < 4; ++i) {
      uint16_t x[8][8];
      for (int r = 0; r < 8; ++r) {
        std::memcpy(x[r], emulator::shared_at(warp.given[8 * i + r][0], 16), 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int r = lane / 4, c = lane % 4 * 2;
        const uint16_t low = kTransposed ? x[c][r] : x[r][c];
        const uint16_t high = kTransposed ? x[c + 1][r] : x[r][c + 1];
        warp.answer[lane][i] = low | uint32_t(high) << 16;
      }
    }
  });
}
inline void load_vectors(uint32_t (&words)[4], uint32_t row_address) {
  load_matrices<false>(words, row_address);
}
inline void load_transposed(uint32_t (&words)[4], uint32_t row_address) {
  load_matrices<true>(words, row_address);
}

inline uint32_t load_word(uint32_t shared) {
  uint32_t word;
  std::memcpy(&word, emulator::shared_at(shared, 4), 4);
  return word;
}
inline void store_words(uint32_t shared, uint32_t word) {
  std::memcpy(emulator::shared_at(shared, 4), &word, 4);
}
inline void store_words(uint32_t shared, uint32_t first, uint32_t second) {
  const uint32_t words[2] = {first, second};
  std::memcpy(emulator::shared_at(shared, 8), words, 8);
}

template <typename IO>
uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(sizeof(IO) == 2);
  // fp32 holds the product of two 16-bit values exactly; fma rounds once more.
  const auto one = [&](int e) {
    return std::fma(double(element<IO>(a, e)), double(element<IO>(b, e)),
                    double(element<IO>(c, e)));
  };
  return Pair<IO>::of(float(one(0)), float(one(1))).word[0];
}

inline float exp2_approx(float x) { return std::exp2(x); }

}  // namespace flashcell::cuda
