// Lists every cell that the extension builds. A new cell needs its #include and its name here.
#pragma once
#include "common/cells/list.h"
#include "gru.h"
#include "lstm.h"
#include "rnn.h"
#include "slstm.h"

namespace flashcell {

using AllCells = CellList<Lstm, Gru, RnnTanh, RnnRelu, Slstm>;

// Whether torch.nn has the cell, whose modules the ops of csrc/stack run: it has one state or two.
template <typename Cell>
inline constexpr bool kIsTorchCell = Cell::kStates <= 2;

}  // namespace flashcell
