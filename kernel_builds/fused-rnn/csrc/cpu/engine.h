// The functions that the CPU engine offers to ops.cpp. The sequence ops take the parameters of
// ../params.h, as the CUDA engines do.
#pragma once
#include "../params.h"
#include "common/cpu/host.h"
#include "common/cpu/levels.h"
#include "common/quantized.h"

namespace flashcell {

// For every i < batch: c_i[m, n] = sum_k a_i[m, k] b_{i mod batch_b}[k, n] (+ bias[n]).
struct GemmParams {
  int64_t M, N, K, batch, batch_b;
  const void* a;  // io; strides in elements
  int64_t a_batch, a_m, a_k;
  const void* b;  // io; one of b_k, b_n is 1
  int64_t b_batch, b_k, b_n;
  void* c;  // io; rows of N contiguous elements
  int64_t c_batch, c_m;
  const void* bias;  // [N] io, or null
};

struct ColumnSumParams {  // out[n] = sum_m a[m, n]
  int64_t M, N;
  const void* a;  // [M, N] io
  void* out;      // [N] io
};

// One decoding step of a residual block, H = N D. Tensors are io unless noted; rows of x are
// x_stride apart.
struct BlockStepParams {
  static constexpr int kMostStates = 8;
  int64_t B, N, D, I;
  const void* x;  // [B, H]
  int64_t x_stride;
  const void *mixer_norm, *mlp_norm;  // [H]
  double mixer_eps, mlp_eps;
  const void* in_proj;           // [G H, H]
  const void* weight;            // [G, N, D, D]
  const void* bias;              // [R, N, D], or null
  void* states[kMostStates];     // [B, N, D] state, changed in place
  const void *gate, *up, *down;  // [I, H], [I, H], [H, I]
  Format format;                 // of in_proj, gate, up and down
  const void* scales[4];         // their factors (common/quantized.h), or null
  void* out;                     // [B, H]
};

// One instruction set's build of the engine; `cell` is the index in AllCells.
struct Backend {
  const char* name;
  void (*forward)(int cell, Dtype, const ForwardParams&, const Host&);
  void (*backward)(int cell, Dtype, const BackwardParams&, const Host&);
  void (*gemm)(Dtype, const GemmParams&, const Host&);
  void (*column_sum)(Dtype, const ColumnSumParams&, const Host&);
  void (*block_step)(int cell, Dtype, const BlockStepParams&, const Host&);
};

#define FLASHCELL_DECLARE(level) \
  namespace level {              \
  extern const Backend kBackend; \
  }
FLASHCELL_LEVELS(FLASHCELL_DECLARE)
#undef FLASHCELL_DECLARE

}  // namespace flashcell
