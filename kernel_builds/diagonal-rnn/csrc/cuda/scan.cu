// linear_scan and block_scan: the choice of width, I/O type and kernel.
#include "launch_linear.cuh"

namespace flashcell::cuda {

// Steps of a warp in a tile: as many as leave room for two blocks on an H200 and for one where a
// block has 99 KB (1x65536x1024: forward 0.30 ms with 16, 0.38 with 8, 0.61 with 4).
template <template <typename, int, int> class Pass, int n>
constexpr int kTileSteps = n == 1   ? 8
                           : n == 2 ? 4
                           : n == 3 ? 2
                                    : 1;
template <>
constexpr int kTileSteps<ScanForward, 1> = 16;

template <template <typename, int, int> class Pass, typename IO, int kN, int n>
using Blocks = Linear<Pass<IO, kN, n>, n == 1 ? 8 : 2, 4, kTileSteps<Pass, n>>;

template <template <typename, int, int> class Pass, typename IO, typename Function>
static void for_width(const ScanParams& p, bool paired, Function function) {
  switch (p.n) {
    case 1:
      if constexpr (sizeof(IO) == 2) {
        if (paired) return function(Blocks<Pass, IO, 2, 1>());
      }
      return function(Blocks<Pass, IO, 1, 1>());
    case 2:
      return function(Blocks<Pass, IO, 1, 2>());
    case 3:
      return function(Blocks<Pass, IO, 1, 3>());
    case 4:
      return function(Blocks<Pass, IO, 1, 4>());
  }
  throw std::invalid_argument("diagonal_rnn: blocks are of 1 to 4");
}

template <template <typename, int, int> class Pass, typename Function>
static void for_io(const ScanParams& p, const Launch& to, Function function) {
  switch (to.dtype) {
    case Dtype::kFloat:
      return for_width<Pass, float>(p, to.paired, function);
    case Dtype::kBFloat16:
      return for_width<Pass, bf16>(p, to.paired, function);
    case Dtype::kHalf:
      return for_width<Pass, fp16>(p, to.paired, function);
    case Dtype::kDouble:
      break;
  }
  throw std::invalid_argument("diagonal_rnn: no CUDA engine for float64");
}

static Way way(const ScanParams& p, const Launch& to) {
  return scan_way(p.B * (to.paired ? p.D / 2 : p.D));
}

template <template <typename, int, int> class Pass>
static int64_t scratch(const ScanParams& p, const Launch& to) {
  int64_t bytes = 0;
  for_io<Pass>(p, to, [&](auto run) { bytes = decltype(run)::scratch(p.B, p.T, p.D, way(p, to)); });
  return bytes;
}
int64_t scan_scratch(const ScanForwardParams& p, const Launch& to) {
  return scratch<ScanForward>(p, to);
}
int64_t scan_scratch(const ScanBackwardParams& p, const Launch& to) {
  return scratch<ScanBackward>(p, to);
}

void scan_forward(const ScanForwardParams& p, const Launch& to) {
  for_io<ScanForward>(p, to,
                      [&](auto run) { decltype(run)::run(p, p.B, way(p, to), to, nullptr); });
}

void scan_backward(const ScanBackwardParams& p, const Launch& to) {
  for_io<ScanBackward>(p, to,
                       [&](auto run) { decltype(run)::run(p, p.B, way(p, to), to, nullptr); });
}

}  // namespace flashcell::cuda
