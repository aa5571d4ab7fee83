// Launches the kernels of the recurrent weight's gradient: chooses tile and splits, sizes scratch.
#include "kernel.cuh"

#include "../launch.h"

namespace flashcell::cuda {

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Narrow heads use a tile of 256 by 64, which reads dr only once; exact fp32 uses 128 by 128.
static bool is_narrow(const DweightParams& p, Dtype dtype, const Launch& launch) {
  return p.D <= 64 && (dtype != Dtype::kFloat || launch.tf32);
}

static DweightPlan make_plan(const DweightParams& p, Dtype dtype, const Launch& launch) {
  const bool narrow = is_narrow(p, dtype, launch);
  const int64_t tiles_m = divide_up(p.G * p.D, narrow ? 256 : 128);
  const int64_t tiles_n = divide_up(p.D, narrow ? 64 : 128);
  const int64_t depth = dtype == Dtype::kFloat ? 16 : 32;
  // Two blocks fit on an SM. Splitting pays only with enough stages per split, because of its
  // partial sums.
  const int64_t wanted = 2 * launch.device.sms / (tiles_m * tiles_n * p.N);
  const int64_t worth = divide_up(p.rows, 8 * depth);
  const int64_t splits = wanted < 1 || worth < 1 ? 1 : wanted < worth ? wanted : worth;
  const int64_t split_rows = divide_up(divide_up(p.rows, splits), depth) * depth;
  return {int(tiles_m), int(tiles_n), p.rows ? int(divide_up(p.rows, split_rows)) : 1, split_rows};
}

int64_t dweight_scratch(const DweightParams& p, Dtype dtype, const Launch& launch) {
  if (p.N == 0 || p.D == 0) return 0;
  const int64_t splits = make_plan(p, dtype, launch).splits;
  return splits == 1 ? 0 : splits * p.G * p.N * p.D * p.D * int64_t(sizeof(float));
}

template <typename IO, bool kMatrix, int kWarpsM, int kWarpsN, bool kVectors>
static void run(const DweightParams& p, const DweightPlan& plan, const Launch& launch) {
  using Tile = DweightTile<IO, kMatrix, kWarpsM, kWarpsN>;
  const auto kernel = dweight_kernel<IO, kMatrix, kWarpsM, kWarpsN, kVectors>;
  const int bytes = Tile::shared_bytes(launch.device.code);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t blocks = int64_t(plan.tiles_m) * plan.tiles_n * p.N * plan.splits;
  kernel<<<unsigned(blocks), Tile::kThreads, bytes, launch.stream>>>(p, plan);
  check(cudaGetLastError());
  if (plan.splits == 1) return;
  const int64_t count = p.G * p.N * p.D * p.D;
  dweight_sum_kernel<IO><<<unsigned(divide_up(count, 256)), 256, 0, launch.stream>>>(
      static_cast<const float*>(p.scratch), plan.splits, count, static_cast<IO*>(p.dweight));
  check(cudaGetLastError());
}

template <typename IO>
static void run(const DweightParams& p, Dtype dtype, const Launch& launch) {
  const DweightPlan plan = make_plan(p, dtype, launch);
  const auto aligned = [](const void* q) { return reinterpret_cast<uintptr_t>(q) % 16 == 0; };
  const bool vectors = p.D % IoTraits<IO>::kVector == 0 && aligned(p.dr) && aligned(p.h_prev);
  if constexpr (sizeof(IO) == 4) {
    if (!launch.tf32) {
      return vectors ? run<IO, false, 2, 4, true>(p, plan, launch)
                     : run<IO, false, 2, 4, false>(p, plan, launch);
    }
  }
  if (is_narrow(p, dtype, launch)) {
    return vectors ? run<IO, true, 4, 2, true>(p, plan, launch)
                   : run<IO, true, 4, 2, false>(p, plan, launch);
  }
  return vectors ? run<IO, true, 2, 4, true>(p, plan, launch)
                 : run<IO, true, 2, 4, false>(p, plan, launch);
}

void recurrent_dweight(const DweightParams& p, Dtype dtype, const Launch& launch) {
  if (p.N == 0 || p.D == 0) return;
  switch (dtype) {
    case Dtype::kBFloat16:
      return run<bf16>(p, dtype, launch);
    case Dtype::kHalf:
      return run<fp16>(p, dtype, launch);
    case Dtype::kFloat:
      return run<float>(p, dtype, launch);
    case Dtype::kDouble:
      break;
  }
  throw std::invalid_argument("fused_rnn: no CUDA engine for float64");
}

}  // namespace flashcell::cuda
