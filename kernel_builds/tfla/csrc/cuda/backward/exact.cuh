// Recomputes the divisor N and delta of the few rows whose divisor nearly cancels, from unrounded
// products: NOTEBOOK.md, "The backward on CUDA".
#pragma once
#include "rows.cuh"

namespace flashcell::cuda {

// A row is recomputed if its spread (terms.cuh) is at least this share of the sum over all rows of
// its head, and at least kExactTimes the mean. There can only be few such rows.
constexpr float kExactShare = 1 / 256.f, kExactTimes = 2;
// State that has decayed to less than this, or is more chunks back, is read in its rounded form:
// its error has decayed as well.
constexpr float kExactDecay = 1 / 16.f;
constexpr int kExactChunks = 8;
// If a row's delta^2 is at least this share of the head's sum, the row has so much of the gradient
// that roundings of its few large dS matter, and its chunk is listed for kPrecise.
constexpr float kListedShare = 1 / 16.f;
constexpr int kExactAtOnce = 8;  // rows or keys that a warp multiplies at once

// For a row t: the sum over j of weight q k_j, and that of weight (q k_j) (dh v_j).
struct RowSums {
  double keys = 0, values = 0;

  DEVICE void add(double by, const RowSums& other) {
    keys += by * other.keys, values += by * other.values;
  }
};

template <typename IO>
struct ExactRow {
  static constexpr int kWarps = kRowThreads / 32;

  const BackwardParams& p;
  const BackwardTerms& terms;
  const int head;
  const int64_t slot;
  const Chunk chunk;
  float *const q, *const dh;  // the row's q and dh, in shared memory

  DEVICE ExactRow(const BackwardParams& params, const BackwardTerms& t, int of_head,
                  int64_t of_slot, float* memory)
      : p(params),
        terms(t),
        head(of_head),
        slot(of_slot),
        chunk(t.rows.chunks.at(slot)),
        q(memory),
        dh(memory + p.K) {}

  DEVICE const IO* row_of(const Strided& x, int64_t row) const {
    return static_cast<const IO*>(x.data) + row / p.T * x.batch + row % p.T * x.time +
           head * x.head;
  }
  DEVICE Strided given() const { return {p.dh, p.T * p.H * p.V, p.H * p.V, p.V}; }

  // sums[i] += the lane's part of the dot product of row i of x with y; rows from `count` on are
  // not read.
  template <typename Sum, typename X>
  DEVICE static void add_dots(Sum (&sums)[kExactAtOnce], const X* x, int64_t stride, int count,
                              const float* y, int64_t width) {
#pragma unroll 2
    for (int column = threadIdx.x % 32 * 4; column < width; column += 128) {
      const float4 b = load_four(y + column);
#pragma unroll
      for (int i = 0; i < kExactAtOnce; ++i) {
        const float4 a = load_four(x + (i < count ? i : 0) * stride + column);
        sums[i] += (Sum(a.x * b.x) + Sum(a.y * b.y)) + (Sum(a.z * b.z) + Sum(a.w * b.w));
      }
    }
  }
  // Returns the warp's part of the sums over the first `end` rows j of a chunk, weighted by
  // weight_of(j).
  template <typename WeightOf>
  DEVICE RowSums sum_of_pairs(const Chunk& at, int end, const WeightOf& weight_of) const {
    RowSums sums;
    for (int j = threadIdx.x / 32 * kExactAtOnce; j < end; j += kWarps * kExactAtOnce) {
      double keys[kExactAtOnce] = {};
      float values[kExactAtOnce] = {};
      add_dots(keys, row_of(p.k, at.row + j), p.k.time, end - j, q, p.K);
      add_dots(values, row_of(p.v, at.row + j), p.v.time, end - j, dh, p.V);
#pragma unroll
      for (int i = 0; i < kExactAtOnce; ++i) {
        const double key = warp_sum(keys[i]), value = warp_sum(values[i]);
        const double weight = j + i < end ? weight_of(j + i) : 0;
        if (weight != 0) sums.add(weight, {key, key * value});
      }
    }
    return sums;
  }
  // Returns the warp's part of q n and of q C dh.
  template <typename X>
  DEVICE RowSums sum_of_state(const X* C, const float* n) const {
    RowSums sums;
    for (int k = threadIdx.x / 32 * kExactAtOnce; k < p.K; k += kWarps * kExactAtOnce) {
      float values[kExactAtOnce] = {};
      add_dots(values, C + k * p.V, p.V, kExactAtOnce, dh, p.V);
#pragma unroll
      for (int i = 0; i < kExactAtOnce; ++i) {
        sums.add(q[k + i], {n ? n[k + i] : 0, warp_sum(values[i])});
      }
    }
    return sums;
  }

  // Returns the warp's part of the sums for step t of the chunk, without the factor K^-1/2.
  DEVICE RowSums sums_of(int t) const {
    const Rows& rows = terms.rows;
    const int64_t first = rows.row(head, chunk), own = first + t;
    const int tile = t / kTile;
    const float2 u = rows.u[own];
    RowSums sums = sum_of_pairs(chunk, t + 1, [&](int j) -> double {
      if (j / kTile == tile) {
        if (j % kTile < rows.start[chunk.row + t]) return 0;
        const float2 w = rows.w[first + j];
        return exp2(double(u.x + w.x) + (double(u.y) + w.y));
      }
      double decay = rows.past[own];
      const float* between = rows.tile_decay + rows.slot(head, slot) * rows.chunks.tiles();
      for (int i = j / kTile + 1; i < tile; ++i) decay *= between[i];
      return decay * rows.future[first + j];
    });
    double decay = rows.inflow[own];
    int64_t at = slot;
    for (; at > slot - chunk.number && slot - at < kExactChunks && decay > kExactDecay; --at) {
      const Chunk before = rows.chunks.at(at - 1);
      const float* outflow = rows.outflow + rows.row(head, before);
      sums.add(decay, sum_of_pairs(before, before.steps, [&](int j) { return outflow[j]; }));
      decay *= rows.keep[rows.slot(head, at - 1)];
    }
    if (!(decay > 0)) return sums;
    if (at > slot - chunk.number) {
      const int64_t state = rows.slot(head, at) * p.K;
      sums.add(decay, sum_of_state(static_cast<const IO*>(terms.C) + state * p.V, terms.n + state));
    } else if (p.C != nullptr) {
      const int64_t state = (chunk.sequence * p.H + head) * p.K;
      const float* n = static_cast<const float*>(p.n);
      sums.add(decay,
               sum_of_state(static_cast<const float*>(p.C) + state * p.V, n ? n + state : nullptr));
    }
    return sums;
  }

  // Recomputes row t, and returns delta^2.
  DEVICE float redo(int t) const {
    const IO *from_q = row_of(p.q, chunk.row + t), *from_dh = row_of(given(), chunk.row + t);
    for (int i = threadIdx.x; i < p.K; i += kRowThreads) q[i] = to_float(from_q[i]);
    for (int i = threadIdx.x; i < p.V; i += kRowThreads) dh[i] = to_float(from_dh[i]);
    __syncthreads();
    const bool tells = threadIdx.x % 32 == 0;
    const RowSums sums = sums_of(t);
    const float total = terms.scale * float(block_sum<kRowThreads>(tells ? sums.keys : 0));
    const float dot = float(block_sum<kRowThreads>(tells ? sums.values : 0));
    const int64_t at = terms.rows.row(head, chunk) + t;
    if (threadIdx.x > 0 || !(fabsf(total) > terms.rows.floor[at])) return 0;
    const float inverse = terms.scale / (fabsf(total) + float(p.eps));
    const float delta = -copysignf(dot * inverse * inverse, dot * total);
    const float inflow = terms.rows.inflow[at];
    terms.inverse[at] = inverse, terms.weight[at] = inflow * inverse;
    terms.delta[at] = delta, terms.n_weight[at] = inflow * delta;
    return delta * delta;
  }
};

// Returns the sum of the spreads of all rows of a head.
DEVICE float sum_of_spreads(const BackwardTerms& terms, int head) {
  const int64_t slots = terms.rows.chunks.slots();
  float part = 0;
  for (int64_t i = threadIdx.x; i < slots; i += kRowThreads) {
    part += terms.spreads[terms.rows.slot(head, i)];
  }
  return block_sum<kRowThreads>(part);
}

// How many chunks of a head a thread block of exact_rows handles: as many as have a row for each of
// its threads.
__host__ DEVICE int exact_chunks(const Chunks& chunks) { return kRowThreads / chunks.length; }

// It needs K + V floats of shared memory.
template <typename IO>
__global__ void __launch_bounds__(kRowThreads) exact_rows(const BackwardParams p,
                                                          const BackwardTerms terms) {
  static_assert(kRowThreads == kLongestChunk);
  extern __shared__ __align__(1024) char memory[];
  __shared__ uint32_t found[kRowThreads / 32];
  const Chunks& chunks = terms.rows.chunks;
  const int head = int(blockIdx.x % unsigned(p.H)), at_once = exact_chunks(chunks);
  const int64_t first = int64_t(blockIdx.x / unsigned(p.H)) * at_once;
  const float all = sum_of_spreads(terms, head);
  const float enough = all * fmaxf(kExactShare, kExactTimes / float(chunks.rows));

  const int part = int(threadIdx.x) / chunks.length, row = int(threadIdx.x) % chunks.length;
  float spread = 0;
  if (part < at_once && first + part < chunks.slots()) {
    const Chunk chunk = chunks.at(first + part);
    if (row < chunk.steps) spread = terms.spread[terms.rows.row(head, chunk) + row];
  }
  const uint32_t own = __ballot_sync(~0u, spread > 0 && spread >= enough);
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = own;
  __syncthreads();
  const int words = chunks.length / 32;  // of a chunk
  for (int part = 0; part < at_once; ++part) {
    float most = 0;  // only thread 0's value is used
    for (int word = 0; word < words; ++word) {
      for (uint32_t rows = found[part * words + word]; rows != 0;) {
        const int last = 31 - __clz(rows);
        rows ^= 1u << last;
        const ExactRow<IO> exact(p, terms, head, first + part, reinterpret_cast<float*>(memory));
        most = fmaxf(most, exact.redo(word * 32 + last));
      }
    }
    if (terms.listed != nullptr && most > all * kListedShare) {
      terms.listed[atomicAdd(terms.count, 1)] = int((first + part) * p.H + head);
    }
  }
}

}  // namespace flashcell::cuda
