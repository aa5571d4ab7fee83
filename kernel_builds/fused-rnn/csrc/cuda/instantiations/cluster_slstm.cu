#include "../cluster/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_16(cluster, Slstm)
}  // namespace flashcell::cuda
