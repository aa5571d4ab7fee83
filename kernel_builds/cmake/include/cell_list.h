// A kernel's cells as a list of types.
#pragma once
#include <type_traits>

namespace flashcell {

template <typename... Cells>
struct CellList {
  static constexpr int kCount = sizeof...(Cells);
};

template <typename Cell, typename... Cells>
constexpr int cell_index(CellList<Cells...>) {
  int index = 0, found = -1;
  ((found = std::is_same_v<Cell, Cells> ? index : found, ++index), ...);
  return found;
}

}  // namespace flashcell
