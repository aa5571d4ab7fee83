// Parameters that ops.cpp (with torch) passes to an engine (without torch), on the CPU and on CUDA.
// S sequences, T time, H heads, K width of a key, V width of a value. io is the dtype of k; state
// is float, or double when io is double.
#pragma once
#include "common/quantized.h"
#include "common/sequence.h"

namespace flashcell {

// Lower bound of an exponential input gate, which float does not round. An m below it means that
// nothing was ever added to the state.
constexpr double kNever = -0x1p100;

// [B, T, H, width], or [B, T, H] for a gate; strides in elements, the last one is 1.
struct Strided {
  const void* data;
  int64_t batch, time, head;
};

struct CellOptions {
  bool exponential;      // input gate e^i with the running maximum m; else sigmoid(i)
  bool normalized;       // h is divided by max(|n q|, e^-m) + eps
  bool normalizer_grad;  // whether the gradient goes through that divisor
  double eps;
};

struct MlstmParams : CellOptions {
  int64_t B, S, T, H, K, V, chunk;
  const Sequence* sequences;  // [S]
  const uint8_t* reset;       // [B, T] or null: the state becomes empty before the step
  const uint8_t* hold;        // [B, T] or null: the step leaves the state unchanged, and its h is 0
  Strided q;                  // io; data is null if only the state is wanted
  Strided k, v;               // io
  Strided i, f;               // state
  const void *C, *n, *m;      // [S, H, K, V], [S, H, K], [S, H] state, or null for 0
  int64_t kept;  // number of chunks whose states before them the forward pass keeps; or 0
};

struct ForwardParams : MlstmParams {
  void* h;                         // [B, T, H, V] io
  void* total;                     // [B, T, H] state: n q of every step; null if the cell has no n
  void *last_C, *last_n, *last_m;  // as C, n, m; n and m are null if the cell has none
  void *kept_C, *kept_n;  // [H, kept, K, V] io, [H, kept, K] state: the states before every chunk
};

struct BackwardParams : MlstmParams {
  const void* dh;                 // [B, T, H, V] io, or null for 0
  const void *dlast_C, *dlast_n;  // state, or null for 0
  const void *last_C, *last_n;    // results of the forward
  const void *h, *total;          // results of the forward
  const void *kept_C, *kept_n;    // kept by the forward
  void *dq, *dk, *dv;             // [B, T, H, .] io
  void *di, *df;                  // [B, T, H] state
  void *dC, *dn;                  // gradients of the initial state
};

// sigmoid(out_gate) norm(h) weight, for every head on its own: README.md, "The epilogue".
struct Epilogue {
  // H is divided by the root of its mean square; centered: after subtracting its mean.
  bool norm, centered;
  double eps;
  Strided out_gate;    // io; data is null if there is no gate
  const void* weight;  // [H, V] state, or null for 1
  bool weight_is_io;   // whether the weight is io instead; on CUDA only

  bool any() const { return norm || out_gate.data != nullptr; }
};

struct EpilogueParams : Epilogue {
  int64_t B, T, H, V;
  const void* h;  // [B, T, H, V] io
  void* y;        // shape and dtype of h
};

struct EpilogueBackwardParams : Epilogue {
  int64_t B, T, H, V;
  const void *dy, *h;    // [B, T, H, V] io
  void *dh, *dout_gate;  // like h; dout_gate is null if there is no gate
  void* dweight;         // [H, V] state, or null
};

// The last steps of each row, which the state does not hold yet; on CUDA only.
struct RingParams {
  int64_t steps;  // R, or 0 if there is no ring
  void *k, *v;    // [B, H, R, K], [B, H, R, V] io
  float *i, *f;   // [B, H, R]
  int32_t* used;  // [B, H] number of entries that hold steps
};

// One decoding step. The new states are written to next_*, which may be the same memory as the old.
// With a ring they are the same memory; and if q is null there is no step: the ring is folded.
struct StepParams : CellOptions {
  int64_t B, H, K, V;
  Strided q, k, v, i, f;  // their time stride is not used
  const void *C, *n, *m;
  void *next_C, *next_n, *next_m;
  Epilogue epilogue;
  void* h;  // [B, H, V] io, after the epilogue
  RingParams ring;
};

// The linear layers of one decoding step: up to kLinears matrices with the same input; io is the
// dtype of x.
constexpr int kLinears = 8;

struct Linear {
  const void* weight;  // [rows, K] io, or of LinearStepParams::format where there is a scale
  const void* scale;   // factors of its rows or groups (common/quantized.h), or null
  const void* bias;    // [rows] io or null
  void* out;           // [B, rows], rows out_stride elements apart
  int64_t rows, out_stride;
  bool capped;  // out is fp32, bounded by cap; otherwise out is io
};

struct LinearStepParams {
  int64_t B, K;
  const void* x;  // [B, K], x_stride elements from row to row
  int64_t x_stride;
  const void* norm;      // [K] io: weight of the RMS norm that is applied to x; or null
  double eps, cap;       // cap 0 means no bound
  const void* residual;  // [B, rows] io, added to the output of the only matrix; or null
  int64_t residual_stride;
  bool gated;  // two matrices with one output: silu(first) * second
  Format format;
  int count;
  Linear linears[kLinears];
};

// The same norm alone, and a few rows of matrices that read its output: all fp32, bounded by cap.
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
