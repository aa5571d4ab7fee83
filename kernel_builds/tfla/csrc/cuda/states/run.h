// The states between chunks, and their gradients: C <- keep C + sum_j weight_j left_j right_j^T.
#pragma once
#include "../gates/rows.cuh"
#include "../run.h"

namespace flashcell::cuda {

struct StateParams {
  Rows rows;
  int64_t H, K, V;
  Strided left, right;             // io: k and v, or q and dh
  bool normalized;                 // whether the cell has an n
  const float *weight, *n_weight;  // [H, rows] weights of the left rows in C, and in n
  const float *first, *first_n;    // [S, H, K, V], [S, H, K], or null for 0
  float *last, *last_n;            // the same shapes, or null
  void* states;                    // [H, slots, K, V] io: the states before every chunk, or null
  float* n;                        // [H, slots, K]
};

// Returns the scratch for the segments of sequences that run in parallel.
template <typename IO>
int64_t states_scratch(const StateParams& p, const Device& device);
// Runs the chunks in order of time or, with kReverse, against it: then `states` holds what follows
// a chunk.
template <typename IO, bool kReverse>
void run_states(const StateParams& p, const Device& device, void* scratch, cudaStream_t stream);

}  // namespace flashcell::cuda
