// Every cell the extension builds: a new one needs its header and its name here.
#pragma once
#include "common/cells/list.h"
#include "gru.h"
#include "lstm.h"
#include "rnn.h"
#include "slstm.h"

namespace flashcell {

using AllCells = CellList<Lstm, Gru, RnnTanh, RnnRelu, Slstm>;

}  // namespace flashcell
