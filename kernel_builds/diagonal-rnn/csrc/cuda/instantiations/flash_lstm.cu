// Compiles the CUDA engine for the cell flash_lstm.
#include "../launch/cell.cuh"

namespace flashcell::cuda {
template struct Engine<FlashLstm>;
}  // namespace flashcell::cuda
