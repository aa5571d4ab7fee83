// The course of a launch of the step engine, the same in both directions: it finds the place of
// every sequence of its tile, loads weights and the inputs of the cells, multiplies, and runs the
// cells.
#pragma once
#include "tile.cuh"

namespace flashcell::cuda {

// Prefetches rows of a forward weight to L2. This is safe before the preceding kernel has ended: a
// kernel that still writes the weights writes them to L2, so no stale copy can arise there.
template <typename IO, typename Product>
DEVICE void prefetch_weights([[maybe_unused]] const Task& task) {
#if __CUDA_ARCH__ >= 900
  constexpr int kLine = 128 / sizeof(IO), kLanes = 8;
  for (int i = threadIdx.x / kLanes; i < Product::kRows * Product::kUnits;
       i += Product::kThreads / kLanes) {
    const int gate = i / Product::kUnits, unit = task.unit + i % Product::kUnits;
    if (unit >= task.D) continue;
    const IO* row =
        static_cast<const IO*>(task.weight) + gate * task.weight_gate + int64_t(unit) * task.D;
    for (int at = task.begin + threadIdx.x % kLanes * kLine; at < task.end; at += kLanes * kLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row + at));
    }
  }
#endif
}

// Finds the places of the tile that starts at sequence `first`, and starts to load the weights.
// `find(s, runs, listed)` returns the place of a sequence, and sets whether it needs a product and
// whether it needs anything at all. `ran` is the step that left the operand. Returns false if there
// is nothing to do.
template <typename Product, typename Find>
DEVICE bool begin(Task& task, typename Product::Weights& weights,
                  Places<Product::kSequences>& places, const SequenceParams& p, const Step& step,
                  int64_t first, int ran, Find find) {
  // Before the first launch of a call, some other kernel may still be writing what this reads.
  const bool reads = p.sequences != nullptr || p.reset != nullptr || p.hold != nullptr;
  if (!step.follows && reads) wait_for_previous();
  // The first sequence is the longest of the tile.
  if (!Column(p, first).runs(ran)) task.end = task.begin;
  task.places = places.place;
  bool runs = false, listed = false;
  if (threadIdx.x < Product::kSequences) {
    places.place[threadIdx.x] = find(first + threadIdx.x, runs, listed);
  }
  places.count(runs, listed);
  if (!step.follows) wait_for_previous();
  weights.load(task);  // after finding the places, which would otherwise wait for these loads
  __syncthreads();
  const int total = places.total();
  wait_for_previous();
  start_next();
  task.columns = total & 0xffff;
  return total >= 1 << 16;
}

// Computes the product of the tile, then calls finish(cell, column, unit, product) for every cell.
// A rank runs the cells of its part of the units; neighbouring threads have neighbouring units.
template <typename Product, typename Cell, typename Params, typename Finish>
DEVICE void multiply_and_finish(const Task& task, typename Product::Weights& weights,
                                const Params& p, const Step& step, const Tile<Product>& tile,
                                Finish finish) {
  const int ranks = 1 << step.rank_bits, bits = tile.bits, unit = tile.rank << bits;
  const int cells = tile.sequences(p) << bits;
  const auto load = [&](int i, Cell& cell) {
    const int of = tile.unit + unit + (i & ((1 << bits) - 1));
    const bool inside = i < cells && of < step.D;
    cell.load(inside, p, step, task.places[inside ? i >> bits : 0], tile.head, of);
  };
  const auto sum_and_finish = [&](int i, const Cell& cell) {
    const int of = unit + (i & ((1 << bits) - 1)), column = i >> bits;
    if (i >= cells || tile.unit + of >= step.D) return;
    float product[Product::kRows] = {};
    if (column < task.columns) Product::sum(product, ranks, column, of - unit, bits);
    finish(cell, column, of, product);
  };
  Cell ahead[Product::kCells];
#pragma unroll
  for (int j = 0; j < Product::kCells; ++j) load(threadIdx.x + j * Product::kThreads, ahead[j]);

  if (task.columns > 0) {
    Product::run(task, weights);
    meet(ranks);
    if (ranks > 1) Product::gather(ranks, task.columns, unit, bits);
  }
#pragma unroll
  for (int j = 0; j < Product::kCells; ++j) {
    sum_and_finish(threadIdx.x + j * Product::kThreads, ahead[j]);
  }
#pragma unroll 1
  for (int i = threadIdx.x + Product::kCells * Product::kThreads; i < cells;
       i += Product::kThreads) {
    load(i, ahead[0]), sum_and_finish(i, ahead[0]);
  }
}

}  // namespace flashcell::cuda
