// The forward pass, parallel in time by the published method: Newton's iteration on all steps at
// once. Each iteration evaluates the cell and its Jacobian at all steps of a segment, and a scan of
// the linearised recurrence corrects the states. A block has 32 channels and a segment of kWarps *
// kSteps steps in registers; segments follow one another with the exact carry. A segment that has
// not converged after max_iters is computed sequentially.
#pragma once
#include "../scan/single_pass.cuh"
#include "../sequential/chain.cuh"

namespace flashcell::cuda {

template <typename Cell, typename IO, bool kMasked, int kWarps, int kSteps>
__global__ void __launch_bounds__(32 * kWarps) newton_kernel(const
                                                             __grid_constant__ ForwardParams p,
                                                             int groups_of_row, float tol,
                                                             int max_iters) {
  constexpr int K = Cell::kStates, kGates = Cell::kGates, P = Cell::kWeights;
  using V = Real<kIsCoarse<IO>>;
  __shared__ float maps[kWarps][K * K + K][32], ends[kWarps][K][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Column column(p, blockIdx.x / groups_of_row);
  int64_t d = int64_t(blockIdx.x % groups_of_row) * 32 + lane;
  const bool stored = d < p.D;
  if (!stored) d = p.D - 1;
  const IO* x_row = static_cast<const IO*>(p.x) + column.x_offset + to_head(p, d) + d;
  IO* h_row = static_cast<IO*>(p.h) + column.row * p.D + d;
  IO* saved_row = static_cast<IO*>(p.saved) + column.row * p.V * p.D + d;

  V w[P];
  float plain[P], carry[K], bias[1][kGates];
  load_bias(p, d, bias);
#pragma unroll
  for (int q = 0; q < P; ++q) w[q] = plain[q] = static_cast<const float*>(p.weight)[q * p.D + d];
  const Chain<Cell, kIsCoarse<IO>> chain(plain);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const float* initial = static_cast<const float*>(p.initial);
    carry[k] = initial == nullptr ? 0 : initial[(k * p.S + column.index) * p.D + d];
  }

  int most = 0, walked = 0;
  float largest = 0;
  for (int begin = 0; begin < column.length; begin += kWarps * kSteps) {
    const int first = begin + warp * kSteps;
    float x[kSteps][kGates], s[kSteps][K];
    // Bits of reset steps, and of steps that pass the states on (held, or past the end).
    unsigned resets = 0, passes = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int t = first + k;
      const bool runs = t < column.length;
      if (!runs || (kMasked && p.hold != nullptr && p.hold[column.row + t])) passes |= 1u << k;
      if (kMasked && runs && p.reset != nullptr && p.reset[column.row + t]) resets |= 1u << k;
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        x[k][g] = runs ? to_float(x_row[int64_t(t) * p.x_time + g * p.x_gate]) + bias[0][g] : 0;
      }
    }
    // Evaluates one step: the next states, and their derivatives by the states before.
    auto evaluate = [&](int k, const float (&from)[K], float (&next)[K], float (&J)[K][K]) {
      const bool cleared = kMasked && (resets >> k & 1);
      V vx[kGates], before[K], after[K], slope[K][K];
#pragma unroll
      for (int g = 0; g < kGates; ++g) vx[g] = x[k][g];
#pragma unroll
      for (int i = 0; i < K; ++i) before[i] = cleared ? 0 : from[i];
      Cell::jacobian(vx, w, before, after, slope);
      const bool passing = passes >> k & 1;
#pragma unroll
      for (int i = 0; i < K; ++i) {
        next[i] = passing ? before[i].v : after[i].v;
#pragma unroll
        for (int j = 0; j < K; ++j) {
          J[i][j] = cleared ? 0 : passing ? float(i == j) : slope[i][j].v;
        }
      }
    };
    const float zero[K] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      float unused[K][K];
      evaluate(k, zero, s[k], unused);
    }

    bool open = true;
    int iteration = 0;
    float residual = 0;
    for (; open && iteration < max_iters; ++iteration) {
#pragma unroll
      for (int i = 0; i < K; ++i) ends[warp][i][lane] = s[kSteps - 1][i];
      __syncthreads();
      float from[K], J[kSteps][K][K], r[kSteps][K], A[K][K], b[K] = {};
#pragma unroll
      for (int i = 0; i < K; ++i) {
        from[i] = warp == 0 ? carry[i] : ends[warp > 0 ? warp - 1 : 0][i][lane];
#pragma unroll
        for (int j = 0; j < K; ++j) A[i][j] = i == j;
      }
      residual = 0;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        float next[K];
        evaluate(k, k == 0 ? from : s[k > 0 ? k - 1 : 0], next, J[k]);
#pragma unroll
        for (int i = 0; i < K; ++i) {
          r[k][i] = next[i] - s[k][i];
          const float size = fabsf(r[k][i]);
          residual = size <= residual ? residual : isnan(size) ? INFINITY : size;
        }
        compose(J[k], r[k], A, b);
      }
#pragma unroll
      for (int i = 0; i < K * K; ++i) maps[warp][i][lane] = A[i / K][i % K];
#pragma unroll
      for (int i = 0; i < K; ++i) maps[warp][K * K + i][lane] = b[i];
      open = __syncthreads_or(!(residual <= tol));
      float delta[K] = {};
      for (int before = 0; before < warp; ++before) {
#pragma unroll
        for (int i = 0; i < K * K; ++i) A[i / K][i % K] = maps[before][i][lane];
#pragma unroll
        for (int i = 0; i < K; ++i) b[i] = maps[before][K * K + i][lane];
        apply(A, b, delta);
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        apply(J[k], r[k], delta);
#pragma unroll
        for (int i = 0; i < K; ++i) s[k][i] += delta[i];
      }
    }
    most = max(most, iteration), largest = fmaxf(largest, residual);

    for (int turn = 0; open && turn < kWarps; ++turn) {  // sequentially, one warp after the other
      if (warp == turn) {
        float state[K], unused[K][K];
#pragma unroll
        for (int i = 0; i < K; ++i) {
          state[i] = warp == 0 ? carry[i] : ends[warp > 0 ? warp - 1 : 0][i][lane];
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int i = 0; i < K; ++i) state[i] = resets >> k & 1 ? 0 : state[i];
          if (!(passes >> k & 1)) chain.template step<false>(x[k], state, unused);
#pragma unroll
          for (int i = 0; i < K; ++i) s[k][i] = state[i];
        }
#pragma unroll
        for (int i = 0; i < K; ++i) ends[warp][i][lane] = state[i];
      }
      __syncthreads();
    }
    if (open) walked += min(kWarps * kSteps, column.length - begin);

#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int64_t t = first + k;
      if (!stored || t >= column.length) continue;
      h_row[t * p.D] = from_float<IO>(passes >> k & 1 ? 0 : s[k][0]);
      for (int v = 0; p.saved != nullptr && v < p.V; ++v) {
        const float kept = v + 1 < K ? s[k][v + 1 < K ? v + 1 : 0] : s[k][0];
        saved_row[(t * p.V + v) * p.D] = from_float<IO>(kept);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < K; ++i) ends[warp][i][lane] = s[kSteps - 1][i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < K; ++i) carry[i] = ends[kWarps - 1][i][lane];
    __syncthreads();
  }

  if (warp == 0 && stored) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      static_cast<float*>(p.last)[(k * p.S + column.index) * p.D + d] = carry[k];
    }
  }
  for (int64_t t = column.length + warp; stored && t < column.length + column.padding;
       t += kWarps) {
    h_row[t * p.D] = from_float<IO>(0);
    for (int64_t v = 0; p.saved != nullptr && v < p.V; ++v) {
      saved_row[(t * p.V + v) * p.D] = from_float<IO>(0);
    }
  }
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  }
  if (lane == 0) {  // the host has zeroed the report
    atomicMax(reinterpret_cast<int*>(p.report + 1), __float_as_int(largest));
    if (warp == 0) {
      atomicMax(reinterpret_cast<int*>(p.report), __float_as_int(float(most)));
      atomicAdd(p.report + 2, float(walked));
    }
  }
}

}  // namespace flashcell::cuda
