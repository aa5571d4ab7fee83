// What the params of every kernel speak of: the dtype of x, and the list of sequences.
#pragma once
#include <cstdint>

namespace flashcell {

enum class Dtype { kFloat, kDouble, kHalf, kBFloat16 };

// One batch row, or one document of a packed row. The engine gets them longest first.
struct Sequence {
  int64_t index;     // s: row of the state tensors
  int64_t row;       // b * T + t of the first step: row of every [B, T, ...] tensor but x
  int64_t x_offset;  // the same step in x, in elements
  int64_t length;    // steps that run
  int64_t padding;   // rows after them, which only pass the state through
};

}  // namespace flashcell
