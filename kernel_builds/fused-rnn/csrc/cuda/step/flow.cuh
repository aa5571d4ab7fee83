// What a launch of the step engine does, the same in both directions: it finds out what the step
// means for every sequence of its tile, loads weights and all that the cells need, multiplies, and
// runs the cells.
#pragma once
#include "tile.cuh"

namespace flashcell::cuda {

// Rows of a forward weight on their way to the L2: the one place where they may be before the
// launch before has ended, for whoever writes them writes them there.
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

// Finds the places of the tile that starts at sequence `first`, and starts to load the weights:
// `find(s, runs, listed)` gives the place of a sequence, whether it needs a product, and whether it
// needs anything. `ran` is the step that left the operand. False where nothing is to be done.
template <typename Product, typename Find>
DEVICE bool begin(Task& task, typename Product::Weights& weights,
                  Places<Product::kSequences>& places, const SequenceParams& p, const Step& step,
                  int64_t first, int ran, Find find) {
  // Before the first launch of a call, anything may be writing what it reads.
  const bool reads = p.sequences != nullptr || p.reset != nullptr || p.hold != nullptr;
  if (!step.follows && reads) wait_for_previous();
  if (!Column(p, first).runs(ran)) task.end = task.begin;  // the longest of the tile
  task.places = places.place;
  bool runs = false, listed = false;
  if (threadIdx.x < Product::kSequences) {
    places.place[threadIdx.x] = find(first + threadIdx.x, runs, listed);
  }
  places.count(runs, listed);
  if (!step.follows) wait_for_previous();
  weights.load(task);  // after the places, which would wait for these loads
  __syncthreads();
  const int total = places.total();
  wait_for_previous();
  start_next();
  task.columns = total & 0xffff;
  return total >= 1 << 16;
}

// The product of the tile and then its cells, `finish(cell, column, unit, product)` each. A rank
// runs those of its part of the units; neighbours in a row are neighbouring threads.
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
