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
#include "held.h"
#include "linear_ops.h"

#include <tuple>
#include <utility>

namespace flashcell {

constexpr int64_t kWidest = 1024;

inline void check_width(const Tensor& tensor, const char* name) {
  const int64_t width = tensor.size(tensor.dim() - 1);
  STD_TORCH_CHECK(width % 8 == 0 && 0 < width && width <= kWidest, name,
                  " must have a width that is a multiple of 8 up to ", kWidest, ", got ", width);
}

// Describes [B, T, H, width], [B, T, H], or either without T.
inline Strided strided(const Tensor& x, bool has_time) {
  return {x.const_data_ptr(), x.stride(0), has_time ? x.stride(1) : 0, x.stride(has_time ? 2 : 1)};
}

// The inputs of both directions and the step, checked; it keeps the tensors alive that params point
// to.
struct Inputs {
  int64_t B, T, H, K, V, S;
  bool has_time;
  Dtype dtype;
  ScalarType io, unrounded;
  OptionalTensor q;
  Tensor k, v, i, f;
  OptionalTensor C, n, m, reset, hold;
  using List = decltype(sequences(std::declval<const Tensor&>(), 0, 0, {}, {}, 0, 0));
  List list{};
  CellOptions cell;

  Inputs(const OptionalTensor& given_q, const Tensor& given_k, const Tensor& given_v,
         const Tensor& given_i, const Tensor& given_f, bool time, CellOptions options)
      : has_time(time), k(given_k), v(given_v), i(given_i), f(given_f), cell(options) {
    const int64_t rank = time ? 4 : 3;
    check_rank(k, "k", rank, time ? "[B, T, H, K]" : "[B, H, K]");
    check_rank(v, "v", rank, time ? "[B, T, H, V]" : "[B, H, V]");
    check_width(k, "k"), check_width(v, "v");
    dtype = io_dtype(k, "k"), io = k.scalar_type(), unrounded = state_dtype(k);
    B = k.size(0), T = time ? k.size(1) : 1, H = k.size(rank - 2);
    K = k.size(rank - 1), V = v.size(rank - 1), S = B;
    Shape rows = shape_of(k);
    rows.pop_back();
    for (const auto& [gate, name] : {std::pair(&i, "i"), std::pair(&f, "f")}) {
      check_shape(*gate, name, rows);
      check_dtype(*gate, name, unrounded);
    }
    Shape values = rows;
    values.push_back(V);
    check_shape(v, "v", values);
    check_dtype(v, "v", io);
    if (given_q) {
      check_shape(*given_q, "q", shape_of(k));
      check_dtype(*given_q, "q", io);
      q = input(*given_q);
    }
    k = input(k), v = input(v);
    STD_TORCH_CHECK(cell.eps >= 0, "eps must not be negative, got ", cell.eps);
    STD_TORCH_CHECK(cell.normalized || !cell.exponential,
                    "exponential must not be without normalized");
  }

  void take_masks(const OptionalTensor& given_reset, const OptionalTensor& given_hold,
                  const OptionalTensor& lengths, const OptionalTensor& cu_seqlens) {
    reset = operand(given_reset, "reset", {B, T}, ScalarType::Bool);
    hold = operand(given_hold, "hold", {B, T}, ScalarType::Bool);
    list = sequences(k, B, T, lengths, cu_seqlens, 0, 0);
    S = list.size();
    if (q) q = without_held(*q, hold);
    k = without_held(k, hold), v = without_held(v, hold);
  }

  void take_state(const OptionalTensor& given_C, const OptionalTensor& given_n,
                  const OptionalTensor& given_m) {
    C = operand(given_C, "C", {S, H, K, V}, unrounded);
    n = cell.normalized ? operand(given_n, "n", {S, H, K}, unrounded) : std::nullopt;
    m = cell.exponential ? operand(given_m, "m", {S, H}, unrounded) : std::nullopt;
  }

  Tensor state(Shape shape, bool has) const {
    return new_tensor(k, has ? shape : Shape{0}, unrounded);
  }
  Tensor new_C() const { return state({S, H, K, V}, true); }
  Tensor new_n() const { return state({S, H, K}, cell.normalized); }
  Tensor new_m() const { return state({S, H}, cell.exponential); }
  Shape total_shape() const { return cell.normalized && q ? Shape{B, T, H} : Shape{0}; }

  template <typename Params>
  void fill(Params& p) const {
    (CellOptions&)p = cell;
    p.H = H, p.K = K, p.V = V;
    if (q) p.q = strided(*q, has_time);
    p.k = strided(k, has_time), p.v = strided(v, has_time);
    p.i = strided(i, has_time), p.f = strided(f, has_time);
    p.C = pointer(C), p.n = pointer(n), p.m = pointer(m);
  }
  void fill_sequence(MlstmParams& p, int64_t chunk_size) const {
    STD_TORCH_CHECK(chunk_size >= 1, "chunk_size must be at least 1, got ", chunk_size);
    fill(p);
    p.B = B, p.S = S, p.T = T, p.chunk = chunk_size;
    p.sequences = list.data();
    p.reset = (const uint8_t*)pointer(reset), p.hold = (const uint8_t*)pointer(hold);
  }
};

inline void* writable(Tensor& tensor, bool has) {
  return has ? tensor.mutable_data_ptr() : nullptr;
}

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

// The epilogue's inputs (norm, weight and output gate) for an h of this shape, checked; it keeps
// the tensors alive that params point to.
#if defined(CUDA_KERNEL)
constexpr bool kReadsRoundedWeight = true;
#else
constexpr bool kReadsRoundedWeight = false;
#endif

struct EpilogueInputs {
  OptionalTensor gate, weight;
  Epilogue params{};

  EpilogueInputs(const Shape& h, ScalarType io, ScalarType unrounded,
                 const OptionalTensor& out_gate, const OptionalTensor& norm_weight, bool norm,
                 bool centered, double eps) {
    const size_t rank = h.size();
    if (out_gate) {
      check_shape(*out_gate, "out_gate", h);
      check_dtype(*out_gate, "out_gate", io);
      gate = input(*out_gate);
      params.out_gate = strided(*gate, rank == 4);
    }
    const bool rounded = kReadsRoundedWeight && norm_weight && norm_weight->scalar_type() == io;
    params.weight_is_io = rounded && io != unrounded;
    weight = operand(norm_weight, "norm_weight", {h[rank - 2], h[rank - 1]},
                     params.weight_is_io ? io : unrounded);
    STD_TORCH_CHECK(norm || !(weight || centered),
                    "norm must be true where there is a norm_weight, or centered is");
    STD_TORCH_CHECK(eps >= 0, "norm_eps must not be negative, got ", eps);
    params.norm = norm, params.centered = centered, params.eps = eps;
    params.weight = pointer(weight);
  }

  template <typename Params>
  void fill(Params& p, const Tensor& h) const {
    (Epilogue&)p = params;
    p.B = h.size(0), p.T = h.size(1), p.H = h.size(2), p.V = h.size(3);
    p.h = h.const_data_ptr();
  }
};

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
                       void* next_m) {
  Tensor h = new_tensor(in.k, {in.B, in.H, in.V}, in.io);
  StepParams params{};
  in.fill(params);
  params.B = in.B, params.epilogue = epilogue.params;
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

Tensor step_in_place(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor C, OptionalTensor n,
                     OptionalTensor m, OptionalTensor out_gate, OptionalTensor norm_weight,
                     bool exponential, bool normalized, double eps, bool norm, bool centered,
                     double norm_eps) {
  Inputs in(q, k, v, i, f, false, {exponential, normalized, true, eps});
  STD_TORCH_CHECK(n.has_value() == normalized && m.has_value() == exponential,
                  "n and m must be given where the cell has them, and only there");
  for (const Tensor* state : {&C, n ? &*n : nullptr, m ? &*m : nullptr}) {
    STD_TORCH_CHECK(state == nullptr || state->is_contiguous(),
                    "C, n and m must be contiguous to be written in place");
  }
  in.take_state(C, n, m);
  const EpilogueInputs epilogue(shape_of(v), in.io, in.unrounded, out_gate, norm_weight, norm,
                                centered, norm_eps);
  Tensor next_C = *in.C;  // C, or a copy if the engine cannot use C's address
  const Tensor h = run_step(in, epilogue, next_C, n ? n->mutable_data_ptr() : nullptr,
                            m ? m->mutable_data_ptr() : nullptr);
  if (next_C.const_data_ptr() != C.const_data_ptr()) torch::stable::copy_(C, next_C);
  return h;
}

void implement(torch::stable::detail::StableLibrary& ops) {
  ops.impl("mlstm_fwd", FLASHCELL_OP(kForwardSchema, forward));
  ops.impl("mlstm_bwd", FLASHCELL_OP(kBackwardSchema, backward));
  ops.impl("mlstm_step", FLASHCELL_OP(kStepSchema, step));
  ops.impl("mlstm_step_", FLASHCELL_OP(kStepInPlaceSchema, step_in_place));
  ops.impl("linear_step", FLASHCELL_OP(kLinearStepSchema, linear_step));
#if defined(CUDA_KERNEL)
  ops.impl("norm_step", FLASHCELL_OP(kNormStepSchema, norm_step));
  ops.impl("gate_step", FLASHCELL_OP(kGateStepSchema, gate_step));
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
#endif
  ops.def(flashcell::kEpilogueSchema);
  ops.def(flashcell::kEpilogueBackwardSchema);
}

FLASHCELL_IMPLEMENT(flashcell::implement(ops))

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
