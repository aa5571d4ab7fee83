// Every cell the extension builds: a new one needs its header and its name here.
#pragma once
#include "common/cells/list.h"
#include "flash_gru.h"
#include "flash_lstm.h"

namespace flashcell {

using AllCells = CellList<FlashGru, FlashLstm>;

}  // namespace flashcell
