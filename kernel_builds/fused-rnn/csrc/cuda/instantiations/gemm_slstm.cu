#include "../gemm/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(gemm, Slstm)
}  // namespace flashcell::cuda
