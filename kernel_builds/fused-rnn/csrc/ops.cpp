// The torch operators: check, allocate, fill a params struct, run the engine.
// B batch, T time, N heads, D head width; G gates, K states, R bias rows, V saved values; S = B, or
// the documents of cu_seqlens. Every cell of cells/all.h gets <cell>_fwd and <cell>_bwd, and ops
// for whole layers and for torch.nn's cells (stack/).
#include "cells/all.h"
#include "common/torch/registration.h"
#if defined(CUDA_KERNEL)
#include "cuda/call.h"
#include "cuda/matmul.h"
#else
#include "cpu/block_ops.h"
#include "cpu/linear.h"
#endif
#include "common/torch/op.h"
#include "plan_op.h"
#include "stack/backward.h"
#include "stack/cell.h"
#include "stack/forward.h"

#include <limits>
#include <tuple>

namespace flashcell {

// x [B,T,G,N,D] strided · weight [G,N,D,D] · bias [R,N,D] in the state dtype or x's · state
// [K,S,N,D] in the state dtype · reset, hold [B,T] bool · lengths [B] · cu_seqlens [S+1]
// -> h [B,T,N,D] · last [K,S,N,D] · saved [B,T,V,N,D], h_prev [B,T,N,D] (both [0] unless `save`)
// grad_clip is for the autograd formula only: the forward does not read it. tf32 concerns fp32 on
// CUDA. clip_state bounds the state that a step adds up (cells/bound.h).
inline constexpr char kForwardSchema[] =
    "_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? reset, Tensor? hold, "
    "Tensor? lengths, Tensor? cu_seqlens, float? grad_clip, bool tf32, bool save, "
    "float? clip_state=None) -> (Tensor h, Tensor last, Tensor saved, Tensor h_prev)";

// dh [B,T,N,D] · dlast [K,S,N,D]
// -> dx [B,T,G,N,D] · dr [B,T,G,N,D] ([0] where it equals dx) · dbias [R,N,D] · dstate [K,S,N,D] ·
// dweight [G,N,D,D] ([0] unless asked for)
inline constexpr char kBackwardSchema[] =
    "_bwd(Tensor dh, Tensor? dlast, Tensor saved, Tensor h_prev, Tensor weight, Tensor? reset, "
    "Tensor? hold, Tensor? lengths, Tensor? cu_seqlens, float? grad_clip, bool tf32, "
    "bool wants_dweight, float? clip_state=None) -> (Tensor dx, Tensor dr, Tensor dbias, Tensor "
    "dstate, Tensor dweight)";

inline constexpr char kLinearForwardSchema[] =
    "linear_fwd(Tensor x, Tensor weight, Tensor? bias) -> Tensor";
inline constexpr char kLinearBackwardSchema[] =
    "linear_bwd(Tensor dy, Tensor x, Tensor weight, bool has_bias) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)";

inline constexpr char kTf32MatmulSchema[] = "tf32_matmul(Tensor a, Tensor b) -> Tensor";  // CUDA

// Returns the bound that the engine reads: 0 for none.
template <typename Cell>
double bound_of(std::optional<double> clip_state) {
  if (!clip_state) return 0;
  STD_TORCH_CHECK(kHasBound<Cell>, "clip_state must be None for ", Cell::kName, ", got ",
                  *clip_state);
  STD_TORCH_CHECK(*clip_state > 0, "clip_state must be more than 0, got ", *clip_state);
  return *clip_state;
}

template <typename Cell>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor x, Tensor weight, OptionalTensor bias,
                                                   OptionalTensor state, OptionalTensor reset,
                                                   OptionalTensor hold, OptionalTensor lengths,
                                                   OptionalTensor cu_seqlens,
                                                   std::optional<double> /*grad_clip*/, bool tf32,
                                                   bool save, std::optional<double> clip_state) {
  check_rank(x, "x", 5, "[B, T, G, N, D]");
  const int64_t B = x.size(0), T = x.size(1), N = x.size(3), D = x.size(4);
  check_shape(x, "x", {B, T, Cell::kGates, N, D});
  const Dtype dtype = io_dtype(x, "x");
  const ScalarType io = x.scalar_type(), unrounded = state_dtype(x);
  x = input(x);
  weight = operand(weight, "weight", {Cell::kGates, N, D, D}, io);
  const bool bias_is_io = bias && takes_bias_in(io, T) && bias->scalar_type() == io;
  if (bias && !bias_is_io && bias->scalar_type() == io) {
    bias = torch::stable::to(*bias, unrounded);
  }
  bias = operand(bias, "bias", {Cell::kBias, N, D}, bias_is_io ? io : unrounded);
  reset = operand(reset, "reset", {B, T}, ScalarType::Bool);
  hold = operand(hold, "hold", {B, T}, ScalarType::Bool);
  const auto list = sequences(x, B, T, lengths, cu_seqlens, x.stride(0), x.stride(1));
  const int64_t S = list.size();
  state = operand(state, "state", {Cell::kStates, S, N, D}, unrounded);

  Tensor h = new_tensor(x, {B, T, N, D}, io);
  Tensor last = new_tensor(x, {Cell::kStates, S, N, D}, unrounded);
  Tensor saved = new_tensor(x, save ? Shape{B, T, Cell::kSaved, N, D} : Shape{0}, saved_dtype(x));
  Tensor h_prev = new_tensor(x, save ? Shape{B, T, N, D} : Shape{0}, io);
  if (N * D > 0) {
    ForwardParams params{};
    params.S = S, params.N = N, params.D = D, params.T = T;
    params.sequences = list.data();
    params.reset = (const uint8_t*)pointer(reset), params.hold = (const uint8_t*)pointer(hold);
    params.weight = weight.const_data_ptr(), params.x = x.const_data_ptr();
    params.x_batch = x.stride(0), params.x_time = x.stride(1), params.x_gate = x.stride(2),
    params.x_head = x.stride(3);
    params.bias = pointer(bias), params.bias_is_io = bias_is_io, params.initial = pointer(state);
    params.h = h.mutable_data_ptr(), params.last = last.mutable_data_ptr();
    params.saved = save ? saved.mutable_data_ptr() : nullptr;
    params.h_prev = save ? h_prev.mutable_data_ptr() : nullptr;
    params.bound = bound_of<Cell>(clip_state);
    run<Cell>(params, dtype, tf32, x);
  }
  return {h, last, saved, h_prev};
}

template <typename Cell>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dh, OptionalTensor dlast, Tensor saved, Tensor h_prev, Tensor weight,
    OptionalTensor reset, OptionalTensor hold, OptionalTensor lengths, OptionalTensor cu_seqlens,
    std::optional<double> grad_clip, bool tf32, bool wants_dweight,
    std::optional<double> clip_state) {
  check_rank(dh, "dh", 4, "[B, T, N, D]");
  const int64_t B = dh.size(0), T = dh.size(1), N = dh.size(2), D = dh.size(3);
  const Dtype dtype = io_dtype(dh, "dh");
  const ScalarType io = dh.scalar_type(), unrounded = state_dtype(dh);
  dh = dense(dh);
  check_shape(h_prev, "h_prev", {B, T, N, D});
  saved = operand(saved, "saved", {B, T, Cell::kSaved, N, D}, saved_dtype(dh));
  weight = operand(weight, "weight", {Cell::kGates, N, D, D}, io);
  reset = operand(reset, "reset", {B, T}, ScalarType::Bool);
  hold = operand(hold, "hold", {B, T}, ScalarType::Bool);
  const auto list = sequences(dh, B, T, lengths, cu_seqlens, 0, 0);
  const int64_t S = list.size();
  dlast = operand(dlast, "dlast", {Cell::kStates, S, N, D}, unrounded);
  STD_TORCH_CHECK(!grad_clip || *grad_clip >= 0, "grad_clip must not be negative, got ",
                  grad_clip.value_or(0));
  STD_TORCH_CHECK(!clip_state || saved_dtype(dh) == unrounded,
                  "clip_state must be None where saved values have 16 bits, got ", *clip_state);

  Tensor dx = new_tensor(dh, {B, T, Cell::kGates, N, D}, io);
  Tensor dr = new_tensor(dh, Cell::kSplitGrad ? Shape{B, T, Cell::kGates, N, D} : Shape{0}, io);
  Tensor dbias = new_tensor(dh, {Cell::kBias, N, D}, unrounded);
  Tensor dstate = new_tensor(dh, {Cell::kStates, S, N, D}, unrounded);
  if (N * D > 0) {
    BackwardParams params{};
    params.S = S, params.N = N, params.D = D, params.T = T;
    params.sequences = list.data();
    params.reset = (const uint8_t*)pointer(reset), params.hold = (const uint8_t*)pointer(hold);
    params.weight = weight.const_data_ptr();
    params.dh = dh.const_data_ptr(), params.dlast = pointer(dlast);
    params.saved = saved.const_data_ptr();
    params.grad_clip = grad_clip.value_or(std::numeric_limits<double>::infinity());
    params.bound = bound_of<Cell>(clip_state);
    params.dx = dx.mutable_data_ptr();
    params.dr = Cell::kSplitGrad ? dr.mutable_data_ptr() : nullptr;
    params.dbias = dbias.mutable_data_ptr(), params.dstate = dstate.mutable_data_ptr();
    run<Cell>(params, dtype, tf32, dh);
  }
  Tensor dweight = wants_dweight ? recurrent_dweight(Cell::kSplitGrad ? dr : dx, h_prev, tf32)
                                 : new_tensor(dh, {0}, io);
  return {dx, dr, dbias, dstate, dweight};
}

template <typename... Cells>
void implement(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  ops.impl("explain_plan", FLASHCELL_OP(kExplainPlanSchema, explain_plan));
  ops.impl("plan_layers", FLASHCELL_OP(kPlanLayersSchema, plan_layers));
  (ops.impl((std::string(Cells::kName) + "_fwd").c_str(),
            FLASHCELL_OP(kForwardSchema, forward<Cells>)),
   ...);
  (ops.impl((std::string(Cells::kName) + "_bwd").c_str(),
            FLASHCELL_OP(kBackwardSchema, backward<Cells>)),
   ...);
  const auto implement_layers = [&ops](auto cell) {
    using Cell = decltype(cell);
    if constexpr (kIsTorchCell<Cell>) {
      const std::string name = Cell::kName;
      ops.impl((name + "_layers_fwd").c_str(),
               FLASHCELL_OP(kLayersForwardSchema, layers_fwd<Cell>));
      ops.impl((name + "_layers_bwd").c_str(),
               FLASHCELL_OP(kLayersBackwardSchema, layers_bwd<Cell>));
    }
  };
  (implement_layers(Cells()), ...);
  implement_cells(ops, CellList<Cells...>());
#if defined(CUDA_KERNEL)
  ops.impl("tf32_matmul", FLASHCELL_OP(kTf32MatmulSchema, tf32_matmul));
#else
  ops.impl("linear_fwd", FLASHCELL_OP(kLinearForwardSchema, linear_fwd));
  ops.impl("linear_bwd", FLASHCELL_OP(kLinearBackwardSchema, linear_bwd));
  implement_block_step(ops, CellList<Cells...>());
#endif
}

template <typename... Cells>
void define(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  (ops.def((std::string(Cells::kName) + kForwardSchema).c_str()), ...);
  (ops.def((std::string(Cells::kName) + kBackwardSchema).c_str()), ...);
  const auto define_layers = [&ops](const std::string& name, bool has_layers) {
    if (!has_layers) return;
    ops.def((name + kLayersForwardSchema).c_str());
    ops.def((name + kLayersBackwardSchema).c_str());
  };
  (define_layers(Cells::kName, kIsTorchCell<Cells>), ...);
  define_cells(ops, CellList<Cells...>());
}

}  // namespace flashcell

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  flashcell::define(ops, flashcell::AllCells());
  ops.def(flashcell::kExplainPlanSchema);
  ops.def(flashcell::kPlanLayersSchema);
  ops.def(flashcell::kLinearForwardSchema), ops.def(flashcell::kLinearBackwardSchema);
#if defined(CUDA_KERNEL)
  ops.def(flashcell::kTf32MatmulSchema);
#else
  flashcell::define_block_step(ops, flashcell::AllCells());
#endif
}

FLASHCELL_IMPLEMENT(flashcell::implement(ops, flashcell::AllCells()))

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
