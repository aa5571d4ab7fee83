// Scratch memory that the step engine keeps from launch to launch, besides the op's outputs.
#pragma once
#include "../../params.h"

namespace flashcell::cuda {

// In the forward pass it is the operand of the product, [2, S, N, D] io: h rounded, double-buffered
// by the parity of the step. A single step reads `initial` instead. The backward pass needs none:
// its operand dr is an output.
inline int64_t step_scratch(const ForwardParams& p, int io_bytes) {
  return p.T > 1 ? 2 * p.S * p.N * p.D * io_bytes : 0;
}

}  // namespace flashcell::cuda
