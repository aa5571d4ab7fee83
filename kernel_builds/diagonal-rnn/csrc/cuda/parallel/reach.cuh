// The backward pass with all chunks of time at once, as multiple_shooting.cuh does forward.
// Gradients fade as states are forgotten, so a run that starts some steps before its chunk with a
// carry of 0 reaches the right carry, and the tangent tells when. A second kernel compares the
// carries at the boundaries of chunks. If any differ by more than rounding, the scan
// (scan/single_pass.cuh) redoes the whole pass: it is exact for every cell but computes all gates
// twice. Otherwise it returns at once.
#pragma once
#include "../sequential/linear_track.cuh"

namespace flashcell::cuda {

struct Reach {
  int chunk, chunks, burn_in, longest_burn_in, blocks_of_row;
  float *start, *end;  // [S, chunks, K, D]: the carry into a chunk, and out of it
  float* largest;      // [S, chunks, D]: largest magnitude of the carries in a chunk
  float* partial;      // [S, chunks, P, D]: sums over a chunk
  int* open;           // set if carries differ at a boundary
};

constexpr float kFaded = 0x1p-26f, kRounding = 0x1p-21f;  // both relative to the largest carry

template <typename Track>
__global__ void __launch_bounds__(32) reach_kernel(const __grid_constant__ typename Track::Params p,
                                                   const Reach reach) {
  constexpr int kN = Track::kN, K = Track::K;
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t row = blockIdx.x / reach.blocks_of_row, s = row / reach.chunks;
  const int first = int(row % reach.chunks) * reach.chunk;
  const int64_t d = int64_t(blockIdx.x % reach.blocks_of_row * 32 + threadIdx.x) * kN;
  if (blockIdx.x == 0 && threadIdx.x == 0) *reach.open = 0;
  Track track(p, s, d, shared);
  auto& e = track.e;
  auto keep = [&](float* carries) {
#pragma unroll
    for (int c = 0; c < kN * K; ++c) {
      carries[(row * K + c % K) * p.D + e.d + c / K] = track.carry[c / K][c % K];
    }
  };
  const int end = min(first + reach.chunk, e.steps);
  if (first < end || first == 0) {
    for (int back = reach.burn_in;; back *= 2) {
      const int begin = max(first - back, 0);
      e.begin(track.carry);
#pragma unroll
      for (int c = 0; c < kN * K; ++c) {
        if (begin > 0) track.carry[c / K][c % K] = 0;
#pragma unroll
        for (int j = 0; j < K; ++j) track.tangent[c / K][c % K][j] = begin > 0 && c % K == j;
      }
      track.prefetch(begin, end);
      track.approach(begin, first);
      float left = 0;
#pragma unroll
      for (int c = 0; c < kN * K * K; ++c) {
        left = fmaxf(left, fabsf(track.tangent[c / (K * K)][c / K % K][c % K]));
      }
      if (begin == 0 || back >= reach.longest_burn_in || !__any_sync(~0u, left > kFaded)) break;
      track.drain();
    }
    keep(reach.start);
    track.template walk<true>(first, end);
    keep(reach.end);
    if (end == e.steps) e.end(track.carry);
  }
#pragma unroll
  for (int c = 0; c < kN; ++c) reach.largest[row * p.D + e.d + c] = track.largest;
  e.pad(max(first, e.steps), min(first + reach.chunk, e.steps + e.padding));
  track.keep_sums(reach.partial, row);
}

// Compares the carries of every channel at every boundary. Boundaries past a sequence's end are
// skipped.
template <int K>
__global__ void __launch_bounds__(256) agree_kernel(const __grid_constant__ SequenceParams p,
                                                    const Reach reach) {
  const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
  const int64_t row = i / p.D, d = i % p.D, s = row / reach.chunks;
  const int w = int(row % reach.chunks);
  if (s >= p.S || w == 0 || w * reach.chunk >= Column(p, s).length) return;
  const float size = fmaxf(reach.largest[(row - 1) * p.D + d], reach.largest[row * p.D + d]);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const float from = reach.end[((row - 1) * K + k) * p.D + d];
    const float to = reach.start[(row * K + k) * p.D + d];
    if (!(fabsf(from - to) <= kRounding * size)) *reach.open = 1;
  }
}

}  // namespace flashcell::cuda
