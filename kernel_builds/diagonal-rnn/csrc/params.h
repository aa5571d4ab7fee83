// Parameters that ops.cpp (with torch) passes to an engine (without torch), on the CPU and on CUDA.
// S sequences, T time, D channels, G gates, P weight rows, K states, V saved states. x is [B, T, G,
// D] or, with its channels in heads of width J, [D / J, B, T, G, J], as a batched product writes
// it; dx has the layout of x, contiguous. io is the dtype of x; state is float, or double when io
// is double.
#pragma once
#include "common/sequence.h"

namespace flashcell {

enum class Method { kSequential, kMultipleShooting, kNewton };

struct SequenceParams {
  int64_t S, D, T;
  const Sequence* sequences;  // [S]; null on CUDA when sequence s is all of row s
  const uint8_t* reset;       // [B, T] or null: states become 0 before the step
  const uint8_t* hold;        // [B, T] or null: the step leaves the states unchanged
  const void* x;              // io, strided
  int64_t x_head;             // strides of x in elements; the last one is 1
  int64_t x_batch;
  int64_t x_time;
  int64_t x_gate;
  int64_t J;            // channels of a head; D if x has no heads
  const void* weight;   // [P, D] state
  const void* bias;     // [G, D] state, added to x, or null; it follows the weight
  const void* initial;  // [K, S, D] state, or null for 0
  int64_t V;  // K - 1 states beside h and, with `hold`, state 0 as well, which h does not hold then
  Method method;
};

struct ForwardParams : SequenceParams {
  void* h;        // [B, T, D] io
  void* last;     // [K, S, D] state
  void* saved;    // [B, T, V, D] io, or null
  float* report;  // [3]: iterations, residual, steps finished sequentially
  double tol;     // tolerance of the iterative methods; negative for their default
  int64_t max_iters;
};

struct BackwardParams : SequenceParams {
  const void* dh;     // [B, T, D] io
  const void* dlast;  // [K, S, D] state, or null for 0
  const void* h;      // [B, T, D] io
  const void* saved;  // [B, T, V, D] io
  void* dx;           // io, strided like x
  int64_t dx_head;    // elements of a head of dx
  void* dweight;      // [P, D] state, then with a bias its [G, D]
  void* dstate;       // [K, S, D] state
};

// h_t = a_t h_{t-1} + b_t, with `reverse` h_t = a_t h_{t+1} + b_t; blocks of n x n, all contiguous.
struct ScanParams {
  int64_t B, T, D, n;
  bool reverse;
  const void* a;   // [B, T, D, n, n] io
  const void* h0;  // [B, D, n] state, or null for 0
};

struct ScanForwardParams : ScanParams {
  const void* b;  // [B, T, D, n] io
  void* h;        // [B, T, D, n] io
};

struct ScanBackwardParams : ScanParams {
  const void* dh;  // [B, T, D, n] io
  const void* h;   // [B, T, D, n] io
  void* da;        // [B, T, D, n, n] io
  void* db;        // [B, T, D, n] io
  void* dh0;       // [B, D, n] state
};

// u_t = weight[4] + sum over j < 4 of weight[3 - j] x_(t - j), y = silu(u) or u.
struct ConvParams {
  static constexpr int kTaps = 4;
  int64_t B, T, D;
  const void* x;  // [B, T, D] io, strided; the last stride is 1
  int64_t x_batch, x_time;
  const void* weight;    // [5, D] state, the bias last
  const void* window;    // [B, 3, D] io: the steps before the first, or null for 0
  const uint8_t* reset;  // [B, T] or null: the step does not see the steps before it
  bool silu;
};

struct ConvForwardParams : ConvParams {
  void* y;  // [B, T, D] io
};

struct ConvBackwardParams : ConvParams {
  const void* dy;  // [B, T, D] io
  void* dx;        // [B, T, D] io
  void* dweight;   // [5, D] state
  void* dwindow;   // [B, 3, D] io
};

// One decoding step of silu(conv); `window` then holds its last two steps and x.
struct ConvStepParams {
  int64_t B, D;
  const void* x;  // [B, D] io, rows x_row apart
  int64_t x_row;
  const void* weight;  // [D, 4] io
  const void* bias;    // [D] io, or null
  void* window;        // [B, 3, D] io
  void* y;             // [B, D] io
};

// One decoding step of a cell and what follows it: y = (h' + skip x) silu(gate). The states are
// changed in place.
struct MixStepParams {
  static constexpr int kMostStates = 2;
  int64_t B, D, J;
  const void* u;     // [N, B, G, J] io, D = N J
  const void* bias;  // [G, D] io, added to u, or null
  // [3, D] io; a, then p: the cell's weights in its order, clamped to [-bound, bound] when read.
  const void* a;
  const void* p;  // [P - 3, D] io, or null
  double bound;
  void* states[kMostStates];  // [B, D] state
  const void* x;              // [B, D] io
  const void* skip;           // [D] io
  const void* gate;           // [B, D] io, rows gate_row apart
  int64_t gate_row;
  void* y;  // [B, D] io
};

}  // namespace flashcell
