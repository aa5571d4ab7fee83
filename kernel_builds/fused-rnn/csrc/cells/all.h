// Every cell the extension builds: a new one needs its header and its name here.
#pragma once
#include "gru.h"
#include "lstm.h"
#include "rnn.h"
#include "slstm.h"

namespace flashcell {

template <typename... Cells>
struct CellList {
  static constexpr int kCount = sizeof...(Cells);
};

using AllCells = CellList<Lstm, Gru, RnnTanh, RnnRelu, Slstm>;

}  // namespace flashcell
