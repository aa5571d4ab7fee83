// The dtype of x and the list of sequences, which the params of every kernel use.
#pragma once
#include <cstdint>

namespace flashcell {

enum class Dtype { kFloat, kDouble, kHalf, kBFloat16 };

// One batch row, or one document of a packed row. Engines receive sequences longest first.
struct Sequence {
  int64_t index;     // row in the state tensors
  int64_t row;       // b * T + t of the first step: row in every [B, T, ...] tensor except x
  int64_t x_offset;  // offset of the first step in x, in elements
  int64_t length;    // number of steps that run
  int64_t padding;   // number of steps after them, which only pass the state on
};

}  // namespace flashcell
