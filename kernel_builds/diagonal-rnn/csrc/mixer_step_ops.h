// The operators of a decoding step. Channels and heads come in pairs. States are changed in place,
// so a state that is not contiguous is rejected. Included after the device's call.h.
#pragma once

#include "common/torch/op.h"
#include "params.h"

namespace flashcell {

// x [B,D] strided · weight [D,4] · bias [D] · window [B,3,D], changed -> y [B,D]
inline constexpr char kConvStepSchema[] =
    "conv_step_(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) window) -> Tensor";
// u [N,B,G,D/N] · a [3,D] · p [P-3,D] · bias [G,D] · h, c [B,D] in the state dtype, changed ·
// x, gate [B,D], gate strided · skip [D] -> y [B,D]
inline constexpr char kMixStepSchema[] =
    "_mix_step_(Tensor u, Tensor a, Tensor? p, Tensor? bias, Tensor(a!) h, Tensor(b!)? c, "
    "Tensor x, Tensor skip, Tensor gate, float bound) -> Tensor";

// A state, which is changed in place.
inline void* in_place(const Tensor& tensor, const char* name, const Shape& shape,
                      ScalarType dtype) {
  check_shape(tensor, name, shape), check_dtype(tensor, name, dtype);
  STD_TORCH_CHECK(tensor.is_contiguous() && uintptr_t(tensor.const_data_ptr()) % 8 == 0, name,
                  " must be contiguous and begin at 8 bytes");
  return tensor.mutable_data_ptr();
}

inline bool begins_at_pairs(const Tensor& tensor) {
  return uintptr_t(tensor.const_data_ptr()) % 8 == 0;
}

// Returns rows [B, D], which may be strided; copies them if they are not aligned to pairs of
// channels.
inline Tensor rows(const Tensor& tensor, const char* name, const Shape& shape, ScalarType dtype) {
  check_shape(tensor, name, shape), check_dtype(tensor, name, dtype);
  STD_TORCH_CHECK(shape[1] % 2 == 0, name, " must have an even width, got ", shape[1]);
  if (tensor.stride(1) == 1 && tensor.stride(0) % 2 == 0 && begins_at_pairs(tensor)) return tensor;
  const Tensor copy = torch::stable::contiguous(tensor);
  return begins_at_pairs(copy) ? copy : torch::stable::clone(copy);
}

inline Tensor conv_step(Tensor x, Tensor weight, OptionalTensor bias, Tensor window) {
  check_rank(x, "x", 2, "[B, D]");
  ConvStepParams p{};
  p.B = x.size(0), p.D = x.size(1);
  const Dtype dtype = io_dtype(x, "x");
  const ScalarType io = x.scalar_type();
  x = rows(x, "x", {p.B, p.D}, io);
  weight = operand(weight, "weight", {p.D, ConvParams::kTaps}, io);
  bias = operand(bias, "bias", {p.D}, io);
  p.window = in_place(window, "window", {p.B, ConvParams::kTaps - 1, p.D}, io);
  Tensor y = new_tensor(x, {p.B, p.D}, io);
  p.x = x.const_data_ptr(), p.x_row = x.stride(0);
  p.weight = weight.const_data_ptr(), p.bias = pointer(bias), p.y = y.mutable_data_ptr();
  run(p, dtype, x);
  return y;
}

template <typename Cell>
Tensor mix_step(Tensor u, Tensor a, OptionalTensor p_rows, OptionalTensor bias, Tensor h,
                OptionalTensor c, Tensor x, Tensor skip, Tensor gate, double bound) {
  check_rank(u, "u", 4, "[N, B, G, D / N]"), check_rank(x, "x", 2, "[B, D]");
  constexpr int64_t G = Cell::kGates, P = Cell::kWeights;
  const int64_t N = u.size(0);
  MixStepParams p{};
  p.B = x.size(0), p.D = x.size(1), p.J = u.size(3), p.bound = bound;
  const Dtype dtype = io_dtype(x, "x");
  const ScalarType io = x.scalar_type(), unrounded = state_dtype(x);
  STD_TORCH_CHECK(p.J % 2 == 0 && p.J * N == p.D, "u must have heads of an even width, ", p.D,
                  " channels together, got shape ", to_string(shape_of(u)));
  STD_TORCH_CHECK(bool(p_rows) == (P > 3), "p must be given to a cell that has peepholes alone");
  STD_TORCH_CHECK(bool(c) == (Cell::kStates > 1), "c must be given to a cell of two states alone");
  STD_TORCH_CHECK(!(bound < 0), "bound must not be negative, got ", bound);
  u = operand(u, "u", {N, p.B, G, p.J}, io), x = operand(x, "x", {p.B, p.D}, io);
  a = operand(a, "a", {3, p.D}, io), p_rows = operand(p_rows, "p", {P - 3, p.D}, io);
  bias = operand(bias, "bias", {G, p.D}, io), skip = operand(skip, "skip", {p.D}, io);
  gate = rows(gate, "gate", {p.B, p.D}, io);
  p.states[0] = in_place(h, "h", {p.B, p.D}, unrounded);
  p.states[1] = c ? in_place(*c, "c", {p.B, p.D}, unrounded) : nullptr;
  Tensor y = new_tensor(x, {p.B, p.D}, io);
  p.u = u.const_data_ptr(), p.x = x.const_data_ptr(), p.a = a.const_data_ptr();
  p.p = pointer(p_rows), p.bias = pointer(bias), p.skip = skip.const_data_ptr();
  p.gate = gate.const_data_ptr(), p.gate_row = gate.stride(0), p.y = y.mutable_data_ptr();
  run<Cell>(p, dtype, x);
  return y;
}

template <typename... Cells>
void define_mixer_step(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  ops.def(kConvStepSchema);
  (ops.def((std::string(Cells::kName) + kMixStepSchema).c_str()), ...);
}
template <typename... Cells>
void implement_mixer_step(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  ops.impl("conv_step_", FLASHCELL_OP(kConvStepSchema, conv_step));
  (ops.impl((std::string(Cells::kName) + "_mix_step_").c_str(),
            FLASHCELL_OP(kMixStepSchema, mix_step<Cells>)),
   ...);
}

}  // namespace flashcell
