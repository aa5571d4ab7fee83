// The states between chunks, and their gradients: C <- keep C + sum_j weight_j left_j right_j^T.
#pragma once
#include "../gates/rows.cuh"
#include "../run.h"

namespace flashcell::cuda {

struct StateParams {
  Rows rows;
  int64_t H, K, V;
  Strided left, right;             // io: k and v, or q and dh
  bool normalized;                 // there is an n
  const float *weight, *n_weight;  // [H, rows] of left in C, and in n
  const float *first, *first_n;    // [S, H, K, V], [S, H, K], or null for 0
  float *last, *last_n;            // likewise, or null
  void* states;                    // [H, slots, K, V] io: before every chunk, or null
  float* n;                        // [H, slots, K]
};

// Segments of a sequence that run side by side, from states that a first pass works out.
template <typename IO>
int64_t states_scratch(const StateParams& p, const Device& device);
// Chunks in the order of time, or against it: then `states` holds what is after a chunk.
template <typename IO, bool kReverse>
void run_states(const StateParams& p, const Device& device, void* scratch, cudaStream_t stream);

}  // namespace flashcell::cuda
