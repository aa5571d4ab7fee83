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

template <typename IO>
struct RowBlock {
  Matrix<IO> left, state, right, inner;
  int row, column;     // the first of the output
  int panels;          // of depth of left, state and right
  int first, end;      // tiles of right and inner
  bool has_state;
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
DEVICE void fill_block(RingProducer<IO>& ring, const RowBlock<IO>& block, int column_blocks) {
  for (int d = 0; d < block.panels; ++d) {
    ring.fill_rows(block.left, block.row, d);
    if (!block.has_state) continue;
    const int depth = d * kPanel<IO>;
    for (int c = 0; c < column_blocks; ++c) {
      const int column = block.column + c * kBlockColumns;
      if constexpr (kState == Major::kDepth) {
        ring.template fill_slot<Second::kBelow>(block.state, column, depth);
      } else {
        ring.template fill_slot<Second::kBeside>(block.state, depth, column);
      }
    }
  }
  for (int tile = block.first; tile < block.end; ++tile) {
    for (int d = 0; d < block.panels; d += 2) {
      ring.template fill_slot<Second::kBeside>(block.right, tile * kTile, d * kPanel<IO>);
    }
    for (int c = 0; c < column_blocks; ++c) {
      ring.template fill_slot<Second::kBeside>(block.inner, tile * kTile,
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
  const RowBlock<IO>& block;
  const int steps;             // of the chunk
  const int group, warp, lane_row, quad;  // warpgroup, warp in it; of the lane

  DEVICE RowProducts(RingConsumer& place, const RowTerms& of_rows, const RowBlock<IO>& of_block,
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

  template <Major kState>
  DEVICE void multiply_state(Sums& sums) {
    fence(sums);
    for (int d = 0; d < block.panels; ++d) {
      ring.wait_rows(d);
      const auto rows = left(d);
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const SharedOperand<kState> state(ring.next(), kGranule);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<IO>(sums[c], rows.step(k), state.step(k));
        ring.issued();
      }
    }
    ring.drain();
    pin_all(sums);
  }

  DEVICE void multiply_pairs(Pairs& pairs) {
    wgmma_fence(pairs);
    for (int d = 0; d < block.panels; d += 2) {
      const uint32_t slot = ring.next();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (d + half == block.panels) break;
        const auto rows = left(d + half);
        const SharedOperand<Major::kDepth> right(slot + half * kGranule);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma<IO>(pairs, rows.step(k), right.step(k), d + half + k > 0);
        }
      }
      ring.issued();
    }
  }

  DEVICE void multiply_inner(Sums& sums, Words& words) {
    pin(words);
    fence(sums);
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      const SharedOperand<Major::kWidth> inner(ring.next(), kGranule);
      wgmma_fence(sums[c], words);
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<IO>(sums[c], words[k], inner.step(k));
      ring.issued();
    }
  }

  // E = decay (inverse pairs + delta), where t sees j, rounded as a left operand. seen(half, e)
  // gets what the lane has of a row, unrounded.
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
        const float x = pairs[j][2 * half], y = pairs[j][2 * half + 1];
        float first, second;
        if constexpr (kSeeing) {
          first = by.x * fmaf(gain[half], x, add[half]);
          second = by.y * fmaf(gain[half], y, add[half]);
        } else {
          first = gain[half] * by.x * fmaf(inverse.x, x, delta.x);
          second = gain[half] * by.y * fmaf(inverse.y, y, delta.y);
        }
        put(words, j, half, first, second);
        body(half, first + second);
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
        put(words, j, half, e[0], e[1]);
        body(half, e[0] + e[1]);
      }
    }
  }
  // Columns 8 j + 2 quad, + 1 of a row of E.
  DEVICE static void put(Words& words, int j, int half, float first, float second) {
    words[j / 2][j % 2 * 2 + half] = Pair<IO>::of(first, second).word[0];
  }

  // sums += E inner, tile by tile. Nothing of terms or left rows is read after it.
  template <RowsAre kRowsAre, typename Body>
  DEVICE void multiply_tiles(Sums& sums, const Body& body) {
    Words words;
    for (int other = block.first; other < block.end; ++other) {
      const bool counts =
          exists() && (kRowsAre == RowsAre::kSeeing ? other <= tile() : other >= tile());
      if (!counts) {
        ring.skip((block.panels + 1) / 2 + kBlocks);
        continue;
      }
      Pairs pairs;
      multiply_pairs(pairs);
      ring.drain(pairs);
      weigh<kRowsAre>(pairs, words, other, body);
      multiply_inner(sums, words);
      ring.drain(words);
      pin_all(sums);
    }
    ring.end_rows();
  }

  // sums = outer (gain sums + add vector), row by row; 0 where outer is 0, whatever the state
  // holds.
  template <typename FactorsOf>
  DEVICE void scale(Sums& sums, const FactorsOf& factors_of) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto f = factors_of(row(half));
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
        for (int j = 0; j < kBlockColumns / 8; ++j) {
          const float2 added = reinterpret_cast<const float2&>(
              terms.vector[c * kBlockColumns + 8 * j + 2 * quad]);
          float &x = sums[c][j][2 * half], &y = sums[c][j][2 * half + 1];
          x = f.outer == 0 ? 0.f : f.outer * fmaf(f.gain, x, f.add * added.x);
          y = f.outer == 0 ? 0.f : f.outer * fmaf(f.gain, y, f.add * added.y);
        }
      }
    }
  }
};

}  // namespace flashcell::cuda
