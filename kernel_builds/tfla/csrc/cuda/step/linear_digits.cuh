// One row of x of linear.cuh as integers, for weights of int4 and the matrix instruction of int8:
// three instructions make eight weights its left operand.
//
// 64 values of x are 2^e X with integers X from -2^22 to 2^22, X = d0 + 256 d1 + 65536
// d2 with digits from -128 to 127. Each digit is a column of the right operand, so that the sums of
// a group's products are exact: 2^e (S0 + 256 S1 + 65536 S2). fp32 adds them up, times the group's
// factor. Values below 2^-14 of the largest of the 64 (fp16: 2^-11) are rounded, to 2^-22 of it.
#pragma once
#include "linear_inputs.cuh"

namespace flashcell::cuda {

namespace {

constexpr int kDigits = 3, kOfUnit = 64;  // values that share 2^e
constexpr int kDigitBits = 22;            // of an integer, without its sign
// From here sums begin. With it an integer is the bits of a float: the sum plus this float.
constexpr int kZero = 0x4b400000;

// x in shared memory: the three digits of 64 values after those of the 64 before, then every 2^e.
template <typename Own>
struct Digits {
  static constexpr int kOfPiece = 2 * Own::kRowBytes;  // values
  char* digits;
  int values;  // K rounded up to whole pieces

  static __host__ DEVICE int whole(int64_t K) {
    return int((K + kOfPiece - 1) / kOfPiece * kOfPiece);
  }
  static int64_t bytes(int64_t K, int64_t) { return whole(K) * kDigits + whole(K) / kOfUnit * 4; }
  DEVICE Digits(char* digits, int K) : digits(digits), values(whole(K)) {}

  // Returns 2^e of the 64 values number i.
  DEVICE float& unit(int i) const { return reinterpret_cast<float*>(digits + values * kDigits)[i]; }
  // Loads the lane's digits of them, for its word of each of their two groups: of values 4 q to 4 q
  // + 3 and 16 + 4 q to 16 + 4 q + 3. Lanes of the columns that are not needed get the last digit
  // too.
  DEVICE uint4 load(int i) const {
    const int digit = smaller(threadIdx.x % 32 / 4, kDigits - 1);
    return *reinterpret_cast<const uint4*>(at(i, digit) + threadIdx.x % 4 * 16);
  }
  // Stores the digits of values 8 j to 8 j + 7.
  DEVICE void store(int j, const int (&integers)[8]) const {
    uint32_t z[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) z[k] = (uint32_t(integers[k]) + 0x808080u) ^ 0x808080u;
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      const uint32_t byte = 0x11u * digit + 0x40u;  // the digit's in both words
      const auto join = [&](const uint32_t* four) {
        return __byte_perm(__byte_perm(four[0], four[1], byte), __byte_perm(four[2], four[3], byte),
                           0x5410);
      };
      const int group = j % 8 / 4, half = j % 4 / 2, quarter = j % 2 * 2;
      char* const first = at(j / 8, digit) + quarter * 16 + group * 8 + half * 4;
      *reinterpret_cast<uint32_t*>(first) = join(z);
      *reinterpret_cast<uint32_t*>(first + 16) = join(z + 4);
    }
  }

 private:
  DEVICE char* at(int i, int digit) const { return digits + (i * kDigits + digit) * kOfUnit; }
};

// Reads x with all warps of the thread block, and returns the warp's sum of the squares. If one of
// 64 values is not finite, their 2^e is NaN.
template <typename IO, typename Own, bool kNorm>
DEVICE float read_digits(const LinearStepParams& p, const Digits<Own>& kept) {
  float square = 0;
  for (int j = threadIdx.x; j < kept.values / 8; j += Own::kThreads) {  // by whole warps
    uint4 words{};
    if (8 * j < int(p.K)) {
      words = *reinterpret_cast<const uint4*>(static_cast<const IO*>(p.x) + 8 * j);
      if constexpr (kNorm) {
        const IO* const norm = static_cast<const IO*>(p.norm) + 8 * j;
        words = weigh<IO>(words, *reinterpret_cast<const uint4*>(norm), square);
      }
    }
    const float2 values[] = {Pair<IO>{{words.x}}.floats(), Pair<IO>{{words.y}}.floats(),
                             Pair<IO>{{words.z}}.floats(), Pair<IO>{{words.w}}.floats()};
    uint32_t most = 0;  // of the bits of |x|, of which those of NaN are the largest
#pragma unroll
    for (const float2& two : values) {
      const uint32_t bits = __float_as_uint(two.x) & 0x7fffffffu;
      most = max(most, max(bits, __float_as_uint(two.y) & 0x7fffffffu));
    }
#pragma unroll
    for (int other = 1; other < 8; other *= 2) {
      most = max(most, __shfl_xor_sync(~0u, most, other));
    }
    const int exponent = int(most >> 23), unit = max(exponent - (kDigitBits - 1), 1);
    const bool is_finite = exponent < 255;
    const float one_over = is_finite ? __uint_as_float(uint32_t(254 - unit) << 23) : 0.f;
    int integers[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      integers[2 * k] = int(rintf(values[k].x * one_over));
      integers[2 * k + 1] = int(rintf(values[k].y * one_over));
    }
    kept.store(j, integers);
    if (j % 8 == 0) kept.unit(j / 8) = __uint_as_float(is_finite ? uint32_t(unit) << 23 : ~0u);
  }
  if constexpr (kNorm) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) square += __shfl_xor_sync(~0u, square, other);
  }
  return square;
}

// What keeps x in shared memory.
template <typename Own>
using KeptOf = std::conditional_t<Own::kTakesDigits, Digits<Own>,
                                  Kept<Own::kFormat, Own::kSteps, Own::kTiles>>;

// Adds the product of step s of a warp's piece, W at `from`, and x to the two parts of d, in turns.
// `step` counts the steps of the whole row, and `zeros` are kZero.
template <typename Own>
DEVICE void multiply_digits(const char* from, int s, int step, const Digits<Own>& kept,
                            const int (&zeros)[4], float (&d)[2][Own::kTiles][4]) {
  const Int4Words<Own> words(from, s);
  // The first and the second half of a lane's weights of a group as int8, 16 times as large.
  const auto first = [](uint32_t word) { return (word << 4 ^ 0x88888888u) & 0xf0f0f0f0u; };
  const auto second = [](uint32_t word) { return (word ^ 0x88888888u) & 0xf0f0f0f0u; };
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint4 x = kept.load(2 * step + j / 2);
    const float unit = kept.unit(2 * step + j / 2) / 16;
    const uint32_t low = words.low(j), high = words.high(j);
    int sums[4];
    mma_int8(sums, {first(low), first(high), second(low), second(high)}, j % 2 ? x.z : x.x,
             j % 2 ? x.w : x.y, zeros);
    const float low_factor = unit * words.low_scale(j), high_factor = unit * words.high_scale(j);
    float (&own)[4] = d[j % 2][0];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = __uint_as_float(uint32_t(sums[i])) - __uint_as_float(uint32_t(kZero));
      own[i] = fmaf(i < 2 ? low_factor : high_factor, sum, own[i]);
    }
  }
}

// Turns the sums of digits into those of x, which the lanes of column 0 get.
DEVICE void join_digits(float (&d)[4]) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    const float third = __shfl_xor_sync(~0u, d[half], 1);
    d[half] = fmaf(65536.f, third, fmaf(256.f, d[half + 1], d[half]));
  }
}

}  // namespace
}  // namespace flashcell::cuda
