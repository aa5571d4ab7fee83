// How the warps of a Hopper block share its memory: a producer warpgroup fills a ring of slots by
// copies, consumers multiply what is there and give it back. Beside the ring lie the left rows of
// the products at hand, for as long as they last.
//
// A slot is two tiles of 64 rows of one panel, swizzled as wgmma.cuh reads them.
#pragma once
#include "chunk_loads.cuh"
#include "mbarrier.cuh"
#include "wgmma.cuh"

namespace flashcell::cuda {

constexpr int kGranule = kTile * kPanelBytes, kSlotBytes = 2 * kGranule;
constexpr int kMostSlots = 12, kMostPanels = 8;  // of the ring, of the left rows

enum class Second { kBelow, kBeside };  // where the second tile of a slot lies in the matrix

struct RingBarriers {
  uint64_t full[kMostSlots], empty[kMostSlots];
  uint64_t rows_full[kMostPanels], rows_empty;

  DEVICE void init(int producers, int consumer_warps) {
    for (uint64_t& barrier : full) barrier_init(shared_address(&barrier), producers);
    for (uint64_t& barrier : rows_full) barrier_init(shared_address(&barrier), producers);
    for (uint64_t& barrier : empty) barrier_init(shared_address(&barrier), consumer_warps);
    barrier_init(shared_address(&rows_empty), consumer_warps);
    barrier_init_fence();
  }
};

// Where a warp is in the ring, and in the left rows, which change with every item.
struct RingPlace {
  uint32_t slots, rows;  // addresses
  RingBarriers& barriers;
  int count, index = 0, phase = 0, item = 0;

  DEVICE uint32_t slot() const { return slots + index * kSlotBytes; }
  DEVICE uint32_t full(int at) const { return shared_address(barriers.full) + 8 * at; }
  DEVICE uint32_t empty(int at) const { return shared_address(barriers.empty) + 8 * at; }
  DEVICE uint32_t rows_full(int panel) const {
    return shared_address(barriers.rows_full) + 8 * panel;
  }
  DEVICE uint32_t rows_empty() const { return shared_address(&barriers.rows_empty); }
  DEVICE void advance() {
    if (++index == count) index = 0, phase ^= 1;
  }
};

// A thread of the producer warpgroup. Two groups of copies stay under way; a barrier is told of a
// group when it has landed, so nothing may be waited for that depends on the last two: flush first.
template <typename IO>
struct RingProducer : RingPlace {
  uint32_t later[2] = {};  // barriers of the groups under way, 0 for none

  DEVICE explicit RingProducer(const RingPlace& place) : RingPlace(place) {}

  template <Second kSecond>
  DEVICE static void copy(uint32_t to, const Matrix<IO>& from, int row, int column) {
    const int thread = threadIdx.x % kWarpgroup, piece = thread % 8, first = thread / 8;
    to += first * kPanelBytes + (piece ^ first % 8) * 16;
#pragma unroll
    for (int i = 0; i < 2 * kTile; i += kWarpgroup / 8) {
      const bool below = kSecond == Second::kBelow;
      const int r = row + first + (below ? i : i % kTile);
      const int c = column + 8 * piece + (below ? 0 : i / kTile * kPanel<IO>);
      const bool exists = r < from.rows && c < from.columns;
      const IO* source = exists ? from.data + r * from.stride + c : from.data;
      copy_async_or_zero(to + i * kPanelBytes, source, exists);
    }
  }
  DEVICE void tell(uint32_t barrier) {
    fence_for_wgmma();
    if (barrier) barrier_arrive(barrier);
  }
  DEVICE void commit(uint32_t barrier) {
    copy_commit();
    copy_wait<2>();
    tell(later[0]);
    later[0] = later[1], later[1] = barrier;
  }
  DEVICE void flush() {
    copy_wait<0>();
    tell(later[0]), tell(later[1]);
    later[0] = later[1] = 0;
  }
  template <Second kSecond>
  DEVICE void fill_slot(const Matrix<IO>& from, int row, int column) {
    barrier_wait(empty(index), phase ^ 1);
    copy<kSecond>(slot(), from, row, column);
    commit(full(index));
    advance();
  }
  // Panel by panel: 128 rows of the left operand.
  DEVICE void begin_rows() {
    flush();
    barrier_wait(rows_empty(), item ^ 1);
  }
  DEVICE void fill_rows(const Matrix<IO>& from, int row, int panel) {
    copy<Second::kBelow>(rows + panel * kSlotBytes, from, row, panel * kPanel<IO>);
    commit(rows_full(panel));
  }
  DEVICE void end_item() { item ^= 1; }
};

// A thread of a consumer warpgroup.
struct RingConsumer : RingPlace {
  int pending = -1;  // the slot that products still read

  DEVICE explicit RingConsumer(const RingPlace& place) : RingPlace(place) {}

  DEVICE static bool is_first_lane() { return threadIdx.x % 32 == 0; }
  DEVICE void release() {
    if (pending >= 0 && is_first_lane()) barrier_arrive(empty(pending));
    pending = -1;
  }
  // The address of the next slot, once it is full.
  DEVICE uint32_t next() {
    barrier_wait(full(index), phase);
    return slot();
  }
  // What has been issued reads the slot: the one before it is free as soon as its products are
  // done.
  DEVICE void issued() {
    wgmma_commit();
    wgmma_wait<1>();
    release();
    pending = index;
    advance();
  }
  template <typename... Registers>
  DEVICE void drain(Registers&... registers) {
    wgmma_wait<0>(registers...);
    release();
  }
  // Slots that are for the other warpgroup alone.
  DEVICE void skip(int slots) {
    drain();
    for (int i = 0; i < slots; ++i) {
      next();
      pending = index;
      release();
      advance();
    }
  }
  DEVICE void wait_rows(int panel) const { barrier_wait(rows_full(panel), item); }
  DEVICE void end_rows() {
    __syncwarp();
    if (is_first_lane()) barrier_arrive(rows_empty());
    item ^= 1;
  }
};

}  // namespace flashcell::cuda
