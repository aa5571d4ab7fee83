// Whether a step of a cell reads the h before it, apart from the product. Where it does not, the
// engines need no h in fp32 between steps.
#pragma once

namespace flashcell {

template <typename Cell>
constexpr bool kReadsH = [] {
  if constexpr (requires { Cell::kReadsH; }) {
    return Cell::kReadsH;
  } else {
    return true;
  }
}();

}  // namespace flashcell
