// Rings of stages in shared memory, which a thread block fills by asynchronous copies ahead of
// their use. Code for Turing, whose copies are not asynchronous, has one stage: it takes the least
// memory, and nothing is copied ahead.
#pragma once
#include "common/cuda/code.h"
#include "common/cuda/ptx/copy_async.cuh"

namespace flashcell::cuda {

// The number of stages of the code that is being compiled, where newer GPUs have kMost.
template <int kMost>
constexpr int kStagesOf = kIsTuring ? 1 : kMost;

// Returns the bytes of a struct with a ring in the code that runs on the GPU, which may have fewer
// stages (`most` on newer GPUs) than the struct has here.
template <typename Shared>
constexpr int bytes_with_stages(const Code& code, int here, int most, int stage_bytes) {
  return int(sizeof(Shared)) + ((code.is_turing() ? 1 : most) - here) * stage_bytes;
}

// Waits until the oldest stage is filled and all threads have read the one before it, whose place
// the next copies take: load() starts them. All threads of the block call it.
template <int kStages, typename Load>
DEVICE void next_stage(const Load& load) {
  if constexpr (kStages > 1) copy_wait<kStages - 2>();
  __syncthreads();
  load();
  if constexpr (kStages == 1) {
    copy_wait<0>();
    __syncthreads();
  }
}

}  // namespace flashcell::cuda
