// The forward pass, parallel in time by multiple shooting. All chunks of a sequence run at once,
// each from an initial state that it works out for itself: these cells forget, so a run that starts
// some steps before the chunk (the burn-in) from any state reaches the right one. The burn-in also
// carries the tangent, the factor by which an error of its first state has shrunk, and starts over
// from twice as far back while the tangent is too large. A second kernel then compares the state at
// which each chunk starts with the end of the chunk before. Where they differ, all chunks are run
// again from boundaries that Newton's method predicts, and chunks that still differ are run one
// after the other. So the result equals the sequential one, to tol at the boundaries, for every
// cell.
#pragma once
#include "../sequential/track.cuh"
#include "common/cuda/ptx/programmatic_launch.cuh"

namespace flashcell::cuda {

struct Shoot {
  int chunk, chunks;  // steps per chunk, and chunks of the longest sequence
  int burn_in, longest_burn_in;
  int passes;         // Newton iterations before what still differs is run sequentially
  int blocks_of_row;  // blocks of the first kernel for a row of channels
  int groups_of_row;  // blocks of the second kernel for a row of channels
  float tol;
  float *start, *end;  // [S, chunks, K, D]: the states at which a chunk started and ended
  float* slope;        // [S, chunks, K K, D]: derivative of the end by the start
};

template <typename Track>
struct Boundary {
  static constexpr int kStates = Track::kStates, kN = Track::kN;

  // Returns row i, of `rows`, of chunk w of sequence s.
  static DEVICE float* at(float* rows_of, const ForwardParams& p, const Shoot& shoot, int64_t s,
                          int w, int rows, int i, int64_t d) {
    return rows_of + (((s * shoot.chunks + w) * rows + i) * p.D + d);
  }
  static DEVICE void keep(float* rows_of, const ForwardParams& p, const Shoot& shoot, int64_t s,
                          int w, const Track& track) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int k = 0; k < kStates; ++k) {
        at(rows_of, p, shoot, s, w, kStates, k, track.channel())[n] = track.state[n][k];
      }
    }
  }
};

template <typename Track>
__global__ void __launch_bounds__(32) shoot_kernel(const __grid_constant__ ForwardParams p,
                                                   const Shoot shoot) {
  using Edge = Boundary<Track>;
  extern __shared__ __align__(16) unsigned char shared[];
  pdl_launch_dependents();
  const int64_t chunk_of_all = blockIdx.x / shoot.blocks_of_row;
  const int64_t s = chunk_of_all / shoot.chunks;
  const int w = int(chunk_of_all % shoot.chunks), first = w * shoot.chunk;
  const Column column(p, s);
  const int64_t d = int64_t(blockIdx.x % shoot.blocks_of_row * 32 + threadIdx.x) * Track::kN;
  if (blockIdx.x == 0 && threadIdx.x < 3) p.report[threadIdx.x] = threadIdx.x == 0;
  if (first > 0 && first >= column.length + column.padding) return;

  Track track(p, column, d, shared);
  const int end = min(first + shoot.chunk, column.length);
  if (first < end || first == 0) {
    for (int back = shoot.burn_in;; back *= 2) {
      const int begin = max(first - back, 0);
      if (begin == 0) track.begin_sequence();
#pragma unroll
      for (int n = 0; n < Track::kN; ++n) {
#pragma unroll
        for (int i = 0; i < Track::kStates; ++i) {
          if (begin > 0) track.state[n][i] = 0;
#pragma unroll
          for (int j = 0; j < Track::kStates; ++j) track.tangent[n][i][j] = begin > 0 && i == j;
        }
      }
      track.prefetch(begin, end);
      track.template walk<true, false>(begin, first);
      float left = 0;
#pragma unroll
      for (int n = 0; n < Track::kN; ++n) {
#pragma unroll
        for (int i = 0; i < Track::kStates; ++i) {
#pragma unroll
          for (int j = 0; j < Track::kStates; ++j) {
            left = fmaxf(left, fabsf(track.tangent[n][i][j]));
          }
        }
      }
      const bool open = __any_sync(~0u, left > 0.25f * shoot.tol);
      if (begin == 0 || back >= shoot.longest_burn_in || !open) break;
      track.drain();
    }
    Edge::keep(shoot.start, p, shoot, s, w, track);
    track.template walk<false, true>(first, end);
    Edge::keep(shoot.end, p, shoot, s, w, track);
    if (end == column.length) track.end_sequence();
  }
  track.pad(max(first, column.length), min(first + shoot.chunk, column.length + column.padding));
}

// One block handles 32 kN channels of a sequence: its lanes are the channels, and its warps share
// the chunks.
template <typename Track, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) settle_kernel(const
                                                             __grid_constant__ ForwardParams p,
                                                             const Shoot shoot) {
  using Edge = Boundary<Track>;
  constexpr int kStates = Track::kStates, kN = Track::kN;
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t s = blockIdx.x / shoot.groups_of_row;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Column column(p, s);
  const int chunks = (column.length + shoot.chunk - 1) / shoot.chunk;
  const int64_t d = int64_t(blockIdx.x % shoot.groups_of_row * 32 + lane) * kN;
  Track track(p, column, d, shared);
  pdl_wait();

  auto row = [&](float* of, int w, int rows, int i) {
    return Edge::at(of, p, shoot, s, w, rows, i, track.channel());
  };
  // Returns how far the start of chunk w is from the end of the chunk before it.
  auto gap = [&](int w) {
    float largest = 0;
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float from = row(shoot.end, w - 1, kStates, k)[n];
        const float to = row(shoot.start, w, kStates, k)[n];
        const bool same = from == to || (isnan(from) && isnan(to));
        const float by = same ? 0 : fabsf(from - to);
        largest = by <= largest ? largest : isnan(by) ? INFINITY : by;
      }
    }
    return largest;
  };
  auto residual = [&]() {
    float largest = 0;
#pragma unroll 4
    for (int w = 1 + warp; w < chunks; w += kWarps) largest = fmaxf(largest, gap(w));
    return largest;
  };
  auto rewalk = [&](int w) {
    const int first = w * shoot.chunk, end = min(first + shoot.chunk, column.length);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        track.state[n][i] = row(shoot.start, w, kStates, i)[n];
#pragma unroll
        for (int j = 0; j < kStates; ++j) track.tangent[n][i][j] = i == j;
      }
    }
    track.prefetch(first, end);
    track.template walk<true, true, true>(first, end);
    track.drain();
    Edge::keep(shoot.end, p, shoot, s, w, track);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < kStates * kStates; ++i) {
        row(shoot.slope, w, kStates * kStates, i)[n] = track.tangent[n][i / kStates][i % kStates];
      }
    }
    if (end == column.length) track.end_sequence();
  };

  float largest = residual();
  bool open = __syncthreads_or(largest > shoot.tol);
  int pass = 0;
  for (; open && pass < shoot.passes; ++pass) {
    // Predict each boundary: the previous chunk's end, plus its slope times its start's change.
    if (warp == 0) {
      float moved[kN][kStates] = {};
      for (int w = 1; w < chunks; ++w) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          float next[kStates];
#pragma unroll
          for (int i = 0; i < kStates; ++i) {
            float to = row(shoot.end, w - 1, kStates, i)[n];
            for (int j = 0; pass > 0 && j < kStates; ++j) {
              const float slope = row(shoot.slope, w - 1, kStates * kStates, i * kStates + j)[n];
              to = fmaf(slope, moved[n][j], to);
            }
            // A state is a convex combination of the state before and a tanh, so it is bounded.
            // Clamping a Newton step to that range turns divergence into slow convergence.
            const float bound = fmaxf(2.0f, 2.0f * fabsf(row(shoot.start, 0, kStates, i)[n]));
            to = to > bound ? bound : to < -bound ? -bound : to;
            float* start = row(shoot.start, w, kStates, i) + n;
            next[i] = to - *start;
            *start = to;
          }
#pragma unroll
          for (int i = 0; i < kStates; ++i) moved[n][i] = next[i];
        }
      }
    }
    __syncthreads();
    for (int w = 1 + warp; w < chunks; w += kWarps) rewalk(w);
    __syncthreads();
    largest = residual();
    open = __syncthreads_or(largest > shoot.tol);
  }
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  }
  if (lane == 0) {
    atomicMax(reinterpret_cast<int*>(p.report + 1), __float_as_int(largest));
    if (warp == 0 && pass > 0) {
      atomicMax(reinterpret_cast<int*>(p.report), __float_as_int(float(1 + pass)));
    }
  }
  if (!open || warp > 0) return;
  int walked = 0;
  for (int w = 1; w < chunks; ++w) {
    if (!__any_sync(~0u, gap(w) > shoot.tol)) continue;
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float end = row(shoot.end, w - 1, kStates, i)[n];
        row(shoot.start, w, kStates, i)[n] = end;
      }
    }
    __syncwarp();
    rewalk(w);
    __syncwarp();
    walked += min(shoot.chunk, column.length - w * shoot.chunk);
  }
  if (lane == 0) atomicAdd(p.report + 2, float(walked));
}

}  // namespace flashcell::cuda
