// A thread's walk forward through time: one sequence, kN channels, states in registers.
#pragma once
#include "chain.cuh"
#include "ring.cuh"
#include "sequence.cuh"

namespace flashcell::cuda {

template <typename CellOf, typename IOOf, int kNOf, bool kMaskedOf, int kThreadsOf>
class Track {
 public:
  using Cell = CellOf;
  using IO = IOOf;
  static constexpr int kN = kNOf, kThreads = kThreadsOf;
  static constexpr int kStates = Cell::kStates, kGates = Cell::kGates;
  static constexpr bool kMasked = kMaskedOf;
  using Words = Word<IO, kN>;

  struct Source {
    using Word = Words;
    static constexpr int kRows = kGates;
    const IO* row[kGates];  // of step 0
    int stride;
    DEVICE static bool has(int, int) { return true; }
    DEVICE const Word* at(int r, int i) const {
      return reinterpret_cast<const Word*>(row[r] + int64_t(i) * stride);
    }
  };
  // 32 steps ahead: a walk of one warp per scheduler takes 24 ns a step, and memory 700 ns.
  using Steps = Ring<Source, 8, 4, kThreads>;
  static constexpr int kSteps = Steps::kSteps;

  float state[kN][kStates];
  float tangent[kN][kStates][kStates];

  // Channels from d; a thread past the last one walks with its neighbour and stores nothing.
  DEVICE Track(const ForwardParams& p, const Column& column, int64_t d, Words* shared)
      : p_(p), column_(column), stored_(d < p.D), d_(d < p.D ? d : p.D - kN), ring_(shared),
        marks_(p, column) {
    const IO* x = static_cast<const IO*>(p.x) + column.x_offset + d_;
#pragma unroll
    for (int g = 0; g < kGates; ++g) source_.row[g] = x + g * p.x_gate;
    source_.stride = int(p.x_time);
    h_ = static_cast<IO*>(p.h) + column.row * p.D + d_;
    saved_ = p.saved == nullptr ? nullptr : static_cast<IO*>(p.saved) + column.row * p.V * p.D + d_;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float w[Cell::kWeights];
#pragma unroll
      for (int q = 0; q < Cell::kWeights; ++q) {
        w[q] = static_cast<const float*>(p.weight)[q * p.D + d_ + n];
      }
      chain_[n] = Chain<Cell, kIsCoarse<IO>>(w);
    }
  }

  DEVICE bool stored() const { return stored_; }
  DEVICE int64_t channel() const { return d_; }

  // The K states of these channels in a [K, S, D] tensor.
  DEVICE int64_t place(int k) const { return (k * p_.S + column_.index) * p_.D + d_; }

  DEVICE void begin_sequence() {
    const float* initial = static_cast<const float*>(p_.initial);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int k = 0; k < kStates; ++k) {
        state[n][k] = initial == nullptr ? 0 : initial[place(k) + n];
      }
    }
  }
  DEVICE void end_sequence() const {
    if (!stored_) return;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int k = 0; k < kStates; ++k) static_cast<float*>(p_.last)[place(k) + n] = state[n][k];
    }
  }

  // Steps [begin, end) will be asked for, in order.
  DEVICE void prefetch(int begin, int end) {
    ring_.start(source_, begin, end);
    marks_.start(begin);
  }
  DEVICE void drain() const { wait_copies<0>(); }

  // Walks [begin, end); only the end of what is prefetched may be no multiple of kSteps.
  template <bool kTangent, bool kStore>
  DEVICE void walk(int begin, int end) {
    int t = begin;
    for (; t + kSteps <= end; t += kSteps) {
      const Words* group = ring_.take(source_);
      marks_.take(t + kSteps);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) step<kTangent, kStore>(t + k, k, group);
    }
    if (t < end) {
      const Words* group = ring_.take(source_);
      marks_.take(t + kSteps);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (t + k < end) step<kTangent, kStore>(t + k, k, group);
      }
    }
  }

  // Outputs of the steps [begin, end) past the sequence's end.
  DEVICE void pad(int begin, int end) const {
    const Words zero = {};
    for (int t = begin; stored_ && t < end; ++t) {
      store(h_ + t * p_.D, zero);
      for (int64_t v = 0; saved_ != nullptr && v < p_.V; ++v) {
        store(saved_ + (t * p_.V + v) * p_.D, zero);
      }
    }
  }

 private:
  const ForwardParams& p_;
  const Column& column_;
  const bool stored_;
  const int64_t d_;
  Source source_;
  Steps ring_;
  Marks<kMasked, false, kSteps> marks_;
  IO *h_, *saved_;
  Chain<Cell, kIsCoarse<IO>> chain_[kN];

  static DEVICE void store(IO* to, const Words& words) { *reinterpret_cast<Words*>(to) = words; }

  template <bool kTangent, bool kStore>
  DEVICE void step(int t, int k, const Words* group) {
    Words words[kGates];
#pragma unroll
    for (int g = 0; g < kGates; ++g) words[g] = group[(k * kGates + g) * kThreads];
    if (marks_.reset(k)) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < kStates; ++i) {
          state[n][i] = 0;
#pragma unroll
          for (int j = 0; j < kStates; ++j) tangent[n][i][j] = 0;
        }
      }
    }
    const bool held = marks_.hold(k);
    if (!held) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float x[kGates];
#pragma unroll
        for (int g = 0; g < kGates; ++g) x[g] = to_float(words[g].value[n]);
        chain_[n].template step<kTangent>(x, state[n], tangent[n]);
      }
    }
    if (kStore && stored_) {
      store(h_ + t * p_.D, held ? Words{} : row(0));
      if (saved_ != nullptr) {  // what h does not hold: the states beside it, or h's own
        IO* to = saved_ + t * p_.V * p_.D;
#pragma unroll
        for (int i = 1; i < kStates; ++i) store(to + (i - 1) * p_.D, row(i));
        if (kMasked && p_.V == kStates) store(to + (kStates - 1) * p_.D, row(0));
      }
    }
  }

  DEVICE Words row(int i) const {
    float values[kN];
#pragma unroll
    for (int n = 0; n < kN; ++n) values[n] = state[n][i];
    return narrow<IO>(values);
  }
};

}  // namespace flashcell::cuda
