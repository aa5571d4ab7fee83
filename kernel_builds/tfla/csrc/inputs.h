// The inputs of the operators, checked. Included after the device's call.h and common/torch/op.h.
#pragma once
#include <utility>

#include "held.h"
#include "params.h"

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

}  // namespace flashcell
