#include "../launch/cell.cuh"

namespace flashcell::cuda {
template struct Engine<FlashGru>;
}  // namespace flashcell::cuda
