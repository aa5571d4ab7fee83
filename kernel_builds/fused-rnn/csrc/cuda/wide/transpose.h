#pragma once
#include "../engine.h"

namespace flashcell::cuda::wide {

// to[head, unit, gate, j] = the weight [gate, head, j, unit] of the heads that run, of which the
// backward pass streams a part.
void transpose_weight(const BackwardParams& p, int gates, float* to, cudaStream_t stream);

}  // namespace flashcell::cuda::wide
