// dq, dk and dv of 128 rows of a chunk of a head, on Hopper: products of row_block.cuh,
//
//   dq = s (dh C^T / N + delta n) + dS k       rows t; dS = decay (dh v^T / N + delta)
//   dk = a (v dC^T + dn) + dS^T q              rows j
//   dv = a (k dC) + (W / N)^T dh               rows j; W = decay (q k^T)
//
// by persistent blocks that walk through items: chunk, head, what of it. in_t = q dq and
// out_j = k dk go to gate_gradients, from unrounded sums.
#pragma once
#include <algorithm>

#include "backward_terms.cuh"
#include "row_block.cuh"

namespace flashcell::cuda {

enum class Gradient { kQuery, kKey, kValue };

constexpr int kMostSlots = 12;

struct BlockItem {
  Chunk chunk;
  int64_t slot;
  int head, row, column;
  Gradient gradient;
};

template <typename IO, int kKeyBlocks, int kValueBlocks>
struct BlockGradients {
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;

  struct Shared {  // behind the ring's slots and the left rows
    RowTerms rows;
    float anchor[kConsumerThreads / 32];
    char barriers[(kMostSlots + kMostPanels) * Slot::kBytes];
  };
  __host__ DEVICE static int panels(int64_t width) { return int((width + kPanel<IO> - 1) / kPanel<IO>); }
  // Slots of the ring: what fits.
  static int slots(const BackwardParams& p, int shared_bytes) {
    const int left = panels(std::max(p.K, p.V)) * kSlotBytes + int(sizeof(Shared));
    return std::min((shared_bytes - left) / kSlotBytes, kMostSlots);
  }
  static int bytes(const BackwardParams& p, int shared_bytes) {
    const int left = panels(std::max(p.K, p.V));
    return (slots(p, shared_bytes) + left) * kSlotBytes + int(sizeof(Shared));
  }

  const BackwardParams& p;
  const BackwardTerms& terms;
  const BlockRing ring;
  const LeftRows left;
  Shared& shared;

  DEVICE BlockGradients(const BackwardParams& params, const BackwardTerms& t, int slots, int panels,
                        char* memory)
      : p(params),
        terms(t),
        ring(shared_address(memory), barriers(memory, slots, panels), slots),
        left{shared_address(memory) + slots * kSlotBytes,
             ring.barriers + slots * Slot::kBytes, panels},
        shared(shared_behind(memory, slots, panels)) {}

  DEVICE static Shared& shared_behind(char* memory, int slots, int panels) {
    return *reinterpret_cast<Shared*>(memory + (slots + panels) * kSlotBytes);
  }
  DEVICE static uint32_t barriers(char* memory, int slots, int panels) {
    return shared_address(shared_behind(memory, slots, panels).barriers);
  }

  // ---- Items. Those of a chunk and head are neighbours, because they read the same rows. ----

  __host__ DEVICE static int64_t value_items(const BackwardParams& p) {
    const int width = kValueBlocks * kBlockColumns;
    return (p.V + width - 1) / width;
  }
  __host__ DEVICE static int items_of_chunk(const BackwardParams& p, int tiles) {
    return (tiles + 1) / 2 * (2 + int(value_items(p)));
  }
  DEVICE BlockItem item(int64_t index) const {
    const int count = items_of_chunk(p, terms.rows.chunks.tiles());
    const int64_t chunk = index / count;
    // The items of a chunk differ in length: every round gives a block another kind.
    const int round = int(chunk * count / gridDim.x % count);
    const int kind = (int(index % count) + round) % count, kinds = 2 + int(value_items(p));
    const int which = kind % kinds;
    BlockItem item;
    item.slot = chunk / p.H, item.head = int(chunk % p.H);
    item.chunk = terms.rows.chunks.at(item.slot);
    item.row = kind / kinds * kBlockRows;
    item.gradient = which == 0   ? Gradient::kQuery
                    : which == 1 ? Gradient::kKey
                                 : Gradient::kValue;
    item.column = which < 2 ? 0 : (which - 2) * kValueBlocks * kBlockColumns;
    return item;
  }

  DEVICE Matrix<IO> matrix(const BlockItem& item, const Strided& x, int64_t width) const {
    const int64_t b = item.chunk.row / p.T, t = item.chunk.row % p.T;
    return {static_cast<const IO*>(x.data) + b * x.batch + t * x.time + item.head * x.head, x.time,
            item.chunk.steps, int(width)};
  }
  DEVICE Matrix<IO> dh(const BlockItem& item) const {
    return matrix(item, {p.dh, p.T * p.H * p.V, p.H * p.V, p.V}, p.V);
  }
  DEVICE Matrix<IO> state(const BlockItem& item, const void* states) const {
    const int64_t at = terms.rows.slot(item.head, item.slot) * p.K * p.V;
    return {static_cast<const IO*>(states) + at, p.V, int(p.K), int(p.V)};
  }
  DEVICE RowBlock block(const BlockItem& item) const {
    const int tiles = (item.chunk.steps + kTile - 1) / kTile, tile = item.row / kTile;
    if (item.gradient == Gradient::kQuery) {
      const bool before = item.chunk.number > 0 || p.C || p.n;
      return {item.row, 0, panels(p.V), 0, tile + 2 < tiles ? tile + 2 : tiles, before};
    }
    const int depth = item.gradient == Gradient::kKey ? panels(p.V) : panels(p.K);
    return {item.row, item.column, depth, tile, tiles, has_after(item)};
  }
  DEVICE RowInputs<IO> inputs(const BlockItem& item) const {
    const Matrix<IO> q = matrix(item, p.q, p.K), k = matrix(item, p.k, p.K);
    const Matrix<IO> v = matrix(item, p.v, p.V), given = dh(item);
    switch (item.gradient) {
      case Gradient::kQuery:
        return {given, state(item, terms.C), v, k};
      case Gradient::kKey:
        return {v, state(item, terms.dC), given, q};
      default:
        return {k, state(item, terms.dC), q, given};
    }
  }
  DEVICE bool has_after(const BlockItem& item) const {
    return !terms.is_last(item.slot) || p.dlast_C || p.dlast_n;
  }

  // ---- The producer ----

  // Lands with the first panel of rows.
  DEVICE void copy_terms(const BlockItem& item) const {
    const Rows& rows = terms.rows;
    const bool seeing = item.gradient == Gradient::kQuery;
    const bool divided = item.gradient != Gradient::kValue && terms.delta;
    const int64_t first = rows.row(item.head, item.chunk);
    const float* gain = seeing ? rows.inflow : rows.outflow;
    RowTerms& to = shared.rows;
    const auto copy_pair = [](float2& to, const float2* from, bool exists) {
      copy_word_or_zero(&to.x, &from->x, exists), copy_word_or_zero(&to.y, &from->y, exists);
    };
#pragma unroll 1
    for (int row = threadIdx.x % kWarpgroup; row < kLongestChunk; row += kWarpgroup) {
      const bool exists = row < item.chunk.steps;
      const int64_t at = first + (exists ? row : 0);
      copy_pair(to.u[row], rows.u + at, exists), copy_pair(to.w[row], rows.w + at, exists);
      copy_word_or_zero(&to.past[row], rows.past + at, exists);
      copy_word_or_zero(&to.future[row], rows.future + at, exists);
      copy_word_or_zero(&to.gain[row], gain + at, exists);
      copy_word_or_zero(&to.inverse[row], terms.inverse + at, exists);
      copy_word_or_zero(&to.delta[row], divided ? terms.delta + at : terms.inverse, divided && exists);
      const int* start = rows.start + item.chunk.row + (exists ? row : 0);
      copy_word_or_zero(reinterpret_cast<float*>(&to.start[row]),
                        reinterpret_cast<const float*>(start), exists);
      const float* vector = seeing ? terms.n : terms.dn;
      const bool has = vector && item.gradient != Gradient::kValue && row < p.K;
      const int64_t state = rows.slot(item.head, item.slot) * p.K;
      copy_word_or_zero(&to.vector[row], has ? vector + state + row : terms.inverse, has);
    }
    const int tile = threadIdx.x % kWarpgroup;
    if (tile < kMostTiles) {
      const bool exists = tile * kTile < item.chunk.steps;
      const float* decays = rows.tile_decay + rows.slot(item.head, item.slot) * rows.chunks.tiles();
      copy_word_or_zero(&to.decay[tile], decays + (exists ? tile : 0), exists);
    }
  }
  DEVICE void produce(int64_t items) const {
    BlockProducer<IO> producer{ring, left};
    for (int64_t index = blockIdx.x; index < items; index += gridDim.x) {
      const BlockItem at = item(index);
      if (at.row >= at.chunk.steps) continue;
      const RowBlock of = block(at);
      const auto terms_too = [&] { copy_terms(at); };
      if (at.gradient == Gradient::kValue) {
        producer.template fill<Major::kWidth>(of, inputs(at), kValueBlocks, terms_too);
      } else {
        producer.template fill<Major::kDepth>(of, inputs(at), kKeyBlocks, terms_too);
      }
    }
    producer.landing.finish();
  }

  // ---- The consumers ----

  // Rows of padding are 0.
  template <int kBlocks, typename Products>
  DEVICE void store(const BlockItem& item, const Products& products,
                    const typename Products::Sums& sums, void* to, int64_t width) const {
    IO* rows = static_cast<IO*>(to) + (item.chunk.row * p.H + item.head) * width + item.column;
    const int own = int(width) - item.column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = products.row(half);
      const bool runs = row < item.chunk.steps;
#pragma unroll
      for (int j = 0; j < kBlocks * kBlockColumns / 8; j += 4) {
        float low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&sum)[4] = sums[j / 16][j % 16 + i];
          low[i] = runs ? sum[2 * half] : 0.f, high[i] = runs ? sum[2 * half + 1] : 0.f;
        }
        const int rest = own - 8 * j < 32 ? own - 8 * j : 32;
        store_row<IO>(rows + row * p.H * width + 8 * j, low, high, row < item.chunk.rows, rest);
      }
    }
  }
  // Rows' products with those of x.
  template <typename Products>
  DEVICE void store_flow(const BlockItem& item, const Products& products,
                         const typename Products::Sums& sums, const Matrix<IO>& x,
                         float* to) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = products.row(half);
      const bool runs = row < x.rows;
      const IO* from = x.data + (runs ? row : 0) * x.stride;
      float total = 0;
#pragma unroll
      for (int j = 0; j < kKeyBlocks * kBlockColumns / 8; ++j) {
        const int column = 8 * j < x.columns ? 8 * j : 0;  // sums of what does not exist are 0
        const float2 pair =
            reinterpret_cast<const Pair<IO>&>(from[column + 2 * products.quad]).floats();
        const float(&sum)[4] = sums[j / 16][j % 16];
        total = fmaf(sum[2 * half], pair.x, total), total = fmaf(sum[2 * half + 1], pair.y, total);
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
      if (products.quad == 0 && runs) to[terms.rows.row(item.head, item.chunk) + row] = total;
    }
  }

  struct Factors {
    float outer, gain, add;
  };

  template <Gradient kGradient>
  DEVICE void consume(BlockRing& place, const LeftRows& rows, const BlockItem& item) const {
    constexpr bool kQuery = kGradient == Gradient::kQuery, kValue = kGradient == Gradient::kValue;
    constexpr int kBlocks = kValue ? kValueBlocks : kKeyBlocks;
    constexpr Major kState = kValue ? Major::kWidth : Major::kDepth;
    constexpr RowsAre kRowsAre = kQuery ? RowsAre::kSeeing : RowsAre::kSeen;
    using Products = RowProducts<IO, kBlocks>;
    const RowBlock of = block(item);
    Products products(place, rows, shared.rows, of, item.chunk.steps);
    if (kQuery && item.row == 0 && item.chunk.steps > 0) add_anchor(item);
    typename Products::Sums sums;
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) clear(sums[c]);
    if (item.row < item.chunk.steps) {
      if (of.has_state) {
        products.template multiply_state<kState>(sums);
        products.scale(sums, [&](int row) {
          const float gain = shared.rows.gain[row];
          return kQuery ? Factors{gain, shared.rows.inverse[row], shared.rows.delta[row]}
                        : Factors{gain, 1, kValue ? 0.f : 1.f};
        });
      } else {
        products.wait_left();
      }
      products.template multiply_tiles<kRowsAre>(sums, [](int, float) {});
    }
    if constexpr (kValue) {
      store<kBlocks>(item, products, sums, p.dv, p.V);
    } else {
      store<kBlocks>(item, products, sums, kQuery ? p.dq : p.dk, p.K);
      const Matrix<IO> x = kQuery ? matrix(item, p.q, p.K) : matrix(item, p.k, p.K);
      store_flow(item, products, sums, x, kQuery ? terms.in : terms.out);
    }
  }
  // <C, dC> + <n, dn> after the chunk, of dC as the products have it, rounded.
  DEVICE void add_anchor(const BlockItem& item) const {
    const int thread = threadIdx.x - kWarpgroup;  // of the consumers
    const int64_t size = p.K * p.V, here = terms.rows.slot(item.head, item.slot),
                  last = item.chunk.sequence * p.H + item.head;
    const IO *C = static_cast<const IO*>(terms.C),
             *dC = static_cast<const IO*>(terms.dC) + here * size;
    float sum = 0;
    const auto add = [&](const auto* x, const auto* dx, int64_t width) {
      sum += part_of_dot<kConsumerThreads>(x, dx, width, thread);
    };
    if (!terms.is_last(item.slot)) {
      add(C + (here + 1) * size, dC, size);
      if (terms.n) add(terms.n + (here + 1) * p.K, terms.dn + here * p.K, p.K);
    } else if (has_after(item)) {
      add(static_cast<const float*>(p.last_C) + last * size, dC, size);
      if (terms.n) {
        add(static_cast<const float*>(p.last_n) + last * p.K, terms.dn + here * p.K, p.K);
      }
    }
    sum = warp_sum(sum);
    sync_threads(1, kConsumerThreads);  // an earlier item's sums have been read
    if (thread % 32 == 0) shared.anchor[thread / 32] = sum;
    sync_threads(1, kConsumerThreads);
    if (thread > 0) return;
    float total = 0;
    for (const float part : shared.anchor) total += part;
    terms.anchor[here] = total;
  }

  DEVICE void consume(int64_t items) const {
    BlockRing place = ring;
    LeftRows rows = left;
    for (int64_t index = blockIdx.x; index < items; index += gridDim.x) {
      const BlockItem at = item(index);
      if (at.row >= at.chunk.rows) continue;
      switch (at.gradient) {
        case Gradient::kQuery:
          consume<Gradient::kQuery>(place, rows, at);
          break;
        case Gradient::kKey:
          consume<Gradient::kKey>(place, rows, at);
          break;
        default:
          consume<Gradient::kValue>(place, rows, at);
      }
      if (at.row < at.chunk.steps) ++rows.round;
    }
  }

  DEVICE void run(int64_t items) const {
    if (threadIdx.x == 0) {
      ring.init();
      for (int panel = 0; panel < left.count; ++panel) left.slot(panel).init();
      barrier_init_fence();
    }
    __syncthreads();
    if (warpgroup() == 0) {
      leave_registers<kProducerRegisters>();
      produce(items);
    } else {
      take_registers<kConsumerRegisters>();
      consume(items);
    }
  }
};

template <typename IO, int kKeyBlocks, int kValueBlocks>
__global__ void __launch_bounds__(kRingThreads, 1)
    block_gradients(const BackwardParams p, const BackwardTerms terms, int64_t items, int slots,
                    int panels) {
#if FLASHCELL_WGMMA_CODE
  extern __shared__ __align__(1024) char memory[];
  BlockGradients<IO, kKeyBlocks, kValueBlocks>(p, terms, slots, panels, memory).run(items);
#endif
}

}  // namespace flashcell::cuda
