#include "../launch/cell.cuh"

namespace flashcell::cuda {
template struct Engine<FlashLstm>;
}  // namespace flashcell::cuda
