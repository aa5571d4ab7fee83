// Parameters that ops.cpp (with torch) passes to an engine (without torch), on the CPU and on CUDA.
// S sequences, T time, N heads, D head width, G gates, R bias rows, K states, V saved values.
// io is the dtype of x; state is float, or double when io is double.
#pragma once
#include "common/sequence.h"

namespace flashcell {

struct SequenceParams {
  int64_t S, N, D, T;
  const Sequence* sequences;  // [S]; null on CUDA when sequence s is all of row s
  const uint8_t* reset;       // [B, T] or null: states become 0 before the step
  const uint8_t* hold;        // [B, T] or null: the step leaves the states unchanged
  const void* weight;         // [G, N, D, D] io: gate, head, unit it computes, unit it reads
  // CUDA: the heads that run, of those that the tensors have. 0 heads means all: run()
  // (cuda/call.h) replaces it. The step and batch engines always run all of them.
  int64_t first_head, heads;
  double bound;  // on the state that a step adds up (cells/bound.h); 0 for none. On CUDA the step
                 // engine alone has it
};

// CUDA: the input of a layer of one head and whole sequences, and its weight, from which the batch
// engine computes x.
struct LayerInput {
  int64_t I;            // its width, or 0 if x is given
  const void* data;     // [B, T, I] io, strided; the last stride is 1
  int64_t batch, time;  // strides in elements
  const void* weight;   // [G, D, I] io
};

struct ForwardParams : SequenceParams {
  const void* x;    // [B, T, G, N, D] io, strided; null if `input` is given
  int64_t x_batch;  // strides of x in elements; the last one is 1
  int64_t x_time;
  int64_t x_gate;
  int64_t x_head;
  LayerInput input;
  const void* bias;  // [R, N, D] state, or null; io if bias_is_io, which the step engine takes
  bool bias_is_io;
  const void* initial;  // [K, S, N, D] state, or null for 0
  void* h;              // [B, T, N, D] io
  // CUDA: of one head, the strides of h [B, T, h_units] in elements, or 0 if they are as above.
  // Only the batch engine takes others, for whole sequences and an even number of units.
  int64_t h_batch, h_time, h_units;
  void* last;    // [K, S, N, D] state
  void* saved;   // [B, T, V, N, D] state (CUDA: io), or null
  void* h_prev;  // [B, T, N, D] io, or null: the operand of the recurrent product
  // CPU: whether a single step of many sequences may pack the weights. Its products are then summed
  // in another order than those of few sequences, so that decoding does without.
  bool packs_one_step;
  // The first state of `initial` is 0; on CUDA in one step of the step engine, which does not read
  // the weight then.
  bool h_begins_as_zero;
};

struct BackwardParams : SequenceParams {
  const void* dh;       // [B, T, N, D] io
  const void* dlast;    // [K, S, N, D] state, or null for 0
  const void* saved;    // [B, T, V, N, D] state (CUDA: io)
  double grad_clip;     // bound on the elements of weight^T dr; infinity for none
  void* dx;             // [B, T, G, N, D] io
  void* dr;             // [B, T, G, N, D] io, or null where it equals dx
  void* dbias;          // [R, N, D] state
  void* dbias_partial;  // CUDA: [tiles of sequences][R, N, D] state
  void* dstate;         // [K, S, N, D] state
  bool skips_initial;   // dstate is not read, and may stay undefined
};

}  // namespace flashcell
