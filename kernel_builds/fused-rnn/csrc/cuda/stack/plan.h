// Decides whether the layers of a module run side by side (../../stack/wavefront.h), and in chunks
// of how many steps: a pure function of sizes and of the GPU.
#pragma once
#include "../plan.h"

namespace flashcell::cuda::wavefront {

// Either how often a call has each of these, or what one of each takes on the GPU, in us. A step
// takes longer the larger its load is, which is how often its thread blocks would fill the GPU, or
// a group's tiles, and the more it reads of the weight: `width` and `load_width` count 1024 units
// of a cell with four gates. `product` counts the us of all matrix products at their nominal rate.
// (On the gemm engine the load counts the us that the product of a step takes.)
struct Work {
  double step, load, width, load_width, product;
  double layer, wave, call;  // a layer that runs alone; a wave; and a call with waves
};

struct Costs {
  Work gpu;
  double start, host_layer, host_wave;  // of a call; and what the host takes to launch, in us
};

// The time of a call: the GPU waits for the host where that takes longer.
constexpr double total(const Work& n, const Costs& each) {
  const Work& gpu = each.gpu;
  const double busy = n.step * gpu.step + n.load * gpu.load + n.width * gpu.width +
                      n.load_width * gpu.load_width + n.product * gpu.product +
                      n.layer * gpu.layer + n.wave * gpu.wave;
  const double launches = n.layer * each.host_layer + n.wave * each.host_wave;
  return each.start + n.call * gpu.call + std::max(busy, launches);
}

// Fitted to the times of random modules on an H200 (scripts/plan_chunks): of an inference, and of a
// forward and a backward pass.
constexpr Costs kCosts[kEngineCount][2] = {
    {{{0.112, 0.311, 3.3, 0.0913, 4.6, 31, 11.1, 70.6}, 97.5, 18.6, 24.7},
     {{0.0973, 1.28, 4.45, 0.0246, 3.54, 191, 37.1, 455}, 655, 113, 58}},
    {{{0.299, 0.0853, 0.712, 0.0831, 2.43, 21.2, 13.2, 28.6}, 117, 30, 24.6},
     {{0.569, 0.151, 1.11, 0.163, 2.64, 86.6, 25.7, 366}, 658, 235, 66.7}},
    {{{0.856, 0.0794, 0.181, 0, 3.47, 50, 26.2, 33.9}, 111, 30, 42},
     {{1.29, 0.164, 0.685, 0.00593, 2.57, 187, 70.3, 198}, 553, 200, 113}},
    {},  // step
    {{{6.75, 0.325, 4.59, 0.0369, 1.6, 119, 73.8, 15.2}, 24.1, 30, 15},
     {{15.2, 0.706, 7.51, 0, 1.61, 252, 187, 57.9}, 54.3, 200, 60}},
    {{{0.195, 0.277, 2.27, 0.00904, 6.27, 26.8, 15.1, 42.5}, 95.7, 44.7, 25.1},
     {{0.209, 0.398, 4.01, 0.0179, 4.63, 91.8, 34.4, 227}, 818, 184, 62.7}},
    {},  // batch
    {},  // wide
};

// Layers run side by side if that takes less than kShare of the time of one layer after the other,
// less kLeastSaved us, because one estimate in ten is off by a third.
constexpr double kShare[2] = {0.95, 0.9}, kLeastSaved[2] = {60, 100};
constexpr int64_t kShortestChunk = 16, kMostChunks = 64;
// The most bytes of the outputs of all layers, which exist at the same time, and in a backward pass
// of their gradients too.
constexpr int64_t kMostBytes = int64_t(4) << 30;

struct Load {
  int64_t launches;  // that a step's heads are divided among
  double load;       // 1 or more
};

constexpr Load load_of(Engine engine, const Problem& p, const Device& device) {
  const auto ceil = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  if (engine == Engine::kBlock) {
    return {1, std::max(1.0, double(p.N * ceil(p.S, block_tile(p, device))) / device.sms)};
  }
  if (engine == Engine::kCluster) {
    const int64_t clusters = p.N * ceil(p.S, cluster::tile(p.S, p.N, p.D, device));
    return {1, double(ceil(clusters, std::max<int64_t>(1, cluster::at_once(p.D, device))))};
  }
  if (engine == Engine::kFma) {  // a block of one sequence, or of several in passes of four
    const int tile = fma::tile(p.S, p.N, p.D, p.gates, device);
    const int64_t together = std::max<int64_t>(1, fma::at_once(p.D, p.gates, device));
    return {ceil(p.N * ceil(p.S, tile), together), tile == 1 ? 1 : 1 + tile / 4.0};
  }
  if (engine == Engine::kGemm) {  // one more than the us that the product takes
    const int panels = int(gemm::round_up(p.D, gemm::kPanel) / gemm::kPanel);
    return {1, 1 + gemm::Tiles(p.S, p.gates * p.D, p.N, panels, device.sms).clocks / 1700};
  }
  Load best{0, 0};
  double least = 0;
  for (const int units : {grid::kTallUnits, grid::kUnits}) {
    const grid::Shape shape = grid::forward_shape(p.gates, 4, p.io_bytes, 1, units);
    const bool tall = units > grid::kUnits;
    if (tall && !(device.code.sm_90a && grid::has_tall_blocks(p.gates, p.io_bytes) &&
                  grid::blocks_of_depth(shape, p.D) == grid::kTallBlocks)) {
      continue;
    }
    const int64_t blocks = ceil(p.D, units), tiles = ceil(p.S, 8);
    const int64_t launches = ceil(p.N, std::max<int64_t>(1, device.sms / blocks));
    const int64_t heads = ceil(p.N, launches);
    const int64_t groups = std::clamp<int64_t>(device.sms / (heads * blocks), 1, tiles);
    const Load load{launches, double(ceil(tiles, groups))};
    const double time = double(launches) * (1 + 0.4 * load.load);
    if (best.launches == 0 || time < least) best = load, least = time;
  }
  return best;
}

// Adds `steps` steps of p.N layers, without the products of inputs and of weights' gradients.
constexpr void add_steps(Work& n, double steps, Engine engine, const Problem& p,
                         const Device& device) {
  const Load at = load_of(engine, p, device);
  const double count = steps * double(at.launches), more = at.load - 1;
  const double size = double(p.D) / 1024 * (p.gates + 1) / 4;
  n.step += count, n.load += count * more;
  n.width += count * size, n.load_width += count * more * size;
}

// A module of `layers` layers, each of which is p (p.N = 1).
struct Module {
  Problem p;
  int64_t layers;
  bool saves;  // whether a backward pass follows
  Device device;

  constexpr Problem together() const {
    Problem all = p;
    all.N = layers;
    return all;
  }
  constexpr Engine engine() const { return select_part(p, device); }
  constexpr Engine engine_together() const { return select_part(together(), device); }

  // Whether the layers may run side by side: all launches run on the same engine. Those of the gemm
  // engine only if they multiply in halves (gemm/split.h), because such products leave SMs idle.
  bool may_join() const {
    for (const Problem& q : {p, together()}) {
      const Engine engine = select_part(q, device);
      if (engine == Engine::kStep || select_engine(q, device) != engine) return false;
      if (saves && select_backward(q, device) != engine) return false;
      if (engine == Engine::kGemm && !gemm_sizes(q, device).splits()) return false;
    }
    return true;
  }
  // The least steps of a chunk: on the gemm engine so many that they run as a graph.
  constexpr int64_t shortest() const {
    const bool graph = engine() == Engine::kGemm || engine_together() == Engine::kGemm;
    return graph ? gemm::kLeastSteps + 1 : kShortestChunk;
  }

  constexpr double products() const {  // of a step of all layers
    const double rate = p.io_bytes == 2 ? 500 : is_exact(p, device) ? 80 : 200;
    const double multiplied = 2.0 * double(p.S) * p.gates * double(p.D) * double(p.D);
    return multiplied / 1e6 / rate * (saves ? 4 : 1) * double(layers);
  }

  constexpr Work alone() const {
    Work n{};
    add_steps(n, double(p.T * layers), engine(), p, device);
    n.product = double(p.T) * products(), n.layer = double(layers);
    return n;
  }

  constexpr int64_t waves(int64_t steps) const { return p.T / steps + layers - 1; }
  // Side by side in chunks of `steps` steps. The first T % steps run one layer after the other.
  constexpr Work chunked(int64_t steps) const {
    Work n{};
    const int64_t rest = p.T % steps;
    add_steps(n, double(waves(steps) * steps), engine_together(), together(), device);
    add_steps(n, double(layers * rest), engine(), p, device);
    n.product = double(p.T) * products(), n.call = 1;
    n.wave = double(waves(steps) + (rest > 0 ? layers : 0));
    return n;
  }

  constexpr bool has_room(int64_t steps) const {
    const int64_t rows = (waves(steps) * steps + p.T % steps) * p.S;
    const int64_t kept = saves ? 2 * (p.gates + 4) : 1;  // values of a unit at a step
    return rows * layers * p.D * kept * p.io_bytes <= kMostBytes;
  }
};

// Returns the steps of a chunk of `layers` layers, each of which is p (p.N = 1), or 0 for one layer
// after the other. `saves`: whether a backward pass will follow.
inline int64_t chunk_of(const Problem& p, int64_t layers, bool saves, const Device& device) {
  const Module module{p, layers, saves, device};
  if (!module.may_join()) return 0;
  const Costs& one = kCosts[int(module.engine())][saves];
  const Costs& all = kCosts[int(module.engine_together())][saves];
  double least = kShare[saves] * total(module.alone(), one) - kLeastSaved[saves];
  int64_t best = 0;
  for (int64_t chunks = 2; chunks <= kMostChunks && p.T / chunks >= module.shortest(); ++chunks) {
    const int64_t steps = p.T / chunks;
    if (p.T % chunks >= steps || !module.has_room(steps)) continue;
    const double time = total(module.chunked(steps), all);
    if (time < least) least = time, best = steps;
  }
  return best;
}

}  // namespace flashcell::cuda::wavefront
