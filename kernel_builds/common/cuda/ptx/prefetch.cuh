// Fetches global memory into L2.
#pragma once
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

DEVICE void prefetch_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

}  // namespace flashcell::cuda
