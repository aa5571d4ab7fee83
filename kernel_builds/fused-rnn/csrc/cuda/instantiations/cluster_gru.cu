// Compiles the cluster engine for the cell gru.
#include "../cluster/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_16(cluster, Gru)
}  // namespace flashcell::cuda
