// The torch operators: check, allocate, fill a params struct, run the engine.
// B batch, T time, H heads, K width of a key, V of a value; S = B, or the documents of cu_seqlens.
#include "common/torch/registration.h"
#include "params.h"
#include "schemas.h"
#if defined(CUDA_KERNEL)
#include "cuda/call.h"
#else
#include "cpu/call.h"
#endif
#include "common/torch/op.h"
#include "inputs.h"
#include "linear_ops.h"

#include <tuple>

namespace flashcell {

inline void check_kept(int64_t kept, [[maybe_unused]] bool has_q) {
#if defined(CUDA_KERNEL)
  STD_TORCH_CHECK(kept >= 0, "kept must not be negative, got ", kept);
  STD_TORCH_CHECK(kept == 0 || has_q, "kept must be 0 where there is no q, got ", kept);
#else
  STD_TORCH_CHECK(kept == 0, "kept must be 0 on the CPU, got ", kept);
#endif
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    OptionalTensor q, Tensor k, Tensor v, Tensor i, Tensor f, OptionalTensor C, OptionalTensor n,
    OptionalTensor m, OptionalTensor reset, OptionalTensor hold, OptionalTensor lengths,
    OptionalTensor cu_seqlens, bool exponential, bool normalized, double eps, bool normalizer_grad,
    int64_t chunk_size, int64_t kept) {
  Inputs in(q, k, v, i, f, true, {exponential, normalized, normalizer_grad, eps});
  in.take_masks(reset, hold, lengths, cu_seqlens);
  in.take_state(C, n, m);
  Tensor h = new_tensor(k, q ? Shape{in.B, in.T, in.H, in.V} : Shape{0}, in.io);
  Tensor last_C = in.new_C(), last_n = in.new_n(), last_m = in.new_m();
  Tensor total = in.state(in.total_shape(), true);
  ForwardParams params{};
  in.fill_sequence(params, chunk_size);
  params.h = h.mutable_data_ptr(), params.total = writable(total, normalized && q.has_value());
  params.last_C = last_C.mutable_data_ptr(), params.last_n = writable(last_n, normalized);
  params.last_m = writable(last_m, exponential);
  check_kept(kept, q.has_value());
  Tensor kept_C = new_tensor(k, kept ? Shape{in.H, kept, in.K, in.V} : Shape{0}, in.io);
  Tensor kept_n = in.state({in.H, kept, in.K}, kept && normalized);
  params.kept = kept, params.kept_C = writable(kept_C, kept);
  params.kept_n = writable(kept_n, kept && normalized);
  run(params, in.dtype, k);
  return {h, last_C, last_n, last_m, total, kept_C, kept_n};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    OptionalTensor dh, OptionalTensor dC, OptionalTensor dn, Tensor last_C, Tensor last_n,
    OptionalTensor h, Tensor total, OptionalTensor kept_C, OptionalTensor kept_n, OptionalTensor q,
    Tensor k, Tensor v, Tensor i, Tensor f, OptionalTensor C, OptionalTensor n, OptionalTensor m,
    OptionalTensor reset, OptionalTensor hold, OptionalTensor lengths, OptionalTensor cu_seqlens,
    bool exponential, bool normalized, double eps, bool normalizer_grad, int64_t chunk_size) {
  Inputs in(q, k, v, i, f, true, {exponential, normalized, normalizer_grad, eps});
  in.take_masks(reset, hold, lengths, cu_seqlens);
  in.take_state(C, n, m);
  const auto [B, T, H, K, V, S] = std::tuple(in.B, in.T, in.H, in.K, in.V, in.S);
  dh = operand(dh, "dh", {B, T, H, V}, in.io);
  if (dh) dh = without_held(*dh, in.hold);
  dC = operand(dC, "dC", {S, H, K, V}, in.unrounded);
  dn = normalized ? operand(dn, "dn", {S, H, K}, in.unrounded) : std::nullopt;
  last_C = operand(last_C, "last_C", {S, H, K, V}, in.unrounded);
  last_n = operand(last_n, "last_n", normalized ? Shape{S, H, K} : Shape{0}, in.unrounded);
  h = operand(h, "h", {B, T, H, V}, in.io);
  total = operand(total, "total", in.total_shape(), in.unrounded);
  STD_TORCH_CHECK(h || !(dh && normalized && normalizer_grad),
                  "h must be given where the gradient goes through the divisor");
  if (kept_C) check_rank(*kept_C, "kept_C", 4, "[H, kept, K, V]");
  const int64_t kept = kept_C ? kept_C->size(1) : 0;
  check_kept(kept, q.has_value());
  kept_C = operand(kept_C, "kept_C", {H, kept, K, V}, in.io);
  kept_n = operand(kept_n, "kept_n", {H, kept, K}, in.unrounded);
  STD_TORCH_CHECK(kept_n.has_value() == (kept && normalized),
                  "kept_n must be given where kept_C is, of a cell that has n, and nowhere else");
  Tensor dq = new_tensor(k, q ? Shape{B, T, H, K} : Shape{0}, in.io);
  Tensor dk = new_tensor(k, {B, T, H, K}, in.io), dv = new_tensor(k, {B, T, H, V}, in.io);
  Tensor di = in.state({B, T, H}, true), df = in.state({B, T, H}, true);
  Tensor first_C = in.new_C(), first_n = in.new_n();
  BackwardParams params{};
  in.fill_sequence(params, chunk_size);
  params.dh = q ? pointer(dh) : nullptr, params.dlast_C = pointer(dC), params.dlast_n = pointer(dn);
  params.last_C = last_C.const_data_ptr();
  params.last_n = normalized ? last_n.const_data_ptr() : nullptr;
  params.kept = kept, params.kept_C = pointer(kept_C), params.kept_n = pointer(kept_n);
  params.h = pointer(h), params.total = normalized ? total.const_data_ptr() : nullptr;
  params.dq = writable(dq, q.has_value());
  params.dk = dk.mutable_data_ptr(), params.dv = dv.mutable_data_ptr();
  params.di = di.mutable_data_ptr(), params.df = df.mutable_data_ptr();
  params.dC = first_C.mutable_data_ptr(), params.dn = writable(first_n, normalized);
  run(params, in.dtype, k);
  return {dq, dk, dv, di, df, first_C, first_n};
}

// Returns h in the layout that the epilogue reads.
inline Tensor check_h(const Tensor& h) {
  check_rank(h, "h", 4, "[B, T, H, V]");
  check_width(h, "h");
  return dense(h);
}

Tensor epilogue(Tensor given_h, OptionalTensor out_gate, OptionalTensor norm_weight, bool norm,
                bool centered, double eps) {
  const Tensor h = check_h(given_h);
  const Dtype dtype = io_dtype(h, "h");
  const EpilogueInputs in(shape_of(h), h.scalar_type(), state_dtype(h), out_gate, norm_weight, norm,
                          centered, eps);
  Tensor y = new_tensor(h, shape_of(h), h.scalar_type());
  EpilogueParams params{};
  in.fill(params, h);
  params.y = y.mutable_data_ptr();
  run(params, dtype, h);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> epilogue_backward(Tensor given_dy, Tensor given_h,
                                                     OptionalTensor out_gate,
                                                     OptionalTensor norm_weight, bool norm,
                                                     bool centered, double eps) {
  const Tensor h = check_h(given_h);
  const Dtype dtype = io_dtype(h, "h");
  const Shape shape = shape_of(h);
  const ScalarType io = h.scalar_type();
  const EpilogueInputs in(shape, io, state_dtype(h), out_gate, norm_weight, norm, centered, eps);
  const Tensor dy = operand(given_dy, "dy", shape, io);
  Tensor dh = new_tensor(h, shape, io);
  Tensor dgate = new_tensor(h, in.gate ? shape : Shape{0}, io);
  Tensor dweight =
      new_tensor(h, in.weight ? Shape{h.size(2), h.size(3)} : Shape{0}, state_dtype(h));
  EpilogueBackwardParams params{};
  in.fill(params, h);
  params.dy = dy.const_data_ptr(), params.dh = dh.mutable_data_ptr();
  params.dout_gate = writable(dgate, in.gate.has_value());
  params.dweight = writable(dweight, in.weight.has_value());
  run(params, dtype, h);
  return {dh, dgate, dweight};
}

inline Tensor run_step(Inputs& in, const EpilogueInputs& epilogue, Tensor& next_C, void* next_n,
                       void* next_m, const RingParams& ring = {}) {
  Tensor h = new_tensor(in.k, in.q ? Shape{in.B, in.H, in.V} : Shape{0}, in.io);
  StepParams params{};
  in.fill(params);
  params.B = in.B, params.epilogue = epilogue.params, params.ring = ring;
  params.next_C = next_C.mutable_data_ptr(), params.next_n = next_n, params.next_m = next_m;
  params.h = h.mutable_data_ptr();
  run(params, in.dtype, in.k);
  return h;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> step(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f,
                                                OptionalTensor C, OptionalTensor n,
                                                OptionalTensor m, OptionalTensor out_gate,
                                                OptionalTensor norm_weight, bool exponential,
                                                bool normalized, double eps, bool norm,
                                                bool centered, double norm_eps) {
  Inputs in(q, k, v, i, f, false, {exponential, normalized, true, eps});
  in.take_state(C, n, m);
  const EpilogueInputs epilogue(shape_of(v), in.io, in.unrounded, out_gate, norm_weight, norm,
                                centered, norm_eps);
  Tensor next_C = in.new_C(), next_n = in.new_n(), next_m = in.new_m();
  Tensor h =
      run_step(in, epilogue, next_C, writable(next_n, normalized), writable(next_m, exponential));
  return {h, next_C, next_n, next_m};
}

inline void check_written_state(const Inputs& in, const Tensor& C, const OptionalTensor& n,
                                const OptionalTensor& m) {
  STD_TORCH_CHECK(n.has_value() == in.cell.normalized && m.has_value() == in.cell.exponential,
                  "n and m must be given where the cell has them, and only there");
  for (const Tensor* state : {&C, n ? &*n : nullptr, m ? &*m : nullptr}) {
    STD_TORCH_CHECK(state == nullptr || state->is_contiguous(),
                    "C, n and m must be contiguous to be written in place");
  }
}

Tensor step_in_place(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor C, OptionalTensor n,
                     OptionalTensor m, OptionalTensor out_gate, OptionalTensor norm_weight,
                     bool exponential, bool normalized, double eps, bool norm, bool centered,
                     double norm_eps) {
  Inputs in(q, k, v, i, f, false, {exponential, normalized, true, eps});
  check_written_state(in, C, n, m);
  in.take_state(C, n, m);
  const EpilogueInputs epilogue(shape_of(v), in.io, in.unrounded, out_gate, norm_weight, norm,
                                centered, norm_eps);
  Tensor next_C = *in.C;  // C, or a copy if the engine cannot use C's address
  const Tensor h = run_step(in, epilogue, next_C, n ? n->mutable_data_ptr() : nullptr,
                            m ? m->mutable_data_ptr() : nullptr);
  if (next_C.const_data_ptr() != C.const_data_ptr()) torch::stable::copy_(C, next_C);
  return h;
}

#if defined(CUDA_KERNEL)
// Checks a tensor that is written where it lies, in vectors of 16 bytes if it has rows; returns its
// address.
inline void* written(Tensor& x, const char* name, const Shape& shape, ScalarType dtype) {
  check_shape(x, name, shape);
  check_dtype(x, name, dtype);
  const bool aligned =
      shape.size() < 4 || reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  STD_TORCH_CHECK(x.is_contiguous() && aligned, name,
                  " must be contiguous, and begin at a multiple of 16 bytes");
  return x.mutable_data_ptr();
}

constexpr int64_t kMostRingSteps = 16;

Tensor replay_in_place(OptionalTensor q, OptionalTensor k, OptionalTensor v, OptionalTensor i,
                       OptionalTensor f, Tensor C, OptionalTensor n, OptionalTensor m,
                       Tensor ring_k, Tensor ring_v, Tensor ring_i, Tensor ring_f, Tensor used,
                       OptionalTensor out_gate, OptionalTensor norm_weight, bool exponential,
                       bool normalized, double eps, bool norm, bool centered, double norm_eps) {
  check_rank(ring_k, "ring_k", 4, "[B, H, R, K]"), check_rank(ring_v, "ring_v", 4, "[B, H, R, V]");
  const int64_t R = ring_k.size(2);
  STD_TORCH_CHECK(1 <= R && R <= kMostRingSteps, "ring_k must have 1 to ", kMostRingSteps,
                  " entries, got ", R);
  if (!q) {  // k, v, i and f are not used then, but for their shapes
    STD_TORCH_CHECK(!k && !v && !i && !f, "k, v, i and f must be None where q is");
    const int64_t B = ring_k.size(0), H = ring_k.size(1);
    k = new_tensor(ring_k, {B, H, ring_k.size(3)}, ring_k.scalar_type());
    v = new_tensor(ring_k, {B, H, ring_v.size(3)}, ring_k.scalar_type());
    i = f = new_tensor(ring_k, {B, H}, state_dtype(ring_k));
  }
  STD_TORCH_CHECK(k && v && i && f, "k, v, i and f must be given where q is");
  Inputs in(q, *k, *v, *i, *f, false, {exponential, normalized, true, eps});
  check_written_state(in, C, n, m);
  in.take_state(C, n, m);
  const EpilogueInputs epilogue(shape_of(*v), in.io, in.unrounded, out_gate, norm_weight, norm,
                                centered, norm_eps);
  RingParams ring{};
  ring.steps = R;
  written(C, "C", {in.B, in.H, in.K, in.V}, in.unrounded);
  ring.k = written(ring_k, "ring_k", {in.B, in.H, R, in.K}, in.io);
  ring.v = written(ring_v, "ring_v", {in.B, in.H, R, in.V}, in.io);
  ring.i = (float*)written(ring_i, "ring_i", {in.B, in.H, R}, in.unrounded);
  ring.f = (float*)written(ring_f, "ring_f", {in.B, in.H, R}, in.unrounded);
  ring.used = (int32_t*)written(used, "used", {in.B, in.H}, ScalarType::Int);
  return run_step(in, epilogue, C, n ? n->mutable_data_ptr() : nullptr,
                  m ? m->mutable_data_ptr() : nullptr, ring);
}
#endif

void implement(torch::stable::detail::StableLibrary& ops) {
  ops.impl("mlstm_fwd", FLASHCELL_OP(kForwardSchema, forward));
  ops.impl("mlstm_bwd", FLASHCELL_OP(kBackwardSchema, backward));
  ops.impl("mlstm_step", FLASHCELL_OP(kStepSchema, step));
  ops.impl("mlstm_step_", FLASHCELL_OP(kStepInPlaceSchema, step_in_place));
  ops.impl("linear_step", FLASHCELL_OP(kLinearStepSchema, linear_step));
#if defined(CUDA_KERNEL)
  ops.impl("norm_step", FLASHCELL_OP(kNormStepSchema, norm_step));
  ops.impl("gate_step", FLASHCELL_OP(kGateStepSchema, gate_step));
  ops.impl("mlstm_replay_", FLASHCELL_OP(kReplaySchema, replay_in_place));
#endif
  ops.impl("mlstm_epilogue", FLASHCELL_OP(kEpilogueSchema, epilogue));
  ops.impl("mlstm_epilogue_bwd", FLASHCELL_OP(kEpilogueBackwardSchema, epilogue_backward));
}

}  // namespace flashcell

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(flashcell::kForwardSchema);
  ops.def(flashcell::kBackwardSchema);
  ops.def(flashcell::kStepSchema);
  ops.def(flashcell::kStepInPlaceSchema);
  ops.def(flashcell::kLinearStepSchema);
#if defined(CUDA_KERNEL)
  ops.def(flashcell::kNormStepSchema);
  ops.def(flashcell::kGateStepSchema);
  ops.def(flashcell::kReplaySchema);
#endif
  ops.def(flashcell::kEpilogueSchema);
  ops.def(flashcell::kEpilogueBackwardSchema);
}

FLASHCELL_IMPLEMENT(flashcell::implement(ops))

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
