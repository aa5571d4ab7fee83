// The ops of the layers between two mLSTM steps of a model, for one token per row; on CUDA in 16
// bits. Included after the device's call.h.
#pragma once
#include <vector>

#include "common/torch/checks.h"
#include "params.h"

namespace flashcell {

// x [B, K], weights [rows, K] each · scales: those of the first matrices, which have 8 bits (scales
// [rows] fp32) or 4 (weights [rows, K / 2] uint8, scales [rows, K / 32] bf16) · biases: those of
// the last matrices · capped: how many of the last matrices give the state dtype, bounded by cap ·
// norm [K] · residual [B, rows], only with a single matrix.
inline constexpr char kLinearStepSchema[] =
    "linear_step(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases, int capped, float "
    "cap, Tensor? norm, float eps, Tensor? residual, bool gated) -> (Tensor out, Tensor bounded)";

inline constexpr char kNormStepSchema[] =
    "norm_step(Tensor x, Tensor norm, float eps, Tensor[] weights, Tensor[] biases, float cap) -> "
    "(Tensor out, Tensor bounded)";
inline constexpr char kGateStepSchema[] = "gate_step(Tensor gate, Tensor up) -> Tensor";

inline Dtype step_dtype(const Tensor& x, const char* name) {
  const Dtype dtype = io_dtype(x, name);
#if defined(CUDA_KERNEL)
  STD_TORCH_CHECK(dtype == Dtype::kBFloat16 || dtype == Dtype::kHalf, name,
                  " must be bfloat16 or float16, got ",
                  torch::headeronly::toString(x.scalar_type()));
#endif
  return dtype;
}

// The matrices of a call, `count` of them; biases belong to the last ones, scales to the first
// ones, whose weights have fewer bits. It keeps biases and scales alive.
struct Matrices {
  std::vector<Tensor> weights, biases, scales{};
  int64_t count = int64_t(weights.size());

  Linear linear(int64_t s, int64_t K, ScalarType io) {
    const Tensor& weight = weights[s];
    check_rank(weight, "weights", 2, "[rows, K]");
    const bool scaled = s < int64_t(scales.size());
    const ScalarType dtype = scaled ? weights[0].scalar_type() : io;
    const bool packed = dtype == ScalarType::Byte;
    const int64_t width = packed ? K / 2 : K;
    check_shape(weight, "weights", {weight.size(0), width}), check_dtype(weight, "weights", dtype);
    STD_TORCH_CHECK(input(weight).const_data_ptr() == weight.const_data_ptr() &&
                        (weight.size(0) <= 1 || K == 0 || weight.stride(0) == width),
                    "weights must be contiguous and begin at 16 bytes");
    Linear linear{};
    linear.weight = weight.const_data_ptr(), linear.rows = weight.size(0);
    if (scaled && packed) {
      // read before the kernel ahead has ended, which a copy would be
      check_shape(scales[s], "scales", {linear.rows, K / kInt4Group});
      check_dtype(scales[s], "scales", ScalarType::BFloat16);
      STD_TORCH_CHECK(input(scales[s]).const_data_ptr() == scales[s].const_data_ptr() &&
                          scales[s].is_contiguous(),
                      "scales must be contiguous and begin at 16 bytes");
    } else if (scaled) {
      scales[s] = operand(scales[s], "scales", {linear.rows}, ScalarType::Float);
    }
    if (scaled) linear.scale = scales[s].const_data_ptr();
    const int64_t b = s - (count - int64_t(biases.size()));
    if (b < 0) return linear;
    check_shape(biases[b], "biases", {linear.rows}), check_dtype(biases[b], "biases", io);
    biases[b] = dense(biases[b]), linear.bias = biases[b].const_data_ptr();
    return linear;
  }
  void check_counts(int64_t least) const {
    STD_TORCH_CHECK(least <= count && count <= kLinears, "weights must be ", least, " to ",
                    kLinears, " matrices, got ", count);
    STD_TORCH_CHECK(int64_t(biases.size()) <= count, "biases must be at most one for each of ",
                    count, " weights, got ", biases.size());
    STD_TORCH_CHECK(int64_t(scales.size()) <= count, "scales must be at most one for each of ",
                    count, " weights, got ", scales.size());
  }
  // Returns what the weights with scales are, which K values of x meet.
  Format format(int64_t K) const {
    if (scales.empty()) return Format::kPlain;
    const ScalarType dtype = weights[0].scalar_type();
#if defined(CUDA_KERNEL)
    const int64_t of_words =
        dtype == ScalarType::Byte ? 64 : 16;  // whole words of scales or weights
#else
    const int64_t of_words = dtype == ScalarType::Byte ? kInt4Group : 8;
#endif
    STD_TORCH_CHECK(K % of_words == 0, "x must have a width that is a multiple of ", of_words,
                    ", got ", K);
    if (dtype == ScalarType::Byte) return Format::kInt4;
#if defined(CUDA_KERNEL)
    if (dtype == ScalarType::Float8_e4m3fn) return Format::kFp8;
#endif
    STD_TORCH_CHECK(dtype == ScalarType::Char,
                    "weights must be int8, uint8 or, on CUDA, "
                    "float8_e4m3fn where there are scales, got ",
                    torch::headeronly::toString(dtype));
    return Format::kInt8;
  }
};

inline std::tuple<Tensor, Tensor> linear_step(Tensor given_x, std::vector<Tensor> weights,
                                              std::vector<Tensor> scales,
                                              std::vector<Tensor> biases, int64_t capped,
                                              double cap, OptionalTensor norm, double eps,
                                              OptionalTensor residual, bool gated) {
  Matrices given{std::move(weights), std::move(biases), std::move(scales)};
  given.check_counts(1);
  const int64_t count = given.count;
  check_rank(given_x, "x", 2, "[B, K]");
  const Tensor x = input(given_x);
  const ScalarType io = x.scalar_type();
  const Dtype dtype = step_dtype(x, "x");
  STD_TORCH_CHECK(0 <= capped && capped <= count, "capped must be 0 to ", count, ", got ", capped);
  STD_TORCH_CHECK(!residual || count == 1, "residual must be that of one matrix, got ", count);
  STD_TORCH_CHECK(!gated || (count == 2 && capped == 0 && given.biases.empty()),
                  "gated must come with two weights, no biases and nothing capped");
  LinearStepParams p{};
  p.B = x.size(0), p.K = x.size(1), p.x = x.const_data_ptr(), p.x_stride = x.stride(0);
  STD_TORCH_CHECK(p.K % 8 == 0, "x must have a width that is a multiple of 8, got ", p.K);
  norm = operand(norm, "norm", {p.K}, io);
  p.norm = pointer(norm), p.eps = eps, p.cap = cap, p.gated = gated, p.count = int(count);
  p.format = given.format(p.K);
  int64_t widths[2] = {};  // widths of `out` and of `bounded`
  for (int64_t s = 0; s < count; ++s) {
    Linear& linear = p.linears[s] = given.linear(s, p.K, io);
    linear.capped = s >= count - capped;
    widths[linear.capped] += linear.rows;
  }
  if (gated) {
    check_shape(given.weights[1], "weights", shape_of(given.weights[0]));
    STD_TORCH_CHECK(given.scales.size() != 1, "scales must be two or none with gated, got 1");
    widths[0] /= 2;
  }
  if (residual) {
    check_shape(*residual, "residual", {p.B, widths[0]}), check_dtype(*residual, "residual", io);
    if (residual->stride(1) != 1) residual = dense(torch::stable::contiguous(*residual));
    p.residual = residual->const_data_ptr(), p.residual_stride = residual->stride(0);
  }
  Tensor out = new_tensor(x, {p.B, widths[0]}, io);
  Tensor bounded = new_tensor(x, {p.B, widths[1]}, state_dtype(x));
  int64_t at[2] = {};
  for (int64_t s = 0; s < count; ++s) {
    Linear& linear = p.linears[s];
    const Tensor& to = linear.capped ? bounded : out;
    linear.out = static_cast<char*>(to.mutable_data_ptr()) + at[linear.capped] * to.element_size();
    linear.out_stride = widths[linear.capped];
    if (!gated) at[linear.capped] += linear.rows;
  }
  run(p, dtype, x);
  return {out, bounded};
}

#if defined(CUDA_KERNEL)
// Returns x [B, K] normed, and the products of the matrices with it, in fp32.
inline std::tuple<Tensor, Tensor> norm_step(Tensor given_x, Tensor norm, double eps,
                                            std::vector<Tensor> weights, std::vector<Tensor> biases,
                                            double cap) {
  Matrices given{std::move(weights), std::move(biases)};
  given.check_counts(0);
  check_rank(given_x, "x", 2, "[B, K]");
  const Tensor x = input(given_x);
  const Dtype dtype = step_dtype(x, "x");
  NormStepParams p{};
  p.B = x.size(0), p.K = x.size(1), p.x = x.const_data_ptr(), p.x_stride = x.stride(0);
  STD_TORCH_CHECK(p.K % 8 == 0, "x must have a width that is a multiple of 8, got ", p.K);
  norm = operand(norm, "norm", {p.K}, x.scalar_type());
  p.norm = norm.const_data_ptr(), p.eps = eps, p.cap = cap, p.count = int(given.count);
  int64_t width = 0, at = 0;
  for (int64_t s = 0; s < given.count; ++s) {
    p.linears[s] = given.linear(s, p.K, x.scalar_type());
    width += p.linears[s].rows;
  }
  Tensor out = new_tensor(x, {p.B, p.K}, x.scalar_type());
  Tensor bounded = new_tensor(x, {p.B, width}, ScalarType::Float);
  p.out = out.mutable_data_ptr();
  for (int64_t s = 0; s < given.count; ++s) {
    p.linears[s].out = static_cast<float*>(bounded.mutable_data_ptr()) + at;
    p.linears[s].out_stride = width, at += p.linears[s].rows;
  }
  run(p, dtype, x);
  return {out, bounded};
}

// Returns silu(gate) * up, [B, N].
inline Tensor gate_step(Tensor given_gate, Tensor given_up) {
  check_rank(given_gate, "gate", 2, "[B, N]");
  const Dtype dtype = step_dtype(given_gate, "gate");
  check_shape(given_up, "up", shape_of(given_gate));
  check_dtype(given_up, "up", given_gate.scalar_type());
  const Tensor gate = input(given_gate), up = input(given_up);
  GateStepParams p{};
  p.B = gate.size(0), p.N = gate.size(1);
  STD_TORCH_CHECK(p.N % 8 == 0, "gate must have a width that is a multiple of 8, got ", p.N);
  p.gate = gate.const_data_ptr(), p.gate_stride = gate.stride(0);
  p.up = up.const_data_ptr(), p.up_stride = up.stride(0);
  Tensor out = new_tensor(gate, {p.B, p.N}, gate.scalar_type());
  p.out = out.mutable_data_ptr();
  run(p, dtype, gate);
  return out;
}
#endif

}  // namespace flashcell
