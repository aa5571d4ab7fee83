// The parts of h that a thread block of Hopper's forward kernel computes, its shared memory, and
// the warpgroup that loads it: q and n of a part, then C, k and v in the order in which wgmma.cuh
// multiplies them.
#pragma once
#include "../chunk/ring.cuh"
#include "../chunk/tile.cuh"
#include "../gates/rows.cuh"
#include "terms.cuh"

namespace flashcell::cuda {

constexpr int kSlotBytes = 16 << 10;
constexpr int kWidestKey = 256;  // q stays in shared memory, and a tile of k takes two slots

// One part of a chunk of a head: 128 rows, and a block of columns from `column` on.
struct OutputPart {
  Chunk chunk;
  int64_t slot;
  int head, row, column;

  DEVICE bool has_steps() const { return row < chunk.steps; }
};

// Numbers all parts. Those of a chunk are neighbours, so that they read the same rows at the same
// time.
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
  // Later rows of a chunk take longer. A thread block's stride through the parts may be a multiple
  // of the parts of a chunk, so the part is rotated by `turn`: the block then gets a different one
  // each time.
  DEVICE OutputPart at(const Chunks& chunks, unsigned index, unsigned turn) const {
    const unsigned unit = index / in_chunk, slot = unit / heads, part = (index + turn) % in_chunk;
    return {chunks.at(slot), slot, int(unit % heads), int(part / by_column * 128),
            int(part % by_column * kColumns)};
  }
};

template <typename IO, int kColumns>
struct OutputLoads {
  static constexpr int kDeep = 128;  // depth of a slot of k
  // Rows of v, or of C's depth, in a slot.
  static constexpr int kSlotRows = kSlotBytes / 2 / kColumns;
  using QTile = Tile<IO, 2 * kTile>;
  using KTile = Tile<IO, kTile>;
  using SlotTile = Tile<IO, kSlotRows>;
  static constexpr int kNBytes = 8 * kPanelBytes;  // bytes for three pieces of n, for each 64 of K

  struct Terms {  // values for the 64 rows of one tile
    float2 w[kTile];
    float future[kTile];
  };
  // Offsets in dynamic shared memory: q, n, the ring's slots, their terms and their barriers, q's
  // barriers.
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
  const int consumer;  // which consumer; the compiler sees that it is uniform for a warp
  int round = 0;       // number of parts with steps so far
  OutputPart part;

  DEVICE OutputLoads(const ForwardParams& params, const ForwardTerms& t, int shared_bytes,
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
  DEVICE int tiles() const {  // number of tiles that the part's rows see
    const int steps = part.chunk.steps, end = part.row + 128 < steps ? part.row + 128 : steps;
    return (end + kTile - 1) / kTile;
  }
  static DEVICE int pieces(int64_t width, int size) { return int((width + size - 1) / size); }

  template <typename Body>
  DEVICE void for_parts(const Body& body) {
    const unsigned count = unsigned(parts.count(terms.rows.chunks));
    unsigned turn = 0;
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
      part = parts.at(terms.rows.chunks, index, turn++);
      body();
      if (part.has_steps()) ++round;
    }
  }

  // ---- The copies ----

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

  // Fills the next slot by calling body(address).
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
    mbarrier_arrive(q_slot().full);  // n has been stored by then
  }
  // Stores n as three pieces that add up to it, in rows 0 to 2 of eight.
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
    for_parts([&] {
      if (!part.has_steps()) return;
      if (has_before()) {
        const int64_t at = terms.rows.slot(part.head, part.slot) * p.K * p.V;
        const Source C{static_cast<const IO*>(terms.C) + at, p.V, int(p.K), int(p.V)};
        for (int depth = 0; depth < p.K; depth += kSlotRows) {
          fill([&](uint32_t to) { load<kColumns>(SlotTile{to}, C, depth, part.column); });
        }
      }
      load_q();  // last, because the part before may still use its q
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
    });
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
};

}  // namespace flashcell::cuda
