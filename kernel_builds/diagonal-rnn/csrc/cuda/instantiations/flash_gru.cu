// Compiles the CUDA engine for the cell flash_gru.
#include "../launch/cell.cuh"

namespace flashcell::cuda {
template struct Engine<FlashGru>;
}  // namespace flashcell::cuda
