// Compiles the fma engine for the cells rnn_tanh and rnn_relu.
#include "../fma/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_32(fma, RnnTanh)
FLASHCELL_INSTANTIATE_32(fma, RnnRelu)
}  // namespace flashcell::cuda
