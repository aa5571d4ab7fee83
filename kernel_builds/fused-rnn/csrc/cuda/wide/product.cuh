// The product of the wide engine, in exact fp32: weights in shared memory, or streamed from the L2
// cache, times an operand that other thread blocks have written.
#pragma once
#include "../grid/exchange.cuh"
#include "../lanes.cuh"
#include "plan.h"

namespace flashcell::cuda {

// Where the operand of a sequence comes from: a row of the exchange tensor, zeros, or the initial
// states.
constexpr int64_t kFromZeros = -1, kFromInitial = -2;

// kRows rows of a task, kSequences sequences of a pass. A lane reads four elements of the depth of
// every row and every sequence at once.
template <int kRows, int kSequences>
class WideProduct {
 public:
  static constexpr int kSlots = wide::kMostRows;  // of a sequence, for the rows of a task
  static constexpr int kEach = kSequences * kSlots < 32 ? kSequences * kSlots : 32;
  static constexpr int kCalls = kSequences * kSlots / kEach;

  // A row of the exchange tensor has the operand in parts of `part` elements, which begin `stride`
  // elements apart: one part forward, and one for each gate backward.
  DEVICE WideProduct(const wide::Memory& m, float* memory, int part, int stride)
      : m_(m),
        part_(part),
        gap_(stride - part),
        weights_(memory + m.weights),
        stage_(memory + m.stage),
        partial_(memory + m.partial),
        slices_(m.product.slices),
        task_(threadIdx.x / 32 / slices_),
        slice_(threadIdx.x / 32 % slices_) {}

  // Computes the product for the sequences of a pass. source(s) is where the operand of sequence s
  // comes from; row(source) points to the head's elements in the exchange tensor, initial(s, i)
  // returns element i of the initial state, and weight(r) points to row r of the weight in global
  // memory. It ends with a barrier, so that every thread may call sum().
  template <typename Source, typename Row, typename Initial, typename Weight>
  DEVICE void run(int count, Source source, Row row, Initial initial, Weight weight) {
    float sums[kCalls][kEach] = {};
    const float* from[kSequences];
    unsigned states = 0;  // a bit for each sequence whose operand is the initial state
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      const int64_t place = s < count ? source(s) : kFromZeros;
      from[s] = place >= 0 ? row(place) : nullptr;
      if (place == kFromInitial) states |= 1u << s;
    }
    uint32_t words[kSequences][4];
    ask(words, from, states, 0, initial);
    const int tasks = m_.product.tasks, depth = m_.product.depth;
    for (int begin = 0; begin < depth; begin += m_.piece) {
      receive(words, from, begin);
      if (begin > 0) __syncthreads();  // all warps have read the piece before
      put(words, begin);
      __syncthreads();
      const bool is_last = begin + m_.piece >= depth;
      if (!is_last) ask(words, from, states, begin + m_.piece, initial);
      // With more tasks than warps, a warp adds up each task's sums in shared memory, piece by
      // piece. With fewer, its only task keeps them in registers.
      for (int task = task_; task < tasks; task += wide::kWarps) {
        multiply(sums, task, begin, weight);
        if (tasks > wide::kWarps) {
          store(sums, task, begin > 0);
        } else if (is_last) {
          store(sums, task, false);
        }
      }
    }
    __syncthreads();
  }

  // Returns the sums of neighbouring rows of one task for a sequence of the pass.
  template <int kN>
  DEVICE void sum(int row, int s, float (&totals)[kN]) const {
    const float* from = partial_ + (row / kRows * kSequences + s) * kSlots + row % kRows;
    const int stride = m_.product.tasks * kSequences * kSlots;
    constexpr int kAtOnce = kN == 1 ? 6 : 4;  // slices whose loads overlap
#pragma unroll
    for (int i = 0; i < kN; ++i) totals[i] = 0;
#pragma unroll 1
    for (int first = 0; first < slices_; first += kAtOnce) {
      float values[kAtOnce][kN];
#pragma unroll
      for (int z = 0; z < kAtOnce; ++z) {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          values[z][i] = first + z < slices_ ? from[(first + z) * stride + i] : 0.0f;
        }
      }
#pragma unroll
      for (int z = 0; z < kAtOnce; ++z) {
#pragma unroll
        for (int i = 0; i < kN; ++i) totals[i] += values[z][i];
      }
    }
  }

 private:
  const wide::Memory& m_;
  int part_, gap_;
  const float* weights_;
  float *stage_, *partial_;
  int slices_, task_, slice_;

  DEVICE bool inside(int begin) const {
    const int at = threadIdx.x * 4;
    return at < m_.piece && begin + at < m_.product.depth;
  }

  // The thread's place in a row of the exchange tensor.
  DEVICE int offset(int begin) const {
    const int at = begin + int(threadIdx.x) * 4;
    return gap_ == 0 ? at : at + at / part_ * gap_;
  }

  // Starts to load a vector of every sequence.
  template <typename Initial>
  DEVICE void ask(uint32_t (&words)[kSequences][4], const float* const (&from)[kSequences],
                  unsigned states, int begin, Initial initial) const {
    const bool mine = inside(begin);
    const int at = offset(begin);
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[s][i] = 0;
      request(words[s], from[s] + at, mine && from[s] != nullptr);
    }
    if (states == 0 || !mine) return;
#pragma unroll 1
    for (int s = 0; s < kSequences; ++s) {
      if (!(states >> s & 1)) continue;
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = initial(s, begin + int(threadIdx.x) * 4 + i);
#pragma unroll
      for (int to = 0; to < kSequences; ++to) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (to == s) words[to][i] = min(__float_as_uint(values[i]), kUnwritten - 1);
        }
      }
    }
  }

  // Asks again until every vector has been written.
  DEVICE void receive(uint32_t (&words)[kSequences][4], const float* const (&from)[kSequences],
                      int begin) const {
    const int at = offset(begin);
    bool waits = true;
    while (waits) {
      waits = false;
#pragma unroll
      for (int s = 0; s < kSequences; ++s) {
        const bool missing = unwritten(words[s]);
        request(words[s], from[s] + at, missing);
        waits |= missing;
      }
    }
  }

  DEVICE void put(const uint32_t (&words)[kSequences][4], int begin) const {
    if (!inside(begin)) return;
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      *reinterpret_cast<uint4*>(stage_ + s * m_.piece + threadIdx.x * 4) =
          make_uint4(words[s][0], words[s][1], words[s][2], words[s][3]);
    }
  }

  // Adds up the lanes' sums, stores them for sum() and clears them.
  DEVICE void store(float (&sums)[kCalls][kEach], int task, bool adds) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kCalls; ++i) {
      const float sum = sum_over_lanes<kEach>(sums[i]);  // lane l gets that of value l
      float& to =
          partial_[((slice_ * m_.product.tasks + task) * kCalls + i) * kEach + lane % kEach];
      if (lane < kEach) to = adds ? to + sum : sum;
#pragma unroll
      for (int j = 0; j < kEach; ++j) sums[i][j] = 0;
    }
  }

  template <typename Weight>
  DEVICE void multiply(float (&sums)[kCalls][kEach], int task, int begin, Weight weight) const {
    const int end = min(m_.piece, m_.product.depth - begin);
    // A row outside is the last one, whose sums are not used.
    const auto row_of = [&](int r) { return min(task * kRows + r, m_.product.rows - 1); };
    const float* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = weights_ + row_of(r) * m_.held + begin;
    int at = slice_ * wide::kChunk + int(threadIdx.x) % 32 * 4;
    const int held = min(end, m_.held - begin);
#pragma unroll 1
    for (; at < held; at += slices_ * wide::kChunk) {
      float4 w[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) w[r] = *reinterpret_cast<const float4*>(rows[r] + at);
      multiply(sums, w, at);
    }
    if (m_.held >= m_.product.depth) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = weight(row_of(r)) + begin;
#pragma unroll 1
    for (; at < end; at += slices_ * wide::kChunk) {
      float4 w[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) w[r] = load_streamed(rows[r] + at);
      multiply(sums, w, at);
    }
  }

  DEVICE void multiply(float (&sums)[kCalls][kEach], const float4 (&w)[kRows], int at) const {
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      const float4 x = *reinterpret_cast<const float4*>(stage_ + s * m_.piece + at);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float& sum = sums[(s * kSlots + r) / kEach][(s * kSlots + r) % kEach];
        sum = fmaf(w[r].x, x.x, sum), sum = fmaf(w[r].y, x.y, sum);
        sum = fmaf(w[r].z, x.z, sum), sum = fmaf(w[r].w, x.w, sum);
      }
    }
  }

  // Loads four elements of the weight, whose first need not lie at a multiple of 16 bytes.
  static DEVICE float4 load_streamed(const float* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      return __ldg(reinterpret_cast<const float4*>(from));
    }
    return make_float4(__ldg(from), __ldg(from + 1), __ldg(from + 2), __ldg(from + 3));
  }
};

}  // namespace flashcell::cuda
