// The steps ahead of a thread: its own column of a ring in shared memory, filled by asynchronous
// copies. A register ring would not do: the hardware waits for loads in a handful of groups, so the
// oldest of them cannot be taken before younger ones have come. No thread reads another's column,
// so nothing synchronises.
#pragma once
#include "lane.cuh"

namespace flashcell::cuda {

// Rows of a step: Source::kRows words, row r of step i at source.at(r, i) if it has(r, i).
template <typename Source, int kStepsOf, int kGroupsOf, int kThreads>
class Ring {
 public:
  using Word = typename Source::Word;
  static constexpr int kSteps = kStepsOf, kGroups = kGroupsOf, kRows = Source::kRows;
  static constexpr int kBytes = kGroups * kSteps * kRows * kThreads * int(sizeof(Word));

  DEVICE Ring(Word* shared) : column_(shared + threadIdx.x) {}

  DEVICE void start(const Source& source, int begin, int end) {
    next_ = begin, end_ = end, fill_ = take_ = 0;
#pragma unroll 1
    for (int g = 0; g < kGroups - 1; ++g) request(source);
  }

  // The next group of steps: row r of its step k is group[(k * kRows + r) * kThreads].
  DEVICE const Word* take(const Source& source) {
    request(source);
    wait_copies<kGroups - 1>();
    const Word* group = column_ + take_ * kGroup;
    take_ = take_ + 1 == kGroups ? 0 : take_ + 1;
    return group;
  }

 private:
  static constexpr int kGroup = kSteps * kRows * kThreads;
  Word* column_;
  int next_, end_, fill_, take_;

  DEVICE void request(const Source& source) {
    Word* to = column_ + fill_ * kGroup;
    if (next_ + kSteps <= end_) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) request_step(source, next_ + k, to + k * kRows * kThreads);
    } else {
#pragma unroll 1
      for (int k = 0; next_ + k < end_; ++k) {
        request_step(source, next_ + k, to + k * kRows * kThreads);
      }
    }
    commit_copies();
    next_ += kSteps, fill_ = fill_ + 1 == kGroups ? 0 : fill_ + 1;
  }
  DEVICE static void request_step(const Source& source, int i, Word* to) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (source.has(r, i)) copy_async<sizeof(Word)>(to + r * kThreads, source.at(r, i));
    }
  }
};

}  // namespace flashcell::cuda
