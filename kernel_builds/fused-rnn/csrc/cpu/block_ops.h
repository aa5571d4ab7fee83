// The CPU kernel's op for one decoding step of a whole residual block.
#pragma once
#include "call.h"
#include "common/torch/op.h"

namespace flashcell {

// x [B,H] · norms [H] · in_proj [G H,H] · weight [G,N,D,D] · bias [R,N,D] · state: K tensors
// [B,N,D] in the state dtype, changed in place · gate, up [I,H] · down [H,I] -> [B,H]. H = N D;
// every other tensor has the dtype of x. Or in_proj, gate, up and down are int8, and scales the
// factors of their rows, [G H], [I], [I], [H] fp32; or they are int4 (common/quantized.h), uint8 of
// half the width, and scales the factors of their groups, bf16 of a thirty-second of the width.
inline constexpr char kBlockStepSchema[] =
    "_block_step_(Tensor x, Tensor mixer_norm, float mixer_eps, Tensor in_proj, Tensor weight, "
    "Tensor? bias, Tensor(a!)[] state, Tensor mlp_norm, float mlp_eps, Tensor gate, Tensor up, "
    "Tensor down, Tensor[] scales) -> Tensor";

// Checks that the tensor can be used in place: a copy would cost what the op saves, and changing a
// copied state would have no effect.
inline const void* in_place(const Tensor& tensor, const char* name, const Shape& shape,
                            ScalarType dtype) {
  check_shape(tensor, name, shape), check_dtype(tensor, name, dtype);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  return tensor.const_data_ptr();
}

template <typename Cell>
Tensor block_step(Tensor x, Tensor mixer_norm, double mixer_eps, Tensor in_proj, Tensor weight,
                  OptionalTensor bias, std::vector<Tensor> state, Tensor mlp_norm, double mlp_eps,
                  Tensor gate, Tensor up, Tensor down, std::vector<Tensor> scales) {
  check_rank(x, "x", 2, "[B, H]"), check_rank(weight, "weight", 4, "[G, N, D, D]");
  check_rank(gate, "gate", 2, "[I, H]");
  constexpr int64_t G = Cell::kGates;
  BlockStepParams p{};
  const int64_t H = x.size(1);
  p.B = x.size(0), p.N = weight.size(1), p.D = weight.size(2), p.I = gate.size(0);
  STD_TORCH_CHECK(p.N * p.D == H, "weight must have heads of ", H, " units together, got shape ",
                  to_string(shape_of(weight)));
  const Dtype dtype = io_dtype(x, "x");
  const ScalarType io = x.scalar_type(), unrounded = state_dtype(x);
  const bool packed = !scales.empty() && in_proj.scalar_type() == ScalarType::Byte;
  const ScalarType linear = scales.empty() ? io : packed ? ScalarType::Byte : ScalarType::Char;
  p.format = scales.empty() ? Format::kPlain : packed ? Format::kInt4 : Format::kInt8;
  STD_TORCH_CHECK(!packed || (H % kInt4Group == 0 && p.I % kInt4Group == 0),
                  "x and gate must have widths that are multiples of ", kInt4Group, ", got ", H,
                  " and ", p.I);
  const auto width = [&](int64_t weights) { return packed ? weights / 2 : weights; };
  if (x.stride(1) != 1) x = dense(x);
  p.x = x.const_data_ptr(), p.x_stride = x.stride(0);
  p.mixer_norm = in_place(mixer_norm, "mixer_norm", {H}, io), p.mixer_eps = mixer_eps;
  p.in_proj = in_place(in_proj, "in_proj", {G * H, width(H)}, linear);
  p.weight = in_place(weight, "weight", {G, p.N, p.D, p.D}, io);
  if (bias) p.bias = in_place(*bias, "bias", {Cell::kBias, p.N, p.D}, io);
  STD_TORCH_CHECK(int64_t(state.size()) == Cell::kStates, "state must be ", Cell::kStates,
                  " tensors, got ", state.size());
  for (int64_t k = 0; k < Cell::kStates; ++k) {
    in_place(state[k], "state", {p.B, p.N, p.D}, unrounded);
    p.states[k] = state[k].mutable_data_ptr();
  }
  p.mlp_norm = in_place(mlp_norm, "mlp_norm", {H}, io), p.mlp_eps = mlp_eps;
  p.gate = in_place(gate, "gate", {p.I, width(H)}, linear);
  p.up = in_place(up, "up", {p.I, width(H)}, linear),
  p.down = in_place(down, "down", {H, width(p.I)}, linear);
  STD_TORCH_CHECK(scales.empty() || scales.size() == 4, "scales must be 4 tensors or none, got ",
                  scales.size());
  const int64_t rows[] = {G * H, p.I, p.I, H}, columns[] = {H, H, H, p.I};
  for (size_t s = 0; s < scales.size(); ++s) {
    const Shape shape = packed ? Shape{rows[s], columns[s] / kInt4Group} : Shape{rows[s]};
    p.scales[s] =
        in_place(scales[s], "scales", shape, packed ? ScalarType::BFloat16 : ScalarType::Float);
  }
  Tensor out = new_tensor(x, {p.B, H}, io);
  p.out = out.mutable_data_ptr();
  backend().block_step(AllCells::index_of<Cell>(), dtype, p, host());
  return out;
}

template <typename... Cells>
void define_block_step(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  (ops.def((std::string(Cells::kName) + kBlockStepSchema).c_str()), ...);
}
template <typename... Cells>
void implement_block_step(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  (ops.impl((std::string(Cells::kName) + "_block_step_").c_str(),
            FLASHCELL_OP(kBlockStepSchema, block_step<Cells>)),
   ...);
}

}  // namespace flashcell
