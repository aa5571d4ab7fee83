// Compiles the gemm engine for the cells rnn_tanh and rnn_relu.
#include "../gemm/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(gemm, RnnTanh)
FLASHCELL_INSTANTIATE(gemm, RnnRelu)
}  // namespace flashcell::cuda
