// The torch operators: check, allocate, fill a params struct, run the engine.
// B batch, T time, D channels; G gates, P weight rows, K states; S = B, or the documents of
// cu_seqlens. Every cell of cells/all.h gets <cell>_fwd and <cell>_bwd.
#include "cells/all.h"
#include "common/torch/registration.h"
#if defined(CUDA_KERNEL)
#include "cuda/conv/ops.h"
#else
#include "cpu/call.h"
#endif
#include "common/torch/op.h"
#include "mixer_step_ops.h"
#include "params.h"

#include <tuple>

namespace flashcell {

// x [B,T,G,D] or, in N heads, [N,B,T,G,D/N], strided · weight [P,D], with a bias of x [P+G,D], and
// state [K,S,D] in the state dtype · reset, hold [B,T] bool · lengths [B] · cu_seqlens [S+1] ·
// method sequential, multiple_shooting or newton · tol, max_iters: negative for their defaults
// -> h [B,T,D] · last [K,S,D] · saved [B,T,V,D] ([0] unless `save`): the states after each step
// that h does not hold: the other states, then with `hold` state 0 · report [3]: iterations,
// residual, number of steps finished sequentially
inline constexpr char kForwardSchema[] =
    "_fwd(Tensor x, Tensor weight, Tensor? state, Tensor? reset, Tensor? hold, Tensor? lengths, "
    "Tensor? cu_seqlens, str method, float tol, int max_iters, bool save) "
    "-> (Tensor h, Tensor last, Tensor saved, Tensor report)";

// dh [B,T,D] · dlast [K,S,D] -> dx as x · dweight as weight · dstate [K,S,D]
inline constexpr char kBackwardSchema[] =
    "_bwd(Tensor dh, Tensor? dlast, Tensor x, Tensor weight, Tensor h, Tensor saved, "
    "Tensor? state, Tensor? reset, Tensor? hold, Tensor? lengths, Tensor? cu_seqlens, str method) "
    "-> (Tensor dx, Tensor dweight, Tensor dstate)";

// a [B,T,D] or [B,T,D,n,n] · b [B,T,D] or [B,T,D,n] · h0 as b without T, in the state dtype
inline constexpr char kScanForwardSchema[] =
    "_fwd(Tensor a, Tensor b, Tensor? h0, bool reverse) -> Tensor";
inline constexpr char kScanBackwardSchema[] =
    "_bwd(Tensor dh, Tensor a, Tensor h, Tensor? h0, bool reverse) "
    "-> (Tensor da, Tensor db, Tensor dh0)";
constexpr int64_t kWidestBlock = 4;

inline Method method_of(const std::string& name) {
  if (name == "sequential") return Method::kSequential;
  if (name == "multiple_shooting") return Method::kMultipleShooting;
  STD_TORCH_CHECK(name == "newton", "method must be sequential, multiple_shooting or newton, got ",
                  name);
  return Method::kNewton;
}

// The arguments of both directions, checked; it keeps their tensors alive as long as the params.
template <typename Cell>
struct Arguments {
  Dtype dtype;
  ScalarType io, unrounded;
  Tensor x, weight;
  OptionalTensor state, reset, hold;
  int batch;  // dimension of x that is the batch: 1 if heads come first
  int64_t B, T, J, D, S;
  bool has_bias;
  decltype(sequences(x, 0, 0, OptionalTensor(), OptionalTensor(), 0, 0)) list;

  Arguments(const Tensor& given_x, const Tensor& given_weight, const OptionalTensor& given_state,
            const OptionalTensor& given_reset, const OptionalTensor& given_hold,
            const OptionalTensor& lengths, const OptionalTensor& cu_seqlens)
      : x(checked(given_x)),
        weight(given_weight),
        batch(int(x.dim()) - 4),
        B(x.size(batch)),
        T(x.size(batch + 1)),
        J(x.size(batch + 3)),
        D(batch == 0 ? J : x.size(0) * J),
        list(sequences(x, B, T, lengths, cu_seqlens, x.stride(batch), x.stride(batch + 1))) {
    S = list.size(), dtype = io_dtype(x, "x"), io = x.scalar_type(), unrounded = state_dtype(x);
    const int64_t rows_with_bias = int64_t(Cell::kWeights) + Cell::kGates;
    has_bias = weight.dim() == 2 && weight.size(0) == rows_with_bias;
    const int64_t rows = has_bias ? rows_with_bias : int64_t(Cell::kWeights);
    weight = operand(given_weight, "weight", {rows, D}, unrounded);
    state = operand(given_state, "state", {Cell::kStates, S, D}, unrounded);
    reset = operand(given_reset, "reset", {B, T}, ScalarType::Bool);
    hold = operand(given_hold, "hold", {B, T}, ScalarType::Bool);
  }

  static Tensor checked(const Tensor& x) {
    if (x.dim() != 5) check_rank(x, "x", 4, "[B, T, G, D] or [N, B, T, G, D / N]");
    Shape shape = shape_of(x);
    shape[shape.size() - 2] = Cell::kGates;
    check_shape(x, "x", shape);
    io_dtype(x, "x");
    return input(x);
  }

  int64_t saved_states() const { return Cell::kStates - 1 + (hold ? 1 : 0); }

  void fill(SequenceParams& p, const std::string& method) const {
    p.S = S, p.D = D, p.T = T, p.V = saved_states(), p.method = method_of(method);
    p.sequences = list.data();
    p.reset = (const uint8_t*)pointer(reset), p.hold = (const uint8_t*)pointer(hold);
    p.x = x.const_data_ptr();
    p.x_head = batch == 0 ? 0 : x.stride(0), p.J = J;
    p.x_batch = x.stride(batch), p.x_time = x.stride(batch + 1), p.x_gate = x.stride(batch + 2);
    p.weight = weight.const_data_ptr(), p.initial = pointer(state);
    const int64_t bias = Cell::kWeights * D * weight.element_size();
    p.bias = has_bias ? static_cast<const char*>(p.weight) + bias : nullptr;
  }
};

template <typename Cell>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor x, Tensor weight, OptionalTensor state,
                                                   OptionalTensor reset, OptionalTensor hold,
                                                   OptionalTensor lengths,
                                                   OptionalTensor cu_seqlens, std::string method,
                                                   double tol, int64_t max_iters, bool save) {
  const Arguments<Cell> given(x, weight, state, reset, hold, lengths, cu_seqlens);
  const auto [B, T, D, S] = std::tuple(given.B, given.T, given.D, given.S);
  Tensor h = new_tensor(x, {B, T, D}, given.io);
  Tensor last = new_tensor(x, {Cell::kStates, S, D}, given.unrounded);
  const Shape saved_shape = save ? Shape{B, T, given.saved_states(), D} : Shape{0};
  Tensor saved = new_tensor(x, saved_shape, given.io);
  Tensor report = new_tensor(x, {3}, ScalarType::Float);
  ForwardParams params{};
  given.fill(params, method);
  params.h = h.mutable_data_ptr(), params.last = last.mutable_data_ptr();
  params.saved = save ? saved.mutable_data_ptr() : nullptr;
  params.report = (float*)report.mutable_data_ptr();
  params.tol = tol, params.max_iters = max_iters;
  run<Cell>(params, given.dtype, x);
  return {h, last, saved, report};
}

template <typename Cell>
std::tuple<Tensor, Tensor, Tensor> backward(Tensor dh, OptionalTensor dlast, Tensor x,
                                            Tensor weight, Tensor h, Tensor saved,
                                            OptionalTensor state, OptionalTensor reset,
                                            OptionalTensor hold, OptionalTensor lengths,
                                            OptionalTensor cu_seqlens, std::string method) {
  const Arguments<Cell> given(x, weight, state, reset, hold, lengths, cu_seqlens);
  const auto [B, T, D, S] = std::tuple(given.B, given.T, given.D, given.S);
  dh = operand(dh, "dh", {B, T, D}, given.io);
  dlast = operand(dlast, "dlast", {Cell::kStates, S, D}, given.unrounded);
  h = operand(h, "h", {B, T, D}, given.io);
  saved = operand(saved, "saved", {B, T, given.saved_states(), D}, given.io);
  Tensor dx = new_tensor(x, shape_of(x), given.io);
  Tensor dweight = new_tensor(x, shape_of(given.weight), given.unrounded);
  Tensor dstate = new_tensor(x, {Cell::kStates, S, D}, given.unrounded);
  BackwardParams params{};
  given.fill(params, method);
  params.dh = dh.const_data_ptr(), params.dlast = pointer(dlast);
  params.h = h.const_data_ptr(), params.saved = saved.const_data_ptr();
  params.dx = dx.mutable_data_ptr(), params.dx_head = B * T * Cell::kGates * given.J;
  params.dweight = dweight.mutable_data_ptr();
  params.dstate = dstate.mutable_data_ptr();
  run<Cell>(params, given.dtype, x);
  return {dx, dweight, dstate};
}

// Reads the sizes of a scan from b, or from h of the same shape; `name` is that argument's name.
// The rank tells the scan over blocks from the elementwise scan, whose blocks are 1 x 1. scan_* and
// block_scan_* are two schemas of one function.
inline ScanParams scan_params(Tensor& a, const Tensor& b, const char* name, OptionalTensor& h0,
                              bool reverse) {
  const bool block = b.dim() == 4;
  if (!block) check_rank(b, name, 3, "[B, T, D] or [B, T, D, n]");
  io_dtype(b, name);
  ScanParams p{};
  p.B = b.size(0), p.T = b.size(1), p.D = b.size(2), p.n = block ? b.size(3) : 1;
  STD_TORCH_CHECK(1 <= p.n && p.n <= kWidestBlock, name, " must have blocks of 1..", kWidestBlock,
                  ", got ", p.n);
  Shape shape = shape_of(b), first = shape;
  if (block) shape.push_back(p.n);
  first.erase(first.begin() + 1);
  a = operand(a, "a", shape, b.scalar_type());
  h0 = operand(h0, "h0", first, state_dtype(b));
  p.a = a.const_data_ptr(), p.h0 = pointer(h0), p.reverse = reverse;
  return p;
}

inline Tensor scan_forward(Tensor a, Tensor b, OptionalTensor h0, bool reverse) {
  ScanForwardParams params{};
  (ScanParams&)params = scan_params(a, b, "b", h0, reverse);
  b = dense(b);
  Tensor h = new_tensor(b, shape_of(b), b.scalar_type());
  params.b = b.const_data_ptr(), params.h = h.mutable_data_ptr();
  run(params, io_dtype(b, "b"), b);
  return h;
}

inline std::tuple<Tensor, Tensor, Tensor> scan_backward(Tensor dh, Tensor a, Tensor h,
                                                        OptionalTensor h0, bool reverse) {
  ScanBackwardParams params{};
  (ScanParams&)params = scan_params(a, h, "h", h0, reverse);
  const ScalarType io = h.scalar_type();
  dh = operand(dh, "dh", shape_of(h), io);
  h = dense(h);
  Shape first = shape_of(h);
  first.erase(first.begin() + 1);
  Tensor da = new_tensor(h, shape_of(a), io), db = new_tensor(h, shape_of(h), io);
  Tensor dh0 = new_tensor(h, first, state_dtype(h));
  params.dh = dh.const_data_ptr(), params.h = h.const_data_ptr();
  params.da = da.mutable_data_ptr(), params.db = db.mutable_data_ptr();
  params.dh0 = dh0.mutable_data_ptr();
  run(params, io_dtype(h, "h"), h);
  return {da, db, dh0};
}

template <typename... Cells>
void implement(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  (ops.impl((std::string(Cells::kName) + "_fwd").c_str(),
            FLASHCELL_OP(kForwardSchema, forward<Cells>)),
   ...);
  (ops.impl((std::string(Cells::kName) + "_bwd").c_str(),
            FLASHCELL_OP(kBackwardSchema, backward<Cells>)),
   ...);
  ops.impl("scan_fwd", FLASHCELL_OP(kScanForwardSchema, scan_forward));
  ops.impl("scan_bwd", FLASHCELL_OP(kScanBackwardSchema, scan_backward));
  ops.impl("block_scan_fwd", FLASHCELL_OP(kScanForwardSchema, scan_forward));
  ops.impl("block_scan_bwd", FLASHCELL_OP(kScanBackwardSchema, scan_backward));
  implement_mixer_step(ops, CellList<Cells...>());
#if defined(CUDA_KERNEL)
  implement_conv(ops);
#endif
}

template <typename... Cells>
void define(torch::stable::detail::StableLibrary& ops, CellList<Cells...>) {
  (ops.def((std::string(Cells::kName) + kForwardSchema).c_str()), ...);
  (ops.def((std::string(Cells::kName) + kBackwardSchema).c_str()), ...);
  for (const char* scan : {"scan", "block_scan"}) {
    ops.def((std::string(scan) + kScanForwardSchema).c_str());
    ops.def((std::string(scan) + kScanBackwardSchema).c_str());
  }
}

}  // namespace flashcell

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  flashcell::define(ops, flashcell::AllCells());
  flashcell::define_mixer_step(ops, flashcell::AllCells());
#if defined(CUDA_KERNEL)
  flashcell::define_conv(ops);
#endif
}

FLASHCELL_IMPLEMENT(flashcell::implement(ops, flashcell::AllCells()))

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
