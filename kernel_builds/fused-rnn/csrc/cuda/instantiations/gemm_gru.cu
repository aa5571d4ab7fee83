// Compiles the gemm engine for the cell gru.
#include "../gemm/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(gemm, Gru)
}  // namespace flashcell::cuda
