// What the step engine keeps in memory from launch to launch, besides outputs of the op.
#pragma once
#include "../../params.h"

namespace flashcell::cuda {

// Forward, the operand of the product, [2, S, N, D] io: the state h, rounded, by the parity of the
// step. A single step reads it from `initial`; backward it is dr, an output.
inline int64_t step_scratch(const ForwardParams& p, int io_bytes) {
  return p.T > 1 ? 2 * p.S * p.N * p.D * io_bytes : 0;
}

}  // namespace flashcell::cuda
