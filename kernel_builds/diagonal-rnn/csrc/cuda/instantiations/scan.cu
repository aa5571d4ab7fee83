// linear_scan and block_scan on CUDA: chooses word width, I/O type and kernel.
#include "../launch/cluster.cuh"

namespace flashcell::cuda {

// Steps of a warp in a tile: as many as let two blocks share an SM of an H200, and one an SM whose
// blocks have 99 KB (1x65536x1024: forward 0.30 ms with 16 steps, 0.38 with 8, 0.61 with 4).
template <template <typename, int, int> class Pass, int n>
constexpr int kTileSteps = n == 1   ? 8
                           : n == 2 ? 4
                           : n == 3 ? 2
                                    : 1;
template <>
constexpr int kTileSteps<ScanForward, 1> = 16;

template <template <typename, int, int> class Pass, typename IO, int kN, int n>
using Tiles = Parallel<Pass<IO, kN, n>, 2, 4, kTileSteps<Pass, n>>;

// For the backward pass over many steps: three blocks per SM and longer tiles (1x65536x1024: fp32
// 0.461 ms instead of 0.474, bf16 0.304 instead of 0.340; but 1x4096x512 takes 21.0 us instead of
// 19.7, and 15.6 instead of 14.6).
template <template <typename, int, int> class Pass, typename IO, int kN>
using LongTiles = Parallel<Pass<IO, kN, 1>, 2, 4, 10, 3>;
constexpr int64_t kLongScan = 1 << 24;  // channel steps

// Scans of scalars by clusters. The parameters are warps, steps of a warp in a tile, tiles in
// shared memory, and rounds by which the carry may lag. Short 16-bit scans have one channel per
// thread, so that more blocks share them; fp32 scans with very many steps have two, so that rows
// are longer.
template <typename Element, int kBytes = int(sizeof(typename Element::Word))>
struct InClusters;
template <typename Element>
struct InClusters<Element, 2> : Clusters<Element, 8, 32, 3, 1> {};
template <typename Element>
struct InClusters<Element, 4>
    : std::conditional_t<!Element::kIsForward, Clusters<Element, 8, 16, 4, 1>,
                         std::conditional_t<Element::kN == 1, Clusters<Element, 11, 16, 4, 2>,
                                            Clusters<Element, 8, 16, 5, 2>>> {};
template <typename Element>
struct InClusters<Element, 8> : Clusters<Element, 8, 8, 6, 1> {};

// Sequential scans. The parameters are threads, steps per group and groups in flight. Words of 8
// bytes reach more bandwidth (8x2048x4096: fp32 forward 0.203 ms, against 0.220 with one channel
// per thread; bf16 0.103 against 0.121 with two) but need enough channels. Groups of 6 steps: fp32
// forward 0.194 ms, of 8 0.200, of 4 0.217. Words of 16 bytes, used by the fp32 forward only: 0.192
// ms and 0.198 (32x2048x1024), where words of 8 bytes take 0.193 and 0.204 in the same run; with
// L2's evict_last policy 0.189 and 0.194.
template <typename Element, bool kForward = Element::kIsForward,
          int kBytes = int(sizeof(typename Element::Word))>
using Steps = std::conditional_t<
    (Element::kStates > 1), Walk<Element, kWalkThreads, 2, 4>,
    std::conditional_t<sizeof(typename Element::IO) == 2,
                       Walk<Element, 64, kForward ? 8 : 4, kForward ? 6 : 8>,
                       std::conditional_t<kBytes == 16, Walk<Element, 64, 8, 3, Leaves::kLast>,
                                          Walk<Element, kWalkThreads, kForward ? 6 : 4, 4>>>>;

template <template <typename, int, int> class Pass, typename IO, typename Function>
static void for_width(const ScanParams& p, const Launch& to, Function function) {
  const Way way = scan_way(p.B * words_of_row(p.D, to));
  auto with = [&](auto channels, auto block) {
    constexpr int kN = decltype(channels)::value, n = decltype(block)::value;
    using Element = Pass<IO, kN, n>;
    if (way == Way::kSequential) return function(Steps<Element>(), way);
    if constexpr (kN * sizeof(IO) <= 4 && n == 1 && !Element::kIsForward) {
      if (p.B * p.T * p.D >= kLongScan) return function(LongTiles<Pass, IO, kN>(), way);
    }
    if constexpr (kN * sizeof(IO) <= 4 || n > 1) function(Tiles<Pass, IO, kN, n>(), way);
  };
  auto clusters = [&](auto channels) {
    function(InClusters<Pass<IO, decltype(channels)::value, 1>>(), Way::kScan);
  };
  using std::integral_constant;
  using One = integral_constant<int, 1>;
  constexpr int kWord = 4 / sizeof(IO), kWide = 2 * kWord;
  switch (p.n) {
    case 1: {
      constexpr bool kForward = Pass<IO, 1, 1>::kIsForward;
      const int channels = way == Way::kScan ? cluster_channels(p.B, p.T, p.D, kForward, to) : 0;
      if constexpr (kForward) {
        if (channels == 1) return clusters(One());
        if (channels == 2) return clusters(integral_constant<int, 2>());
      } else if (channels > 0) {
        return clusters(integral_constant<int, kWord>());
      }
      if constexpr (kForward && sizeof(IO) == 4) {
        if (way == Way::kSequential && to.together >= 4)
          return with(integral_constant<int, 4>(), One());
      }
      if (way == Way::kSequential && to.together >= kWide) {
        return with(integral_constant<int, kWide>(), One());
      }
      if constexpr (sizeof(IO) == 2) {
        if (to.together >= 2) return with(integral_constant<int, 2>(), One());
      }
      return with(One(), One());
    }
    case 2:
      return with(One(), integral_constant<int, 2>());
    case 3:
      return with(One(), integral_constant<int, 3>());
    case 4:
      return with(One(), integral_constant<int, 4>());
  }
  throw std::invalid_argument("diagonal_rnn: blocks are of 1 to 4");
}

template <template <typename, int, int> class Pass, typename Function>
static void for_io(const ScanParams& p, const Launch& to, Function function) {
  switch (to.dtype) {
    case Dtype::kFloat:
      return for_width<Pass, float>(p, to, function);
    case Dtype::kBFloat16:
      return for_width<Pass, bf16>(p, to, function);
    case Dtype::kHalf:
      return for_width<Pass, fp16>(p, to, function);
    case Dtype::kDouble:
      break;
  }
  throw std::invalid_argument("diagonal_rnn: no CUDA engine for float64");
}

template <template <typename, int, int> class Pass>
static int64_t scratch(const ScanParams& p, const Launch& to) {
  int64_t bytes = 0;
  for_io<Pass>(p, to, [&](auto run, Way way) { bytes = run.scratch(p.B, p.T, p.D, way); });
  return bytes;
}
int64_t scan_scratch(const ScanForwardParams& p, const Launch& to) {
  return scratch<ScanForward>(p, to);
}
int64_t scan_scratch(const ScanBackwardParams& p, const Launch& to) {
  return scratch<ScanBackward>(p, to);
}

void scan_forward(const ScanForwardParams& p, const Launch& to) {
  for_io<ScanForward>(p, to, [&](auto run, Way way) { run.run(p, p.B, way, to, nullptr); });
}

void scan_backward(const ScanBackwardParams& p, const Launch& to) {
  for_io<ScanBackward>(p, to, [&](auto run, Way way) { run.run(p, p.B, way, to, nullptr); });
}

}  // namespace flashcell::cuda
