// Compiles the cluster engine for the cell lstm.
#include "../cluster/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_16(cluster, Lstm)
}  // namespace flashcell::cuda
