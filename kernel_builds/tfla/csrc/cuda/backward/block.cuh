// dq, dk and dv on Hopper, by the products of row_block.cuh. An item is 128 rows of a chunk of a
// head:
//
//   dq = s (dh C^T / N + delta n) + dS k       rows t; dS = decay (dh v^T / N + delta)
//   dk = a (v dC^T + dn) + dS^T q              rows j
//   dv = a (k dC) + (W / N)^T dh               rows j; W = decay (q k^T)
//
// Blocks are persistent. Each starts with one of the three gradients, so that its code stays in the
// instruction cache. It takes that gradient's next free item until none is left, then items of the
// other gradients: some blocks take a third longer than others for the same work. The sums in_t = q
// dq and out_j = k dk, from unrounded gradients, go to gate_gradients.
#pragma once
#include <algorithm>

#include "row_block.cuh"
#include "terms.cuh"

namespace flashcell::cuda {

enum class Gradient { kQuery, kKey, kValue };
constexpr int kGradients = 3;

// How many thread blocks start with which gradient.
struct GradientBlocks {
  int count[kGradients];

  __host__ DEVICE int total() const { return count[0] + count[1] + count[2]; }
};

constexpr int kMostSlots = 12;
// This producer has more values in registers than others: with fewer registers it spills.
constexpr int kBlockProducerRegisters = 88, kBlockConsumerRegisters = 208;

struct BlockItem {
  Chunk chunk;
  int64_t slot;
  int head, row, column;
  Gradient gradient;
};

// With kPrecise it redoes the listed chunks, with E split in two pieces. It is a separate kernel,
// because its registers, or a check of the list, would slow the common one down by a tenth.
template <typename IO, int kKeyBlocks, int kValueBlocks, bool kPrecise>
struct BlockGradients {
  struct Shared {  // follows the ring's slots and the left rows in shared memory
    RowTerms rows;
    int items[ItemQueue::kAhead];
    char barriers[(kMostSlots + kMostPanels + ItemQueue::kAhead) * Slot::kBytes];
  };
  __host__ DEVICE static int panels(int64_t width) {
    return int((width + kPanel<IO> - 1) / kPanel<IO>);
  }
  // Returns how many slots of the ring fit in shared memory.
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
  const ItemQueue queue;

  DEVICE BlockGradients(const BackwardParams& params, const BackwardTerms& t, int slots, int panels,
                        char* memory)
      : p(params),
        terms(t),
        ring(shared_address(memory), barriers(memory, slots, panels), slots),
        left{shared_address(memory) + slots * kSlotBytes, ring.barriers + slots * Slot::kBytes,
             panels},
        shared(shared_behind(memory, slots, panels)),
        queue{shared.items, left.barriers + panels * Slot::kBytes} {}

  DEVICE static Shared& shared_behind(char* memory, int slots, int panels) {
    return *reinterpret_cast<Shared*>(memory + (slots + panels) * kSlotBytes);
  }
  DEVICE static uint32_t barriers(char* memory, int slots, int panels) {
    return shared_address(shared_behind(memory, slots, panels).barriers);
  }

  // ---- Items: 128 rows of a chunk and head, and up to 128 kBlocks columns. ----

  __host__ DEVICE static int value_items(const BackwardParams& p) {
    constexpr int kWidth = kValueBlocks * kBlockColumns;
    return (int(p.V) + kWidth - 1) / kWidth;
  }
  // Shares the SMs among gradients in proportion to their multiplications.
  static GradientBlocks share(const BackwardParams& p, int tiles, int sms) {
    const double pairs = 32. * tiles * (tiles + 1), state = double(p.K * p.V * tiles);
    const double keys = pairs * double(p.K + p.V) + state;
    const double values = pairs * double(p.K * value_items(p) + p.V) + state;
    const int each = std::max(1, int(sms * keys / (2 * keys + values) + 0.5));
    return {each, each, std::max(1, sms - 2 * each)};
  }

  DEVICE int columns(Gradient gradient) const {
    return gradient == Gradient::kValue ? value_items(p) : 1;
  }
  DEVICE int parts(Gradient gradient) const {  // items of a chunk and head
    return (terms.rows.chunks.tiles() + 1) / 2 * columns(gradient);
  }
  DEVICE int items(Gradient gradient) const {
    const int chunks = kPrecise ? *terms.count : int(terms.rows.chunks.slots()) * int(p.H);
    return chunks * parts(gradient);
  }
  DEVICE BlockItem item(Gradient gradient, int index) const {
    const int of_chunk = parts(gradient), wide = columns(gradient);
    const int place = index / of_chunk, part = index % of_chunk;
    const int chunk = kPrecise ? terms.listed[place] : place;
    BlockItem item;
    item.slot = chunk / int(p.H), item.head = chunk % int(p.H);
    item.chunk = terms.rows.chunks.at(item.slot);
    item.row = part / wide * kBlockRows;
    item.column = part % wide * kValueBlocks * kBlockColumns;
    item.gradient = gradient;
    return item;
  }

  DEVICE Matrix<IO> matrix(const BlockItem& item, const Strided& x, int64_t width) const {
    const unsigned b = unsigned(item.chunk.row) / unsigned(p.T);
    const unsigned t = unsigned(item.chunk.row) % unsigned(p.T);
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

  // Copies a chunk's row terms; they land with the first panel of the left rows.
  template <Gradient kGradient>
  DEVICE void copy_terms(const BlockItem& item) const {
    constexpr bool kQuery = kGradient == Gradient::kQuery, kValue = kGradient == Gradient::kValue;
    const Rows& rows = terms.rows;
    RowTerms& to = shared.rows;
    const int steps = item.chunk.steps, thread = threadIdx.x;
    const int64_t slot = rows.slot(item.head, item.slot), state = slot * p.K;
    const float* vector = kQuery ? terms.n : terms.dn;
#pragma unroll
    for (int row = thread; row < kLongestChunk; row += kWarpgroup) {
      const bool exists = row < steps;
      const int64_t at = rows.row(item.head, item.chunk) + row;
      copy_word_or_zero(&to.u[row].x, &rows.u[at].x, exists);
      copy_word_or_zero(&to.u[row].y, &rows.u[at].y, exists);
      copy_word_or_zero(&to.w[row].x, &rows.w[at].x, exists);
      copy_word_or_zero(&to.w[row].y, &rows.w[at].y, exists);
      copy_word_or_zero(&to.past[row], rows.past + at, exists);
      copy_word_or_zero(&to.future[row], rows.future + at, exists);
      copy_word_or_zero(&to.gain[row], (kQuery ? rows.inflow : rows.outflow) + at, exists);
      copy_word_or_zero(&to.inverse[row], terms.inverse + at, exists);
      copy_word_or_zero(&to.delta[row], terms.delta + at, exists && !kValue && terms.delta);
      const int* start = rows.start + item.chunk.row + row;
      copy_word_or_zero(reinterpret_cast<float*>(&to.start[row]),
                        reinterpret_cast<const float*>(start), exists);
      copy_word_or_zero(&to.vector[row], vector + state + row, !kValue && vector && row < p.K);
    }
    if (thread < kMostTiles) {
      const int tiles = rows.chunks.tiles();
      copy_word_or_zero(&to.decay[thread], rows.tile_decay + slot * tiles + thread,
                        thread * kTile < steps);
    }
  }
  template <Gradient kGradient>
  DEVICE void produce(BlockProducer<IO>& producer, ItemQueue& numbers) const {
    constexpr bool kValue = kGradient == Gradient::kValue;
    const bool asks = threadIdx.x == 0;
    int* const taken = terms.taken + (kPrecise ? kGradients : 0) + int(kGradient);
    const int count = items(kGradient);
    int next = asks ? atomicAdd(taken, 1) : 0;
    while (true) {
      if (asks) {
        numbers.put(next);
        if (next < count) next = atomicAdd(taken, 1);
      }
      const int index = numbers.take();
      if (index >= count) return;
      const BlockItem of = item(kGradient, index);
      if (of.row >= of.chunk.steps) continue;
      producer.template fill<kValue ? Major::kWidth : Major::kDepth,
                             kValue ? kValueBlocks : kKeyBlocks>(
          block(of), inputs(of), [&] { copy_terms<kGradient>(of); });
    }
  }

  // ---- The consumers ----

  // Stores the sums of the rows; rows of padding get zeros.
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
          const float (&sum)[4] = sums[j / 16][j % 16 + i];
          low[i] = runs ? sum[2 * half] : 0.f, high[i] = runs ? sum[2 * half + 1] : 0.f;
        }
        const int rest = own - 8 * j < 32 ? own - 8 * j : 32;
        store_row<IO>(rows + row * p.H * width + 8 * j, low, high, row < item.chunk.rows, rest);
      }
    }
  }
  // Stores the dot product of each row's sums with the same row of x.
  template <typename Products>
  DEVICE void store_flow(const BlockItem& item, const Products& products,
                         const typename Products::Sums& sums, const Matrix<IO>& x,
                         float* to) const {
    constexpr int kPairs = kBlockColumns / 8;
    float total[2] = {};
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      Pair<IO> pairs[2][kPairs];  // all loads are started before the first is used
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = products.row(half);
        const IO* from = x.data + (row < x.rows ? row : 0) * x.stride + 2 * products.quad;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const int column = block * kBlockColumns + 8 * j;  // past the last column the sums are 0
          const IO* at = from + (column < x.columns ? column : 0);
          pairs[half][j] = reinterpret_cast<const Pair<IO>&>(*at);
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) {
        const int half = i / kPairs, j = i % kPairs;
        const float2 pair = pairs[half][j].floats();
        const float (&sum)[4] = sums[block][j];
        total[half] = fmaf(sum[2 * half], pair.x, total[half]);
        total[half] = fmaf(sum[2 * half + 1], pair.y, total[half]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) {
        total[half] += __shfl_xor_sync(~0u, total[half], mask);
      }
      const int row = products.row(half);
      if (products.quad == 0 && row < x.rows) {
        to[terms.rows.row(item.head, item.chunk) + row] = total[half];
      }
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
    typename Products::Sums sums;
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) clear(sums[c]);
    if (item.row < item.chunk.steps) {
      if (of.has_state) {
        products.template multiply_state<kState>(sums);
        products.template scale<!kValue>(sums, [&](int row) {
          const float gain = shared.rows.gain[row];
          return kQuery ? Factors{gain, shared.rows.inverse[row], shared.rows.delta[row]}
                        : Factors{gain, 1, 1};
        });
      } else {
        products.wait_left();
      }
      products.template multiply_tiles<kRowsAre, kPrecise>(sums);
    }
    if constexpr (kValue) {
      store<kBlocks>(item, products, sums, p.dv, p.V);
    } else {
      store<kBlocks>(item, products, sums, kQuery ? p.dq : p.dk, p.K);
      const Matrix<IO> x = matrix(item, kQuery ? p.q : p.k, p.K);
      store_flow(item, products, sums, x, kQuery ? terms.in : terms.out);
    }
  }
  template <Gradient kGradient>
  DEVICE void consume(BlockRing& place, LeftRows& rows, ItemQueue& numbers) const {
    const int count = items(kGradient);
    while (true) {
      const int index = numbers.take();
      if (index >= count) return;
      const BlockItem of = item(kGradient, index);
      if (of.row >= of.chunk.rows) continue;
      consume<kGradient>(place, rows, of);
      if (of.row < of.chunk.steps) ++rows.round;
    }
  }

  // Calls body for all gradients, starting with the block's own.
  template <typename Body>
  DEVICE static void for_gradients(int own, const Body& body) {
    for (int i = 0; i < kGradients; ++i) {
      switch (Gradient((own + i) % kGradients)) {
        case Gradient::kQuery:
          body.template operator()<Gradient::kQuery>();
          break;
        case Gradient::kKey:
          body.template operator()<Gradient::kKey>();
          break;
        case Gradient::kValue:
          body.template operator()<Gradient::kValue>();
      }
    }
  }
  DEVICE void run(const GradientBlocks& blocks) const {
    if (threadIdx.x == 0) {
      ring.init(), queue.init();
      for (int panel = 0; panel < left.count; ++panel) left.slot(panel).init();
      mbarrier_init_fence();
    }
    __syncthreads();
    const int after_query = int(blockIdx.x) - blocks.count[0];
    const int own = after_query < 0 ? 0 : after_query < blocks.count[1] ? 1 : 2;
    ItemQueue numbers = queue;
    if (warpgroup() == 0) {
      setmaxnreg_dec<kBlockProducerRegisters>();
      BlockProducer<IO> producer{ring, left};
      for_gradients(own, [&]<Gradient kGradient>() { produce<kGradient>(producer, numbers); });
    } else {
      setmaxnreg_inc<kBlockConsumerRegisters>();
      BlockRing place = ring;
      LeftRows rows = left;
      for_gradients(own, [&]<Gradient kGradient>() { consume<kGradient>(place, rows, numbers); });
    }
  }
};

template <typename IO, int kKeyBlocks, int kValueBlocks, bool kPrecise>
__global__ void __launch_bounds__(kRingThreads, 1) block_gradients(const BackwardParams p,
                                                                   const BackwardTerms terms,
                                                                   GradientBlocks blocks, int slots,
                                                                   int panels) {
#if FLASHCELL_WGMMA_CODE
  extern __shared__ __align__(1024) char memory[];
  using Gradients = BlockGradients<IO, kKeyBlocks, kValueBlocks, kPrecise>;
  Gradients(p, terms, slots, panels, memory).run(blocks);
#else
  __trap();  // Compiled for sm_90 instead of sm_90a: fail, rather than return uninitialised memory.
#endif
}

}  // namespace flashcell::cuda
