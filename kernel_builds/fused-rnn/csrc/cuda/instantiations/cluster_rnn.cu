// Compiles the cluster engine for the cells rnn_tanh and rnn_relu.
#include "../cluster/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_16(cluster, RnnTanh)
FLASHCELL_INSTANTIATE_16(cluster, RnnRelu)
}  // namespace flashcell::cuda
