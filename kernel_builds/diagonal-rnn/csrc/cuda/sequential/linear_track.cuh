// A thread's sequential pass along a linear recurrence (linear.cuh): an element with its carry in
// registers.
#pragma once
#include "linear.cuh"
#include "ring.cuh"

namespace flashcell::cuda {

// The reset and hold masks of a backward pass, loaded a group ahead; a scan has no masks.
template <typename Element, int kSteps, bool kMasked = Element::kMasked>
struct LinearMarks {
  template <typename Params>
  DEVICE LinearMarks(const Params&, int64_t) {}
  DEVICE void start(int) {}
  DEVICE void take(int) {}
  DEVICE Mark at(int) const { return {}; }
};
template <typename Element, int kSteps>
struct LinearMarks<Element, kSteps, true> : Marks<true, true, kSteps> {
  DEVICE LinearMarks(const SequenceParams& p, int64_t s)
      : Marks<true, true, kSteps>(p, Column(p, s)) {}
  DEVICE Mark at(int k) const { return {this->reset(k), this->hold(k)}; }
};

template <typename ElementOf, int kStepsOf, int kGroups, Leaves kLeaves = Leaves::kInTurn>
struct LinearTrack {
  using Element = ElementOf;
  using Params = typename Element::Params;
  using Word = typename Element::Word;
  static constexpr int kSteps = kStepsOf, kRows = Element::kRows;
  static constexpr int kN = Element::kN, K = Element::kStates, P = Element::kSums;
  static constexpr bool kGrouped = Element::kOnce < kRows;
  using Steps = Ring<Word, kRows, kSteps, kGroups, Element::kOnce, kLeaves>;

  Element e;
  float carry[kN][K];
  float tangent[kN][K][K];  // derivative of the carry by the carry at the start of the burn-in
  float largest = 0;        // largest carry so far, for passes that need it

  DEVICE LinearTrack(const Params& p, int64_t s, int64_t channel, unsigned char* shared)
      : e(p, s, channel), ring_(shared), marks_(p, s) {}

  // Starts loading the steps [begin, end). The last step of the sequence does not have all rows, so
  // it is loaded separately, before the others.
  DEVICE void prefetch(int begin, int end) {
    whole_ = end < e.steps ? end : e.steps - 1;
    const void* first[kRows];
    int bytes[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const char* step_0 = static_cast<const char*>(e.first(r));
      bytes[r] = e.bytes(r);
      first[r] = step_0 + int64_t(begin) * bytes[r];
      if (end == e.steps && end > 0 && e.needs(r, whole_)) {
        last_[r] = *reinterpret_cast<const Word*>(step_0 + int64_t(whole_) * bytes[r]);
      }
    }
    ring_.start(first, bytes, whole_ - begin);
    ring_.take(ahead_);
    marks_.start(begin);
  }
  DEVICE void drain() const { copy_wait<0>(); }

  // Advances the carry and its tangent over [begin, end), in full groups, without storing results.
  DEVICE void approach(int begin, int end) {
    for (int i = begin; i < end; i += kSteps) {
      Word now[kSteps][kRows];
      take(now, i);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        float A[kN][K][K], b[kN][K];
        e.map(now[k], i + k, marks_.at(k), A, b);
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          const float none[K] = {};
          apply(A[c], b[c], carry[c]);
          float unused[K] = {};
          compose(A[c], none, tangent[c], unused);
        }
        measure();
      }
    }
  }

  // Runs the steps [begin, end), where end is also the end of what was prefetched.
  template <bool kMeasured = false>
  DEVICE void walk(int begin, int end) {
    int i = begin;
    // With masks, one group in a round is as fast as two or faster, and smaller code (LSTM bf16
    // 8x2048x4096 with resets, H200: both passes 0.82 ms against 1.00).
#pragma unroll(Element::kMasked ? 1 : 2)
    for (; i + kSteps <= whole_; i += kSteps) {
      Word now[kSteps][kRows];
      take(now, i);
      if constexpr (kGrouped) {
        e.advance_group(now, i, kSteps, carry);
      } else {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          e.advance(now[k], i + k, marks_.at(k), carry);
          if (kMeasured) measure();
        }
      }
    }
    if constexpr (kGrouped) {
      if (i < whole_) e.advance_group(ahead_, i, whole_ - i, carry);
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (i + k < whole_) e.advance(ahead_[k], i + k, e.mark(i + k), carry);
      }
    }
    if (end == e.steps && end > 0) e.advance(last_, whole_, e.mark(whole_), carry);
  }

  DEVICE void keep_sums(float* partial, int64_t row) const {
    if constexpr (P > 0) {
#pragma unroll
      for (int c = 0; c < kN * P; ++c) {
        partial[(row * P + c % P) * e.p->D + e.d + c / P] = e.sums[c / P][c % P];
      }
    }
  }

 private:
  Steps ring_;
  Word ahead_[kSteps][kRows];
  typename Element::Raw last_ = {};
  LinearMarks<Element, kSteps> marks_;
  int whole_ = 0;

  DEVICE void take(Word (&now)[kSteps][kRows], int i) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) now[k][r] = ahead_[k][r];
    }
    // Keeping the warps of a row at the same step lets them read whole memory pages (fp32 GRU of
    // 8x2048x4096, words of 8 bytes: 0.532 ms instead of 0.536).
    if (sizeof(Word) >= 8 && blockDim.x > 32) __syncthreads();
    ring_.take(ahead_);
    marks_.take(i + kSteps);
  }
  DEVICE void measure() {
#pragma unroll
    for (int c = 0; c < kN * K; ++c) largest = fmaxf(largest, fabsf(carry[c / K][c % K]));
  }
};

}  // namespace flashcell::cuda
