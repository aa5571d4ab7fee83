// A ring of prefetched steps: each thread has its own column in its warp's part of the shared
// memory, filled by asynchronous copies. A ring in registers would not work: the hardware tracks
// loads with only a few counters, so waiting for the oldest load waits for younger ones too. No
// thread reads another's column, so no synchronisation is needed. Turing, whose copies are not
// asynchronous, has one group, which is copied when it is taken.
#pragma once
#include "../lane.cuh"
#include "common/cuda/code.h"

namespace flashcell::cuda {

// Holds words of kRows rows in kGroups groups of kSteps steps. Rows from kOnce on are read only at
// a group's last step, into the place of step kSteps - 1. With evict_last loads, lines are returned
// to normal priority after use, for as many of the last steps as fill L2; lines of earlier steps
// have left it by then.
template <typename WordOf, int kRowsOf, int kStepsOf, int kGroupsOf, int kOnce = kRowsOf,
          Leaves kLeaves = Leaves::kInTurn>
class Ring {
 public:
  using Word = WordOf;
  static constexpr int kSteps = kStepsOf, kGroups = kIsTuring ? 1 : kGroupsOf, kRows = kRowsOf;
  static constexpr int kLanes = 32, kGroup = kSteps * kRows * kLanes;
  // Bytes of shared memory of a thread block that runs this code.
  static constexpr int bytes(const Code& code, int threads) {
    return (code.is_turing() ? 1 : kGroupsOf) * kGroup * threads / kLanes * int(sizeof(Word));
  }

  DEVICE Ring(unsigned char* shared)
      : column_(reinterpret_cast<Word*>(shared) + threadIdx.x / kLanes * kGroups * kGroup +
                threadIdx.x % kLanes) {}

  // Starts prefetching `count` steps, bytes[r] apart in row r.
  DEVICE void start(const void* const (&first)[kRows], const int (&bytes)[kRows], int count) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      from_[r] = static_cast<const char*>(first[r]), bytes_[r] = bytes[r];
    }
    left_ = count, fill_ = take_ = 0, policy_ = cache_policy<kLeaves>();
    given_back_ = int(kCacheBytes / (int64_t(gridDim.x) * blockDim.x * kRows * sizeof(Word)));
#pragma unroll 1
    for (int g = 0; g < kGroups - 1; ++g) request();
  }

  // Takes the words of the next group, one group ahead of their use, because reading shared memory
  // takes time too.
  DEVICE void take(Word (&words)[kSteps][kRows]) {
    request();
    copy_wait<kGroups - 1>();
    const Word* group = column_ + take_ * kGroup;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int r = 0; r < (k + 1 < kSteps ? kOnce : kRows); ++r) {
        words[k][r] = group[(k * kRows + r) * kLanes];
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
    copy_commit();
#pragma unroll
    for (int r = 0; r < kRows; ++r) from_[r] += int64_t(bytes_[r]) * kSteps;
    left_ -= kSteps, fill_ = fill_ + 1 == kGroups ? 0 : fill_ + 1;
  }
  template <int kFirst, int kEnd>
  DEVICE void copy_rows(int step, int place, Word* to) const {
#pragma unroll
    for (int r = kFirst; r < kEnd; ++r) {
      copy_word<sizeof(Word), kLeaves>(to + (place * kRows + r) * kLanes,
                                       from_[r] + int64_t(bytes_[r]) * step, policy_);
    }
  }
  // Returns the cache lines of the group just taken to normal priority. The thread with the first
  // word of a line does it. The loop must be unrolled to gain time. An incomplete last group is
  // left alone.
  DEVICE void give_back_group() const {
    constexpr int kThreadsOfLine = kCacheLine / int(sizeof(Word));
    const int count = left_ + kGroups * kSteps;  // remaining steps, from this group on
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
