// Declares the kernels for one step of one layer and head, which read and write the tensors of
// torch.nn's modules as they are. stack/one_step.h calls them; it needs no CUDA headers.
// B sequences, I input width, D units, G gates, K states, R bias rows, V saved values. io is the
// dtype of x and of the weights.
#pragma once
#include "../engine.h"

namespace flashcell::cuda {

constexpr int kMostStates = 2;

// [B, D], or no tensor at all, which counts as zeros.
struct StateView {
  const void* data;   // io, or fp32 unless is_io
  int64_t row, unit;  // strides in elements
  bool is_io;
};

// One side of the gates' sums: weight [G, D, depth] times an operand [B, depth].
struct CellProduct {
  const void* weight;  // io, contiguous; null: no such product
  StateView operand;
  int64_t depth;
};

struct CellForward {
  int64_t B, D;
  CellProduct input, recurrent;  // what the kernel multiplies itself, or
  const void* gates;             // [B, G, D]: the input's product, io, or fp32 unless gates_are_io
  const float* sums;             // [B, G, D]: the recurrent product, or null for 0
  bool gates_are_io;
  int piece;  // above 0: the kernel multiplies on tensor cores, and reads so many bytes at once
  const void *b_ih, *b_hh;         // [G, D] io, or null
  StateView initial[kMostStates];  // K
  void* next[kMostStates];         // [B, D] io each; null: not wanted. The first is h
  void* h;                         // [B, D] io: a second copy of h, or null
  void* saved;                     // [B, V, D] io, or null
  void* h_prev;                    // [B, D] io: h before the step, or null
};

// The bytes that can be read at once of a product's rows, of 16-bit elements: 16, 8, 4, or 0 for
// fewer.
inline int piece_of(const CellProduct& product) {
  const StateView& x = product.operand;
  if (product.weight == nullptr) return 16;
  if (!x.is_io || x.unit != 1) return 0;
  const auto addresses =
      reinterpret_cast<uintptr_t>(product.weight) | reinterpret_cast<uintptr_t>(x.data);
  for (const int bytes : {16, 8, 4}) {
    const int64_t elements = bytes / 2;
    if (addresses % bytes == 0 && product.depth % elements == 0 && x.row % elements == 0) {
      return bytes;
    }
  }
  return 0;
}

// What the kernel for the gradients of the weights reads and writes besides, of at most kMostSummed
// sequences. It does all that the other kernel does, but leaves CellBackward::zeros alone.
struct CellWeights {
  void *dw_ih, *dw_hh;  // [G, D, depth of the operand] io; null: the caller computes them
  StateView x, h;       // the operands: their units are next to each other; h null: dw_hh is 0
  int64_t width;        // of x
};
constexpr int64_t kMostSummed = 256;

struct CellBackward {
  int64_t B, D;
  StateView dh;                  // of the first copy of h
  StateView dlast[kMostStates];  // K
  const void* saved;             // [B, V, D] io
  void *dx, *dr;                 // [B, G, D] io, or null: not wanted; dr also where it equals dx
  float* dstate[kMostStates];    // K of [B, D], without the product of dr, or null
  void *db_ih, *db_hh;           // [G, D] io, or null
  float* partial;                // [cell_chunks(B), R, D]; not read if there is one chunk
  void* zeros;                   // filled with zeros: a gradient that nothing contributes to
  int64_t zero_bytes;
  CellWeights weights;
};

// Rows whose bias gradients one thread block adds up: up to here no second kernel is launched.
constexpr int64_t kCellChunk = 1024;
constexpr int64_t cell_chunks(int64_t B) { return (B + kCellChunk - 1) / kCellChunk; }

// `cell` is the index in AllCells. The backward sums db in an order that only depends on B.
void cell_forward(int cell, const CellForward&, Dtype, const Launch&);
void cell_backward(int cell, const CellBackward&, Dtype, const Launch&);

// Instantiated for every cell of torch.nn and every I/O type.
template <typename Cell, typename IO>
void forward_cell(const CellForward&, const Launch&);
template <typename Cell, typename IO>
void backward_cell(const CellBackward&, const Launch&);

}  // namespace flashcell::cuda
