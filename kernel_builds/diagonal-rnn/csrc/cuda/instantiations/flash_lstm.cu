#include "launch_cell.cuh"

namespace flashcell::cuda {
template struct Engine<FlashLstm>;
}  // namespace flashcell::cuda
