// Compiles the gemm engine for the cell lstm.
#include "../gemm/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(gemm, Lstm)
}  // namespace flashcell::cuda
