// The ops that run a torch.nn cell: those of forward.h and backward.h for one step, without lists.
// The host limits the speed of a cell of few units, and takes several microseconds to pass lists of
// tensors.
#pragma once
#include "backward.h"
#include "forward.h"
#if !defined(CUDA_KERNEL)
#include "cell_step.h"
#endif

namespace flashcell {

// x [B,I] · h, c [B,D], all or none of the states; a cell of one state has no c · w_ih [G D,I] ·
// w_hh [G D,D] · b_ih, b_hh [G D], both or none. All have the dtype of x, but that states may have
// the state dtype.
//
// _cell_fwd: returns the next h, c [B,D].
//
// _cell_train_fwd: returns these and what the backward reads: saved [B,V,1,D], and h_prev [B,1,D],
// or [0,1,D] without states.
//
// _cell_bwd: takes the gradients dh, dc [B,D] of the next states, and returns those of x ([0] if
// not wanted), of h and c in the state dtype ([0] if not wanted), and of w_ih, w_hh, b_ih, b_hh
// ([0] if there are none).
template <int64_t kStates>
struct CellSchemas;
template <>
struct CellSchemas<1> {
  static constexpr char kForward[] =
      "_cell_fwd(Tensor x, Tensor? h, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
      "bool tf32) -> Tensor";
  static constexpr char kTrainForward[] =
      "_cell_train_fwd(Tensor x, Tensor? h, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
      "bool tf32) -> (Tensor h, Tensor saved, Tensor h_prev)";
  static constexpr char kBackward[] =
      "_cell_bwd(Tensor? dh, Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
      "Tensor saved, Tensor h_prev, bool tf32, bool wants_dx, bool wants_dstate) -> (Tensor dx, "
      "Tensor dh, Tensor dw_ih, Tensor dw_hh, Tensor db_ih, Tensor db_hh)";
};
template <>
struct CellSchemas<2> {
  static constexpr char kForward[] =
      "_cell_fwd(Tensor x, Tensor? h, Tensor? c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, "
      "Tensor? b_hh, bool tf32) -> (Tensor h, Tensor c)";
  static constexpr char kTrainForward[] =
      "_cell_train_fwd(Tensor x, Tensor? h, Tensor? c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, "
      "Tensor? b_hh, bool tf32) -> (Tensor h, Tensor c, Tensor saved, Tensor h_prev)";
  static constexpr char kBackward[] =
      "_cell_bwd(Tensor? dh, Tensor? dc, Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, "
      "Tensor? b_hh, Tensor saved, Tensor h_prev, bool tf32, bool wants_dx, bool wants_dstate) -> "
      "(Tensor dx, Tensor dh, Tensor dc, Tensor dw_ih, Tensor dw_hh, Tensor db_ih, Tensor db_hh)";
};

// Checks the shape and the dtype.
inline void expect(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape,
                   ScalarType type) {
  if (!has_shape(tensor, shape)) check_shape(tensor, name, shape);
  if (tensor.scalar_type() != type) check_dtype(tensor, name, type);
}

// Checks the weights and returns them as a list. states_of_cell does the same with states.
template <typename Cell>
Tensors weights_of_cell(const Tensor& x, const Tensor& w_ih, const Tensor& w_hh,
                        const OptionalTensor& b_ih, const OptionalTensor& b_hh) {
  check_rank(x, "x", 2, "[B, I]");
  check_rank(w_hh, "w_hh", 2, "[G D, D]");
  STD_TORCH_CHECK(b_ih.has_value() == b_hh.has_value(), "b_ih and b_hh must both be given or None");
  const int64_t D = w_hh.size(1), rows = Cell::kGates * D;
  const ScalarType io = x.scalar_type();
  expect(w_ih, "w_ih", {rows, x.size(1)}, io), expect(w_hh, "w_hh", {rows, D}, io);
  if (!b_ih) return {w_ih, w_hh};
  expect(*b_ih, "b_ih", {rows}, io), expect(*b_hh, "b_hh", {rows}, io);
  return {w_ih, w_hh, *b_ih, *b_hh};
}

inline void expect_state(const Tensor& x, const Tensor& state, const char* name, int64_t D) {
  const ScalarType type = state.scalar_type();
  expect(state, name, {x.size(0), D}, type == state_dtype(x) ? type : x.scalar_type());
}
inline Tensors states_of_cell(const Tensor& x, const Tensor& w_hh, const OptionalTensor& h) {
  if (!h) return {};
  expect_state(x, *h, "h", w_hh.size(1));
  return {*h};
}
inline Tensors states_of_cell(const Tensor& x, const Tensor& w_hh, const OptionalTensor& h,
                              const OptionalTensor& c) {
  STD_TORCH_CHECK(h.has_value() == c.has_value(), "h and c must both be given or None");
  if (!h) return {};
  expect_state(x, *h, "h", w_hh.size(1)), expect_state(x, *c, "c", w_hh.size(1));
  return {*h, *c};
}

// Returns the next states and, if `save`, the two tensors that the backward reads.
template <typename Cell>
Tensors run_cell(const Tensor& x, const Tensors& states, const Tensors& weights, bool tf32,
                 bool save) {
#if !defined(CUDA_KERNEL)
  CellStep<Cell> step;
  if (step.fits(x, weights) && step.are_dense(states)) {
    Tensors kept, next = step.forward(x, states, weights, save ? &kept : nullptr);
    next.insert(next.end(), kept.begin(), kept.end());
    return next;
  }
#endif
  auto [y, last, kept] = layers_fwd<Cell>(x, states, weights, {}, weights.size() > 2, false, 1,
                                          true, weights[1].size(1), 0, tf32, save, 0);
  Tensors found{y};
  found.insert(found.end(), last.begin(), last.end());
  found.insert(found.end(), kept.begin(), kept.end());
  return found;
}

// Returns the gradients of x, of the states, and of four weights.
template <typename Cell>
Tensors differentiate_cell(const std::vector<OptionalTensor>& dnext, const Tensor& x,
                           const Tensors& weights, const Tensors& kept, bool tf32, bool wants_dx,
                           bool wants_dstate) {
  const int64_t B = x.size(0), D = weights[1].size(1);
  for (size_t k = 0; k < dnext.size(); ++k) {
    if (dnext[k]) expect(*dnext[k], k == 0 ? "dh" : "dc", {B, D}, x.scalar_type());
  }
  expect(kept[0], "saved", {B, Cell::kSaved, 1, D}, saved_dtype(x));
  const int64_t rows = kept[1].dim() > 0 && kept[1].size(0) == 0 ? 0 : B;  // 0 without states
  expect(kept[1], "h_prev", {rows, 1, D}, x.scalar_type());
#if !defined(CUDA_KERNEL)
  CellStep<Cell> step;
  if (step.fits(x, weights) && step.are_dense(kept) && step.are_dense(dnext)) {
    return step.backward(dnext, x, weights, kept, wants_dx, wants_dstate);
  }
#endif
  Tensors dlast;
  for (size_t k = 1; k < dnext.size(); ++k) {
    if (dnext[k]) dlast.push_back(*dnext[k]);
  }
  auto [dx, dstate, dweights] =
      layers_bwd<Cell>(dnext[0], dlast, x, weights, kept, {}, weights.size() > 2, false, 1, true,
                       weights[1].size(1), 0, tf32, wants_dx, wants_dstate, 0);
  Tensors found{dx};
  const auto add = [&](const Tensors& part, size_t count) {
    found.insert(found.end(), part.begin(), part.end());
    for (size_t i = part.size(); i < count; ++i) {
      found.push_back(new_tensor(x, {0}, x.scalar_type()));
    }
  };
  add(dstate, Cell::kStates), add(dweights, 4);
  return found;
}

// The ops of a cell with so many states.
template <typename Cell, int64_t kStates = Cell::kStates>
struct CellOps;

template <typename Cell>
struct CellOps<Cell, 1> {
  static Tensor forward(Tensor x, OptionalTensor h, Tensor w_ih, Tensor w_hh, OptionalTensor b_ih,
                        OptionalTensor b_hh, bool tf32) {
    const Tensors weights = weights_of_cell<Cell>(x, w_ih, w_hh, b_ih, b_hh);
    return run_cell<Cell>(x, states_of_cell(x, w_hh, h), weights, tf32, false)[0];
  }
  static std::tuple<Tensor, Tensor, Tensor> train_forward(Tensor x, OptionalTensor h, Tensor w_ih,
                                                          Tensor w_hh, OptionalTensor b_ih,
                                                          OptionalTensor b_hh, bool tf32) {
    const Tensors weights = weights_of_cell<Cell>(x, w_ih, w_hh, b_ih, b_hh);
    const Tensors t = run_cell<Cell>(x, states_of_cell(x, w_hh, h), weights, tf32, true);
    return {t[0], t[1], t[2]};
  }
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
      OptionalTensor dh, Tensor x, Tensor w_ih, Tensor w_hh, OptionalTensor b_ih,
      OptionalTensor b_hh, Tensor saved, Tensor h_prev, bool tf32, bool wants_dx,
      bool wants_dstate) {
    const Tensors weights = weights_of_cell<Cell>(x, w_ih, w_hh, b_ih, b_hh);
    const Tensors t =
        differentiate_cell<Cell>({dh}, x, weights, {saved, h_prev}, tf32, wants_dx, wants_dstate);
    return {t[0], t[1], t[2], t[3], t[4], t[5]};
  }
};

template <typename Cell>
struct CellOps<Cell, 2> {
  static std::tuple<Tensor, Tensor> forward(Tensor x, OptionalTensor h, OptionalTensor c,
                                            Tensor w_ih, Tensor w_hh, OptionalTensor b_ih,
                                            OptionalTensor b_hh, bool tf32) {
    const Tensors weights = weights_of_cell<Cell>(x, w_ih, w_hh, b_ih, b_hh);
    const Tensors t = run_cell<Cell>(x, states_of_cell(x, w_hh, h, c), weights, tf32, false);
    return {t[0], t[1]};
  }
  static std::tuple<Tensor, Tensor, Tensor, Tensor> train_forward(Tensor x, OptionalTensor h,
                                                                  OptionalTensor c, Tensor w_ih,
                                                                  Tensor w_hh, OptionalTensor b_ih,
                                                                  OptionalTensor b_hh, bool tf32) {
    const Tensors weights = weights_of_cell<Cell>(x, w_ih, w_hh, b_ih, b_hh);
    const Tensors t = run_cell<Cell>(x, states_of_cell(x, w_hh, h, c), weights, tf32, true);
    return {t[0], t[1], t[2], t[3]};
  }
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
      OptionalTensor dh, OptionalTensor dc, Tensor x, Tensor w_ih, Tensor w_hh, OptionalTensor b_ih,
      OptionalTensor b_hh, Tensor saved, Tensor h_prev, bool tf32, bool wants_dx,
      bool wants_dstate) {
    const Tensors weights = weights_of_cell<Cell>(x, w_ih, w_hh, b_ih, b_hh);
    const Tensors t = differentiate_cell<Cell>({dh, dc}, x, weights, {saved, h_prev}, tf32,
                                               wants_dx, wants_dstate);
    return {t[0], t[1], t[2], t[3], t[4], t[5], t[6]};
  }
};

template <typename... Cells>
void define_cells(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  const auto define = [&ops](auto cell) {
    using Cell = decltype(cell);
    if constexpr (kIsTorchCell<Cell>) {
      using Schemas = CellSchemas<Cell::kStates>;
      for (const char* schema : {Schemas::kForward, Schemas::kTrainForward, Schemas::kBackward}) {
        ops.def((std::string(Cell::kName) + schema).c_str());
      }
    }
  };
  (define(Cells()), ...);
}

template <typename... Cells>
void implement_cells(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  const auto implement = [&ops](auto cell) {
    using Cell = decltype(cell);
    if constexpr (kIsTorchCell<Cell>) {
      using Schemas = CellSchemas<Cell::kStates>;
      const std::string name = Cell::kName;
      ops.impl((name + "_cell_fwd").c_str(),
               FLASHCELL_OP(Schemas::kForward, CellOps<Cell>::forward));
      ops.impl((name + "_cell_train_fwd").c_str(),
               FLASHCELL_OP(Schemas::kTrainForward, CellOps<Cell>::train_forward));
      ops.impl((name + "_cell_bwd").c_str(),
               FLASHCELL_OP(Schemas::kBackward, CellOps<Cell>::backward));
    }
  };
  (implement(Cells()), ...);
}

}  // namespace flashcell
