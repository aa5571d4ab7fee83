// Compiles the batch engine for the cells rnn_tanh and rnn_relu.
#include "../batch/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_FORWARD(batch, RnnTanh)
FLASHCELL_INSTANTIATE_FORWARD(batch, RnnRelu)
}  // namespace flashcell::cuda
