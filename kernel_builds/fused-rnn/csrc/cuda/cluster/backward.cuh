// The backward pass of the cluster engine; launch.cuh describes the engine.
#pragma once
#include "forward.cuh"

namespace flashcell::cuda {

// A block multiplies the dr of its own 32 units by their rows of the weight, which gives a share of
// the gradient of every unit of the head. It sends each share to the block that owns the unit,
// which adds the shares of all members in rank order.
template <typename Cell_, typename IO_, int kDepth, int kPerLane, bool kRagged>
struct ClusterBackward {
  using Cell = Cell_;
  using IO = IO_;
  using V = typename IoTraits<IO>::Value;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;
  static constexpr int kUnits = cluster::kUnits, kCells = 32 * cluster::kCellWarps;
  static constexpr int kMembers = kDepth / kUnits;
  // A warp multiplies for two members: four tiles of 16 units.
  static constexpr int kWarps = kMembers / 2, kThreads = 32 * kWarps, kTiles = 4;
  static constexpr int kSteps = G * kUnits / 16;
  static constexpr int kOperandBytes = G * kUnits * 16;
  // Bytes that one member sends to another per step.
  static constexpr int kPartBytes = kUnits * 4 * kPerLane * 4;
  using Inputs = Pipeline<IO, kUnits, kKept + 1, kCells, 1>;  // saved values, then dh
  // The rows written are dx, then dr if it differs.
  using Outputs = Outbox<IO, kUnits, Cell::kSplitGrad ? 2 * G : G, kCells>;

  static constexpr int64_t kPlannedBytes =
      cluster::backward_shared_bytes(kSizesOf<Cell>, kDepth, 4 * kPerLane);

  struct Shared {
    // Received shares of the gradient of h, double-buffered by the parity of the step. The values
    // that several warps (four; with eight sequences two) want for the same lane are adjacent in 16
    // bytes. Their order alternates every eight lanes, so that each warp reads from all banks.
    alignas(16) uint8_t inbox[2][kMembers][kPartBytes];
    // `dr` of a step, [gate][unit][column], double-buffered by the parity of the step.
    alignas(16) uint8_t operand[2][kOperandBytes];
    uint64_t received[2];
    typename Inputs::Shared inputs;
    typename Outputs::Shared outputs;
  };

  struct Product {
    uint32_t a[kTiles][kSteps][4];
    uint32_t read, there[2], place, counter;
    int members;

    DEVICE Product(const BackwardParams& p, Shared& shared, int64_t head, int rank, int members)
        : members(members) {
      const int lane = threadIdx.x % 32, q = lane % 4, D = int(p.D), warp = threadIdx.x / 32;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int member = warp + m / 2 * kWarps;
            const int to = member * kUnits + m % 2 * 16 + lane / 4 + j % 2 * 8;
            const int depth = (2 * i + j / 2) * 8 + q * 2, g = depth / kUnits;
            const int from = rank * kUnits + depth % kUnits;
            const uint16_t* row =
                (const uint16_t*)p.weight + ((g * p.N + head) * p.D + from) * p.D + to;
            a[m][i][j] = keep(to < D && from < D ? row[0] | uint32_t(row[p.D]) << 16 : 0);
          }
        }
      }
      const uint32_t base = shared_address(&shared);
      read = keep(shared_address(shared.operand[0]) + lane * 16);
      place = keep(shared_address(shared.inbox[0][rank]) - base + lane * 16);
      counter = keep(shared_address(&shared.received[0]) - base);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        there[i] = cluster_address(base, min(warp + i * kWarps, members - 1));
      }
    }

    // Computes weight^T dr of step t and sends every member its share.
    DEVICE void run(int t) const {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      float sums[kTiles][4] = {};
      const uint32_t rows = read + (t & 1) * kOperandBytes;
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        uint32_t b[4];
        load_transposed(b, rows + i * 256);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) mma<IO>(sums[m], a[m][i], b[0], b[1]);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) mma<IO>(sums[m], a[m][i + 1], b[2], b[3]);
      }
      const uint32_t to = place + (t & 1) * (kMembers * kPartBytes), counts = counter + (t & 1) * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (warp + i * kWarps >= members) break;
        if constexpr (kPerLane == 1) {
          const auto& low = sums[2 * i];
          const auto& high = sums[2 * i + 1];
          uint32_t v[4] = {bits(low[0]), bits(low[2]), bits(high[0]), bits(high[2])};
          exchange_if(lane & 8, v[0], v[1]), exchange_if(lane & 8, v[2], v[3]);
          exchange_if(lane & 16, v[0], v[2]), exchange_if(lane & 16, v[1], v[3]);
          store_async(there[i] + to, there[i] + counts, v);
        } else {
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            uint32_t v[4];
            for (int e = 0; e < 4; ++e) v[e] = bits(sums[2 * i + pair][e]);
            exchange_if(lane & 8, v[0], v[2]), exchange_if(lane & 8, v[1], v[3]);
            store_async(there[i] + to + pair * 512, there[i] + counts, v);
          }
        }
      }
    }

    static DEVICE uint32_t bits(float value) { return __float_as_uint(value); }
    static DEVICE void exchange_if(bool wanted, uint32_t& a, uint32_t& b) {
      const uint32_t first = wanted ? b : a;
      b = wanted ? a : b;
      a = first;
    }
  };

  static DEVICE void run(const BackwardParams& p, Shared& shared) {
    const int members = cluster_size(), rank = cluster_rank();
    const int64_t group = blockIdx.x / members, tile = group / p.heads;
    const int64_t head = p.first_head + group % p.heads;
    const int steps =
        kRagged ? longest(p, tile * (4 * kPerLane), 4 * kPerLane) : int(keep(uint32_t(p.T)));
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : shared.received) {
        mbarrier_init(barrier, 1);
        mbarrier_arrive_expect_tx(barrier, members * kPartBytes);
      }
    }
    const Product product(p, shared, head, rank, members);
    cluster_sync();
    if (kWarps == cluster::kCellWarps || threadIdx.x < kCells) {
      run_cell(p, shared, product, head, tile, rank, steps);
    } else {
      for (int t = steps - 1; t >= 0; --t) {
        named_barrier_sync_diverged<kThreads>(1);
        product.run(t);
      }
    }
    cluster_sync();  // no block may exit while others still send to its shared memory
  }

  static DEVICE void run_cell(const BackwardParams& p, Shared& shared, const Product& product,
                              int64_t head, int64_t tile, int rank, int steps) {
    const int lane = threadIdx.x % 32, q = lane % 4, warp = threadIdx.x / 32, D = int(p.D);
    const int first_unit = rank * kUnits, unit = first_unit + warp * 8 + lane / 4;
    const bool in_head = unit < D;
    const int64_t first = tile * (4 * kPerLane), ND = p.N * p.D, at = head * p.D + unit;
    const int64_t to_block = head * p.D + first_unit;
    const float bound = float(p.grad_clip);

    const Column source(p, sequence_of<kPerLane>(p, first, Inputs::column()));
    Inputs inputs(shared.inputs, warp * 8, source.length, D - first_unit, steps - 1, -1,
                  (const IO*)p.saved + source.row * kKept * ND + to_block, ND, kKept * ND,
                  (const IO*)p.dh + source.row * ND + to_block, ND);
    Outputs outputs(
        shared.outputs, warp * 8, source.length, D - first_unit,
        [&](int row) {
          const int64_t from = ((source.row + steps - 1) * G + row % G) * ND + to_block;
          return (IO*)(row < G ? p.dx : p.dr) + from;
        },
        [&](int) { return -G * ND; });

    float d_bias[R] = {};
    V d[kPerLane][K];
    bool exists[kPerLane];
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      const int64_t s = sequence_of<kPerLane>(p, first, 2 * q + c);
      const Column column(p, s);
      exists[c] = s < p.S;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const bool given = p.dlast != nullptr && k < Cell::kGradStates && exists[c] && in_head;
        d[c][k] = given ? ((const float*)p.dlast)[(k * p.S + column.index) * ND + at] : 0.0f;
      }
    }
    const Marks<kRagged> marks[2] = {{p, sequence_of<kPerLane>(p, first, 2 * q)},
                                     {p, sequence_of<kPerLane>(p, first, 2 * q + 1)}};
    inputs.wait();
    named_barrier_sync<kCells>(2);

    const uint32_t write = keep(shared_address(shared.operand[0]) + warp * 128 + lane * 4);
    const uint32_t read = keep(
        shared_address(shared.inbox[0][0]) + lane * 16 +
        (kPerLane == 1 ? (warp ^ lane / 8) * 4 : warp / 2 * 512 + ((warp ^ lane / 8) & 1) * 8));
    // Adds the gradient that reaches the states before step t through step t.
    const auto enter = [&](int t, const Asked<kRagged>& asked) {
      float sum[2] = {};
      if (t < steps) {
        mbarrier_poll(shared.received[t & 1], (steps - 1 - t) >> 1 & 1);
        const uint32_t parts = read + (t & 1) * (kMembers * kPartBytes);
#pragma unroll
        for (int from = 0; from < kMembers; ++from) {
          if (from >= product.members) break;
          const float2 part = load_part(parts + from * kPartBytes);
          sum[0] += part.x, sum[1] += part.y;
        }
        // Two buffers suffice: a member sends for step t - 2 only after it has received every share
        // of step t - 1, and each sender sent that one after it had read step t.
        if (threadIdx.x == 0) {
          mbarrier_arrive_expect_tx(shared.received[t & 1], product.members * kPartBytes);
        }
      }
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        const bool cleared = asked.resets[c], flows = !cleared && asked.runs[c];
        for (int k = 0; k < K; ++k) d[c][k] = cleared ? V(0) : d[c][k];
        d[c][0] = flows && t < steps ? d[c][0] + V(clip(sum[c], bound)) : d[c][0];
      }
    };

    Asked<kRagged> asked(marks, p, steps);
    for (int t = steps - 1; t >= 0; --t) {
      ColumnPair<IO> in[kKept + 1];
      inputs.load(in, t);
      const Asked<kRagged> now(marks, p, t);
      enter(t + 1, asked);
      asked = now;
      V dx[kPerLane][G], dr[kPerLane][G];
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        const auto value = [&](int row) {
          const float2 both = in[row].floats();
          return V(c ? both.y : both.x);
        };
        V kept[kKept], after[K];
        for (int v = 0; v < kKept; ++v) kept[v] = value(v);
        for (int k = 0; k < K; ++k) after[k] = d[c][k];
        after[0] += value(kKept);
        Cell::backward(kept, after, dx[c], dr[c]);
        for (int k = 0; k < K; ++k) d[c][k] = select(now.runs[c], after[k], d[c][k]);
      }
      const auto masked = [&](const V(&values)[kPerLane][G], int g) {
        return ColumnPair<IO>::of(
            now.runs[0] ? to_float(values[0][g]) : 0,
            kPerLane == 2 && now.runs[1] ? to_float(values[kPerLane - 1][g]) : 0);
      };
      ColumnPair<IO> dr_pair[G];
#pragma unroll
      for (int g = 0; g < G; ++g) {
        dr_pair[g] = masked(dr, g);
        const uint32_t word = in_head ? dr_pair[g].pair.word[0] : 0;
        const uint32_t to = write + (t & 1) * kOperandBytes + g * (kUnits * 16);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
      }
      inputs.template wait<1>();
      named_barrier_sync_diverged<kThreads>(1);
      product.run(t);
      // The rest of the step overlaps with the exchange.
      if (t + 1 < steps) outputs.send(t + 1);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        outputs.put(t, g, Cell::kSplitGrad ? masked(dx, g) : dr_pair[g]);
        if constexpr (Cell::kSplitGrad) outputs.put(t, G + g, dr_pair[g]);
      }
      inputs.start(t - (Inputs::kStages - 1));
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        // An empty column of a tile may hold any bits, even NaN: it must not reach the sum.
        const bool counts = now.runs[c] && exists[c];
        for (int g = 0; g < G; ++g) d_bias[g] += counts ? to_float(dx[c][g]) : 0.0f;
        if constexpr (R > G) d_bias[R - 1] += counts ? to_float(dr[c][G - 1]) : 0.0f;
      }
    }
    if (steps > 0) {
      named_barrier_sync<kCells>(2);
      outputs.send(0);
      enter(0, asked);
    }
    // Outputs are sent in descending order, so the pointer is at step 0 and padding lies above it.
    if (kRagged) outputs.clear(-(source.length + source.padding), source.padding);

#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      if (!exists[c] || !in_head) continue;
      const Column column(p, sequence_of<kPerLane>(p, first, 2 * q + c));
      for (int k = 0; k < K; ++k) {
        float* to = (float*)p.dstate + (k * p.S + column.index) * ND + at;
        *to = k < Cell::kGradStates ? to_float(d[c][k]) : 0;
      }
    }
#pragma unroll
    // A lane has summed its own columns; add those of the four lanes of a row.
    for (int g = 0; g < R; ++g) {
      d_bias[g] += __shfl_xor_sync(~0u, d_bias[g], 1);
      d_bias[g] += __shfl_xor_sync(~0u, d_bias[g], 2);
      if (q == 0 && in_head) ((float*)p.dbias_partial)[(tile * R + g) * ND + at] = d_bias[g];
    }
  }

  // Loads one member's share for the lane's columns.
  static DEVICE float2 load_part(uint32_t address) {
    float2 part{};
    if constexpr (kPerLane == 1) {
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part.x) : "r"(address));
    } else {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(part.x), "=f"(part.y) : "r"(address));
    }
    return part;
  }
};

}  // namespace flashcell::cuda
