// The values that the kernels of h read, besides the caller's arrays.
#pragma once
#include "../gates/rows.cuh"

namespace flashcell::cuda {

struct ForwardTerms {
  Rows rows;
  float scale;     // K^-1/2
  const void* C;   // [H, slots, K, V] io, the state before the chunk
  const float* n;  // [H, slots, K], or null
};

}  // namespace flashcell::cuda
