// The operators of a decoded token. Channels and heads come in pairs; what is not contiguous here
// is refused, because a copy would be a launch. Included behind the call.h of the device.
#pragma once
#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "params.h"

namespace flashcell {

// x [B,D] strided · weight [D,4] · bias [D] · window [B,3,D], changed -> y [B,D]
constexpr const char* kConvStepSchema =
    "conv_step_(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) window) -> Tensor";
// u [N,B,G,D/N] · a [3,D] · p [P-3,D] · bias [G,D] · h, c [B,D] in the state dtype, changed ·
// x, gate [B,D], gate strided · skip [D] -> y [B,D]
constexpr const char* kMixStepSchema =
    "_mix_step_(Tensor u, Tensor a, Tensor? p, Tensor? bias, Tensor(a!) h, Tensor(b!)? c, "
    "Tensor x, Tensor skip, Tensor gate, float bound) -> Tensor";

// A tensor as a step reads it, where it lies.
inline const void* in_place(const Tensor& tensor, const char* name, const Shape& shape,
                            ScalarType dtype) {
  check_shape(tensor, name, shape), check_dtype(tensor, name, dtype);
  STD_TORCH_CHECK(tensor.is_contiguous() && uintptr_t(tensor.const_data_ptr()) % 8 == 0, name,
                  " must be contiguous and begin at 8 bytes");
  return tensor.const_data_ptr();
}
inline const void* in_place(const OptionalTensor& tensor, const char* name, const Shape& shape,
                            ScalarType dtype) {
  return tensor ? in_place(*tensor, name, shape, dtype) : nullptr;
}

// The same of rows [B, D], which may lie apart.
inline int64_t check_rows(const Tensor& tensor, const char* name, const Shape& shape,
                          ScalarType dtype) {
  check_shape(tensor, name, shape), check_dtype(tensor, name, dtype);
  STD_TORCH_CHECK(tensor.stride(1) == 1 && tensor.stride(0) % 2 == 0 && shape[1] % 2 == 0 &&
                      uintptr_t(tensor.const_data_ptr()) % 8 == 0,
                  name, " must have rows of an even width that begin at even elements");
  return tensor.stride(0);
}

inline Tensor conv_step(Tensor x, Tensor weight, OptionalTensor bias, Tensor window) {
  check_rank(x, "x", 2, "[B, D]");
  ConvStepParams p{};
  p.B = x.size(0), p.D = x.size(1);
  const ScalarType io = x.scalar_type();
  p.x_row = check_rows(x, "x", {p.B, p.D}, io), p.x = x.const_data_ptr();
  p.weight = in_place(weight, "weight", {p.D, ConvParams::kTaps}, io);
  p.bias = in_place(bias, "bias", {p.D}, io);
  in_place(window, "window", {p.B, ConvParams::kTaps - 1, p.D}, io);
  p.window = window.mutable_data_ptr();
  Tensor y = new_tensor(x, {p.B, p.D}, io);
  p.y = y.mutable_data_ptr();
  run(p, io_dtype(x, "x"), x);
  return y;
}

template <typename Cell>
Tensor mix_step(Tensor u, Tensor a, OptionalTensor p_rows, OptionalTensor bias, Tensor h,
                OptionalTensor c, Tensor x, Tensor skip, Tensor gate, double bound) {
  check_rank(u, "u", 4, "[N, B, G, D / N]"), check_rank(x, "x", 2, "[B, D]");
  constexpr int64_t G = Cell::kGates, P = Cell::kWeights;
  MixStepParams p{};
  p.B = x.size(0), p.D = x.size(1), p.J = u.size(3), p.bound = float(bound);
  const ScalarType io = x.scalar_type(), unrounded = state_dtype(x);
  STD_TORCH_CHECK(p.J % 2 == 0 && p.J * u.size(0) == p.D, "u must have heads of an even width, ",
                  p.D, " channels together, got shape ", to_string(shape_of(u)));
  STD_TORCH_CHECK(bool(p_rows) == (P > 3), "p must be given to a cell that has peepholes alone");
  STD_TORCH_CHECK(bool(c) == (Cell::kStates > 1), "c must be given to a cell of two states alone");
  p.u = in_place(u, "u", {p.D / p.J, p.B, G, p.J}, io), p.x = in_place(x, "x", {p.B, p.D}, io);
  p.a = in_place(a, "a", {3, p.D}, io), p.p = in_place(p_rows, "p", {P - 3, p.D}, io);
  p.bias = in_place(bias, "bias", {G, p.D}, io), p.skip = in_place(skip, "skip", {p.D}, io);
  p.gate_row = check_rows(gate, "gate", {p.B, p.D}, io), p.gate = gate.const_data_ptr();
  in_place(h, "h", {p.B, p.D}, unrounded), in_place(c, "c", {p.B, p.D}, unrounded);
  p.states[0] = h.mutable_data_ptr(), p.states[1] = c ? c->mutable_data_ptr() : nullptr;
  Tensor y = new_tensor(x, {p.B, p.D}, io);
  p.y = y.mutable_data_ptr();
  run<Cell>(p, io_dtype(x, "x"), x);
  return y;
}

template <typename... Cells>
void define_mixer_step(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  ops.def(kConvStepSchema);
  (ops.def((std::string(Cells::kName) + kMixStepSchema).c_str()), ...);
}
template <typename... Cells>
void implement_mixer_step(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  ops.impl("conv_step_", TORCH_BOX(&conv_step));
  (ops.impl((std::string(Cells::kName) + "_mix_step_").c_str(), TORCH_BOX(&mix_step<Cells>)), ...);
}

}  // namespace flashcell
