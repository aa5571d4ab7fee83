// Where a step is in memory and which steps run, for every engine.
#pragma once
#include "../params.h"
#include "tensor_core.cuh"

namespace flashcell::cuda {

// A column of a tile: one sequence, or, if `s` is past the last sequence, an empty column.
struct Column {
  int64_t index = 0, row = 0, x_offset = 0;
  int length = 0, padding = 0;

  DEVICE Column(const SequenceParams& p, int64_t s, int64_t x_batch = 0) {
    if (s >= p.S) return;
    if (p.sequences != nullptr) {
      const Sequence& q = p.sequences[s];
      index = q.index, row = q.row, x_offset = q.x_offset;
      length = int(q.length), padding = int(q.padding);
    } else {
      index = s, row = s * p.T, x_offset = s * x_batch, length = int(p.T);
    }
  }

  DEVICE bool runs(int t) const { return 0 <= t && t < length; }
  DEVICE bool resets(const SequenceParams& p, int t) const {
    return p.reset != nullptr && runs(t) && p.reset[row + t];
  }
  DEVICE bool holds(const SequenceParams& p, int t) const {
    return p.hold != nullptr && runs(t) && p.hold[row + t];
  }
};

// The masks of a column's steps. If the sequences are not ragged, all steps run and none is reset.
template <bool kRagged>
struct Marks {
  DEVICE Marks(const SequenceParams&, int64_t) {}
  DEVICE bool runs(const SequenceParams&, int) const { return true; }
  DEVICE bool resets(const SequenceParams&, int) const { return false; }
};
template <>
struct Marks<true> {
  int64_t row;
  int length;

  DEVICE Marks(const SequenceParams& p, int64_t s) {
    const Column column(p, s);
    row = column.row, length = column.length;
  }
  DEVICE bool marked(const uint8_t* marks, int t) const {
    return marks != nullptr && unsigned(t) < unsigned(length) && marks[row + t];
  }
  DEVICE bool runs(const SequenceParams& p, int t) const {
    return unsigned(t) < unsigned(length) && !marked(p.hold, t);
  }
  DEVICE bool resets(const SequenceParams& p, int t) const { return marked(p.reset, t); }
};

// Returns the length of the longest of the tile's sequences; every thread must call it.
DEVICE int longest(const SequenceParams& p, int64_t first, int sequences) {
  int length = 0;
  for (int64_t s = first; s < first + sequences && s < p.S; ++s) {
    length = max(length, Column(p, s).length);
  }
  return length;
}

DEVICE float clip(float value, float bound) {  // NaN fails both comparisons and is returned
  return bound < value ? bound : value < -bound ? -bound : value;
}

}  // namespace flashcell::cuda
