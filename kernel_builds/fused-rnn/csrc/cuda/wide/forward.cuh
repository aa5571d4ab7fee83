// The forward pass of the wide engine; launch.cuh describes it.
#pragma once
#include "block.cuh"
#include "product.cuh"

namespace flashcell::cuda {

template <typename Cell, int kSequences>
struct WideForward {
  using V = Full;
  using Params = ForwardParams;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;
  using Product = WideProduct<wide::forward_rows(G), kSequences>;
  using Tile = FmaTile<kSequences, 1>;

  // Writes a step of a cell: h, which the other thread blocks wait for, the state before the step
  // and the saved values. A step that is held writes zeros.
  static DEVICE void write(const ForwardParams& p, int64_t row, int at, int width, bool runs,
                           float h, float h_prev, const float (&saved)[kKept]) {
    float* to = (float*)p.h + row * width + at;
    store_relaxed(to, runs ? min(__float_as_uint(h), kUnwritten - 1) : 0u);
    if (p.saved == nullptr) return;
    ((float*)p.h_prev)[row * width + at] = runs ? h_prev : 0.0f;
    float* kept = (float*)p.saved + row * kKept * width + at;
#pragma unroll
    for (int v = 0; v < kKept; ++v) kept[int64_t(v) * width] = runs ? saved[v] : 0.0f;
  }

  static DEVICE void run(const ForwardParams& p, const wide::Memory& m, int first_head,
                         const float* /*transposed*/, float* memory) {
    const WideBlock block(p, m, first_head);
    const int width = int(p.N * p.D), head_at = int(block.head * p.D);
    const int at = head_at + block.first_unit + block.unit;  // of the thread's cell in a row
    const int sequences = block.sequences(p, m);
    const int steps = longest(p, block.first, sequences);

    Tile tile(p, m, memory, block.first, p.x_batch);
    // Row r of the thread block's weight; there is one for every gate of a unit.
    const auto weight = [&](int r) {
      const int unit = block.first_unit + min(r / G, block.units - 1), gate = r % G;
      return (const float*)p.weight + ((gate * p.N + block.head) * p.D + unit) * p.D;
    };
    load_wide_weights<false>(memory + m.weights, m, [&](int r, int i) { return weight(r)[i]; });
    float bias[R];
#pragma unroll
    for (int row = 0; row < R; ++row) {
      const bool given = p.bias != nullptr && block.runs;
      bias[row] = given ? ((const float*)p.bias)[row * width + at] : 0.0f;
    }
    __syncthreads();
    tile.begin(p, 0);
    __syncthreads();
    // Where the operand of a step comes from, of four steps one after the other.
    int64_t* sources = reinterpret_cast<int64_t*>(memory + m.sources);
    int64_t source = p.initial == nullptr ? kFromZeros : kFromInitial;  // of a thread's sequence
    const auto pass_on = [&](int t, int mark) {
      if (mark & kFmaResets) source = kFromZeros;
      sources[(t & 3) * m.tile + threadIdx.x] = mark & kFmaRuns ? source : kFromZeros;
    };
    const bool keeps_source = threadIdx.x < unsigned(sequences);
    if (keeps_source) pass_on(0, tile.mark(0, 0, threadIdx.x));

    const auto state_at = [&](int s, int k) -> float& {
      return memory[m.states + (k * m.tile + s) * m.units + block.unit];
    };
    // Calls a function for the sequence of every cell of this thread.
    const auto of_cells = [&](auto function) {
      for (int s = block.sequence; block.runs && s < sequences; s += kSequences) function(s);
    };
    of_cells([&](int s) {
      const bool given = p.initial != nullptr && !(tile.mark(0, 0, s) & kFmaResets);
      const int64_t from = int64_t(tile.place(s).index) * width + at;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        state_at(s, k) = given ? ((const float*)p.initial)[k * p.S * width + from] : 0.0f;
      }
    });
    __syncthreads();

    Product product(m, memory, int(p.D), int(p.D));
    for (int t = 0; t < steps; ++t) {
      tile.load(p, t);
      if (keeps_source) {
        if (tile.mark(0, t, threadIdx.x) & kFmaRuns) source = tile.place(threadIdx.x).row + t;
        pass_on(t + 1, tile.mark(1, t, threadIdx.x));
      }
#pragma unroll 1
      for (int begin = 0; begin < sequences; begin += kSequences) {
        const int s = begin + block.sequence;
        const bool exists = block.runs && s < sequences;
        const int mark = exists ? tile.mark(0, t, s) : 0;
        const FmaPlace& place = tile.place(exists ? s : 0);
        const float* from = (const float*)p.x + block.head * p.x_head + block.first_unit +
                            block.unit + place.input + int64_t(t) * p.x_time;
        float inputs[G];
#pragma unroll
        for (int g = 0; g < G; ++g) inputs[g] = load_ahead(mark & kFmaRuns, from + g * p.x_gate);
        product.run(
            min(kSequences, sequences - begin),
            [&](int i) { return sources[(t & 3) * m.tile + begin + i]; },
            [&](int64_t row) { return (const float*)p.h + row * width + head_at; },
            [&](int i, int unit) {
              const int64_t row = int64_t(tile.place(begin + i).index) * width;
              return ((const float*)p.initial)[row + head_at + unit];
            },
            weight);
        if (begin == 0) tile.advance(t);
        if (!(mark & (kFmaRuns | kFmaZeros))) continue;
        V x[G], r[G], state[K], next[K], saved[kKept];
        float sums[G];
        product.sum(block.unit * G, block.sequence, sums);
#pragma unroll
        for (int g = 0; g < G; ++g) x[g] = V(inputs[g] + bias[g]), r[g] = V(sums[g]);
        if constexpr (R > G) r[G - 1] += V(bias[R - 1]);
#pragma unroll
        for (int k = 0; k < K; ++k) state[k] = V(state_at(s, k));
        Cell::forward(x, r, state, next, saved);
        const bool runs = mark & kFmaRuns, clears = tile.mark(1, t, s) & kFmaResets;
        float kept[kKept];
#pragma unroll
        for (int v = 0; v < kKept; ++v) kept[v] = to_float(saved[v]);
        write(p, place.row + t, at, width, runs, to_float(next[0]), to_float(state[0]), kept);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          state_at(s, k) = clears ? 0.0f : to_float(select(runs, next[k], state[k]));
        }
      }
    }

    of_cells([&](int s) {
      const FmaPlace& place = tile.place(s);
      const float none[kKept] = {};
      for (int t = steps; t < place.length + place.padding; ++t) {
        write(p, place.row + t, at, width, false, 0, 0, none);
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        ((float*)p.last)[(k * p.S + place.index) * width + at] = state_at(s, k);
      }
    });
  }
};

}  // namespace flashcell::cuda
