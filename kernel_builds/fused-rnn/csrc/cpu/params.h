// The whole contract between ops.cpp (torch) and the engine (no torch): plain structs.
// S sequences, T time, N heads, D head width, G gates, R bias rows, K states, V saved values.
// io = the dtype of x; state = float, or double when io is double.
#pragma once
#include <cstdint>

namespace flashcell {

enum class Dtype { kFloat, kDouble, kHalf, kBFloat16 };

// What the engine asks of its host.
struct Host {
  void (*parallel)(int64_t count, void (*body)(void* context, int64_t begin, int64_t end),
                   void* context);
  void* (*allocate)(int64_t bytes);  // 64-byte aligned, uninitialised; throws, never null
  void (*release)(void* pointer);
  int threads;
};

// One batch row, or one document of a packed row. The engine gets them longest first.
struct Sequence {
  int64_t index;     // s: row of the [K, S, N, D] state tensors
  int64_t row;       // b * T + t of the first step: row of every [B, T, ...] tensor but x
  int64_t x_offset;  // the same step in x, in elements
  int64_t length;    // steps that run
  int64_t padding;   // rows after them, which only pass the state through
};

struct SequenceParams {
  int64_t S, N, D;
  const Sequence* sequences;  // [S]
  const uint8_t* reset;       // [B, T] or null: states become 0 before the step
  const uint8_t* hold;        // [B, T] or null: the step passes the states through
  const void* weight;         // [G, N, D, D] io: gate, head, to, from
};

struct ForwardParams : SequenceParams {
  const void* x;   // [B, T, G, N, D] io, strided
  int64_t x_time;  // strides of x in elements; the last one is 1
  int64_t x_gate;
  int64_t x_head;
  const void* bias;     // [R, N, D] state, or null
  const void* initial;  // [K, S, N, D] state, or null for 0
  void* h;              // [B, T, N, D] io
  void* last;           // [K, S, N, D] state
  void* saved;          // [B, T, V, N, D] state, or null
  void* h_prev;         // [B, T, N, D] io, or null: the operand of the recurrent product
};

struct BackwardParams : SequenceParams {
  const void* dh;     // [B, T, N, D] io
  const void* dlast;  // [K, S, N, D] state, or null for 0
  const void* saved;  // [B, T, V, N, D] state
  double grad_clip;   // bound on the elements of weight^T dr; infinity for none
  void* dx;           // [B, T, G, N, D] io
  void* dr;           // [B, T, G, N, D] io, or null where it equals dx
  void* dbias;        // [R, N, D] state
  void* dstate;       // [K, S, N, D] state
};

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

// One instruction set's build of the engine; cell = position in AllCells.
struct Backend {
  const char* name;
  void (*forward)(int cell, Dtype, const ForwardParams&, const Host&);
  void (*backward)(int cell, Dtype, const BackwardParams&, const Host&);
  void (*gemm)(Dtype, const GemmParams&, const Host&);
  void (*column_sum)(Dtype, const ColumnSumParams&, const Host&);
};

namespace baseline {
extern const Backend kBackend;
}
namespace avx2 {
extern const Backend kBackend;
}
namespace avx512 {
extern const Backend kBackend;
}

}  // namespace flashcell
