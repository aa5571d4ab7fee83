// h on Hopper: (s (q C) + W v) / N for 128 rows of a chunk and up to kColumns columns. README.md,
// "Equations", and mma.cuh, which computes the same sums, have the details.
//
// A warpgroup has 64 rows (a tile of gates/rows.cuh) and all columns in registers. It computes the
// products of pairs 64 by 64 at a time and weights them in registers, where they are the left
// operand of W v. Thread blocks are persistent: they take one part of a chunk after another, and
// the producer runs ahead.
#pragma once
#include "loads.cuh"

namespace flashcell::cuda {

template <typename IO, int kColumns>
struct OutputWgmma : OutputLoads<IO, kColumns> {
  using Base = OutputLoads<IO, kColumns>;
  using Base::Base;
  using Base::for_parts, Base::has_before, Base::kDeep, Base::kNBytes, Base::kSlotRows,
      Base::memory, Base::n_tile, Base::p, Base::part, Base::pieces, Base::q_slot, Base::q_tile,
      Base::ring, Base::round, Base::slot_terms, Base::terms, Base::tiles, Base::consumer;
  using typename Base::KTile, typename Base::QTile, typename Base::SlotTile, typename Base::Terms;
  static constexpr int kBlocks = kColumns / 8, kPairs = kTile / 8;

  using Outputs = float[kBlocks][4];
  struct RowTerms {  // terms of the lane's two rows
    float2 u[2];
    float past[2], inflow[2], floor[2], sum[2];
    int start[2];
  };

  DEVICE int own_tile() const { return part.row / kTile + consumer; }
  // Returns one of the lane's two rows, counted in the tile.
  DEVICE static int tile_row(int down) {
    return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4 + 8 * down;
  }
  DEVICE int row(int down) const { return own_tile() * kTile + tile_row(down); }
  DEVICE static bool is_held(const RowTerms& r, int down) { return r.start[down] > tile_row(down); }

  DEVICE RowTerms row_terms() const {
    const Rows& rows = terms.rows;
    RowTerms r;
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const bool exists = row(down) < part.chunk.steps;
      const int64_t at = rows.row(part.head, part.chunk) + (exists ? row(down) : 0);
      r.u[down] = rows.u[at], r.floor[down] = rows.floor[at];
      r.past[down] = exists ? rows.past[at] : 0.f;
      r.inflow[down] = exists ? rows.inflow[at] : 0.f;
      r.start[down] = exists ? rows.start[part.chunk.row + row(down)] : kTile;
      r.sum[down] = 0;
    }
    return r;
  }

  // Skips a tile that this warpgroup does not need.
  DEVICE void skip_tile() {
    for (int i = pieces(p.K, kDeep) + kTile / kSlotRows; i > 0; --i) {
      ring.slot().wait_full(ring.round);
      ring.slot().release();
      ring.advance();
    }
  }
  // Releases the slots from `first` up to the warpgroup's position.
  DEVICE void release_from(Ring<kSlotBytes> first) const {
    for (; first.index != ring.index; first.advance()) first.slot().release();
  }

  // sums = s (q C), and the rows' sums s (q n). The products of one slot run while the next slot is
  // waited for.
  DEVICE void multiply_before(Outputs& sums, RowTerms& r) {
    const SharedOperand<Major::kDepth> q(q_tile().address + consumer * kTile * kPanelBytes);
    const auto q_step = [&](int step) { return q.at(step / 4 * QTile::kStride).step(step % 4); };
    const SharedOperand<Major::kDepth> n(n_tile());
    float q_n[1][4] = {};
    wgmma_fence(sums, q_n);
    Slot running{};
    int depth = 0;
    do {
      const Slot slot = ring.slot();
      slot.wait_full(ring.round);
      wgmma_fence();
      const SharedOperand<Major::kWidth> right(ring.address(), SlotTile::kStride);
#pragma unroll
      for (int d = 0; d < kSlotRows / 16; ++d) {
        const int step = depth / 16 + d;
        wgmma<IO>(sums, q_step(step), right.step(d));
        wgmma<IO>(q_n, q_step(step), n.at(step / 4 * kNBytes).step(step % 4));
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (running.full) running.release();
      running = slot;
      ring.advance();
      depth += kSlotRows;
    } while (depth < p.K);
    wgmma_wait<0>(sums, q_n);
    running.release();
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const float s = r.inflow[down] * terms.scale;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& sum = sums[j][2 * down + e];
          sum = s == 0 ? 0.f : s * sum;
        }
      }
      // n's pieces are in columns 0 to 2, the others are 0; `divide` adds up the lanes of a row.
      r.sum[down] = s == 0 ? 0.f : s * (q_n[0][2 * down] + q_n[0][2 * down + 1]);
    }
  }

  using Pairs = float[kPairs][4];

  DEVICE void multiply_pairs(Pairs& pairs) {
    const SharedOperand<Major::kDepth> q(q_tile().address + consumer * kTile * kPanelBytes);
    clear(pairs);
    wgmma_fence(pairs);
    int depth = 0;
    do {
      ring.slot().wait_full(ring.round);
      wgmma_fence();
      const SharedOperand<Major::kDepth> k(ring.address());
#pragma unroll
      for (int d = 0; d < kDeep / 16; ++d) {  // q and k are padded with zeros beyond K
        wgmma<IO>(pairs, q.at((depth / 64 + d / 4) * QTile::kStride).step(d % 4),
                  k.at(d / 4 * KTile::kStride).step(d % 4));
      }
      ring.advance();
      depth += kDeep;
    } while (depth < p.K);
    wgmma_commit();
    wgmma_wait<0>(pairs);
  }

  // The lane's weights of tile j, rounded: left operands of 16 columns each.
  using Weights = uint32_t[kTile / 16][4];

  DEVICE void weigh(Weights& weights, const Pairs& pairs, const Terms& columns, int tile,
                    RowTerms& r, const float (&decay)[kMostTiles]) const {
    const int own = own_tile(), q = threadIdx.x % 4;
    const float scale = terms.scale;
    float between = scale;
#pragma unroll
    for (int j = 1; j < kMostTiles; ++j) between *= tile < j && j < own ? decay[j] : 1.f;
    const auto put = [&](int j, int down, float first, float second) {
      r.sum[down] += first + second;
      weights[j / 2][j % 2 * 2 + down] = Pair<IO>::of(first, second).word[0];
    };
    if (tile < own) {
      const float past[2] = {r.past[0] * between, r.past[1] * between};
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float2 future = reinterpret_cast<const float2&>(columns.future[8 * j + 2 * q]);
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          put(j, down, past[down] * future.x * pairs[j][2 * down],
              past[down] * future.y * pairs[j][2 * down + 1]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int column = 8 * j + 2 * q;
        const float4 w = reinterpret_cast<const float4&>(columns.w[column]);
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const float2 u = r.u[down];
          // Computed for unseen pairs too: with a condition around each exponential, they would run
          // one after another.
          const auto weight = [&](int c, float whole, float rest, float pair) {
            const float decay = keep_float(exp2_approx((u.x + whole) + (u.y + rest)));
            const bool seen = r.start[down] <= c && c <= tile_row(down);
            return seen ? decay * (scale * pair) : 0.f;
          };
          put(j, down, weight(column, w.x, w.y, pairs[j][2 * down]),
              weight(column + 1, w.z, w.w, pairs[j][2 * down + 1]));
        }
      }
    }
  }

  // sums += W v for one tile.
  DEVICE void multiply_values(Outputs& sums, Weights& weights) {
    wgmma_fence(sums, weights);
    Slot running{};
#pragma unroll
    for (int i = 0; i < kTile / kSlotRows; ++i) {
      const Slot slot = ring.slot();
      slot.wait_full(ring.round);
      wgmma_fence();
      const SharedOperand<Major::kWidth> v(ring.address(), SlotTile::kStride);
#pragma unroll
      for (int d = 0; d < kSlotRows / 16; ++d) {
        wgmma<IO>(sums, weights[i * (kSlotRows / 16) + d], v.step(d));
      }
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        running.release();
      }
      running = slot;
      ring.advance();
    }
    wgmma_wait<0>(sums, weights);
    running.release();
  }

  DEVICE void store(const Outputs& sums, const RowTerms& r, const float (&inverse)[2]) const {
    const Chunk& chunk = part.chunk;
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int t = row(down);
      const bool has_h = t < chunk.steps && !is_held(r, down);
      IO* to = static_cast<IO*>(p.h) + ((chunk.row + t) * p.H + part.head) * p.V + part.column;
#pragma unroll
      for (int j = 0; j < kBlocks; j += 4) {
        float low[4], high[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          low[c] = has_h ? inverse[down] * sums[j + c][2 * down] : 0.f;
          high[c] = has_h ? inverse[down] * sums[j + c][2 * down + 1] : 0.f;
        }
        store_row<IO>(to + 8 * j, low, high, t < chunk.rows, int(p.V) - part.column - 8 * j);
      }
    }
  }
  // Computes 1 / N, and writes the row's total for the caller (0 in padding and held rows).
  DEVICE void divide(RowTerms& r, float (&inverse)[2]) const {
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      float total = r.sum[down];
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
      const int t = row(down);
      const bool tells = threadIdx.x % 4 == 0 && part.column == 0 && t < part.chunk.rows;
      if (tells) {
        static_cast<float*>(p.total)[(part.chunk.row + t) * p.H + part.head] =
            t < part.chunk.steps && !is_held(r, down) ? total : 0.f;
      }
      inverse[down] = 1 / divisor(total, r.floor[down], p.eps);
    }
  }

  DEVICE void consume() {
    for_parts([&] {
      Outputs sums;
      clear(sums);
      RowTerms r{};
      if (part.has_steps()) {
        r = row_terms();
        float decay[kMostTiles];
        const int own = own_tile();
#pragma unroll
        for (int j = 1; j < kMostTiles; ++j) {
          const int64_t at = terms.rows.slot(part.head, part.slot) * terms.rows.chunks.tiles();
          decay[j] = j < own ? terms.rows.tile_decay[at + j] : 1.f;
        }
        q_slot().wait_full(round);
        if (has_before()) multiply_before(sums, r);
        const int last = own < tiles() ? own : tiles() - 1;
        for (int tile = 0; tile <= last; ++tile) {
          const Ring<kSlotBytes> first = ring;  // the slot that holds the tile's terms
          Pairs pairs;
          multiply_pairs(pairs);
          if (tile == last) q_slot().release();
          Weights weights;
          weigh(weights, pairs, slot_terms(first), tile, r, decay);
          release_from(first);
          multiply_values(sums, weights);
        }
        for (int tile = last + 1; tile < tiles(); ++tile) skip_tile();
      }
      float inverse[2] = {1, 1};
      if (p.normalized) divide(r, inverse);
      store(sums, r, inverse);
    });
  }

  DEVICE void run() {
    if (threadIdx.x == 0) ring.init(), q_slot().init(2 * kWarpgroup), mbarrier_init_fence();
    __syncthreads();
    if (warpgroup() == 0) {
      setmaxnreg_dec<kProducerRegisters>();
      this->produce();
    } else {
      setmaxnreg_inc<kConsumerRegisters>();
      consume();
    }
  }
};

template <typename IO, int kColumns>
__global__ void __launch_bounds__(kRingThreads, 1) outputs_wgmma(const ForwardParams p,
                                                                 const ForwardTerms terms,
                                                                 int shared_bytes) {
#if FLASHCELL_WGMMA_CODE
  extern __shared__ __align__(1024) char memory[];
  OutputWgmma<IO, kColumns>(p, terms, shared_bytes, memory).run();
#else
  __trap();  // Compiled for sm_90 instead of sm_90a: fail, rather than return uninitialised memory.
#endif
}

}  // namespace flashcell::cuda
