// The sequence and channels that a thread works on, and the masks of its steps.
#pragma once
#include "../params.h"
#include "lane.cuh"

namespace flashcell::cuda {

// Sequence s of the list, as the kernels use it.
struct Column {
  int64_t index, row, x_offset;
  int length, padding;

  DEVICE Column(const SequenceParams& p, int64_t s) {
    if (p.sequences != nullptr) {
      const Sequence& q = p.sequences[s];
      index = q.index, row = q.row, x_offset = q.x_offset;
      length = int(q.length), padding = int(q.padding);
    } else {
      index = s, row = s * p.T, x_offset = s * p.x_batch, length = int(p.T), padding = 0;
    }
  }
};

// Returns the offset that channel d has in x beyond d itself, because its head is stored apart.
DEVICE int64_t to_head(const SequenceParams& p, int64_t d) {
  return int(d) / int(p.J) * (p.x_head - p.J);
}

// Loads the bias of kN channels from d on, or zeros.
template <int kGates, int kN>
DEVICE void load_bias(const SequenceParams& p, int64_t d, float (&bias)[kN][kGates]) {
#pragma unroll
  for (int i = 0; i < kN * kGates; ++i) {
    const float* row = static_cast<const float*>(p.bias) + i % kGates * p.D;
    bias[i / kGates][i % kGates] = p.bias == nullptr ? 0 : row[d + i / kGates];
  }
}

// The reset and hold masks of a group of steps. They are the same for every channel, so each lane
// of a warp loads one of them, a group ahead. With kReverse time runs backwards: step i is at t =
// length - 1 - i.
template <bool kMasked, bool kReverse, int kSteps>
struct Marks {
  DEVICE Marks(const SequenceParams&, const Column&) {}
  DEVICE void start(int) {}
  DEVICE void take(int) {}
  DEVICE bool reset(int) const { return false; }
  DEVICE bool hold(int) const { return false; }
};
template <bool kReverse, int kSteps>
struct Marks<true, kReverse, kSteps> {
  const uint8_t* marks;  // the mask that this lane loads, or null
  int length, ahead = 0;
  unsigned bits = 0;
  static_assert(2 * kSteps <= 32);

  DEVICE Marks(const SequenceParams& p, const Column& column) : length(column.length) {
    const unsigned lane = threadIdx.x % 32;
    marks = lane < kSteps ? p.reset : lane < 2 * kSteps ? p.hold : nullptr;
    if (marks != nullptr) marks += column.row;
  }
  DEVICE void start(int first) {
    const int i = first + int(threadIdx.x % 32) % kSteps;
    const bool runs = marks != nullptr && i < length;
    ahead = runs ? marks[kReverse ? length - 1 - i : i] : 0;
  }
  DEVICE void take(int next) {  // next: the first step of the next group
    bits = __ballot_sync(~0u, ahead != 0);
    start(next);
  }
  DEVICE bool reset(int k) const { return bits >> k & 1; }
  DEVICE bool hold(int k) const { return bits >> (kSteps + k) & 1; }
};

}  // namespace flashcell::cuda
