// Defines CellList, which names a kernel's cells as a list of types.
#pragma once
#include <type_traits>

namespace flashcell {

template <typename... Cells>
struct CellList {
  static constexpr int kCount = sizeof...(Cells);

  // Returns the index of a cell in the list. Sources that are compiled separately identify a cell
  // by this index.
  template <typename Cell>
  static constexpr int index_of() {
    int index = 0, found = -1;
    ((found = std::is_same_v<Cell, Cells> ? index : found, ++index), ...);
    return found;
  }
};

}  // namespace flashcell
