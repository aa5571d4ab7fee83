// delta of the few rows whose divisor nearly cancels, from products that nothing rounds: README,
// The backward on CUDA.
#pragma once
#include "backward_rows.cuh"

namespace flashcell::cuda {

// A row is worked out again if its spread is both this share of the sum over its head and sequence,
// and so many times the mean: there cannot be many.
constexpr float kExactShare = 1 / 256.f, kExactTimes = 8;
// What lies further back comes from the rounded state, what has decayed below this is left out.
constexpr int kExactChunks = 16;
constexpr float kExactDecay = 1e-9f;

template <typename IO>
struct ExactRow {
  static constexpr int kWarps = kRowThreads / 32;

  const BackwardParams& p;
  const BackwardTerms& terms;
  const int head;
  const int64_t slot;
  const Chunk chunk;
  float *const q, *const dh;  // of the row, in shared memory

  DEVICE ExactRow(const BackwardParams& params, const BackwardTerms& t, float* memory)
      : p(params),
        terms(t),
        head(int(blockIdx.x % unsigned(p.H))),
        slot(blockIdx.x / unsigned(p.H)),
        chunk(t.rows.chunks.at(slot)),
        q(memory),
        dh(memory + p.K) {}

  // The least spread of a row that is worked out again.
  DEVICE float least() const {
    const int64_t first = slot - chunk.number, slots = terms.rows.chunks.slots();
    float sum = 0, steps = 0;
    for (int64_t i = threadIdx.x; first + i < slots; i += kRowThreads) {
      const Chunk at = terms.rows.chunks.at(first + i);
      if (at.sequence != chunk.sequence || at.number != i || at.steps == 0) break;
      sum += terms.spreads[terms.rows.slot(head, first + i)], steps += float(at.steps);
    }
    sum = block_sum<kRowThreads>(sum), steps = block_sum<kRowThreads>(steps);
    return sum * fmaxf(kExactShare, kExactTimes / steps);
  }

  DEVICE const IO* row_of(const Strided& x, int64_t row) const {
    return static_cast<const IO*>(x.data) + row / p.T * x.batch + row % p.T * x.time +
           head * x.head;
  }
  DEVICE Strided given() const { return {p.dh, p.T * p.H * p.V, p.H * p.V, p.V}; }

  // sums[i] += the lane's part of x[i stride ..] y; rows from `count` on are not read.
  DEVICE static void add_dots(float (&sums)[kRowsAtOnce], const IO* x, int64_t stride, int count,
                              const float* y, int64_t width) {
#pragma unroll 2
    for (int column = threadIdx.x % 32 * 4; column < width; column += 128) {
      const float4 b = load_four(y + column);
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const float4 a = load_four(x + (i < count ? i : 0) * stride + column);
        sums[i] = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sums[i]))));
      }
    }
  }
  // Sum over the first `end` rows j of a chunk of weight_of(j) (q k_j) (dh v_j): the warp's part.
  template <typename WeightOf>
  DEVICE float sum_of_pairs(const Chunk& at, int end, const WeightOf& weight_of) const {
    float sum = 0;
    for (int j = threadIdx.x / 32 * kRowsAtOnce; j < end; j += kWarps * kRowsAtOnce) {
      float keys[kRowsAtOnce] = {}, values[kRowsAtOnce] = {};
      add_dots(keys, row_of(p.k, at.row + j), p.k.time, end - j, q, p.K);
      add_dots(values, row_of(p.v, at.row + j), p.v.time, end - j, dh, p.V);
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const float product = warp_sum(keys[i]) * warp_sum(values[i]);
        const float weight = j + i < end ? weight_of(j + i) : 0.f;
        sum += weight == 0 ? 0.f : weight * product;
      }
    }
    return sum;
  }
  // q C dh: the warp's part.
  template <typename X>
  DEVICE float sum_of_state(const X* C) const {
    float sum = 0;
    for (int k = threadIdx.x / 32; k < p.K; k += kWarps) {
      sum += q[k] * warp_sum(part_of_dot<32>(C + k * p.V, dh, p.V, threadIdx.x % 32));
    }
    return sum;
  }

  // Of step t of the chunk: dh times the numerator of h, without K^-1/2.
  DEVICE float numerator(int t) const {
    const Rows& rows = terms.rows;
    const int64_t first = rows.row(head, chunk), own = first + t;
    const int tile = t / kTile;
    const float2 u = rows.u[own];
    float sum = sum_of_pairs(chunk, t + 1, [&](int j) {
      if (j / kTile == tile) {
        if (j % kTile < rows.start[chunk.row + t]) return 0.f;
        const float2 w = rows.w[first + j];
        return exp2f((u.x + w.x) + (u.y + w.y));
      }
      float decay = rows.past[own];
      const float* between = rows.tile_decay + rows.slot(head, slot) * rows.chunks.tiles();
      for (int i = j / kTile + 1; i < tile; ++i) decay *= between[i];
      return decay * rows.future[first + j];
    });
    float decay = rows.inflow[own];
    int64_t at = slot;
    for (; at > slot - chunk.number && slot - at < kExactChunks && decay > kExactDecay; --at) {
      const Chunk before = rows.chunks.at(at - 1);
      const float* outflow = rows.outflow + rows.row(head, before);
      sum += decay * sum_of_pairs(before, before.steps, [&](int j) { return outflow[j]; });
      decay *= rows.keep[rows.slot(head, at - 1)];
    }
    if (!(decay > kExactDecay)) return sum;
    const int64_t size = p.K * p.V;
    if (at > slot - chunk.number) {
      return sum +
             decay * sum_of_state(static_cast<const IO*>(terms.C) + rows.slot(head, at) * size);
    }
    if (p.C == nullptr) return sum;
    return sum + decay * sum_of_state(static_cast<const float*>(p.C) +
                                      (chunk.sequence * p.H + head) * size);
  }

  DEVICE void redo(int t) const {
    const IO *from_q = row_of(p.q, chunk.row + t), *from_dh = row_of(given(), chunk.row + t);
    for (int i = threadIdx.x; i < p.K; i += kRowThreads) q[i] = to_float(from_q[i]);
    for (int i = threadIdx.x; i < p.V; i += kRowThreads) dh[i] = to_float(from_dh[i]);
    __syncthreads();
    const float part = numerator(t);
    const float sum = block_sum<kRowThreads>(threadIdx.x % 32 == 0 ? part : 0.f);
    if (threadIdx.x > 0) return;
    const int64_t at = terms.rows.row(head, chunk) + t;
    const float inverse = terms.inverse[at], factor = sum * inverse * inverse;
    const float total = static_cast<const float*>(p.total)[(chunk.row + t) * p.H + head];
    const float delta = -copysignf(factor, factor * total);
    terms.delta[at] = delta, terms.n_weight[at] = terms.rows.inflow[at] * delta;
  }

  DEVICE void run() const {
    if (chunk.steps == 0) return;
    const float enough = least();
    const int64_t first = terms.rows.row(head, chunk);
    __shared__ uint32_t found[kLongestChunk / 32];
    const int row = threadIdx.x;
    static_assert(kRowThreads == kLongestChunk);
    const float spread = row < chunk.steps ? terms.spread[first + row] : 0.f;
    const uint32_t own = __ballot_sync(~0u, spread > 0 && spread >= enough);
    if (row % 32 == 0) found[row / 32] = own;
    __syncthreads();
    for (int word = 0; word < kLongestChunk / 32; ++word) {
      for (uint32_t rows = found[word]; rows != 0;) {
        const int last = 31 - __clz(rows);
        rows ^= 1u << last;
        redo(word * 32 + last);
      }
    }
  }
};

// A thread block for a chunk of a head; K + V floats of shared memory.
template <typename IO>
__global__ void __launch_bounds__(kRowThreads) exact_rows(const BackwardParams p,
                                                          const BackwardTerms terms) {
  extern __shared__ __align__(1024) char memory[];
  ExactRow<IO>(p, terms, reinterpret_cast<float*>(memory)).run();
}

}  // namespace flashcell::cuda
