// Runs a cell on CUDA in both directions. One source file for each cell includes it.
#pragma once
#include "../parallel/adjoint.cuh"
#include "../parallel/multiple_shooting.cuh"
#include "../parallel/newton.cuh"
#include "linear.cuh"

namespace flashcell::cuda {

// Selects the instantiation for a call: I/O type, channels per word, masks. 16-bit rows with an odd
// number of channels are rare and use the one-channel kernels. Words of two fp32 channels are for
// sequential passes over many channels only.
template <bool kWalks, typename Function>
void for_lanes(const SequenceParams& p, const Launch& to, Function function) {
  const bool masked = p.reset != nullptr || p.hold != nullptr, paired = to.together >= 2;
  auto with = [&](auto io, auto channels) {
    if (masked || (sizeof(io) == 2 && decltype(channels)::value == 1)) {
      function(io, channels, std::true_type());
    } else if constexpr (sizeof(io) == 4 || decltype(channels)::value == 2) {
      function(io, channels, std::false_type());
    }
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  switch (to.dtype) {
    case Dtype::kFloat:
      if constexpr (kWalks) {
        if (paired && p.S * p.D >= kPairedChannels) return with(float(), Two());
      }
      return with(float(), One());
    case Dtype::kBFloat16:
      return paired ? with(bf16(), Two()) : with(bf16(), One());
    case Dtype::kHalf:
      return paired ? with(fp16(), Two()) : with(fp16(), One());
    case Dtype::kDouble:
      break;
  }
  throw std::invalid_argument("diagonal_rnn: no CUDA engine for float64");
}

template <typename Cell>
int64_t Engine<Cell>::forward_scratch(const ForwardParams& p, const Launch& to) {
  if (p.method != Method::kMultipleShooting) return 0;
  const int chunk = chunk_steps(p.T, p.S * words_of_row(p.D, to));
  const int64_t chunks = (p.T + chunk - 1) / chunk, K = Cell::kStates;
  return p.S * (chunks > 0 ? chunks : 1) * (2 * K + K * K) * p.D * int64_t(sizeof(float));
}

template <typename Track>
void run_walk(const ForwardParams& p, const Launch& to) {
  const int threads = walk_threads(ceil_div(p.D, Track::kN));
  const int64_t blocks_of_row = ceil_div(p.D, threads * Track::kN);
  launch(walk_kernel<Track>,
         {p.S * blocks_of_row, threads, Track::Steps::bytes(to.device.code, threads), to.stream}, p,
         int(blocks_of_row));
}

template <typename Cell, typename IO, int kN, bool kMasked>
void run_shoot(const ForwardParams& p, const Launch& to) {
  using Own = Track<Cell, IO, kN, kMasked>;
  constexpr int kWarps = 8;  // of the second kernel
  Shoot shoot{};
  shoot.chunk = chunk_steps(p.T, p.S * words_of_row(p.D, to));
  shoot.chunks = p.T > 0 ? int(ceil_div(p.T, shoot.chunk)) : 1;
  shoot.burn_in = kBurnIn, shoot.longest_burn_in = kLongestBurnIn;
  shoot.passes = p.max_iters < 0 ? kShootPasses : int(p.max_iters);
  const double tolerance = sizeof(IO) == 4 ? kTolerance : kTolerance16;
  shoot.tol = float(p.tol < 0 ? tolerance : p.tol);
  shoot.blocks_of_row = int(ceil_div(p.D, 32 * kN)), shoot.groups_of_row = shoot.blocks_of_row;
  const int64_t boundaries = p.S * shoot.chunks * Cell::kStates * p.D;
  shoot.start = static_cast<float*>(to.scratch), shoot.end = shoot.start + boundaries;
  shoot.slope = shoot.end + boundaries;
  launch(shoot_kernel<Own>,
         {p.S * shoot.chunks * shoot.blocks_of_row, 32, Own::Steps::bytes(to.device.code, 32),
          to.stream},
         p, shoot);
  launch(settle_kernel<Own, kWarps>,
         {p.S * shoot.groups_of_row, 32 * kWarps, Own::Steps::bytes(to.device.code, 32 * kWarps),
          to.stream, to.device.code.arch >= 90},
         p, shoot);
}

template <typename Cell, typename IO, bool kMasked>
void run_newton(const ForwardParams& p, const Launch& to) {
  constexpr bool kAsksForMasks =
      kMasked || sizeof(IO) == 2;  // 16 bits have one kernel, to save code
  const int64_t groups = ceil_div(p.D, 32);
  const double tolerance = sizeof(IO) == 4 ? kTolerance : kTolerance16;
  check(cudaMemsetAsync(p.report, 0, 3 * sizeof(float), to.stream));
  launch(newton_kernel<Cell, IO, kAsksForMasks, 8, 8>, {p.S * groups, 256, 0, to.stream}, p,
         int(groups), float(p.tol < 0 ? tolerance : p.tol),
         p.max_iters < 0 ? kNewtonIterations : int(p.max_iters));
}

template <typename Cell>
void Engine<Cell>::forward(const ForwardParams& p, const Launch& to) {
  if (p.method == Method::kSequential) {
    return for_lanes<true>(p, to, [&](auto io, auto channels, auto masked) {
      constexpr int kN = decltype(channels)::value;
      run_walk<Track<Cell, decltype(io), kN, decltype(masked)::value>>(p, to);
    });
  }
  for_lanes<false>(p, to, [&](auto io, auto channels, auto masked) {
    using IO = decltype(io);
    constexpr bool kMasked = decltype(masked)::value;
    if (p.method == Method::kNewton) return run_newton<Cell, IO, kMasked>(p, to);
    run_shoot<Cell, IO, decltype(channels)::value, kMasked>(p, to);
  });
}

// Steps of a warp in a tile of the scan: as many as let two blocks share an SM (8x2048x4096: GRU
// fp32 0.92 ms with 8 and 1.05 with 4; LSTM fp32 1.26 with 6 and 1.83 with 8, bf16 0.95 with 4 and
// 1.28 with 6).
template <typename Cell, int kN>
constexpr int kTileSteps = Cell::kStates == 1 ? 8
                           : kN == 1          ? 6
                                              : 4;

// Calls function(run, way), where `run` implements the backward pass of this call and `way` is how
// it is parallelised.
template <typename Cell, typename Function>
void for_way(const BackwardParams& p, const Launch& to, Function function) {
  const Way way = backward_way(p.T, p.S * words_of_row(p.D, to));
  if (way == Way::kSequential) {
    return for_lanes<true>(p, to, [&](auto io, auto channels, auto masked) {
      constexpr int kN = decltype(channels)::value;
      constexpr bool kMasked = decltype(masked)::value, kOnce = sizeof(io) == 4 && !kMasked;
      // Longer groups read fewer states (8x2048x4096 and 32x2048x1024: GRU 0.470 and 0.500 ms in
      // groups of 8, 0.484 and 0.505 in groups of 4, 0.527 and 0.551 when all states are read; LSTM
      // 0.503 and 0.524 in groups of 4, 0.593 and 0.610 when all are read).
      constexpr bool kLong = kOnce && kN == 2 && Cell::kStates == 1;
      constexpr int kSteps = kLong ? 8 : 4, kGroups = kLong ? 2 : 4;
      using E = Adjoint<Cell, decltype(io), kN, kMasked, kOnce>;
      function(Walk<E, kWalkThreads, kSteps, kGroups>(), way);
    });
  }
  for_lanes<false>(p, to, [&](auto io, auto channels, auto masked) {
    constexpr int kN = decltype(channels)::value;
    using E = Adjoint<Cell, decltype(io), kN, decltype(masked)::value>;
    function(Parallel<E, 4, 4, kTileSteps<Cell, kN>>(), way);
  });
}

template <typename Cell>
int64_t Engine<Cell>::backward_scratch(const BackwardParams& p, const Launch& to) {
  int64_t bytes = 0;
  for_way<Cell>(p, to, [&](auto run, Way way) { bytes = run.scratch(p.S, p.T, p.D, way); });
  return bytes;
}

template <typename Cell>
void Engine<Cell>::backward(const BackwardParams& p, const Launch& to) {
  for_way<Cell>(
      p, to, [&](auto run, Way way) { run.run(p, p.S, way, to, static_cast<float*>(p.dweight)); });
}

}  // namespace flashcell::cuda
