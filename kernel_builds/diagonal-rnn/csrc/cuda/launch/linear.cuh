// Runs a linear recurrence sequentially or in parallel: its scratch memory, its kernels, and the
// sums over steps at the end.
#pragma once
#include "../engine.h"
#include "../launch.h"
#include "../parallel/reach.cuh"
#include "../plan.h"
#include "../scan/single_pass.cuh"
#include "../sequential/kernels.cuh"

namespace flashcell::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kSumWarps = 8;

struct Partial {  // rows of sums that blocks have written
  const float* sums;
  int64_t rows;
};

// out[i] = sum over rows of partial[row][i], for i < count <= width of a row, in a fixed order; the
// warps share the rows. If `is_redone` is given and set, the rows of `redone` are summed instead.
static __global__ void __launch_bounds__(32 * kSumWarps) sum_kernel(Partial partial, Partial redone,
                                                                    const int* is_redone,
                                                                    int64_t width, int64_t count,
                                                                    float* out) {
  __shared__ float sums[kSumWarps][32];
  if (is_redone != nullptr && *is_redone != 0) partial = redone;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t i = blockIdx.x * int64_t(32) + lane;
  float sum = 0;
  if (i < count) {
#pragma unroll 8
    for (int64_t row = warp; row < partial.rows; row += kSumWarps) {
      sum += partial.sums[row * width + i];
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

// Adds up the rows of sums that a sequential pass or the tiles of a scan have written.
template <typename Element>
void add_up(const typename Element::Params& p, Partial partial, Partial redone,
            const int* is_redone, float* sums, const Launch& to) {
  if constexpr (Element::kSums > 0) {
    const int64_t count = Element::sum_rows(p) * p.D;
    launch(sum_kernel, {ceil_div(count, 32), 32 * kSumWarps, 0, to.stream}, partial, redone,
           is_redone, Element::kSums * p.D, count, sums);
  }
}

// The sequential pass: every thread runs its own channels of one of S sequences of D channels.
template <typename Element, int kWideThreads, int kSteps, int kGroups,
          Leaves kLeaves = Leaves::kInTurn>
struct Walk {
  using Params = typename Element::Params;

  static int64_t scratch(int64_t S, int64_t, int64_t D, Way) {
    return S * Element::kSums * D * int64_t(sizeof(float));
  }
  static void run(const Params& p, int64_t S, Way, const Launch& to, float* sums) {
    using Track = LinearTrack<Element, kSteps, kGroups, kLeaves>;
    const bool wide = walk_threads(ceil_div(p.D, Element::kN)) == kWalkThreads;
    const int threads = wide ? kWideThreads : kNarrowThreads;
    const int64_t blocks_of_row = ceil_div(p.D, threads * Element::kN);
    launch(linear_walk_kernel<Track, kWideThreads>,
           {S * blocks_of_row, threads, Track::Steps::bytes(to.device.code, threads), to.stream}, p,
           int(blocks_of_row), static_cast<float*>(to.scratch));
    add_up<Element>(p, {static_cast<const float*>(to.scratch), S}, {}, nullptr, sums, to);
  }
};

// The passes that are parallel in time: tiles that exchange their maps, with kResident blocks per
// SM, or chunks that each work out their own first carry.
template <typename Element, int kReachSteps, int kReachGroups, int kScanSteps, int kResident = 2>
struct Parallel {
  using Params = typename Element::Params;
  using T = Tile<Element, 8, kScanSteps>;
  static constexpr int kN = Element::kN, P = Element::kSums;
  static constexpr int64_t kTicketWords = 32;

  static Scan scan_of(int64_t S, int64_t steps, int64_t D, void* scratch) {
    Scan scan{};
    scan.tiles = steps > 0 ? int(ceil_div(steps, T::kLength)) : 1;
    scan.groups_of_row = int(ceil_div(D, T::kChannels));
    scan.columns = S * scan.groups_of_row;
    scan.ticket = static_cast<uint32_t*>(scratch);
    scan.maps = static_cast<float*>(scratch) + kTicketWords;
    scan.carries = scan.maps + S * scan.tiles * T::kMap * D;
    scan.partial = scan.carries + S * ceil_div(scan.tiles, T::kGroup) * T::K * D;
    return scan;
  }
  // The chunks' scratch follows the scan's, because the scan may have to run afterwards.
  static Reach reach_of(int64_t S, int64_t steps, int64_t D, const Scan& scan) {
    Reach reach{};
    const int64_t words = ceil_div(D, kN), rows_of_scan = S * scan.tiles;
    reach.chunk = chunk_steps(steps, S * words);
    reach.chunks = steps > 0 ? int(ceil_div(steps, reach.chunk)) : 1;
    reach.burn_in = kBurnIn, reach.longest_burn_in = kLongestBurnIn;
    reach.blocks_of_row = int(ceil_div(words, 32));
    const int64_t rows = S * reach.chunks;
    reach.start = scan.partial + rows_of_scan * P * D, reach.end = reach.start + rows * T::K * D;
    reach.largest = reach.end + rows * T::K * D, reach.partial = reach.largest + rows * D;
    reach.open = reinterpret_cast<int*>(reach.partial + rows * P * D);
    return reach;
  }
  static int64_t scratch(int64_t S, int64_t steps, int64_t D, Way way) {
    const Scan scan = scan_of(S, steps, D, nullptr);
    if (way == Way::kScan) return int64_t(uintptr_t(scan.partial + S * scan.tiles * P * D));
    return int64_t(uintptr_t(reach_of(S, steps, D, scan).open + 1));
  }

  static void run(const Params& p, int64_t S, Way way, const Launch& to, float* sums) {
    Scan scan = scan_of(S, p.T, p.D, to.scratch);
    Partial partial{scan.partial, S * scan.tiles}, redone{};
    const int* open = nullptr;
    if constexpr (P > 0) {
      if (way == Way::kReach) {
        const Reach reach = reach_of(S, p.T, p.D, scan);
        chunks(p, S, reach, to);
        open = scan.wanted = reach.open;
        redone = partial, partial = {reach.partial, S * reach.chunks};
      }
    }
    tiles(p, scan, to);
    add_up<Element>(p, partial, redone, open, sums, to);
  }

 private:
  static void tiles(const Params& p, const Scan& scan, const Launch& to) {
    const int64_t published =
        reinterpret_cast<char*>(scan.partial) - static_cast<char*>(to.scratch);
    check(cudaMemsetAsync(to.scratch, 0xff, size_t(published), to.stream));
    const int64_t tiles = scan.columns * scan.tiles, resident = kResident * to.device.sms;
    launch(scan_kernel<Element, 8, kScanSteps, kResident>,
           {tiles < resident ? tiles : resident, T::kThreads, T::bytes(to.device.code), to.stream},
           p, scan);
  }

  static void chunks(const Params& p, int64_t S, const Reach& reach, const Launch& to) {
    using Track = LinearTrack<Element, kReachSteps, kReachGroups>;
    const int64_t rows = S * reach.chunks;
    launch(reach_kernel<Track>,
           {rows * reach.blocks_of_row, 32, Track::Steps::bytes(to.device.code, 32), to.stream}, p,
           reach);
    launch(agree_kernel<T::K>, {ceil_div(rows * p.D, 256), 256, 0, to.stream},
           static_cast<const SequenceParams&>(p), reach);
  }
};

}  // namespace flashcell::cuda
