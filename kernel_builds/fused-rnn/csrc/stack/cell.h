// The op that runs a torch.nn cell in inference: that of forward.h for one step, without lists. The
// host limits the speed of a cell of few units, and takes several microseconds to pass lists of
// tensors.
#pragma once
#include "forward.h"
#if !defined(CUDA_KERNEL)
#include "cell_step.h"
#endif

namespace flashcell {

// x [B,I] · h, c [B,D], all or none of the states · w_ih [G D,I] · w_hh [G D,D] · b_ih, b_hh [G D],
// both or none -> the next h, c [B,D]. Dtypes: see forward.h.
inline constexpr char kCellSchema[] =
    "_cell_fwd(Tensor x, Tensor? h, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
    "bool tf32) -> Tensor";
inline constexpr char kTwoStateCellSchema[] =
    "_cell_fwd(Tensor x, Tensor? h, Tensor? c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, "
    "Tensor? b_hh, bool tf32) -> (Tensor h, Tensor c)";

// Whether a torch.nn cell is this one.
template <typename Cell>
inline constexpr bool kIsTorchCell = Cell::kStates <= 2;

template <typename Cell>
Tensors run_cell(Tensor x, Tensors states, Tensor w_ih, Tensor w_hh, OptionalTensor b_ih,
                 OptionalTensor b_hh, bool tf32) {
  check_rank(x, "x", 2, "[B, I]");
  check_rank(w_hh, "w_hh", 2, "[G D, D]");
  STD_TORCH_CHECK(b_ih.has_value() == b_hh.has_value(), "b_ih and b_hh must both be given or None");
  Tensors weights{w_ih, w_hh};
  if (b_ih) weights.insert(weights.end(), {*b_ih, *b_hh});
#if !defined(CUDA_KERNEL)
  CellStep<Cell> step;
  if (step.fits(x, states, weights)) return step.run(x, states, weights);
#endif
  auto [y, last, kept] = layers_fwd<Cell>(x, states, weights, {}, b_ih.has_value(), false, 1, true,
                                          w_hh.size(1), 0, tf32, false, 0);
  last.insert(last.begin(), y);
  return last;
}

template <typename Cell>
Tensor cell_fwd(Tensor x, OptionalTensor h, Tensor w_ih, Tensor w_hh, OptionalTensor b_ih,
                OptionalTensor b_hh, bool tf32) {
  return run_cell<Cell>(x, h ? Tensors{*h} : Tensors{}, w_ih, w_hh, b_ih, b_hh, tf32)[0];
}

template <typename Cell>
std::tuple<Tensor, Tensor> two_state_cell_fwd(Tensor x, OptionalTensor h, OptionalTensor c,
                                              Tensor w_ih, Tensor w_hh, OptionalTensor b_ih,
                                              OptionalTensor b_hh, bool tf32) {
  STD_TORCH_CHECK(h.has_value() == c.has_value(), "h and c must both be given or None");
  const Tensors states = h ? Tensors{*h, *c} : Tensors{};
  const Tensors next = run_cell<Cell>(x, states, w_ih, w_hh, b_ih, b_hh, tf32);
  return {next[0], next[1]};
}

template <typename... Cells>
void define_cells(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  const auto define = [&ops](auto cell) {
    using Cell = decltype(cell);
    if constexpr (kIsTorchCell<Cell>) {
      const char* schema = Cell::kStates == 1 ? kCellSchema : kTwoStateCellSchema;
      ops.def((std::string(Cell::kName) + schema).c_str());
    }
  };
  (define(Cells()), ...);
}

template <typename... Cells>
void implement_cells(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  const auto implement = [&ops](auto cell) {
    using Cell = decltype(cell);
    const std::string name = std::string(Cell::kName) + "_cell_fwd";
    if constexpr (kIsTorchCell<Cell> && Cell::kStates == 1) {
      ops.impl(name.c_str(), FLASHCELL_OP(kCellSchema, cell_fwd<Cell>));
    } else if constexpr (kIsTorchCell<Cell>) {
      ops.impl(name.c_str(), FLASHCELL_OP(kTwoStateCellSchema, two_state_cell_fwd<Cell>));
    }
  };
  (implement(Cells()), ...);
}

}  // namespace flashcell
