// Compiles the cluster engine for the cell slstm.
#include "../cluster/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_16(cluster, Slstm)
}  // namespace flashcell::cuda
