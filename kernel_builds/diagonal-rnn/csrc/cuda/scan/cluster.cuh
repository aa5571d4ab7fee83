// Scan of a scalar linear recurrence (sequential/linear.cuh) by thread block clusters, for few
// channels (sm_90). A cluster processes 32 kN channels over the whole sequence: in every round each
// of its blocks takes the next tile of kWarps * kSteps steps. Rows are copied to shared memory in
// pieces of 16 bytes, as many tiles ahead as fit. Each warp composes the affine maps of its steps
// into one. Two more warps of the block exchange them: one sends the map of the block's tile to all
// blocks of the cluster; the other applies the maps of all tiles of the round to the carry and
// gives each warp the carry into its steps. The other warps work on the next tile in the meantime,
// so the latency of the exchange is hidden. Nothing passes through global memory, so nothing has to
// be cleared first, and blocks wait only for blocks of their own cluster, which run at the same
// time.
#pragma once
#include "../plan.h"
#include "../sequential/linear.cuh"
#include "common/cuda/ptx/cluster.cuh"
#include "common/cuda/ptx/mbarrier.cuh"
#include "common/cuda/ptx/programmatic_launch.cuh"

namespace flashcell::cuda {

template <typename ElementOf, int kWarpsOf, int kStepsOf, int kSlotsOf, int kLagOf = 1>
struct ClusterTile {
  using Element = ElementOf;
  using Word = typename Element::Word;
  static constexpr int kWarps = kWarpsOf, kSteps = kStepsOf, kLength = kWarps * kSteps;
  static constexpr int kSlots = kSlotsOf, kLag = kLagOf, kBuffers = kLag + 1;
  static constexpr int kN = Element::kN, kRows = Element::kRows, kChannels = 32 * kN;
  static constexpr int kThreads = 32 * (kWarps + 2);
  // The number of rounds whose tile maps a block must be able to hold: the warps of another block
  // can be that far ahead of it.
  static constexpr int kRounds = 2 * kLag + 2;
  static constexpr int kPieces = 2 * sizeof(Word);  // 16-byte pieces of a row
  static constexpr int kTogether = 32 / kPieces;    // rows that a warp copies at once
  static_assert(kPieces <= 32 && kSteps % kTogether == 0 && kSlots > kLag);

  struct Shared {
    Word rows[kSlots][kWarps][kRows][kSteps][32];
    float2 warp_map[kBuffers][kWarps][kChannels];  // the map is carry' = x carry + y
    float2 tile_map[kRounds][kMostBlocks][kChannels];
    float carry[kBuffers][kWarps][kChannels];  // the carry into the steps of each warp
    // `full`: warp_map is written. `ready`: warp_map is read, and `carry` is written. Every lane
    // arrives for itself, so that each write is ordered directly (and compute-sanitizer sees it).
    uint64_t full[kBuffers], ready[kBuffers];
    uint64_t told[kRounds];  // tile_map has the maps of all blocks in the round
  };
};

// Applies carry = map(carry) to the channels of a lane.
template <int kN>
DEVICE void take_over(const float2 (&map)[kN], float (&carry)[kN]) {
#pragma unroll
  for (int c = 0; c < kN; ++c) carry[c] = fmaf(map[c].x, carry[c], map[c].y);
}

template <int kN>
DEVICE void read(const float2* maps, int lane, float2 (&map)[kN]) {
#pragma unroll
  for (int c = 0; c < kN; ++c) map[c] = maps[lane * kN + c];
}

// Run by the warp that sends the map of each of the block's tiles to the whole cluster.
template <typename Tile>
DEVICE void tell_maps(typename Tile::Shared& shared, int rounds) {
  constexpr int kN = Tile::kN, kBuffers = Tile::kBuffers;
  const int lane = threadIdx.x % 32, size = cluster_size(), rank = cluster_rank();
  uint32_t to[kMostBlocks];
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    to[i] = cluster_address(shared_address(&shared), i < size ? i : 0);
  }
  for (int round = 0; round < rounds; ++round) {
    const int at = round % kBuffers, there = round % Tile::kRounds;
    mbarrier_wait(shared.full[at], round / kBuffers);
    if (size == 1) {  // with one block there is nobody to send to
      mbarrier_arrive(shared.ready[at]);
      continue;
    }
    float2 map[kN];
#pragma unroll
    for (int c = 0; c < kN; ++c) map[c] = {1, 0};
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) {
#pragma unroll
      for (int c = 0; c < kN; ++c) {
        const float2 next = shared.warp_map[at][w][lane * kN + c];
        map[c] = {next.x * map[c].x, fmaf(next.x, map[c].y, next.y)};
      }
    }
    mbarrier_arrive(shared.ready[at]);  // warp_map has been read
    const uint32_t place =
        shared_address(&shared.tile_map[there][rank][lane * kN]) - shared_address(&shared);
    const uint32_t told = shared_address(&shared.told[there]) - shared_address(&shared);
#pragma unroll
    for (int i = 0; i < kMostBlocks; ++i) {
      if (i < size) {
#pragma unroll
        for (int c = 0; c < kN; ++c) store_async(to[i] + place + c * 8, to[i] + told, map[c]);
      }
    }
  }
}

// Run by the warp that takes the carry over all tiles of a round and gives every warp the carry
// into its steps.
template <typename Tile>
DEVICE void hand_carries(typename Tile::Shared& shared, typename Tile::Element& e, int rounds) {
  constexpr int kN = Tile::kN, kBuffers = Tile::kBuffers;
  const int lane = threadIdx.x % 32, size = cluster_size(), rank = cluster_rank();
  float first[kN][1], carry[kN];  // the carry into the round
  e.begin(first);
#pragma unroll
  for (int c = 0; c < kN; ++c) carry[c] = first[c][0];
  for (int round = 0; round < rounds; ++round) {
    const int at = round % kBuffers, there = round % Tile::kRounds;
    if (size > 1 && lane == 0) {
      mbarrier_arrive_expect_tx(shared.told[there], size * Tile::kChannels * int(sizeof(float2)));
    }
    // All maps are read before any carry is written: the compiler must assume that a write may
    // alias the maps, and would otherwise read each map only after the write before it.
    float2 of_warps[Tile::kWarps][kN], of_blocks[kMostBlocks][kN];
    mbarrier_wait(shared.full[at], round / kBuffers);
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) read(shared.warp_map[at][w], lane, of_warps[w]);
    float mine[kN];
#pragma unroll
    for (int c = 0; c < kN; ++c) mine[c] = carry[c];
    if (size > 1) {
      mbarrier_wait_cluster(shared.told[there], round / Tile::kRounds);
#pragma unroll
      for (int from = 0; from < kMostBlocks; ++from) {
        read(shared.tile_map[there][from < size ? from : 0], lane, of_blocks[from]);
      }
#pragma unroll
      for (int from = 0; from < kMostBlocks; ++from) {
        if (from < size) take_over(of_blocks[from], carry);
#pragma unroll
        for (int c = 0; c < kN; ++c) mine[c] = from < rank ? carry[c] : mine[c];
      }
    }
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) {
#pragma unroll
      for (int c = 0; c < kN; ++c) shared.carry[at][w][lane * kN + c] = mine[c];
      take_over(of_warps[w], mine);
    }
    mbarrier_arrive(shared.ready[at]);
    if (size == 1) {
#pragma unroll
      for (int c = 0; c < kN; ++c) carry[c] = mine[c];
    }
  }
#pragma unroll
  for (int c = 0; c < kN; ++c) first[c][0] = carry[c];
  if (rank == 0) e.end(first);
}

// One worker warp and its steps in every tile of the block.
template <typename Tile>
struct Worker {
  using Element = typename Tile::Element;
  using Raw = typename Element::Raw;
  using Word = typename Tile::Word;
  static constexpr int kN = Tile::kN, kSteps = Tile::kSteps, kRows = Tile::kRows;

  typename Tile::Shared& shared;
  Element& e;
  int warp, lane, word, stride, start;
  const char* from[kRows];  // addresses of this lane's pieces

  DEVICE Worker(const typename Element::Params& p, typename Tile::Shared& memory, Element& element,
                int64_t s, int64_t channel)
      : shared(memory), e(element), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
    const Element whole(p, s, channel);  // used for its row addresses, from its first channel on
    const int bytes = int(p.D - channel) * int(sizeof(typename Element::IO));
    const int piece = min(lane % Tile::kPieces * 16, bytes - 16);
    word = int(e.d - channel) / kN;  // a lane past the last channel repeats the last channel's work
    start = cluster_rank() * Tile::kLength + warp * kSteps;
    stride = cluster_size() * Tile::kLength;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      from[r] = static_cast<const char*>(whole.first(r)) + piece;
    }
  }

  DEVICE void request(int round) const {
    const int slot = round % Tile::kSlots, first = start + round * stride + lane / Tile::kPieces;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const char* row = from[r] + int64_t(first) * e.bytes(r);
      char* to = reinterpret_cast<char*>(shared.rows[slot][warp][r]) + lane * 16;
#pragma unroll
      for (int k = 0; k < kSteps; k += Tile::kTogether) {
        if (first + k < e.steps && e.needs(r, first + k)) {
          copy_async(to + k * int(sizeof(Word)) * 32, row + int64_t(k) * e.bytes(r));
        }
      }
    }
  }

  // Calls body(step, raw) for every step that exists. All rows of a full tile are read before the
  // body stores anything.
  template <typename Body>
  DEVICE void for_steps(int round, Body body) const {
    const auto& rows = shared.rows[round % Tile::kSlots][warp];
    const int first = start + round * stride;
    if (first + kSteps <= e.steps) {
      Raw raw[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) take(rows, k, raw[k]);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) body(first + k, raw[k]);
    } else {
#pragma unroll 1
      for (int k = 0; first + k < e.steps; ++k) {
        Raw raw;
        take(rows, k, raw);
        body(first + k, raw);
      }
    }
  }
  DEVICE void take(const Word (&rows)[kRows][kSteps][32], int k, Raw& raw) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw[r] = rows[r][k][word];
  }

  DEVICE void compose_steps(int round) const {
    constexpr int kBuffers = Tile::kBuffers;
    float A[kN][1][1], b[kN][1];
#pragma unroll
    for (int c = 0; c < kN; ++c) identity(A[c], b[c]);
    for_steps(round, [&](int i, const Raw& raw) {
      float step_A[kN][1][1], step_b[kN][1];
      e.map(raw, i, Mark{}, step_A, step_b);
#pragma unroll
      for (int c = 0; c < kN; ++c) compose(step_A[c], step_b[c], A[c], b[c]);
    });
    const int at = round % kBuffers;
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      shared.warp_map[at][warp][lane * kN + c] = {A[c][0][0], b[c][0]};
    }
    mbarrier_arrive(shared.full[at]);
  }

  DEVICE void advance(int round) {
    const int at = round % Tile::kBuffers;
    mbarrier_wait(shared.ready[at], round / Tile::kBuffers);
    float carry[kN][1];
#pragma unroll
    for (int c = 0; c < kN; ++c) carry[c][0] = shared.carry[at][warp][lane * kN + c];
    for_steps(round, [&](int i, const Raw& raw) { e.advance(raw, i, Mark{}, carry); });
    __syncwarp();
  }
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) cluster_scan_kernel(
    const __grid_constant__ typename Tile::Element::Params p, int rounds, int groups_of_row) {
#if __CUDA_ARCH__ >= 900
  using Element = typename Tile::Element;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  const int column = int(blockIdx.x / cluster_size()), s = column / groups_of_row;
  const int64_t channel = column % groups_of_row * int64_t(Tile::kChannels);
  const int warp = threadIdx.x / 32;
  Element e(p, s, channel + threadIdx.x % 32 * Tile::kN);
  if (threadIdx.x == 0) {
    for (int b = 0; b < Tile::kBuffers; ++b) {
      mbarrier_init(shared.full[b], 32 * Tile::kWarps);
      mbarrier_init(shared.ready[b], 2 * 32);
    }
    for (auto& told : shared.told) mbarrier_init(told, 1);
    mbarrier_init_fence();
  }
  __syncwarp();
  cluster_arrive();
  pdl_launch_dependents();
  pdl_wait();
  if (warp == Tile::kWarps) {
    cluster_wait();
    tell_maps<Tile>(shared, rounds);
  } else if (warp > Tile::kWarps) {
    cluster_wait();
    hand_carries<Tile>(shared, e, rounds);
  } else {
    Worker<Tile> worker(p, shared, e, s, channel);
#pragma unroll 1
    for (int round = 0; round < Tile::kSlots; ++round) {
      if (round < rounds) worker.request(round);
      copy_commit();
    }
    cluster_wait();
#pragma unroll 1
    for (int round = 0; round < rounds + Tile::kLag; ++round) {
      const int before = round - Tile::kLag;
      if (round < rounds) {
        if (round < Tile::kSlots)
          copy_wait<Tile::kSlots - 1>();
        else
          copy_wait<Tile::kSlots - Tile::kLag - 1>();
        __syncwarp();
        worker.compose_steps(round);
      }
      if (before >= 0) {
        worker.advance(before);
        if (before + Tile::kSlots < rounds) worker.request(before + Tile::kSlots);
      }
      copy_commit();
    }
  }
  // No cluster barrier is needed at the end: a block's last warp exits only after it has received
  // the maps of every round, so no other block writes to the shared memory of a block that has
  // exited.
#else
  __trap();  // the planner chooses this kernel only where clusters exist
#endif
}

}  // namespace flashcell::cuda
