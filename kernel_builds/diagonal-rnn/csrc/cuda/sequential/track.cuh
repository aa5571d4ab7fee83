// A thread's forward pass through time: one sequence, kN channels, states in registers.
#pragma once
#include "../sequence.cuh"
#include "chain.cuh"
#include "ring.cuh"

namespace flashcell::cuda {

template <typename CellOf, typename IOOf, int kNOf, bool kMaskedOf, int kGroups = 4>
class Track {
 public:
  using Cell = CellOf;
  using IO = IOOf;
  static constexpr int kN = kNOf, kStates = Cell::kStates, kGates = Cell::kGates;
  static constexpr bool kMasked = kMaskedOf;
  using Words = Word<IO, kN>;

  // Prefetch 24 to 32 steps: with one warp per scheduler a step may take 30 ns, and memory 700 ns.
  using Steps = Ring<Words, kGates, 8, kGroups>;
  static constexpr int kSteps = Steps::kSteps;
  // Groups in a round of the loop. With masks, one is as fast as two and smaller code, but for a
  // 16-bit GRU (8x2048x4096 with resets, H200: LSTM fp32 0.314 ms against 0.332 with two, GRU bf16
  // 0.239 against 0.205).
  static constexpr int kGroupsAtOnce = kMasked && (kStates > 1 || sizeof(IO) == 4) ? 1 : 2;

  float state[kN][kStates];
  float tangent[kN][kStates][kStates];

  // Starts at channel d; a thread past the last channel repeats the last channel's work.
  DEVICE Track(const ForwardParams& p, const Column& column, int64_t d, unsigned char* shared)
      : p_(p), column_(column), d_(d < p.D ? d : p.D - kN), ring_(shared), marks_(p, column) {
    x_ = static_cast<const IO*>(p.x) + column.x_offset + to_head(p, d_) + d_;
    h_ = static_cast<IO*>(p.h) + column.row * p.D + d_;
    saved_ = static_cast<IO*>(p.saved) + column.row * p.V * p.D + d_;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float w[Cell::kWeights];
#pragma unroll
      for (int q = 0; q < Cell::kWeights; ++q) {
        w[q] = static_cast<const float*>(p.weight)[q * p.D + d_ + n];
      }
      chain_[n] = Chain<Cell, kIsCoarse<IO>>(w);
    }
    load_bias(p, d_, bias_);
  }

  DEVICE int64_t channel() const { return d_; }

  // Returns the K states of these channels in a [K, S, D] tensor.
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
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int k = 0; k < kStates; ++k) static_cast<float*>(p_.last)[place(k) + n] = state[n][k];
    }
  }

  // Starts loading the steps [begin, end), in order.
  DEVICE void prefetch(int begin, int end) {
    const void* first[kGates];
    int bytes[kGates];
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      first[g] = x_ + begin * p_.x_time + g * p_.x_gate;
      bytes[g] = int(p_.x_time) * int(sizeof(IO));
    }
    ring_.start(first, bytes, end - begin);
    ring_.take(ahead_);
    marks_.start(begin);
  }
  DEVICE void drain() const { copy_wait<0>(); }

  // Runs the steps [begin, end). Only the end of the prefetched range may be no multiple of kSteps.
  // With kCompact the code is a third as long, but asks before every step whether it is past the
  // end.
  template <bool kTangent, bool kStore, bool kCompact = false>
  DEVICE void walk(int begin, int end) {
    IO* h = h_ + begin * p_.D;
    IO* saved = saved_ + begin * p_.V * p_.D;
    int t = begin;
#pragma unroll kGroupsAtOnce
    for (; !kCompact && t + kSteps <= end; t += kSteps) {
      Words now[kSteps][kGates];
      take(now, t);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) step<kTangent, kStore>(k, now[k], h, saved);
    }
#pragma unroll 1
    for (; t < end; t += kSteps) {
      Words now[kSteps][kGates];
      take(now, t);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (t + k < end) step<kTangent, kStore>(k, now[k], h, saved);
      }
    }
  }

  // Zeros the outputs of the steps [begin, end), past the sequence's end.
  DEVICE void pad(int begin, int end) const {
    const Words zero = {};
    for (int64_t t = begin; t < end; ++t) {
      store(h_ + t * p_.D, zero);
      for (int64_t v = 0; p_.saved != nullptr && v < p_.V; ++v) {
        store(saved_ + (t * p_.V + v) * p_.D, zero);
      }
    }
  }

 private:
  const ForwardParams& p_;
  const Column& column_;
  const int64_t d_;
  const IO* x_;
  Steps ring_;
  Words ahead_[kSteps][kGates];
  Marks<kMasked, false, kSteps> marks_;
  IO *h_, *saved_;
  Chain<Cell, kIsCoarse<IO>> chain_[kN];
  float bias_[kN][kGates];

  static DEVICE void store(IO* to, const Words& words) { *reinterpret_cast<Words*>(to) = words; }

  DEVICE void take(Words (&now)[kSteps][kGates], int t) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) now[k][g] = ahead_[k][g];
    }
    ring_.take(ahead_);
    marks_.take(t + kSteps);
  }

  // Runs step k of its group; `h` and `saved` point to its rows and are advanced.
  template <bool kTangent, bool kStore>
  DEVICE void step(int k, const Words (&words)[kGates], IO*& h, IO*& saved) {
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
      float rows[kGates][kN];
#pragma unroll
      for (int g = 0; g < kGates; ++g) widen(words[g], rows[g]);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float x[kGates];
#pragma unroll
        for (int g = 0; g < kGates; ++g) x[g] = rows[g][n] + bias_[n][g];
        chain_[n].template step<kTangent>(x, state[n], tangent[n]);
      }
    }
    if constexpr (kStore) {
      store(h, held ? Words{} : row(0));
      h += p_.D;
      // Save the states that h does not hold: the other states, or h's own after a held step.
      if (kMasked || kStates > 1) {
        if (p_.saved != nullptr) {
#pragma unroll
          for (int i = 1; i < kStates; ++i) store(saved + (i - 1) * p_.D, row(i));
          if (kMasked && p_.V == kStates) store(saved + (kStates - 1) * p_.D, row(0));
          saved += p_.V * p_.D;
        }
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
