// The steps ahead of a thread: its own column of a ring in shared memory, filled by asynchronous
// copies. A register ring would not do: the hardware waits for loads in a handful of groups, so the
// oldest of them cannot be taken before younger ones have come. No thread reads another's column,
// so nothing synchronises.
#pragma once
#include "../lane.cuh"

namespace flashcell::cuda {

// Words of kRows rows; kGroups groups of kSteps steps. Of the rows from kOnce on only a group's
// last step is read, into the place of step kSteps - 1. What is to leave L2 last is given back once
// it is read, over as many of the last steps as fill the L2: those before have left by then.
template <typename WordOf, int kRowsOf, int kStepsOf, int kGroupsOf, int kThreads,
          int kOnce = kRowsOf, Leaves kLeaves = Leaves::kInTurn>
class Ring {
 public:
  using Word = WordOf;
  static constexpr int kSteps = kStepsOf, kGroups = kGroupsOf, kRows = kRowsOf;
  static constexpr int kGroup = kSteps * kRows * kThreads;
  static constexpr int kBytes = kGroups * kGroup * int(sizeof(Word));

  DEVICE Ring(unsigned char* shared) : column_(reinterpret_cast<Word*>(shared) + threadIdx.x) {}

  // Steps of `bytes` from each other in each row.
  DEVICE void start(const void* const (&first)[kRows], const int (&bytes)[kRows], int count) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      from_[r] = static_cast<const char*>(first[r]), bytes_[r] = bytes[r];
    }
    left_ = count, fill_ = take_ = 0, policy_ = cache_policy<kLeaves>();
    given_back_ = int(kCacheBytes / (int64_t(gridDim.x) * kThreads * kRows * sizeof(Word)));
#pragma unroll 1
    for (int g = 0; g < kGroups - 1; ++g) request();
  }

  // The words of the next group, one group ahead of their use: reading them takes its time too.
  DEVICE void take(Word (&words)[kSteps][kRows]) {
    request();
    wait_copies<kGroups - 1>();
    const Word* group = column_ + take_ * kGroup;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int r = 0; r < (k + 1 < kSteps ? kOnce : kRows); ++r) {
        words[k][r] = group[(k * kRows + r) * kThreads];
      }
    }
    take_ = take_ + 1 == kGroups ? 0 : take_ + 1;
    if constexpr (kLeaves == Leaves::kLast) give_back_group();
  }

 private:
  Word* column_;
  const char* from_[kRows];
  int bytes_[kRows], left_, fill_, take_, given_back_;
  uint64_t policy_;

  DEVICE void request() {
    Word* to = column_ + fill_ * kGroup;
    if (left_ >= kSteps) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) copy_rows<0, kOnce>(k, k, to);
      copy_rows<kOnce, kRows>(kSteps - 1, kSteps - 1, to);
    } else {
#pragma unroll 1
      for (int k = 0; k < left_; ++k) copy_rows<0, kOnce>(k, k, to);
      if (left_ > 0) copy_rows<kOnce, kRows>(left_ - 1, kSteps - 1, to);
    }
    commit_copies();
#pragma unroll
    for (int r = 0; r < kRows; ++r) from_[r] += int64_t(bytes_[r]) * kSteps;
    left_ -= kSteps, fill_ = fill_ + 1 == kGroups ? 0 : fill_ + 1;
  }
  template <int kFirst, int kEnd>
  DEVICE void copy_rows(int step, int place, Word* to) const {
#pragma unroll
    for (int r = kFirst; r < kEnd; ++r) {
      copy_async<sizeof(Word), kLeaves>(to + (place * kRows + r) * kThreads,
                                        from_[r] + int64_t(bytes_[r]) * step, policy_);
    }
  }
  // The lines of the group just taken, each by the thread that has its first word; unrolled, or it
  // takes longer than it gains. The last group, if it is not whole, stays.
  DEVICE void give_back_group() const {
    constexpr int kThreadsOfLine = kCacheLine / int(sizeof(Word));
    const int count = left_ + kGroups * kSteps;  // of its steps and those after it
    if (count > given_back_ || count < kSteps || threadIdx.x % kThreadsOfLine != 0) return;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        give_back(from_[r] + int64_t(bytes_[r]) * (k - kGroups * kSteps));
      }
    }
  }
};

}  // namespace flashcell::cuda
