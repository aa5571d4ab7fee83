// h on Hopper: (s (q C) + W v) / N of 128 rows of a chunk and up to kColumns columns. README,
// Equations, and `forward.cuh`, whose sums these are.
//
// A warpgroup has 64 rows, a tile of rows.cuh, and all columns in registers. The products of its
// pairs, 64 by 64 at a time, are weighed in registers, where they are the left operand of W v.
// Thread blocks stay, and take one part of a chunk after another; the producer runs ahead.
#pragma once
#include "forward_terms.cuh"
#include "ring.cuh"
#include "rows.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

constexpr int kSlotBytes = 16 << 10;
constexpr int kWidestKey = 256;  // q stays in shared memory, and a tile of k has two slots

// One part of a chunk of a head: 128 rows, and columns from `column` on.
struct OutputPart {
  Chunk chunk;
  int64_t slot;
  int head, row, column;

  DEVICE bool has_steps() const { return row < chunk.steps; }
};

// Numbered; those of a chunk are neighbours, which read the same rows at the same time.
template <int kColumns>
struct OutputParts {
  unsigned heads, by_column, in_chunk;

  __host__ DEVICE OutputParts(int64_t H, int64_t V, int length)
      : heads(unsigned(H)),
        by_column(unsigned((V + kColumns - 1) / kColumns)),
        in_chunk((length + 127) / 128 * by_column) {}

  __host__ DEVICE int64_t count(const Chunks& chunks) const {
    return chunks.slots() * heads * in_chunk;
  }
  // Later rows of a chunk cost more: a thread block that takes every so many parts, in multiples of
  // a chunk's, gets another kind at every turn.
  DEVICE OutputPart at(const Chunks& chunks, unsigned index, unsigned turn) const {
    const unsigned unit = index / in_chunk, slot = unit / heads, part = (index + turn) % in_chunk;
    return {chunks.at(slot), slot, int(unit % heads), int(part / by_column * 128),
            int(part % by_column * kColumns)};
  }
};

template <typename IO, int kColumns>
struct OutputWgmma {
  static constexpr int kDeep = 128;                            // of K, in a slot of k
  static constexpr int kSlotRows = kSlotBytes / 2 / kColumns;  // of v, or of C's depth
  static constexpr int kBlocks = kColumns / 8, kPairs = kTile / 8;
  using QTile = Tile<IO, 2 * kTile>;
  using KTile = Tile<IO, kTile>;
  using SlotTile = Tile<IO, kSlotRows>;
  static constexpr int kNBytes = 8 * kPanelBytes;  // three pieces of n, for 64 of K

  struct Terms {  // of the 64 rows of one tile
    float2 w[kTile];
    float future[kTile];
  };
  // Dynamic shared memory: q, n, the ring's slots, their terms and barriers, q's.
  struct Layout {
    int n, slots, terms, barriers, bytes, count;

    __host__ DEVICE Layout(int64_t K, int shared_bytes) {
      const int panels = int((K + kDeep - 1) / kDeep) * (kDeep / 64);
      n = panels * QTile::kStride;
      slots = n + panels * kNBytes;
      slots = (slots + 1023) / 1024 * 1024;
      count =
          (shared_bytes - slots - Slot::kBytes) / int(kSlotBytes + sizeof(Terms) + Slot::kBytes);
      terms = slots + count * kSlotBytes;
      barriers = terms + count * int(sizeof(Terms));
      bytes = barriers + (count + 1) * Slot::kBytes;
    }
  };

  const ForwardParams& p;
  const ForwardTerms& terms;
  const OutputParts<kColumns> parts;
  const Layout layout;
  char* const memory;
  Ring<kSlotBytes> ring;
  const int consumer;  // which of them, in the same for all its threads as the compiler sees it
  int round = 0;       // parts with steps so far
  OutputPart part;
  unsigned index = 0, turn = 0;  // of the part; how many came before it here

  DEVICE OutputWgmma(const ForwardParams& params, const ForwardTerms& t, int shared_bytes,
                     char* shared)
      : p(params),
        terms(t),
        parts(p.H, p.V, t.rows.chunks.length),
        layout(p.K, shared_bytes),
        memory(shared),
        ring(shared_address(shared + layout.slots), shared_address(shared + layout.barriers),
             layout.count),
        consumer(warpgroup() - 1) {}

  DEVICE Slot q_slot() const {
    return {shared_address(memory + layout.barriers) + layout.count * Slot::kBytes};
  }
  DEVICE QTile q_tile() const { return {shared_address(memory)}; }
  DEVICE uint32_t n_tile() const { return shared_address(memory + layout.n); }
  DEVICE Terms& slot_terms(const Ring<kSlotBytes>& at) const {
    return reinterpret_cast<Terms*>(memory + layout.terms)[at.index];
  }
  DEVICE bool has_before() const { return part.chunk.number > 0 || p.C || p.n; }
  DEVICE int tiles() const {  // that the part's rows see
    const int steps = part.chunk.steps, end = part.row + 128 < steps ? part.row + 128 : steps;
    return (end + kTile - 1) / kTile;
  }
  static DEVICE int pieces(int64_t width, int size) { return int((width + size - 1) / size); }

  // Through the parts of this thread block: false after the last one.
  DEVICE bool start() {
    index = blockIdx.x;
    return take();
  }
  DEVICE bool advance() {
    if (part.has_steps()) ++round;
    index += gridDim.x, ++turn;
    return take();
  }
  DEVICE bool take() {
    const bool exists = index < parts.count(terms.rows.chunks);
    if (exists) part = parts.at(terms.rows.chunks, index, turn);
    return exists;
  }

  // ---- The producer ----

  struct Source {  // rows of a head, of which `rows` exist
    const IO* data;
    int64_t stride;
    int rows, columns;
  };
  DEVICE Source source(const Strided& x, int64_t width) const {
    const unsigned row = unsigned(part.chunk.row), b = row / unsigned(p.T),
                   t = row - b * unsigned(p.T);
    return {static_cast<const IO*>(x.data) + b * x.batch + t * x.time + part.head * x.head, x.time,
            part.chunk.steps, int(width)};
  }
  template <int kWidth, typename To>
  DEVICE static void load(To to, const Source& from, int row, int column) {
    copy_tile<kWarpgroup, kWidth>(to, from.data + row * from.stride + column, from.stride,
                                  from.rows - row, from.columns - column);
  }

  // body(address) fills the next slot.
  template <typename Body>
  DEVICE void fill(const Body& body) {
    const Slot slot = ring.slot();
    slot.wait_empty(ring.round);
    body(ring.address());
    slot.fill();
    ring.advance();
  }

  DEVICE void load_q() const {
    constexpr int kMost = kWidestKey / kWarpgroup;
    const bool with_n = p.normalized && has_before();
    const float* from = terms.n + terms.rows.slot(part.head, part.slot) * p.K;
    float n[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int k = i * kWarpgroup + threadIdx.x;
      n[i] = with_n && k < p.K ? from[k] : 0.f;
    }
    q_slot().wait_empty(round);
    const Source q = source(p.q, p.K);
    for (int panel = 0; panel < pieces(p.K, kDeep) * (kDeep / 64); ++panel) {
      load<64>(QTile{q_tile().address + panel * QTile::kStride}, q, part.row, panel * 64);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i * kWarpgroup < p.K) store_n(i * kWarpgroup + threadIdx.x, n[i]);
    }
    q_slot().fill();
    barrier_arrive(q_slot().full);  // for n, which is stored
  }
  // n in three pieces, which add up to it: rows 0 to 2 of eight.
  DEVICE void store_n(int k, float n) const {
    IO* panel = reinterpret_cast<IO*>(memory + layout.n + k / 64 * kNBytes);
    const int piece = k % 64 / 8;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const IO x = from_float<IO>(row < 3 ? n : 0.f);
      n -= to_float(x);
      panel[row * 64 + (piece ^ row) * 8 + k % 8] = x;
    }
  }

  DEVICE void produce() {
    for (bool more = start(); more; more = advance()) {
      if (!part.has_steps()) continue;
      if (has_before()) {
        const int64_t at = terms.rows.slot(part.head, part.slot) * p.K * p.V;
        const Source C{static_cast<const IO*>(terms.C) + at, p.V, int(p.K), int(p.V)};
        for (int depth = 0; depth < p.K; depth += kSlotRows) {
          fill([&](uint32_t to) { load<kColumns>(SlotTile{to}, C, depth, part.column); });
        }
      }
      load_q();  // after what can be loaded while the part before still needs its q
      const Source k = source(p.k, p.K), v = source(p.v, p.V);
      for (int tile = 0; tile < tiles(); ++tile) {
        const int row = tile * kTile;
        for (int depth = 0; depth < p.K; depth += kDeep) {
          fill([&](uint32_t to) {
            load<kDeep>(KTile{to}, k, row, depth);
            if (depth == 0) load_terms(row);
          });
        }
#pragma unroll 1
        for (int i = 0; i < kTile / kSlotRows; ++i) {
          fill([&](uint32_t to) {
            load<kColumns>(SlotTile{to}, v, row + i * kSlotRows, part.column);
          });
        }
      }
    }
  }
  DEVICE void load_terms(int row) const {
    const Rows& rows = terms.rows;
    const int64_t at = rows.row(part.head, part.chunk) + row;
    Terms& to = slot_terms(ring);
    const int i = threadIdx.x, left = part.chunk.steps - row;
    const bool has_w = i < 2 * left, has_future = i < left;
    copy_word_or_zero(&to.w[0].x + i, &rows.w[at].x + (has_w ? i : 0), has_w);
    if (i < kTile)
      copy_word_or_zero(&to.future[i], &rows.future[at] + (has_future ? i : 0), has_future);
  }

  // ---- A consumer ----

  using Outputs = float[kBlocks][4];
  struct RowTerms {  // of the lane's two rows, and the decays of tiles
    float2 u[2];
    float past[2], inflow[2], floor[2], sum[2];
    int start[2];
    float decay[kMostTiles];
  };

  DEVICE int own_tile() const { return part.row / kTile + consumer; }
  // Of the lane's two rows, in the tile.
  DEVICE static int tile_row(int down) {
    return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4 + 8 * down;
  }
  DEVICE int row(int down) const { return own_tile() * kTile + tile_row(down); }

  DEVICE RowTerms row_terms() const {
    const Rows& rows = terms.rows;
    RowTerms r{};
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      r.start[down] = kTile;
      if (row(down) >= part.chunk.steps) continue;
      const int64_t at = rows.row(part.head, part.chunk) + row(down);
      r.u[down] = rows.u[at], r.floor[down] = rows.floor[at];
      r.past[down] = rows.past[at], r.inflow[down] = rows.inflow[at];
      r.start[down] = rows.start[part.chunk.row + row(down)];
    }
    const float* decay = rows.tile_decay + rows.slot(part.head, part.slot) * rows.chunks.tiles();
#pragma unroll
    for (int j = 1; j < kMostTiles; ++j) {
      if (j < own_tile() && part.has_steps()) r.decay[j] = decay[j];
    }
    return r;
  }

  // A tile that the warpgroup has no use for.
  DEVICE void skip_tile() {
    for (int i = pieces(p.K, kDeep) + kTile / kSlotRows; i > 0; --i) {
      ring.slot().wait_full(ring.round);
      ring.slot().release();
      ring.advance();
    }
  }
  // The slots from `first` to where the warpgroup is.
  DEVICE void release_from(Ring<kSlotBytes> first) const {
    for (; first.index != ring.index; first.advance()) first.slot().release();
  }

  // sums = s (q C), and the rows' sums s (q n). One slot's products run while the next is waited
  // for.
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
      // n's pieces are columns 0 to 2, the others 0; lanes of a row add up in the end.
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
      for (int d = 0; d < kDeep / 16; ++d) {  // q and k have zeros beyond K
        wgmma<IO>(pairs, q.at((depth / 64 + d / 4) * QTile::kStride).step(d % 4),
                  k.at(d / 4 * KTile::kStride).step(d % 4));
      }
      ring.advance();
      depth += kDeep;
    } while (depth < p.K);
    wgmma_commit();
    wgmma_wait<0>(pairs);
  }

  // The lane's weights of tile j, rounded, as left operands of 16 columns each.
  using Weights = uint32_t[kTile / 16][4];

  DEVICE void weigh(Weights& weights, const Pairs& pairs, const Terms& columns, int tile,
                    RowTerms& r) const {
    const int own = own_tile(), q = threadIdx.x % 4;
    const float scale = terms.scale;
    float between = scale;
#pragma unroll
    for (int j = 1; j < kMostTiles; ++j) between *= tile < j && j < own ? r.decay[j] : 1.f;
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
          // Unseen ones as well: conditions around each exponential would run one after another.
          const auto weight = [&](int c, float whole, float rest, float pair) {
            const float decay = keep(exp2_approx((u.x + whole) + (u.y + rest)));
            const bool seen = r.start[down] <= c && c <= tile_row(down);
            return seen ? decay * (scale * pair) : 0.f;
          };
          put(j, down, weight(column, w.x, w.y, pairs[j][2 * down]),
              weight(column + 1, w.z, w.w, pairs[j][2 * down + 1]));
        }
      }
    }
  }

  // sums += W v of a tile.
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

  // Rows of padding are 0, whatever the sums are.
  DEVICE void store(Outputs& sums, const float (&inverse)[2], const OutputPart& to) const {
    const int first = to.row + consumer * kTile;
    if (first + kTile > to.chunk.steps) {
#pragma unroll
      for (int i = 0; i < kBlocks * 4; ++i) {
        if (first + tile_row(i % 4 / 2) >= to.chunk.steps) sums[i / 4][i % 4] = 0;
      }
    }
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int t = first + tile_row(down);
      IO* h = static_cast<IO*>(p.h) + ((to.chunk.row + t) * p.H + to.head) * p.V + to.column;
#pragma unroll
      for (int j = 0; j < kBlocks; j += 4) {
        float low[4], high[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          low[c] = inverse[down] * sums[j + c][2 * down];
          high[c] = inverse[down] * sums[j + c][2 * down + 1];
        }
        store_row<IO>(h + 8 * j, low, high, t < to.chunk.rows, int(p.V) - to.column - 8 * j);
      }
    }
  }
  // 1 / N, after the row's total went to the caller; padding has 0.
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
            t < part.chunk.steps ? total : 0.f;
      }
      inverse[down] = 1 / (fmaxf(fabsf(total), r.floor[down]) + float(p.eps));
    }
  }

  DEVICE void multiply(Outputs& sums, RowTerms& r) {
    const int own = own_tile(), last = own < tiles() ? own : tiles() - 1;
    q_slot().wait_full(round);
    if (has_before()) multiply_before(sums, r);
    for (int tile = 0; tile <= last; ++tile) {
      const Ring<kSlotBytes> first = ring;  // whose terms are the tile's
      Pairs pairs;
      multiply_pairs(pairs);
      if (tile == last) q_slot().release();
      Weights weights;
      weigh(weights, pairs, slot_terms(first), tile, r);
      release_from(first);
      multiply_values(sums, weights);
    }
    for (int tile = last + 1; tile < tiles(); ++tile) skip_tile();
  }

  DEVICE void consume() {
    RowTerms r{};
    bool more = start();
    if (more) r = row_terms();
    while (more) {
      Outputs sums;
      clear(sums);
      if (part.has_steps()) multiply(sums, r);
      float inverse[2] = {1, 1};
      if (p.normalized) divide(r, inverse);
      const OutputPart done = part;
      more = advance();
      if (more) r = row_terms();  // on their way while the rows are stored
      store(sums, inverse, done);
    }
  }

  DEVICE void run() {
    if (threadIdx.x == 0) ring.init(), q_slot().init(2 * kWarpgroup), barrier_init_fence();
    __syncthreads();
    if (warpgroup() == 0) {
      leave_registers<kProducerRegisters>();
      produce();
    } else {
      take_registers<kConsumerRegisters>();
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
#endif
}

}  // namespace flashcell::cuda
