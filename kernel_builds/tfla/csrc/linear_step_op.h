// The operator linear_step: the layers of one token that read the same x.
#pragma once
#include <vector>

#include "checks.h"
#include "cuda/call.h"
#include "params.h"

namespace flashcell {

// x [B, K], weights [rows, K] each, in 16 bits · biases of the last matrices · `capped`, how many
// of the last give fp32, bounded by cap · norm [K] · residual [B, rows] of the one matrix.
constexpr const char* kLinearStepSchema =
    "linear_step(Tensor x, Tensor[] weights, Tensor[] biases, int capped, float cap, Tensor? norm, "
    "float eps, Tensor? residual, bool gated) -> (Tensor out, Tensor bounded)";

inline std::tuple<Tensor, Tensor> linear_step(Tensor given_x, std::vector<Tensor> weights,
                                              std::vector<Tensor> biases, int64_t capped,
                                              double cap, OptionalTensor norm, double eps,
                                              OptionalTensor residual, bool gated) {
  const int64_t count = int64_t(weights.size()), biased = int64_t(biases.size());
  check_rank(given_x, "x", 2, "[B, K]");
  const Tensor x = input(given_x);
  const ScalarType io = x.scalar_type();
  const Dtype dtype = io_dtype(x, "x");
  STD_TORCH_CHECK(dtype == Dtype::kBFloat16 || dtype == Dtype::kHalf,
                  "x must be bfloat16 or float16, got ", torch::headeronly::toString(io));
  STD_TORCH_CHECK(0 < count && count <= kLinears, "weights must be 1 to ", kLinears,
                  " matrices, got ", count);
  STD_TORCH_CHECK(biased <= count, "biases must be at most one for each of ", count,
                  " weights, got ", biased);
  STD_TORCH_CHECK(0 <= capped && capped <= count, "capped must be 0 to ", count, ", got ", capped);
  STD_TORCH_CHECK(!residual || count == 1, "residual must be that of one matrix, got ", count);
  STD_TORCH_CHECK(!gated || (count == 2 && capped == 0 && biased == 0),
                  "gated must come with two weights, no biases and nothing capped");
  LinearStepParams p{};
  p.B = x.size(0), p.K = x.size(1), p.x = x.const_data_ptr(), p.x_stride = x.stride(0);
  STD_TORCH_CHECK(p.K % 8 == 0, "x must have a width that is a multiple of 8, got ", p.K);
  norm = operand(norm, "norm", {p.K}, io);
  p.norm = pointer(norm), p.eps = eps, p.cap = cap, p.gated = gated, p.count = int(count);
  int64_t widths[2] = {};  // of out and of what is bounded
  for (int64_t s = 0; s < count; ++s) {
    Tensor& weight = weights[s];
    check_rank(weight, "weights", 2, "[rows, K]");
    check_shape(weight, "weights", {weight.size(0), p.K});
    check_dtype(weight, "weights", io);
    STD_TORCH_CHECK(input(weight).const_data_ptr() == weight.const_data_ptr() &&
                        (weight.size(0) <= 1 || weight.stride(0) == p.K),
                    "weights must be contiguous and begin at 16 bytes");
    Linear& linear = p.linears[s];
    linear.weight = weight.const_data_ptr(), linear.rows = weight.size(0);
    linear.capped = s >= count - capped;
    widths[linear.capped] += linear.rows;
    const int64_t b = s - (count - biased);
    if (b < 0) continue;
    check_shape(biases[b], "biases", {linear.rows}), check_dtype(biases[b], "biases", io);
    biases[b] = dense(biases[b]), linear.bias = biases[b].const_data_ptr();
  }
  if (gated) {
    check_shape(weights[1], "weights", shape_of(weights[0]));
    widths[0] /= 2;
  }
  if (residual) {
    check_shape(*residual, "residual", {p.B, widths[0]}), check_dtype(*residual, "residual", io);
    if (residual->stride(1) != 1) residual = dense(torch::stable::contiguous(*residual));
    p.residual = residual->const_data_ptr(), p.residual_stride = residual->stride(0);
  }
  Tensor out = new_tensor(x, {p.B, widths[0]}, io);
  Tensor bounded = new_tensor(x, {p.B, widths[1]}, ScalarType::Float);
  int64_t at[2] = {};
  for (int64_t s = 0; s < count; ++s) {
    Linear& linear = p.linears[s];
    char* base = static_cast<char*>((linear.capped ? bounded : out).mutable_data_ptr());
    linear.out = base + at[linear.capped] * (linear.capped ? 4 : 2);
    linear.out_stride = widths[linear.capped];
    if (!gated) at[linear.capped] += linear.rows;
  }
  run(p, dtype, x);
  return {out, bounded};
}

}  // namespace flashcell
