// Lists every cell that the extension builds. A new cell needs its #include and its name here.
#pragma once
#include "common/cells/list.h"
#include "flash_gru.h"
#include "flash_lstm.h"

namespace flashcell {

using AllCells = CellList<FlashGru, FlashLstm>;

}  // namespace flashcell
