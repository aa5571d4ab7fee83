// 128 rows of an output of a chunk of a head, on Hopper: rows times a state, and rows times the
// rows of a tile, weighed, times rows again:
//
//   sums = factors (left state) + E inner,   E = weigh(left right^T)
//
// A consumer warpgroup has 64 rows, by 128 kBlocks columns. E never leaves its registers: it is the
// left operand of the second product as it comes out of the first.
#pragma once
#include "row_ring.cuh"

namespace flashcell::cuda {

constexpr int kBlockRows = 2 * kTile, kBlockColumns = 128;

struct RowBlock {
  int row, column;  // the first of the output
  int panels;       // of depth of left, state and right
  int first, end;   // tiles of right and inner
  bool has_state;
};
template <typename IO>
struct RowInputs {
  Matrix<IO> left, state, right, inner;
};

// What depends on the gates, row by row of the chunk; 0 for rows that do not exist.
struct RowTerms {
  float2 u[kLongestChunk], w[kLongestChunk];
  float past[kLongestChunk], future[kLongestChunk];
  float gain[kLongestChunk];  // inflow, or outflow
  float inverse[kLongestChunk], delta[kLongestChunk];
  int start[kLongestChunk];
  float vector[2 * kBlockColumns];
  float decay[kMostTiles];
};

template <Major kState, typename IO>
DEVICE void fill_block(RingProducer<IO>& ring, const RowBlock& block, const RowInputs<IO>& from,
                       int column_blocks) {
  for (int d = 0; d < (block.panels + 1) / 2 * 2; ++d) {
    ring.fill_rows(from.left, block.row, d);
    if (!block.has_state || d == block.panels) continue;
    const int depth = d * kPanel<IO>;
    for (int c = 0; c < column_blocks; ++c) {
      const int column = block.column + c * kBlockColumns;
      if constexpr (kState == Major::kDepth) {
        ring.template fill_slot<Second::kBelow>(from.state, column, depth);
      } else {
        ring.template fill_slot<Second::kBeside>(from.state, depth, column);
      }
    }
  }
  for (int tile = block.first; tile < block.end; ++tile) {
    for (int d = 0; d < block.panels; d += 2) {
      ring.template fill_slot<Second::kBeside>(from.right, tile * kTile, d * kPanel<IO>);
    }
    for (int c = 0; c < column_blocks; ++c) {
      ring.template fill_slot<Second::kBeside>(from.inner, tile * kTile,
                                               block.column + c * kBlockColumns);
    }
  }
}

// Whose rows the rows of the block are: those of t, which see, or those of j, which are seen.
enum class RowsAre { kSeeing, kSeen };

// A warpgroup's part.
template <typename IO, int kBlocks>
struct RowProducts {
  using Sums = float[kBlocks][kBlockColumns / 8][4];
  using Pairs = float[kTile / 8][4];
  using Words = uint32_t[kTile / 16][4];

  RingConsumer& ring;
  const RowTerms& terms;
  const RowBlock& block;
  const int steps;             // of the chunk
  const int group, warp, lane_row, quad;  // warpgroup, warp in it; of the lane

  DEVICE RowProducts(RingConsumer& place, const RowTerms& of_rows, const RowBlock& of_block,
                     int chunk_steps)
      : ring(place),
        terms(of_rows),
        block(of_block),
        steps(chunk_steps),
        group(__shfl_sync(~0u, int(threadIdx.x / kWarpgroup), 0)),
        warp(threadIdx.x / 32 % 4),
        lane_row(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4) {}

  DEVICE int tile() const { return block.row / kTile + group; }
  DEVICE bool exists() const { return tile() * kTile < steps; }
  DEVICE int row_in_tile(int half) const { return warp * 16 + lane_row + 8 * half; }
  DEVICE int row(int half) const { return tile() * kTile + row_in_tile(half); }

  DEVICE SharedOperand<Major::kDepth> left(int panel) const {
    return SharedOperand<Major::kDepth>(ring.rows + panel * kSlotBytes + group * kGranule);
  }

  DEVICE static void pin_all(Sums& sums) {
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) pin(sums[c]);
  }
  DEVICE static void fence(Sums& sums) {
    pin_all(sums);
    wgmma_fence();
  }

  // The compiler keeps products apart from each other unless loops run at least once, sums are
  // cleared instead of not read, and every wait at a barrier has a fence behind it.

  template <Major kState>
  DEVICE void multiply_state(Sums& sums) {
    fence(sums);
    int d = 0;
    do {
      ring.wait_rows(d);
      const auto rows = left(d);
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const SharedOperand<kState> state(ring.next(), kGranule);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<IO>(sums[c], rows.step(k), state.step(k));
        ring.issued();
      }
    } while (++d < block.panels);
    ring.drain();
    pin_all(sums);
  }

  // An odd number of panels has zeros beside the last one, in both.
  DEVICE void multiply_pairs(Pairs& pairs) {
    clear(pairs);
    wgmma_fence(pairs);
    int d = 0;
    do {
      const uint32_t slot = ring.next();
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto rows = left(d + half);
        const SharedOperand<Major::kDepth> right(slot + half * kGranule);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<IO>(pairs, rows.step(k), right.step(k));
      }
      ring.issued();
      d += 2;
    } while (d < block.panels);
  }
  DEVICE static void clear(Pairs& pairs) {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) pairs[i / 4][i % 4] = 0;
  }

  DEVICE void multiply_inner(Sums& sums, Words& words) {
    pin_all(sums);
    wgmma_fence(words);
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      const SharedOperand<Major::kWidth> inner(ring.next(), kGranule);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<IO>(sums[c], words[k], inner.step(k));
      ring.issued();
    }
  }

  // E = decay (inverse pairs + delta), where t sees j, as a left operand. body(half, e) gets what
  // the lane has of a row, unrounded.
  template <RowsAre kRowsAre, typename Body>
  DEVICE void weigh(const Pairs& pairs, Words& words, int other, const Body& body) const {
    if (other == tile()) {
      weigh_diagonal<kRowsAre>(pairs, words, body);
    } else {
      weigh_tile<kRowsAre>(pairs, words, other, body);
    }
  }

  template <RowsAre kRowsAre, typename Body>
  DEVICE void weigh_tile(const Pairs& pairs, Words& words, int other, const Body& body) const {
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
        put(words, j, half, x, y, body);
      }
    }
  }

  template <RowsAre kRowsAre, typename Body>
  DEVICE void weigh_diagonal(const Pairs& pairs, Words& words, const Body& body) const {
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
        start[half] = terms.start[r];
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
      int2 starts;
      if constexpr (!kSeeing) {
        inverses = reinterpret_cast<const float2&>(terms.inverse[column]);
        deltas = reinterpret_cast<const float2&>(terms.delta[column]);
        starts = reinterpret_cast<const int2&>(terms.start[column]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float e[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int r = row_in_tile(half), s = in_tile + c;
          const int t = kSeeing ? r : s, seen = kSeeing ? s : r;
          const int from = kSeeing ? start[half] : c ? starts.y : starts.x;
          const float by = kSeeing ? inverse[half] : c ? inverses.y : inverses.x;
          const float add = kSeeing ? delta[half] : c ? deltas.y : deltas.x;
          const float decay =
              exp2_approx((own[half].x + other[c].x) + (own[half].y + other[c].y));
          const bool counts = from <= seen && seen <= t && first + t < steps;
          e[c] = counts ? decay * fmaf(by, pairs[j][2 * half + c], add) : 0.f;
        }
        put(words, j, half, e[0], e[1], body);
      }
    }
  }
  // Columns 8 j + 2 quad, + 1 of a row of E.
  template <typename Body>
  DEVICE static void put(Words& words, int j, int half, float first, float second,
                         const Body& body) {
    words[j / 2][j % 2 * 2 + half] = Pair<IO>::of(first, second).word[0];
    body(half, first + second);
  }

  // sums += E inner, tile by tile. Ends the left rows: nothing of them or of terms is read
  // afterwards.
  template <RowsAre kRowsAre, typename Body>
  DEVICE void multiply_tiles(Sums& sums, const Body& body) {
    constexpr bool kSeeing = kRowsAre == RowsAre::kSeeing;
    const int rights = (block.panels + 1) / 2;  // slots
    const int first = kSeeing ? block.first : max(block.first, tile());
    const int end = kSeeing ? min(block.end, tile() + 1) : block.end;
    if (!exists()) {
      ring.skip((block.end - block.first) * (rights + kBlocks));
      ring.end_rows();
      return;
    }
    // The other warpgroup has at most one tile more: before these, or after.
    if (first > block.first) ring.skip(rights + kBlocks);
    Pairs pairs;
    Words words;
    int other = first;
    do {
      multiply_pairs(pairs);
      ring.drain(pairs);
      weigh<kRowsAre>(pairs, words, other, body);
      if (other + 1 == end) ring.end_rows();
      multiply_inner(sums, words);
      ring.drain(words);
      pin_all(sums);
    } while (++other < end);
    if (end < block.end) ring.skip(rights + kBlocks);
  }

  // sums = outer (gain sums + add vector), row by row; 0 where outer is 0, whatever the state
  // holds.
  template <typename FactorsOf>
  DEVICE void scale(Sums& sums, const FactorsOf& factors_of) const {
    const auto first = factors_of(row(0)), second = factors_of(row(1));
    const auto apply = [](float& sum, const auto& by, float added) {
      sum = by.outer == 0 ? 0.f : by.outer * fmaf(by.gain, sum, by.add * added);
    };
#pragma unroll
    for (int j = 0; j < kBlocks * kBlockColumns / 8; ++j) {
      const float2 added = reinterpret_cast<const float2&>(terms.vector[8 * j + 2 * quad]);
      float(&sum)[4] = sums[j / 16][j % 16];
      apply(sum[0], first, added.x), apply(sum[1], first, added.y);
      apply(sum[2], second, added.x), apply(sum[3], second, added.y);
    }
  }
};

}  // namespace flashcell::cuda
