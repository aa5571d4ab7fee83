// 16-byte vectors, 32-bit words, and the matrix instruction mma on them, for bf16, fp16 and fp32
// (as tf32).
//
// A product is D[16 rows, 8 columns] += A[16, depth] B[depth, 8]. The depth advances by two vectors
// per step, i = 0, 1, ..., and lane l = 4 r + q holds
//  a = {row r word q of vector 2i, row r + 8 same, row r word q of vector 2i + 1, row r + 8 same}
//  b = {column r word q of vector 2i, column r word q of vector 2i + 1}
//  d = {(r, 2q), (r, 2q + 1), (r + 8, 2q), (r + 8, 2q + 1)}
//
// The layout is the same for every dtype because vectors are always 16 bytes.
//
// Code for Turing multiplies fp16 with the smaller matrix instruction that it has, and bf16 and
// fp32 in fp32: lanes hand each other their operands, and fp32 operands are not rounded.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <type_traits>

#include "common/cuda/device.cuh"
#include "common/cuda/multiply_by_shuffles.cuh"
#include "common/cuda/ptx/copy_async.cuh"

namespace flashcell::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
DEVICE float to_float(fp16 x) { return __half2float(x); }

template <typename IO>
DEVICE IO from_float(float x) {
  if constexpr (sizeof(IO) == 4) {
    return x;
  } else if constexpr (std::is_same_v<IO, bf16>) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

// Two neighbouring elements: one 32-bit word for 16-bit types, two for fp32.
template <typename IO>
struct Pair {
  uint32_t word[sizeof(IO) / 2];

  DEVICE static Pair of(float lo, float hi) {
    Pair pair;
    if constexpr (sizeof(IO) == 4) {
      pair.word[0] = __float_as_uint(lo), pair.word[1] = __float_as_uint(hi);
    } else if constexpr (kIsTuring) {  // no instruction converts both
      const IO both[2] = {from_float<IO>(lo), from_float<IO>(hi)};
      pair.word[0] = reinterpret_cast<const uint32_t&>(both);
    } else if constexpr (std::is_same_v<IO, bf16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair.word[0]) : "f"(hi), "f"(lo));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair.word[0]) : "f"(hi), "f"(lo));
    }
    return pair;
  }
  DEVICE float2 floats() const {
    if constexpr (sizeof(IO) == 4) {
      return {__uint_as_float(word[0]), __uint_as_float(word[1])};
    } else if constexpr (std::is_same_v<IO, bf16>) {
      return {__uint_as_float(word[0] << 16), __uint_as_float(word[0] & 0xffff0000u)};
    } else {
      return __half22float2(reinterpret_cast<const __half2&>(word[0]));
    }
  }
};

// Rounds fp32 operands of the matrix instruction to tf32; the hardware would truncate them.
template <typename IO>
DEVICE uint32_t operand(uint32_t word) {
  if constexpr (sizeof(IO) == 4 && !kIsTuring) asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(word));
  return word;
}

// The products of Turing: d = a b + c.
template <typename IO>
DEVICE void mma_turing(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                       const float (&c)[4]) {
  if constexpr (std::is_same_v<IO, fp16>) {
    asm("{\n.reg .f32 e<4>;\n"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {e0,e1,e2,e3}, {%4,%5}, {%8}, "
        "{%10,%11,%12,%13};\n"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%6,%7}, {%9}, "
        "{e0,e1,e2,e3};\n}"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  } else {
    multiply_by_shuffles<4 / int(sizeof(IO))>(d, a, b0, b1, c);
  }
}

// d = a b + c
template <typename IO>
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                const float (&c)[4]) {
#define FLASHCELL_MMA(shape)                                                                 \
  asm("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),  \
        "f"(c[2]), "f"(c[3]))
  if constexpr (kIsTuring) {
    mma_turing<IO>(d, a, b0, b1, c);
  } else if constexpr (sizeof(IO) == 4) {
    FLASHCELL_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  } else if constexpr (std::is_same_v<IO, bf16>) {
    FLASHCELL_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else {
    FLASHCELL_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  }
#undef FLASHCELL_MMA
}

template <typename IO>
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma<IO>(d, a, b0, b1, d);
}

// d = a b + c of int8, sixteen elements in a vector. Not in code for Turing.
DEVICE void mma_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     const int (&c)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
#endif
}

// Forces a value to stay in its register; the compiler would otherwise recompute it in every step.
DEVICE uint32_t keep(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
DEVICE float keep_float(float value) {
  asm volatile("" : "+f"(value));
  return value;
}

// Loads words of four groups of eight 16-byte rows: lane l supplies the address of row l % 8 of
// group l / 8 and receives word l % 4 of row l / 4 of each group.
DEVICE void load_vectors(uint32_t (&words)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_address));
}
// The same, transposed: the rows in memory are the depth and their elements are the columns.
DEVICE void load_transposed(uint32_t (&words)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_address));
}

DEVICE uint32_t load_word(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared));
  return word;
}
DEVICE void store_words(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}
DEVICE void store_words(uint32_t shared, uint32_t first, uint32_t second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(first), "r"(second)
               : "memory");
}

// Computes a b + c for both 16-bit elements of a word, rounding once (Turing, for bf16: first to
// fp32, then to bf16).
template <typename IO>
DEVICE uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(sizeof(IO) == 2);
  uint32_t d;
  if constexpr (std::is_same_v<IO, bf16> && kIsTuring) {
    const float2 x = Pair<IO>{{a}}.floats(), y = Pair<IO>{{b}}.floats(), z = Pair<IO>{{c}}.floats();
    d = Pair<IO>::of(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y)).word[0];
  } else if constexpr (std::is_same_v<IO, bf16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashcell::cuda
