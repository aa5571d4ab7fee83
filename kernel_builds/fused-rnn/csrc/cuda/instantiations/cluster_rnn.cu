#include "../cluster/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_16(cluster, RnnTanh)
FLASHCELL_INSTANTIATE_16(cluster, RnnRelu)
}  // namespace flashcell::cuda
