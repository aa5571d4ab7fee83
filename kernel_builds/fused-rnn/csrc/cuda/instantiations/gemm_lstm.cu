#include "../gemm/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(gemm, Lstm)
}  // namespace flashcell::cuda
