// The sequences of a thread block of the fma engine: where they are in memory, which of their steps
// run, and the ring through which their inputs come.
#pragma once
#include "../sequence.cuh"
#include "plan.h"

namespace flashcell::cuda {

struct FmaPlace {              // of a sequence; a Column with its offsets in the tensors
  int64_t row, input, output;  // offsets of the first step in masks, in x or saved, and in h
  int index, length, padding, unused;
};
static_assert(sizeof(FmaPlace) == fma::Memory::kPlaceFloats * sizeof(float));

// What a step of a sequence does.
enum FmaMark { kFmaRuns = 1, kFmaZeros = 2, kFmaResets = 4 };

// kDirection is 1 if steps ascend and -1 if they descend. A step `base` reads its own mark, number
// 0, and that of the step that follows it in this direction, number 1. One sequence is kept in the
// registers of every thread, several in shared memory.
template <int kSequences, int kDirection>
class FmaTile {
 public:
  static constexpr bool kOne = kSequences == 1;
  const fma::Memory& m;
  float* const memory;

  // Every thread must call it; a barrier must follow.
  DEVICE FmaTile(const SequenceParams& p, const fma::Memory& m, float* memory, int64_t first,
                 int64_t x_batch)
      : m(m), memory(memory) {
    if (!kOne && threadIdx.x >= unsigned(m.tile)) return;
    const Column column(p, first + (kOne ? 0 : threadIdx.x), x_batch);
    const int64_t output = column.row * p.N * p.D;
    const FmaPlace place = {column.row,
                            kDirection > 0 ? column.x_offset : output,
                            output,
                            int(column.index),
                            column.length,
                            column.padding,
                            0};
    if constexpr (kOne) {
      own_ = place;
    } else {
      places()[threadIdx.x] = place;
    }
  }

  DEVICE const FmaPlace& place(int s) const {
    if constexpr (kOne) return own_;
    return places()[s];
  }
  DEVICE int mark(int number, int base, int s) const {
    if constexpr (kOne) return window_[number];
    return marks(base + number * kDirection)[s];
  }

  // Reads the marks of the first two steps. A barrier must follow.
  DEVICE void begin(const SequenceParams& p, int base) {
    for (int i = 0; i < 2; ++i)
      load(p, base + (i - 2) * kDirection), advance(base + (i - 2) * kDirection);
  }
  // Starts to read the mark that the next step needs in addition. Some work belongs between this
  // and advance(), because the loads take long.
  DEVICE void load(const SequenceParams& p, int base) {
    const int t = base + 2 * kDirection;
    if constexpr (kOne) {
      const bool exists = unsigned(t) < unsigned(own_.length);
      held_ = exists && p.hold != nullptr ? p.hold[own_.row + t] : 0;
      resets_ = exists && p.reset != nullptr ? p.reset[own_.row + t] : 0;
    } else {
      held_ = resets_ = 0;
      if (!has_own() || unsigned(t) >= unsigned(own().length)) return;
      if (p.hold != nullptr) held_ = p.hold[own().row + t];
      if (p.reset != nullptr) resets_ = p.reset[own().row + t];
    }
  }
  DEVICE void advance(int base) {
    if (!has_own()) return;
    const int t = base + 2 * kDirection;
    const bool listed = unsigned(t) < unsigned(own().length + own().padding);
    const bool runs = listed && t < own().length && !held_;
    const int mark = (runs ? kFmaRuns : listed ? kFmaZeros : 0) | (resets_ ? kFmaResets : 0);
    if constexpr (kOne) {
      window_[0] = window_[1], window_[1] = mark;
    } else {
      marks(t)[threadIdx.x] = mark;
    }
  }

 private:
  FmaPlace own_;  // the only sequence
  int window_[2], held_, resets_;

  // A thread reads the marks of one sequence: the only one, or number threadIdx.x.
  DEVICE bool has_own() const { return kOne || threadIdx.x < unsigned(m.tile); }
  DEVICE const FmaPlace& own() const {
    if constexpr (kOne) return own_;
    return places()[threadIdx.x];
  }
  DEVICE FmaPlace* places() const { return reinterpret_cast<FmaPlace*>(memory); }
  DEVICE int* marks(int t) const {
    return reinterpret_cast<int*>(memory + m.marks) + (t & 3) * m.tile;
  }
};

// Loads inputs ahead of their use: a ring of stages in shared memory. A stage has kRows rows of the
// block's units for every sequence.
template <int kRows, int kSequences, int kDirection, int kCopies>
class FmaRing {
 public:
  static constexpr int kStages = fma::stages(kSequences);
  static constexpr bool kOne = kSequences == 1;
  using Tile = FmaTile<kSequences, kDirection>;

  // row(r) returns where row r of the head is; stride(r) is its distance from step to step, and
  // scale(r) that of two elements of a place's `input`. Starts the first steps, from `t` on.
  template <typename Row, typename Stride, typename Scale>
  DEVICE FmaRing(const Tile& tile, int units, int t, Row row, Stride stride, Scale scale)
      : tile_(tile) {
    const int vectors = units / 4;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int index = threadIdx.x + i * blockDim.x;  // of a sequence, row and vector
      const int vector = index % vectors, r = index / vectors % kRows;
      sequence_[i] = index / vectors / kRows;
      if (sequence_[i] >= kSequences) sequence_[i] = -1;
      from_[i] = row(r) + vector * 4, step_[i] = int(stride(r)), scale_[i] = scale(r);
      if (kOne) from_[i] += tile.place(0).input * scale_[i] + int64_t(t) * step_[i];
      to_[i] = r * tile.m.units + vector * 4;
    }
    for (int i = 0; i < kStages - 1; ++i) start(t + i * kDirection);
  }

  DEVICE int stage(int t, int s) const {
    return tile_.m.ring + ((t & (kStages - 1)) * tile_.m.tile + s) * tile_.m.sequence;
  }

  // Starts the copies for step t, the step after that of the last call. Every call commits one
  // group, even if it copies nothing.
  DEVICE void start(int t) {
#pragma unroll 1
    for (int first = 0; first < (kOne ? 1 : tile_.m.tile); first += kSequences) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const FmaPlace& place = tile_.place(first + max(sequence_[i], 0));
        const bool copies = sequence_[i] >= 0 && unsigned(t) < unsigned(place.length);
        const float* from = from_[i];
        if constexpr (kOne) {
          from_[i] += kDirection * step_[i];
        } else {
          from += place.input * scale_[i] + int64_t(t) * step_[i];
        }
        if (copies) copy_async(tile_.memory + stage(t, first + sequence_[i]) + to_[i], from);
      }
    }
    copy_commit();
  }
  DEVICE void start_after(int t) { start(t + (kStages - 1) * kDirection); }

  // Waits until this thread's copies for the next step have landed; a barrier must follow before
  // other threads read them.
  static DEVICE void wait() { copy_wait<kStages - 2>(); }

 private:
  const Tile& tile_;
  const float* from_[kCopies];
  int step_[kCopies];  // is_aligned() checks that it fits
  // sequence_: of a pass, or negative if there is nothing to copy.
  int scale_[kCopies], sequence_[kCopies], to_[kCopies];
};

}  // namespace flashcell::cuda
