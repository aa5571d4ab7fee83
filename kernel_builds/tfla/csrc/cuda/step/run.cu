// One decoding step: C is read once and written once, with a whole tile of it in flight.
//
// The state may be updated in place, while every thread block reads all of n and m. So a second
// kernel writes n and m; it is launched while C is loading, and starts when all blocks have read
// them. It also computes the epilogue, if there is one. Without an epilogue, and if all thread
// blocks run at once, those of a head form a cluster instead, whose first block writes n and m. An
// H200 runs some thirty clusters of eight at a time, but 66 of two. Where clusters of two suffice
// for all heads, a thread block is as wide as an SM allows and processes its columns in two turns.
#include <cuda_runtime.h>

#include "common/cuda/ptx/cluster.cuh"
#include "head.cuh"
#include "run.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kMostCluster = 8;
// Registers per thread of step_kernel: two narrow thread blocks then leave room on an SM for one of
// finish_kernel.
constexpr int kRegisters = 112;
constexpr int kUnroll = 16;  // rows of a thread in flight

// A thread block of step_kernel: it takes kTurns tiles of a head's columns one after another.
// kLanes lanes share a row of a tile, with four columns each.
template <int kBlockThreads, int kRowLanes, int kTiles>
struct Shape {
  static constexpr int kThreads = kBlockThreads, kWarps = kThreads / 32;
  static constexpr int kLanes = kRowLanes, kRowsAtOnce = kThreads / kLanes;
  static constexpr int kTile = 4 * kLanes, kTurns = kTiles, kColumns = kTurns * kTile;
};
using Narrow = Shape<256, 16, 1>;
using Wide = Shape<512, 32, 2>;

// Bytes of C that are prefetched to L2 while the preceding kernel still runs: of more than this,
// part is evicted again before it is read. One thread block per SM prefetches its part.
constexpr int64_t kFetchBytes = 6 << 20;
// Updates C for a part of a head and computes its h, to `unrounded` if an epilogue follows. The
// first `fetching` thread blocks, which run at once, prefetch `bytes` of C each. kKey and kValue
// are K and V, or 0 if not known at compile time.
template <typename IO, typename Block, bool kCluster, int kKey, int kValue>
__global__ void __maxnreg__(kRegisters) step_kernel(const StepParams p, float* unrounded,
                                                    int fetching, int bytes) {
  constexpr int kThreads = Block::kThreads, kWarps = Block::kWarps, kLanes = Block::kLanes;
  constexpr int kTurns = Block::kTurns, kRows = kUnroll * Block::kRowsAtOnce;
  static_assert(kKey <= kRows && (kKey > 0 || kTurns == 1));
  using Four = Row<kLanes, 4, 1>;
  float2* rows = reinterpret_cast<float2*>(memory);  // [K] key and query
  __shared__ float4 parts[kTurns][kWarps][kLanes];
  __shared__ float4 read[kWarps];  // n q and k q of a warp's rows, and m
  const int K = kKey > 0 ? kKey : int(p.K), V = kValue > 0 ? kValue : int(p.V);
  const int blocks = (V + Block::kColumns - 1) / Block::kColumns;
  // The tile of the first turn.
  const int part = int(blockIdx.x) % blocks, tile = part * Block::kColumns;
  const Head<IO> head(p, int(blockIdx.x) / blocks, K);
  const int thread = cuda::thread<kThreads>();
  const int first = thread / kLanes, column = tile + Four::column(0);
  const int64_t all = int64_t(head.state) * K * V, own_part = all + int64_t(first) * V + column;
  const float* C = static_cast<const float*>(p.C);
  float* next = static_cast<float*>(p.next_C) + own_part;
  const auto inside = [&](int turn) { return kValue > 0 || column + turn * Block::kTile < V; };
  static_assert(kValue % Block::kColumns == 0);
  if (int(blockIdx.x) < fetching && thread == 0) {
    fetch(reinterpret_cast<const char*>(C + all) + part * bytes, bytes);
  }
  head.fetch();
  pdl_wait();
  if (kCluster) pdl_launch_dependents();

  const float input = *head.i, forget = *head.f, before = head.m_before();
  const KeyRow own = head.row(thread);
  Four value[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int from = tile + turn * Block::kTile;
    value[turn].load(at<IO>(p.v, head.b, head.h) + from, V - from);
  }
  float4 old[kUnroll];
  const auto load = [&](int turn, int row, int u) {
    const int r = row + u * Block::kRowsAtOnce;
    const float* from = C + own_part + int64_t(r) * V + turn * Block::kTile;
    const bool has_old = inside(turn) && C != nullptr && first + r < K;
    old[u] = has_old ? __ldcs(reinterpret_cast<const float4*>(from)) : float4{};
  };
  const auto load_all = [&](int turn, int row) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load(turn, row, u);
  };
  __syncwarp();  // keeps the compiler from loading a gate after C, which would delay the factors
  load_all(0, 0);
  float n_q = own.n * own.query, k_q = own.key * own.query;
  if (thread < K) rows[thread] = {own.key, own.query};
#pragma unroll 1  // rarely runs: few heads are so wide
  for (int r = thread + kThreads; r < K; r += kThreads) {
    const KeyRow more = head.row(r);
    n_q += more.n * more.query, k_q += more.key * more.query, rows[r] = {more.key, more.query};
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    n_q += __shfl_xor_sync(~0u, n_q, mask), k_q += __shfl_xor_sync(~0u, k_q, mask);
  }
  // Storing `before` here makes the warp wait until its loads of m have arrived.
  if (threadIdx.x % 32 == 0) read[threadIdx.x / 32] = make_float4(n_q, k_q, before, 0);
  __syncthreads();
  if (kCluster) {
    cluster_arrive_relaxed_diverged();  // a release would wait for the loads of C
  } else {
    pdl_launch_dependents();
  }

  const Factors factors = find_factors(p, input, forget, before);
#pragma unroll
  for (Four& row : value) {
#pragma unroll
    for (float& x : row.x) x *= factors.add;
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    float sum[4] = {};
    for (int row = 0; row < K; row += kRows) {
      if (row > 0) load_all(turn, row);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int r = row + u * Block::kRowsAtOnce;
        float x[4] = {old[u].x, old[u].y, old[u].z, old[u].w};
        if (turn + 1 < kTurns) load(turn + 1, 0, u);
        if (!inside(turn) || first + r >= K) continue;
        const float2 key_query = rows[first + r];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] = times(factors.keep, x[e]) + key_query.x * value[turn].x[e];
          sum[e] += key_query.y * x[e];
        }
        float* to = next + int64_t(r) * V + turn * Block::kTile;
        __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int mask = kLanes; mask < 32; mask *= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], mask);
    }
    if (threadIdx.x % 32 < kLanes) {
      parts[turn][threadIdx.x / 32][threadIdx.x % kLanes] =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
  if (kCluster) {
    cluster_wait_diverged();
    if (part == 0) head.template write_n_and_m<kThreads>(p, factors, own);
  }
  __syncthreads();
  const int turn = thread / kLanes;
  if (turn >= kTurns) return;
  Four total{};
  n_q = k_q = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 more = parts[turn][w][thread % kLanes];
    total.x[0] += more.x, total.x[1] += more.y, total.x[2] += more.z, total.x[3] += more.w;
    n_q += read[w].x, k_q += read[w].y;
  }
  const float query_scale = rsqrtf(float(K));
  float scale = query_scale;
  if (p.normalized) {
    const float total_q = times(factors.keep, n_q) + factors.add * k_q;  // n q with the new n
    scale /= divisor(total_q * query_scale, expf(-factors.m), p.eps);
  }
#pragma unroll
  for (float& x : total.x) x *= scale;
  const int to = tile + turn * Block::kTile;
  const int64_t out = int64_t(head.state) * V + to;
  if (unrounded == nullptr) {
    total.store(static_cast<IO*>(p.h) + out, V - to);
  } else {
    total.store(unrounded + out, V - to);
  }
}

// Writes n and m of a head, which are not read any more, and then computes the head's epilogue.
template <typename IO>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const StepParams p,
                                                                const float* unrounded) {
  const Head<IO> head(p, int(blockIdx.x), int(p.K));
  pdl_launch_dependents();
  if (p.normalized) {
    const KeyRow own = head.row(thread<kFinishThreads>());
    const Factors factors = find_factors(p, *head.i, *head.f, head.m_before());
    __syncthreads();  // all threads have read m
    head.template write_n_and_m<kFinishThreads>(p, factors, own);
  }
  pdl_wait();  // later kernels wait for this kernel only
  if (unrounded != nullptr) head.finish(p, unrounded);
}

// With widths known at compile time the addresses of C are constants apart, so its loads can be
// issued back to back. The usual model widths have such a kernel. The kernel for other widths
// has too few registers to take two tiles one after another.
constexpr bool is_usual(int64_t K, int64_t V) {
  return (K == 256 && V == 512) || (K == 128 && V == 256);
}
template <typename IO, typename Block, bool kCluster>
auto step_kernel_for(int64_t K, int64_t V) {
  if constexpr (Block::kTurns == 1) {
    if (!is_usual(K, V)) return step_kernel<IO, Block, kCluster, 0, 0>;
  }
  if (K == 256) return step_kernel<IO, Block, kCluster, 256, 512>;
  return step_kernel<IO, Block, kCluster, 128, 256>;
}

template <typename Block>
int64_t parts_of(int64_t V) {
  return (V + Block::kColumns - 1) / Block::kColumns;
}

template <typename IO, typename Block, bool kCluster>
void launch_step(const StepParams& p, const Device& device, float* unrounded, Grid grid) {
  const int64_t parts = parts_of<Block>(p.V);
  grid.blocks = p.B * p.H * parts, grid.threads = Block::kThreads;
  grid.shared_bytes = int(p.K * int64_t(sizeof(float2)));
  if (kCluster) grid.cluster = int(parts);
  int64_t fetching = 0, bytes = 0;
  if (p.C != nullptr && grid.blocks > 0) {
    fetching = grid.blocks < device.sms ? grid.blocks : device.sms;
    bytes = p.K * p.V * int64_t(sizeof(float)) / parts;
    if (bytes > kFetchBytes / fetching) bytes = kFetchBytes / fetching;
  }
  launch(step_kernel_for<IO, Block, kCluster>(p.K, p.V), grid, p, unrounded, int(fetching),
         int(bytes / 16 * 16));
}

}  // namespace

int64_t step_scratch(const StepParams& p) {
  return p.epilogue.any() ? p.B * p.H * p.V * int64_t(sizeof(float)) : 0;
}

template <typename IO>
void run_step(const StepParams& p, const Device& device, void* scratch, cudaStream_t stream) {
  const bool pdl = device.code.arch >= 90;  // older code does not wait in its kernels
  const int64_t states = p.B * p.H, sms = device.sms;
  float* unrounded = p.epilogue.any() ? static_cast<float*>(scratch) : nullptr;
  const bool clusters = device.clusters && p.normalized && unrounded == nullptr;
  const int64_t narrow = parts_of<Narrow>(p.V), wide = parts_of<Wide>(p.V);
  const Grid grid{0, 0, 0, stream, pdl};
  if (clusters && narrow <= kMostCluster && states * narrow <= sms) {
    return launch_step<IO, Narrow, true>(p, device, unrounded, grid);
  }
  // Wide blocks on fewer than three in four SMs are slower than narrow ones on all.
  if (clusters && is_usual(p.K, p.V) && states * wide <= sms && 4 * states * wide > 3 * sms) {
    return launch_step<IO, Wide, true>(p, device, unrounded, grid);
  }
  launch_step<IO, Narrow, false>(p, device, unrounded, grid);
  if (!p.normalized && unrounded == nullptr) return;
  launch(finish_kernel<IO>, {states, kFinishThreads, 0, stream, pdl}, p, unrounded);
}
template void run_step<bf16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<fp16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<float>(const StepParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
