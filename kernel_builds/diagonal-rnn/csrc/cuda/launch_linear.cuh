// How a linear recurrence is run: walk or scan, their scratch, and the sums at the end.
#pragma once
#include "engine.h"
#include "launch.h"
#include "plan.h"
#include "reach.cuh"
#include "scan.cuh"
#include "walk.cuh"

namespace flashcell::cuda {

constexpr int kSumWarps = 8;

struct Partial {  // rows of sums that blocks left behind
  const float* sums;
  int64_t rows;
};

// out[i] = sum over rows of partial[row][i], in a fixed order; warps share the rows. The rows are
// `redone` where there is such a flag and it stands.
static __global__ void __launch_bounds__(32 * kSumWarps) sum_kernel(Partial partial, Partial redone,
                                                                    const int* is_redone,
                                                                    int64_t count, float* out) {
  __shared__ float sums[kSumWarps][32];
  if (is_redone != nullptr && *is_redone != 0) partial = redone;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t i = blockIdx.x * int64_t(32) + lane;
  float sum = 0;
  if (i < count) {
#pragma unroll 8
    for (int64_t row = warp; row < partial.rows; row += kSumWarps) {
      sum += partial.sums[row * count + i];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || i >= count) return;
  sum = 0;
#pragma unroll
  for (int w = 0; w < kSumWarps; ++w) sum += sums[w][lane];
  out[i] = sum;
}

// S sequences of D channels and T steps.
template <typename Element, int kWalkSteps, int kWalkGroups, int kScanSteps>
struct Linear {
  using Params = typename Element::Params;
  using T = Tile<Element, 8, kScanSteps>;
  static constexpr int kN = Element::kN, P = Element::kSums;
  static constexpr int64_t kTicketWords = 32;

  static Scan scan_of(int64_t S, int64_t steps, int64_t D, void* scratch) {
    Scan scan{};
    scan.tiles = steps > 0 ? int((steps + T::kLength - 1) / T::kLength) : 1;
    scan.groups_of_row = int((D + T::kChannels - 1) / T::kChannels);
    scan.columns = S * scan.groups_of_row;
    scan.ticket = static_cast<uint32_t*>(scratch);
    scan.maps = static_cast<float*>(scratch) + kTicketWords;
    scan.carries = scan.maps + S * scan.tiles * T::kMap * D;
    scan.partial = scan.carries + S * ((scan.tiles + T::kGroup - 1) / T::kGroup) * T::K * D;
    return scan;
  }
  // What the chunks need lies behind what the scan needs, should it run after all.
  static Reach reach_of(int64_t S, int64_t steps, int64_t D, const Scan& scan) {
    Reach reach{};
    const int64_t words = (D + kN - 1) / kN, rows_of_scan = S * scan.tiles;
    reach.chunk = chunk_steps(steps, S * words);
    reach.chunks = steps > 0 ? int((steps + reach.chunk - 1) / reach.chunk) : 1;
    reach.burn_in = kBurnIn, reach.longest_burn_in = kLongestBurnIn;
    reach.blocks_of_row = int((words + 31) / 32);
    const int64_t rows = S * reach.chunks;
    reach.start = scan.partial + rows_of_scan * P * D, reach.end = reach.start + rows * T::K * D;
    reach.largest = reach.end + rows * T::K * D, reach.partial = reach.largest + rows * D;
    reach.open = reinterpret_cast<int*>(reach.partial + rows * P * D);
    return reach;
  }
  static int64_t scratch(int64_t S, int64_t steps, int64_t D, Way way) {
    if (way == Way::kWalk) return S * P * D * int64_t(sizeof(float));
    const Scan scan = scan_of(S, steps, D, nullptr);
    if (way == Way::kScan) return int64_t(uintptr_t(scan.partial + S * scan.tiles * P * D));
    return int64_t(uintptr_t(reach_of(S, steps, D, scan).open + 1));
  }

  static void run(const Params& p, int64_t S, Way way, const Launch& to, float* sums) {
    const int64_t words = (p.D + kN - 1) / kN;
    Partial partial{static_cast<const float*>(to.scratch), S}, redone{};
    const int* open = nullptr;
    if (way == Way::kWalk) {
      if (walk_threads(words) == kWalkThreads)
        walk<kWalkThreads>(p, S, to);
      else
        walk<kNarrowThreads>(p, S, to);
    } else {
      Scan scan = scan_of(S, p.T, p.D, to.scratch);
      partial = {scan.partial, S * scan.tiles};
      if constexpr (P > 0) {
        if (way == Way::kReach) {
          const Reach reach = reach_of(S, p.T, p.D, scan);
          chunks(p, S, reach, to);
          open = scan.wanted = reach.open;
          redone = partial, partial = {reach.partial, S * reach.chunks};
        }
      }
      tiles(p, scan, to);
    }
    if constexpr (P > 0) {
      launch(sum_kernel, {(P * p.D + 31) / 32, 32 * kSumWarps, 0, to.stream}, partial, redone, open,
             P * p.D, sums);
    }
  }

  static void tiles(const Params& p, const Scan& scan, const Launch& to) {
    const int64_t published =
        reinterpret_cast<char*>(scan.partial) - static_cast<char*>(to.scratch);
    check(cudaMemsetAsync(to.scratch, 0xff, size_t(published), to.stream));
    const int64_t tiles = scan.columns * scan.tiles, resident = 2 * to.device.processors;
    launch(scan_kernel<Element, 8, kScanSteps>,
           {tiles < resident ? tiles : resident, T::kThreads, int(sizeof(typename T::Shared)),
            to.stream},
           p, scan);
  }

  static void chunks(const Params& p, int64_t S, const Reach& reach, const Launch& to) {
    using Track = LinearTrack<Element, 32, kWalkSteps, kWalkGroups>;
    const int64_t rows = S * reach.chunks;
    launch(reach_kernel<Track>, {rows * reach.blocks_of_row, 32, Track::Steps::kBytes, to.stream},
           p, reach);
    launch(agree_kernel<T::K>, {(rows * p.D + 255) / 256, 256, 0, to.stream},
           static_cast<const SequenceParams&>(p), reach);
  }

  template <int kThreads>
  static void walk(const Params& p, int64_t S, const Launch& to) {
    using Track = LinearTrack<Element, kThreads, kWalkSteps, kWalkGroups>;
    const int64_t words = (p.D + kN - 1) / kN, blocks_of_row = (words + kThreads - 1) / kThreads;
    launch(linear_walk_kernel<Track>,
           {S * blocks_of_row, kThreads, Track::Steps::kBytes, to.stream}, p, int(blocks_of_row),
           static_cast<float*>(to.scratch));
  }
};

}  // namespace flashcell::cuda
