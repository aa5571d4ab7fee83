// Compiles the wide engine for the cells rnn_tanh and rnn_relu.
#include "../wide/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_32(wide, RnnTanh)
FLASHCELL_INSTANTIATE_32(wide, RnnRelu)
}  // namespace flashcell::cuda
