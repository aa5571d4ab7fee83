// Norm, weight and output gate of one row of h, in the registers of a warp or of a thread block.
#pragma once
#include "../../params.h"
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

// A thread's part of a row that kThreads threads share: kCount times kVector neighbouring columns,
// with zeros past the end of the row.
template <int kThreads, int kVector, int kCount>
struct Row {
  static constexpr int kSize = kCount * kVector, kWarps = kThreads / 32;
  float x[kSize];

  DEVICE static int column(int vector) {
    return (int(threadIdx.x) % kThreads + kThreads * vector) * kVector;
  }

  // The thread's columns, in the dtype that they have in memory.
  template <typename X>
  struct Raw {
    using Word = std::conditional_t<kVector * sizeof(X) == 8, uint2, uint4>;
    static constexpr int kWords = kVector * sizeof(X) / sizeof(Word);
    union Vector {
      Word words[kWords];
      Pair<X> pairs[kVector / 2];
    };
    Vector vectors[kCount];

    // Loads from L2, because other thread blocks may have written the data.
    DEVICE void load(const X* row, int V) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        const Word* words = reinterpret_cast<const Word*>(row + column(v));
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          vectors[v].words[w] = column(v) < V ? __ldcg(words + w) : Word{};
        }
      }
    }
  };

  template <typename X>
  DEVICE void unpack(const Raw<X>& raw) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const float2 two = raw.vectors[i / kVector].pairs[i % kVector / 2].floats();
      x[i] = two.x, x[i + 1] = two.y;
    }
  }

  template <typename X>
  DEVICE void load(const X* row, int V) {
    Raw<X> raw;
    raw.load(row, V);
    unpack(raw);
  }

  template <typename X>
  DEVICE void store(X* row, int V) const {
    using To = Raw<X>;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      typename To::Vector vector;
#pragma unroll
      for (int e = 0; e < kVector; e += 2) {
        vector.pairs[e / 2] = Pair<X>::of(x[v * kVector + e], x[v * kVector + e + 1]);
      }
      if (column(v) >= V) continue;
      auto* words = reinterpret_cast<typename To::Word*>(row + column(v));
#pragma unroll
      for (int w = 0; w < To::kWords; ++w) words[w] = vector.words[w];
    }
  }

  // Returns the sum of term(i) over the whole row, the same in every thread.
  template <typename Term>
  DEVICE static float total(const Term& term) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += term(i);
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if constexpr (kWarps > 1) {
      __shared__ float sums[kWarps];
      __syncthreads();  // all warps have read the last total
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
      __syncthreads();
      sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += sums[w];
    }
    return sum;
  }

  // Divides by the root mean square, and returns its inverse; centers first if the norm is
  // centered.
  DEVICE float normalize(const Epilogue& p, int V) {
    if (!p.norm) return 1;
    if (p.centered) {
      const float mean = total([&](int i) { return x[i]; }) / float(V);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = column(i / kVector) < V ? x[i] - mean : 0.0f;
    }
    const float squares = total([&](int i) { return x[i] * x[i]; });
    const float inverse = 1 / sqrtf(squares / float(V) + float(p.eps));
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] *= inverse;
    return inverse;
  }

  template <typename IO>
  DEVICE void load_weight(const Epilogue& p, int head, int V) {
    if (p.weight_is_io) {
      load(static_cast<const IO*>(p.weight) + int64_t(head) * V, V);
    } else if (p.weight != nullptr) {
      load(static_cast<const float*>(p.weight) + int64_t(head) * V, V);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = 1;
    }
  }
};

template <typename IO>
DEVICE float sigmoid(float x) {
  constexpr float kLog2e = 1.44269504f;
  return 1 / (1 + (sizeof(IO) == 4 ? expf(-x) : exp2_approx(-kLog2e * x)));
}

template <typename IO>
DEVICE const IO* gate_row(const Epilogue& p, int b, int t, int head) {
  const Strided& gate = p.out_gate;
  return static_cast<const IO*>(gate.data) + b * gate.batch + t * gate.time + head * gate.head;
}

// Computes y in place, where `row` has h and `gate` the gate's pre-activations, which are only read
// if there is a gate.
template <typename IO, typename Row>
DEVICE void finish_row(const Epilogue& p, Row& row, const Row& weight, const Row& gate, int V) {
  row.normalize(p, V);
#pragma unroll
  for (int i = 0; i < Row::kSize; ++i) row.x[i] *= weight.x[i];
  if (p.out_gate.data == nullptr) return;
#pragma unroll
  for (int i = 0; i < Row::kSize; ++i) row.x[i] *= sigmoid<IO>(gate.x[i]);
}

}  // namespace flashcell::cuda
