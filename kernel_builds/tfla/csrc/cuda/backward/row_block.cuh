// 128 rows of an output of a chunk of a head, on Hopper: the rows' products with a state, plus
// their weighted products with the rows of tiles, multiplied with another matrix of rows:
//
//   sums = factors (left state) + E inner,   E = weigh(left right^T)
//
// A consumer warpgroup has 64 rows by 128 kBlocks columns. E never leaves its registers: the result
// of the first product, weighted, is the left operand of the second.
#pragma once
#include "row_loads.cuh"

namespace flashcell::cuda {

// The values of a chunk's rows that depend on the gates; 0 for rows that do not exist.
struct RowTerms {
  float2 u[kLongestChunk], w[kLongestChunk];
  float past[kLongestChunk], future[kLongestChunk];
  float gain[kLongestChunk];  // inflow for dq, outflow for dk and dv
  float inverse[kLongestChunk], delta[kLongestChunk];
  int start[kLongestChunk];
  float vector[2 * kBlockColumns];
  float decay[kMostTiles];
};

// Whether the block's rows are queries t, which see keys, or keys j, which are seen.
enum class RowsAre { kSeeing, kSeen };

// The products of one warpgroup.
template <typename IO, int kBlocks>
struct RowProducts {
  using Sums = float[kBlocks][kBlockColumns / 8][4];
  using Pairs = float[kTile / 8][4];
  using Words = uint32_t[kTile / 16][4];

  BlockRing& ring;
  const LeftRows& lefts;
  const RowTerms& terms;
  const RowBlock& block;
  const int steps;  // steps of the chunk
  // Which consumer, its warp, and the lane's row and column quad.
  const int group, warp, lane_row, quad;
  Slot running{};  // the slot that running products still read

  DEVICE RowProducts(BlockRing& place, const LeftRows& left_rows, const RowTerms& of_rows,
                     const RowBlock& of_block, int chunk_steps)
      : ring(place),
        lefts(left_rows),
        terms(of_rows),
        block(of_block),
        steps(chunk_steps),
        group(warpgroup() - 1),
        warp(threadIdx.x / 32 % 4),
        lane_row(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4) {}

  DEVICE int tile() const { return block.row / kTile + group; }
  DEVICE bool exists() const { return tile() * kTile < steps; }
  DEVICE int row_in_tile(int half) const { return warp * 16 + lane_row + 8 * half; }
  DEVICE int row(int half) const { return tile() * kTile + row_in_tile(half); }

  DEVICE SharedOperand<Major::kDepth> left(int panel) const {
    return SharedOperand<Major::kDepth>(lefts.address(panel) + group * kGranule);
  }
  DEVICE void wait_left() const {
    for (int panel = 0; panel < block.panels; ++panel) lefts.slot(panel).wait_full(lefts.round);
  }
  // The row terms stay valid as long as panel 0.
  DEVICE void release_left(int first, int end) const {
    for (int panel = first; panel < end; ++panel) lefts.slot(panel).release();
  }

  // Waits until the next slot is full, and returns its address.
  DEVICE uint32_t next() const {
    ring.slot().wait_full(ring.round);
    return ring.address();
  }
  // Call it after issuing products that read the current slot. It releases the slot before, whose
  // products have then completed, and advances.
  DEVICE void issued() {
    wgmma_commit();
    wgmma_wait<1>();
    if (running.full) running.release();
    running = ring.slot();
    ring.advance();
  }
  DEVICE void drain() {
    wgmma_wait<0>();
    if (running.full) running.release();
    running.full = 0;
  }
  // Skips slots that only the other warpgroup needs.
  DEVICE void skip(int slots) {
    for (int i = 0; i < slots; ++i) {
      next();
      ring.slot().release();
      ring.advance();
    }
  }

  template <typename... Registers>
  DEVICE static void fence(Sums& sums, Registers&... registers) {
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) wgmma_fence(sums[c], registers...);
  }
  template <typename... Registers>
  DEVICE void drain(Sums& sums, Registers&... registers) {
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) wgmma_wait<0>(sums[c], registers...);
    drain();
  }

  // In the loops below, loops run at least once, sums are cleared instead of starting unread, and a
  // fence follows every wait: otherwise the compiler serialises the products.

  template <Major kState>
  DEVICE void multiply_state(Sums& sums) {
    fence(sums);
    int d = 0;
    do {
      lefts.slot(d).wait_full(lefts.round);
      const auto rows = left(d);
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const SharedOperand<kState> state(next(), kGranule);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<IO>(sums[c], rows.step(k), state.step(k));
        issued();
      }
    } while (++d < block.panels);
    drain(sums);
  }

  DEVICE void multiply_pairs(Pairs& pairs) {
    clear(pairs);
    wgmma_fence(pairs);
    int d = 0;
    do {
      const uint32_t slot = next();
      wgmma_fence();
      multiply_panel(pairs, d, slot);
      if (d + 1 < block.panels) multiply_panel(pairs, d + 1, slot + kGranule);
      issued();
      d += 2;
    } while (d < block.panels);
  }
  DEVICE void multiply_panel(Pairs& pairs, int panel, uint32_t address) const {
    const SharedOperand<Major::kDepth> rows = left(panel), right(address);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<IO>(pairs, rows.step(k), right.step(k));
  }

  // Without kLast another product reads the same slots again.
  template <bool kLast>
  DEVICE void multiply_inner(Sums& sums, Words& words) {
    const BlockRing first = ring;
    fence(sums, words);
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      const SharedOperand<Major::kWidth> inner(next(), kGranule);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<IO>(sums[c], words[k], inner.step(k));
      if constexpr (kLast) {
        issued();
      } else {
        wgmma_commit(), ring.advance();
      }
    }
    if constexpr (!kLast) ring = first;
    drain(sums, words);
  }

  // Computes E = decay (inverse pairs + delta), where t sees j, as a left operand or, with kRest,
  // what rounding E to 16 bits has cut off.
  template <RowsAre kRowsAre, bool kRest>
  DEVICE void weigh(const Pairs& pairs, Words& words, int other) const {
    if (other == tile()) {
      weigh_diagonal<kRowsAre, kRest>(pairs, words);
    } else {
      weigh_tile<kRowsAre, kRest>(pairs, words, other);
    }
  }

  template <RowsAre kRowsAre, bool kRest>
  DEVICE void weigh_tile(const Pairs& pairs, Words& words, int other) const {
    constexpr bool kSeeing = kRowsAre == RowsAre::kSeeing;
    const int low = kSeeing ? other : tile(), high = kSeeing ? tile() : other;
    float chain = 1;
    for (int i = low + 1; i < high; ++i) chain *= terms.decay[i];
    float gain[2], add[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row(half);
      if constexpr (kSeeing) {
        const float past = chain * terms.past[r];
        gain[half] = past * terms.inverse[r], add[half] = past * terms.delta[r];
      } else {
        gain[half] = chain * terms.future[r];
      }
    }
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const int column = other * kTile + 8 * j + 2 * quad;
      float2 by, inverse, delta;
      if constexpr (kSeeing) {
        by = reinterpret_cast<const float2&>(terms.future[column]);
      } else {
        by = reinterpret_cast<const float2&>(terms.past[column]);
        inverse = reinterpret_cast<const float2&>(terms.inverse[column]);
        delta = reinterpret_cast<const float2&>(terms.delta[column]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = pairs[j][2 * half], y = pairs[j][2 * half + 1];
        if constexpr (kSeeing) {
          x = by.x * fmaf(gain[half], x, add[half]), y = by.y * fmaf(gain[half], y, add[half]);
        } else {
          x = gain[half] * by.x * fmaf(inverse.x, x, delta.x);
          y = gain[half] * by.y * fmaf(inverse.y, y, delta.y);
        }
        put<kRest>(words, j, half, x, y);
      }
    }
  }

  template <RowsAre kRowsAre, bool kRest>
  DEVICE void weigh_diagonal(const Pairs& pairs, Words& words) const {
    constexpr bool kSeeing = kRowsAre == RowsAre::kSeeing;
    float2 own[2];
    float inverse[2], delta[2];
    int start[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row(half);
      own[half] = kSeeing ? terms.u[r] : terms.w[r];
      if constexpr (kSeeing) {
        inverse[half] = terms.inverse[r], delta[half] = terms.delta[r];
        start[half] = r < steps ? terms.start[r] : kTile;
      }
    }
    const int first = tile() * kTile;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const int in_tile = 8 * j + 2 * quad, column = first + in_tile;
      const float4 both =
          reinterpret_cast<const float4&>(kSeeing ? terms.w[column] : terms.u[column]);
      const float2 other[2] = {{both.x, both.y}, {both.z, both.w}};
      float2 inverses, deltas;
      int starts[2];
      if constexpr (!kSeeing) {
        inverses = reinterpret_cast<const float2&>(terms.inverse[column]);
        deltas = reinterpret_cast<const float2&>(terms.delta[column]);
        starts[0] = column < steps ? terms.start[column] : kTile;
        starts[1] = column + 1 < steps ? terms.start[column + 1] : kTile;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float e[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int r = row_in_tile(half), s = in_tile + c;
          const int t = kSeeing ? r : s, seen = kSeeing ? s : r;
          const int from = kSeeing ? start[half] : starts[c];
          const float by = kSeeing ? inverse[half] : c ? inverses.y : inverses.x;
          const float add = kSeeing ? delta[half] : c ? deltas.y : deltas.x;
          const float decay = exp2_approx((own[half].x + other[c].x) + (own[half].y + other[c].y));
          const bool counts = from <= seen && seen <= t;
          e[c] = counts ? decay * fmaf(by, pairs[j][2 * half + c], add) : 0.f;
        }
        put<kRest>(words, j, half, e[0], e[1]);
      }
    }
  }
  // Stores columns 8 j + 2 quad and the next of a row of E.
  template <bool kRest>
  DEVICE static void put(Words& words, int j, int half, float first, float second) {
    Pair<IO> pair = Pair<IO>::of(first, second);
    if constexpr (kRest) {
      const float2 rounded = pair.floats();
      pair = Pair<IO>::of(first - rounded.x, second - rounded.y);
    }
    words[j / 2][j % 2 * 2 + half] = pair.word[0];
  }

  // sums += E inner, tile by tile. It releases the left rows: neither they nor the row terms are
  // read afterwards. With kPrecise, E is split in two pieces.
  template <RowsAre kRowsAre, bool kPrecise>
  DEVICE void multiply_tiles(Sums& sums) {
    constexpr bool kSeeing = kRowsAre == RowsAre::kSeeing;
    const int rights = (block.panels + 1) / 2;  // ring slots that `right` takes for each tile
    const int first = kSeeing || tile() < block.first ? block.first : tile();
    const int end = kSeeing && tile() + 1 < block.end ? tile() + 1 : block.end;
    if (!exists()) {
      skip((block.end - block.first) * (rights + kBlocks));
      release_left(0, lefts.count);
      return;
    }
    // The other warpgroup has at most one tile more, before or after these.
    if (first > block.first) skip(rights + kBlocks);
    Pairs pairs;
    Words words;
    int other = first;
    do {
      multiply_pairs(pairs);
      wgmma_wait<0>(pairs);
      drain();
      if (other + 1 == end) release_left(1, lefts.count);
      if constexpr (kPrecise) {
        weigh<kRowsAre, true>(pairs, words, other);
        multiply_inner<false>(sums, words);
      }
      weigh<kRowsAre, false>(pairs, words, other);
      if (other + 1 == end) release_left(0, 1);
      multiply_inner<true>(sums, words);
    } while (++other < end);
    if (end < block.end) skip(rights + kBlocks);
  }

  // sums = outer (gain sums + add vector) for each row or, without the vector, outer sums. Where
  // outer is 0 the result is 0, even if the state holds NaN.
  template <bool kWithVector, typename FactorsOf>
  DEVICE void scale(Sums& sums, const FactorsOf& factors_of) const {
    const auto first = factors_of(row(0)), second = factors_of(row(1));
    const auto apply = [](float& sum, const auto& by, float added) {
      const float inner = kWithVector ? fmaf(by.gain, sum, by.add * added) : sum;
      sum = by.outer == 0 ? 0.f : by.outer * inner;
    };
#pragma unroll
    for (int j = 0; j < kBlocks * kBlockColumns / 8; ++j) {
      float2 added{};
      if (kWithVector) added = reinterpret_cast<const float2&>(terms.vector[8 * j + 2 * quad]);
      float (&sum)[4] = sums[j / 16][j % 16];
      apply(sum[0], first, added.x), apply(sum[1], first, added.y);
      apply(sum[2], second, added.x), apply(sum[3], second, added.y);
    }
  }
};

}  // namespace flashcell::cuda
