// The forward pass of the cluster engine; launch.cuh describes the engine.
#pragma once
#include "../block/forward.cuh"
#include "common/cuda/ptx/cluster.cuh"
#include "common/cuda/ptx/mbarrier.cuh"
#include "common/cuda/ptx/named_barrier.cuh"
#include "plan.h"

namespace flashcell::cuda {

// The masks of a lane's columns at one step, loaded before the wait for the exchange.
template <bool kRagged>
struct Asked {
  bool runs[2], resets[2];

  DEVICE Asked(const Marks<kRagged> (&marks)[2], const SequenceParams& p, int t) {
#pragma unroll
    for (int c = 0; c < 2; ++c) runs[c] = marks[c].runs(p, t), resets[c] = marks[c].resets(p, t);
  }
};

// kDepth is D rounded up; kPerLane and kRagged are as in the block engine.
template <typename Cell_, typename IO_, int kDepth, int kPerLane, bool kRagged>
struct ClusterForward {
  using Cell = Cell_;
  using IO = IO_;
  using V = typename IoTraits<IO>::Value;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;
  static constexpr int kUnits = cluster::kUnits, kCells = 32 * cluster::kCellWarps;
  static constexpr int kMembers = kDepth / kUnits;
  // Beyond a depth of 256, two warps share the same eight units, each with half of the depth.
  static constexpr int kParts = kDepth > 256 ? 2 : 1, kThreads = kParts * kCells;
  static constexpr int kSteps = kDepth / 16 / kParts, kTiles = (G + 1) / 2, kChains = 2;
  static constexpr int kGroupBytes = 64 * kPerLane;  // eight units of all sequences of the tile
  static constexpr int kOperandBytes = kDepth / 8 * kGroupBytes;
  using Inputs = Pipeline<IO, kUnits, G, kCells, 1>;
  using Outputs = Outbox<IO, kUnits, kKept + 2, kCells>;  // h, h_prev, then saved values
  using Sums = float[kTiles][4];

  static constexpr int64_t kPlannedBytes =
      cluster::forward_shared_bytes(kSizesOf<Cell>, kDepth, 4 * kPerLane);

  struct Shared {
    // h before a step, double-buffered by the parity of the step: [unit][column] for eight
    // sequences, [unit / 8][column][unit % 8] for four.
    alignas(16) uint8_t operand[2][kOperandBytes];
    float4 partials[kParts - 1][cluster::kCellWarps][kTiles][32];
    uint64_t received[2];
    typename Inputs::Shared inputs;
    typename Outputs::Shared outputs;
  };

  // The product of a warp, over all or half of the depth.
  struct Product {
    uint32_t a[kTiles][kSteps][4];
    uint32_t read;
    Shared& shared;

    DEVICE Product(const ForwardParams& p, Shared& shared, int64_t head, int unit, int part)
        : shared(shared) {
      const int lane = threadIdx.x % 32, q = lane % 4, D = int(p.D);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int g = 2 * m + j % 2, from = ((part * kSteps + i) * 2 + j / 2) * 8 + q * 2;
            const IO* row = (const IO*)p.weight + ((g * p.N + head) * p.D + unit) * p.D;
            const bool inside = g < G && unit < D && from < D;
            a[m][i][j] = keep(inside ? *(const uint32_t*)(row + from) : 0);
          }
        }
      }
      const int of_lane = kPerLane == 2 ? lane * 16 : lane / 8 * kGroupBytes + lane % 8 / 2 * 16;
      read = keep(shared_address(shared.operand[0]) + part * kSteps * 2 * kGroupBytes + of_lane);
    }

    // Waits until h of the whole head has arrived, then multiplies.
    DEVICE void run(int t, Sums& sums, Sums& start) const {
      float chain[kTiles][4] = {};
      const uint32_t rows = read + (t & 1) * kOperandBytes;
      mbarrier_poll(shared.received[t & 1], t >> 1 & 1);
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        uint32_t b[4];
        if constexpr (kPerLane == 2) {
          load_transposed(b, rows + i * 2 * kGroupBytes);
        } else {
          load_vectors(b, rows + i * 2 * kGroupBytes);
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma<IO>(sums[m], a[m][i], b[0], b[1], i == 0 ? start[m] : sums[m]);
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m) mma<IO>(chain[m], a[m][i + 1], b[2], b[3]);
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][e] += chain[m][e];
      }
    }
  };

  static DEVICE void run(const ForwardParams& p, Shared& shared) {
    const int lane = threadIdx.x % 32, members = cluster_size(), rank = cluster_rank();
    const int64_t group = blockIdx.x / members, head = p.first_head + group % p.heads;
    const int64_t first = group / p.heads * (4 * kPerLane);
    const int warp = threadIdx.x / 32 % cluster::kCellWarps, part = threadIdx.x / kCells;
    const int first_unit = rank * kUnits, unit = first_unit + warp * 8 + lane / 4;
    const int steps = kRagged ? longest(p, first, 4 * kPerLane) : int(keep(uint32_t(p.T)));
    const int bytes = members * (kUnits / 8) * kGroupBytes;

    for (int i = threadIdx.x; i < 2 * kOperandBytes / 16; i += kThreads) {
      reinterpret_cast<uint4*>(shared.operand)[i] = uint4{};
    }
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : shared.received) {
        mbarrier_init(barrier, 1);
        mbarrier_arrive_expect_tx(barrier, bytes);
      }
    }
    const Product product(p, shared, head, unit, part);
    cluster_sync();
    if (part == 0) {
      run_cell(p, shared, product, head, first, first_unit, warp, members, rank, steps, bytes);
    } else if constexpr (kParts > 1) {
      for (int t = 0; t < steps; ++t) {
        Sums sums, zero = {};
        product.run(t, sums, zero);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          shared.partials[0][warp][m][lane] = {sums[m][0], sums[m][1], sums[m][2], sums[m][3]};
        }
        named_barrier_arrive<64>(2 + warp);
      }
    }
    cluster_sync();  // no block may exit while others still send to its shared memory
  }

  static DEVICE void run_cell(const ForwardParams& p, Shared& shared, const Product& product,
                              int64_t head, int64_t first, int first_unit, int warp, int members,
                              int rank, int steps, int bytes) {
    const int lane = threadIdx.x % 32, q = lane % 4, D = int(p.D);
    const int unit = first_unit + warp * 8 + lane / 4;
    const bool in_head = unit < D;
    const int64_t ND = p.N * p.D, at = head * p.D + unit, to = head * p.D + first_unit;

    const Column source(p, sequence_of<kPerLane>(p, first, Inputs::column()), p.x_batch);
    Inputs inputs(shared.inputs, warp * 8, source.length, D - first_unit, 0, 1,
                  (const IO*)p.x + source.x_offset + head * p.x_head + first_unit, p.x_gate,
                  p.x_time);
    Outputs outputs(
        shared.outputs, warp * 8, source.length, D - first_unit,
        [&](int row) -> IO* {
          if (row == 0) return (IO*)p.h + source.row * ND + to;
          if (p.saved == nullptr) return nullptr;
          if (row == 1) return (IO*)p.h_prev + source.row * ND + to;
          return (IO*)p.saved + (source.row * kKept + row - 2) * ND + to;
        },
        [&](int row) { return row < 2 ? ND : kKept * ND; });

    // The sums start from the bias. If the cell has an extra bias row, that one is added to the
    // last gate's product, and the last gate's own row to x.
    Sums start = {};
    float x_bias = 0;
    if (p.bias != nullptr && in_head) {
      const auto row = [&](int g) { return ((const float*)p.bias)[g * ND + at]; };
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const float value = row(R > G && g == G - 1 ? R - 1 : g);
        start[g / 2][g % 2 * 2] = start[g / 2][g % 2 * 2 + 1] = value;
      }
      if (R > G) x_bias = row(G - 1);
    }
    V state[kPerLane][K];
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      const int64_t s = sequence_of<kPerLane>(p, first, 2 * q + c);
      const Column column(p, s);
      const bool given = p.initial != nullptr && in_head && s < p.S;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int64_t from = (k * p.S + column.index) * ND + at;
        state[c][k] = given ? ((const float*)p.initial)[from] : 0.0f;
      }
    }
    const Marks<kRagged> marks[2] = {{p, sequence_of<kPerLane>(p, first, 2 * q)},
                                     {p, sequence_of<kPerLane>(p, first, 2 * q + 1)}};

    // Rounds a value of the lane's columns to io; an empty odd column gets 0.
    const auto both = [&](auto value) {
      return ColumnPair<IO>::of(value(0), kPerLane == 2 ? value(kPerLane - 1) : 0);
    };
    // A warp's part of the operand is 4 kPerLane rows of 16 bytes. Each lane gathers one row from
    // four lanes and sends it to some of the members; kSenders lanes share the members.
    // Lanes per row, and members per lane.
    constexpr int kSenders = 8 / kPerLane, kTargets = kMembers / kSenders;
    const int row = kPerLane == 2 ? lane / 4 : q, sender = kPerLane == 2 ? q : lane / 4;
    const uint32_t base = shared_address(&shared);
    const uint32_t place = keep(shared_address(shared.operand[0]) - base +
                                (rank * kUnits / 8 + warp) * kGroupBytes + row * 16);
    const uint32_t counter = keep(shared_address(&shared.received[0]) - base);
    uint32_t there[kTargets];
#pragma unroll
    for (int i = 0; i < kTargets; ++i) {
      there[i] = cluster_address(base, min(sender + i * kSenders, members - 1));
    }
    const auto send_all = [&](int t, uint32_t word) {
      if (!in_head) word = 0;
      if constexpr (kPerLane == 1) {  // two neighbouring units share a word
        const uint32_t other = __shfl_xor_sync(~0u, word, 4);
        word = lane & 4 ? __byte_perm(other, word, 0x5410) : __byte_perm(word, other, 0x5410);
      }
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = __shfl_sync(~0u, word, kPerLane == 2 ? lane / 4 * 4 + i : i * 8 + q);
      }
      const uint32_t to = place + (t & 1) * kOperandBytes, counts = counter + (t & 1) * 8;
#pragma unroll
      for (int i = 0; i < kTargets; ++i) {
        if (sender + i * kSenders < members) store_async(there[i] + to, there[i] + counts, words);
      }
    };

    const bool saves = keep(p.saved != nullptr);
    ColumnPair<IO> before;  // h as the step reads it, after a reset
    const auto enter = [&](int t, const Asked<kRagged>& asked) {
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        if (asked.resets[c]) {
          for (int k = 0; k < K; ++k) state[c][k] = V(0);
        }
      }
      before = both([&](int c) { return to_float(state[c][0]); });
      if (t < steps) send_all(t, before.pair.word[0]);
    };
    Asked<kRagged> now(marks, p, 0);
    enter(0, now);
    inputs.wait();
    named_barrier_sync<kCells>(1);

    for (int t = 0; t < steps; ++t) {
      ColumnPair<IO> x[G];
      inputs.load(x, t);
      const Asked<kRagged> after(marks, p, t + 1);
      Sums sums;
      product.run(t, sums, start);
      // Two buffers suffice: a member sends for step t + 2 only after it has received all of step t
      // + 1, and every warp contributes to that only after it has read the operand of step t.
      if (threadIdx.x == 0) mbarrier_arrive_expect_tx(shared.received[t & 1], bytes);
      if constexpr (kParts > 1) {
        named_barrier_sync<64>(2 + warp);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const float4 other = shared.partials[0][warp][m][lane];
          sums[m][0] += other.x, sums[m][1] += other.y;
          sums[m][2] += other.z, sums[m][3] += other.w;
        }
      }

      V next[kPerLane][K], saved[kPerLane][kKept];
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        V in[G], r[G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
          in[g] = c ? x[g].floats().y : x[g].floats().x;
          r[g] = sums[g / 2][g % 2 * 2 + c];
        }
        if constexpr (R > G) in[G - 1] += V(x_bias);
        Cell::forward(in, r, state[c], next[c], saved[c]);
        for (int k = 0; k < K; ++k) state[c][k] = select(now.runs[c], next[c][k], state[c][k]);
      }
      const auto masked = [&](auto value) {
        return both([&](int c) { return now.runs[c] ? value(c) : 0.0f; });
      };
      ColumnPair<IO> out[kKept + 2];
      out[0] = masked([&](int c) { return to_float(next[c][0]); });
      out[1] = before;
      if (kRagged) {
        const float2 h = before.floats();
        out[1] = masked([&](int c) { return c ? h.y : h.x; });
      }
#pragma unroll
      for (int v = 0; v < kKept; ++v) {
        out[2 + v] = masked([&](int c) { return to_float(saved[c][v]); });
      }
      enter(t + 1, after);
      now = after;
      // The rest of the step overlaps with the exchange.
      outputs.put(t, 0, out[0]);
      if (saves) {
#pragma unroll
        for (int i = 1; i < kKept + 2; ++i) outputs.put(t, i, out[i]);
      }
      inputs.start(t + Inputs::kStages - 1);
      inputs.wait();
      named_barrier_sync<kCells>(1);
      outputs.send(t);
    }
    if (kRagged) outputs.clear(source.length - steps, source.padding);

#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      const int64_t s = sequence_of<kPerLane>(p, first, 2 * q + c);
      if (!in_head || s >= p.S) continue;
      const Column column(p, s);
      for (int k = 0; k < K; ++k) {
        ((float*)p.last)[(k * p.S + column.index) * ND + at] = to_float(state[c][k]);
      }
    }
  }
};

}  // namespace flashcell::cuda
