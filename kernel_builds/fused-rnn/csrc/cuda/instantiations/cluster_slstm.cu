#include "cluster.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_16(cluster, Slstm)
}  // namespace flashcell::cuda
