// Decides whether the layers of a module run side by side (../../stack/wavefront.h), and in chunks
// of how many steps: a pure function of sizes and of the GPU.
#pragma once
#include "../plan.h"

namespace flashcell::cuda::wavefront {

// Times in us, or how many of each a call takes: its time is the sum of the products. Those of a
// step grow with the load, which is how often its thread blocks would fill the GPU, or a group's
// tiles, and with what it reads of the weight. `width` and `load_width` are those of 1024 units of
// a cell with four gates, `product` that of a matrix product of 1e6 fp16 multiplications.
struct Costs {
  double step, load, width, load_width, product;
  double layer, wave, call;  // a layer that runs alone; a wave; and a call with waves
};

constexpr double total(const Costs& n, const Costs& each) {
  return n.step * each.step + n.load * each.load + n.width * each.width +
         n.load_width * each.load_width + n.product * each.product + n.layer * each.layer +
         n.wave * each.wave + n.call * each.call;
}

// Fitted to 7,129 times of random modules on an H200 (scripts/plan_chunks): of an inference, and of
// a forward and a backward pass. A fit cannot tell the passes of the fma engine's blocks from the
// products, which grow alike, so the loads and products of its row are those with which the plan
// takes the fastest of the measured ways most often.
constexpr Costs kCosts[kEngineCount][2] = {
    {{0.09, 0.107, 2.89, 0.00, 4.32, 57, 18, 147}, {0.06, 0.406, 3.91, 7.99, 3.56, 358, 52, 1011}},
    {{0.31, 0.086, 0.66, 0.00, 2.63, 56, 16, 126}, {0.40, 0.208, 1.12, 0.13, 2.44, 344, 47, 889}},
    {{0.50, 0.128, 0.47, 0.00, 3.36, 77, 26, 148}, {0.66, 0.353, 1.09, 0.00, 2.41, 345, 73, 773}},
    {},  // step
    {},  // gemm
    {{0.25, 0.50, 2.44, 2.00, 2.5, 47, 17, 135}, {0.19, 2.00, 3.93, 7.00, 2.0, 340, 55, 895}},
    {},  // batch
};

// Side by side has to take less than kShare of the time of one layer after the other, and to save
// so many us more, because 1 in 10 estimates is off by a third.
constexpr double kShare[2] = {0.9, 0.8}, kLeastSaved[2] = {100, 250};
constexpr int64_t kShortestChunk = 4, kMostChunks = 64;
// The outputs of all layers are there at once, in a backward pass their gradients too: so many
// bytes at most.
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
constexpr void add_steps(Costs& n, double steps, Engine engine, const Problem& p,
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
  constexpr Engine engine() const { return select_own(p, device); }
  constexpr Engine engine_together() const { return select_own(together(), device); }

  // Whether the layers may run side by side: all launches run on the same engine.
  bool may_join() const {
    for (const Problem& q : {p, together()}) {
      const Engine own = select_own(q, device);
      if (own == Engine::kStep || select_engine(q, device) != own) return false;
      if (saves && select_backward(q, device) != own) return false;
    }
    return true;
  }

  constexpr double products() const {  // of a step of all layers
    const double rate = p.io_bytes == 2 ? 500 : is_exact(p, device) ? 80 : 200;
    const double multiplied = 2.0 * double(p.S) * p.gates * double(p.D) * double(p.D);
    return multiplied / 1e6 / rate * (saves ? 4 : 1) * double(layers);
  }

  constexpr Costs alone() const {
    Costs n{};
    add_steps(n, double(p.T * layers), engine(), p, device);
    n.product = double(p.T) * products(), n.layer = double(layers);
    return n;
  }

  constexpr int64_t waves(int64_t steps) const { return p.T / steps + layers - 1; }
  // Side by side in chunks of `steps` steps. The first T % steps run one layer after the other.
  constexpr Costs chunked(int64_t steps) const {
    Costs n{};
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
  for (int64_t chunks = 2; chunks <= kMostChunks && p.T / chunks >= kShortestChunk; ++chunks) {
    const int64_t steps = p.T / chunks;
    if (p.T % chunks >= steps || !module.has_room(steps)) continue;
    const double time = total(module.chunked(steps), all);
    if (time < least) least = time, best = steps;
  }
  return best;
}

}  // namespace flashcell::cuda::wavefront
