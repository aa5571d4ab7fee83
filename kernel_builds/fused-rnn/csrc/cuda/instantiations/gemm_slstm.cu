// Compiles the gemm engine for the cell slstm.
#include "../gemm/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(gemm, Slstm)
}  // namespace flashcell::cuda
