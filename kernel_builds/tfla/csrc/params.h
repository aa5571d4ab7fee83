// What ops.cpp (torch) hands to an engine (no torch), on the CPU and on CUDA: plain structs.
// S sequences, T time, H heads, K width of a key, V of a value. io = the dtype of k; state = float,
// or double when io is double.
#pragma once
#include "common/sequence.h"

namespace flashcell {

// An exponential input gate no lower, which float does not round; no m is lower but that of what
// nothing was ever added to.
constexpr double kNever = -0x1p100;

struct Strided {  // [B, T, H, width], or [B, T, H] for a gate; strides in elements, the last one is
                  // 1
  const void* data;
  int64_t batch, time, head;
};

struct CellOptions {
  bool exponential;      // e^i with the running maximum m; else sigmoid(i)
  bool normalized;       // h is divided by max(|n q|, e^-m) + eps
  bool normalizer_grad;  // the gradient goes through that divisor
  double eps;
};

struct MlstmParams : CellOptions {
  int64_t B, S, T, H, K, V, chunk;
  const Sequence* sequences;  // [S]
  const uint8_t* reset;       // [B, T] or null: the state becomes empty before the step
  const uint8_t* hold;        // [B, T] or null: the state passes the step, whose h is 0
  Strided q;                  // io; data is null where the state alone is asked for
  Strided k, v;               // io
  Strided i, f;               // state
  const void *C, *n, *m;      // [S, H, K, V], [S, H, K], [S, H] state, or null for 0
  int64_t kept;               // chunks, of whose states the forward keeps the first; or 0
};

struct ForwardParams : MlstmParams {
  void* h;                         // [B, T, H, V] io
  void* total;                     // [B, T, H] state: n q of every step, null where there is no n
  void *last_C, *last_n, *last_m;  // as C, n, m; n and m null where the cell has none
  void *kept_C, *kept_n;           // [H, kept, K, V] io, [H, kept, K] state: before every chunk
};

struct BackwardParams : MlstmParams {
  const void* dh;                 // [B, T, H, V] io, or null for 0
  const void *dlast_C, *dlast_n;  // state, or null for 0
  const void *last_C, *last_n;    // the forward's
  const void *h, *total;          // the forward's
  const void *kept_C, *kept_n;    // the forward's
  void *dq, *dk, *dv;             // [B, T, H, .] io
  void *di, *df;                  // [B, T, H] state
  void *dC, *dn;                  // of the initial state
};

// sigmoid(out_gate) norm(h) weight of every head on its own: README.md, "The epilogue".
struct Epilogue {
  bool norm, centered;  // h over the root of its mean square; after its mean was taken away
  double eps;
  Strided out_gate;    // io; data is null for no gate
  const void* weight;  // [H, V] state, or null for 1
  bool weight_is_io;   // it is io: on CUDA

  bool any() const { return norm || out_gate.data != nullptr; }
};

struct EpilogueParams : Epilogue {
  int64_t B, T, H, V;
  const void* h;  // [B, T, H, V] io
  void* y;        // the same
};

struct EpilogueBackwardParams : Epilogue {
  int64_t B, T, H, V;
  const void *dy, *h;    // [B, T, H, V] io
  void *dh, *dout_gate;  // the same; dout_gate null where there is no gate
  void* dweight;         // [H, V] state, or null
};

// One step. The states after it are written to next_*, which may be where the old ones are.
struct StepParams : CellOptions {
  int64_t B, H, K, V;
  Strided q, k, v, i, f;  // time is not used
  const void *C, *n, *m;
  void *next_C, *next_n, *next_m;
  Epilogue epilogue;
  void* h;  // [B, H, V] io, after the epilogue
};

// One token's linear layers, of up to kLinears matrices with the same input, io = the dtype of x.
constexpr int kLinears = 8;

struct Linear {
  const void* weight;  // [rows, K] io
  const void* bias;    // [rows] io or null
  void* out;           // [B, rows], rows out_stride elements apart
  int64_t rows, out_stride;
  bool capped;  // out is fp32, bounded by cap; else out is io
};

struct LinearStepParams {
  int64_t B, K;
  const void* x;  // [B, K], x_stride elements from row to row
  int64_t x_stride;
  const void* norm;  // [K] io: x is divided by its root mean square and multiplied by it; or null
  double eps, cap;   // cap 0: no bound
  const void* residual;  // [B, rows] io, added to the one matrix's output; or null
  int64_t residual_stride;
  bool gated;  // two matrices, one output: silu(first) * second
  int count;
  Linear linears[kLinears];
};

// The same norm alone, and few rows of matrices that read it: all fp32, bounded by cap.
struct NormStepParams {
  int64_t B, K;
  const void* x;
  int64_t x_stride;
  const void* norm;
  double eps, cap;
  void* out;  // [B, K] io
  int count;
  Linear linears[kLinears];
};

struct GateStepParams {  // out = silu(gate) * up, [B, N] io
  int64_t B, N;
  const void *gate, *up;
  int64_t gate_stride, up_stride;
  void* out;
};

}  // namespace flashcell
