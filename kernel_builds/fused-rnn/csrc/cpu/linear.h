// Linear layers and their gradients as ops of the CPU kernel, through its own matrix product.
#pragma once
#include "call.h"

namespace flashcell {

inline int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

// y[..., m] = sum_k weight[m, k] x[..., k] + bias[m]
inline Tensor linear_fwd(Tensor x, Tensor weight, OptionalTensor bias) {
  const Dtype dtype = io_dtype(x, "x");
  check_rank(weight, "weight", 2, "[M, K]");
  STD_TORCH_CHECK(x.dim() > 0, "x must be [..., K], got a scalar");
  const int64_t M = weight.size(0), K = weight.size(1), rows = rows_of(x);
  Shape shape = shape_of(x);
  shape.back() = K;
  x = operand(x, "x", shape, x.scalar_type());
  weight = operand(weight, "weight", {M, K}, x.scalar_type());
  bias = operand(bias, "bias", {M}, x.scalar_type());
  shape.back() = M;
  Tensor y = new_tensor(x, shape, x.scalar_type());
  backend().gemm(dtype,
                 {rows, M, K, 1, 1, x.const_data_ptr(), 0, K, 1, weight.const_data_ptr(), 0, 1, K,
                  y.mutable_data_ptr(), 0, M, pointer(bias)},
                 host());
  return y;
}

// dx = dy weight · dweight = dy^T x · dbias = sum of dy over rows (or [0]), in the dtype of x
inline std::tuple<Tensor, Tensor, Tensor> linear_bwd(Tensor dy, Tensor x, Tensor weight,
                                                     bool has_bias) {
  const Dtype dtype = io_dtype(x, "x");
  const ScalarType io = x.scalar_type();
  check_rank(weight, "weight", 2, "[M, K]");
  STD_TORCH_CHECK(x.dim() > 0, "x must be [..., K], got a scalar");
  const int64_t M = weight.size(0), K = weight.size(1), rows = rows_of(x);
  Shape x_shape = shape_of(x), y_shape = x_shape;
  x_shape.back() = K, y_shape.back() = M;
  x = operand(x, "x", x_shape, io);
  dy = operand(dy, "dy", y_shape, io);
  weight = operand(weight, "weight", {M, K}, io);
  Tensor dx = new_tensor(x, x_shape, io), dweight = new_tensor(x, {M, K}, io);
  Tensor dbias = new_tensor(x, {has_bias ? M : 0}, io);
  backend().gemm(dtype,
                 {rows, K, M, 1, 1, dy.const_data_ptr(), 0, M, 1, weight.const_data_ptr(), 0, K, 1,
                  dx.mutable_data_ptr(), 0, K, nullptr},
                 host());
  backend().gemm(dtype,
                 {M, K, rows, 1, 1, dy.const_data_ptr(), 0, 1, M, x.const_data_ptr(), 0, K, 1,
                  dweight.mutable_data_ptr(), 0, K, nullptr},
                 host());
  if (has_bias) {
    backend().column_sum(dtype, {rows, M, dy.const_data_ptr(), dbias.mutable_data_ptr()}, host());
  }
  return {dx, dweight, dbias};
}

// dweight[g, n, j, k] = sum_bt dr[b, t, g, n, j] h_prev[b, t, n, k]
inline Tensor recurrent_dweight(Tensor dr, Tensor h_prev, bool /*tf32*/) {
  const Dtype dtype = io_dtype(dr, "dr");
  check_rank(dr, "dr", 5, "[B, T, G, N, D]");
  const int64_t B = dr.size(0), T = dr.size(1), G = dr.size(2), N = dr.size(3), D = dr.size(4);
  dr = dense(dr);
  h_prev = operand(h_prev, "h_prev", {B, T, N, D}, dr.scalar_type());
  Tensor dweight = new_tensor(dr, {G, N, D, D}, dr.scalar_type());
  backend().gemm(
      dtype,
      {D, D, B * T, G * N, N, dr.const_data_ptr(), D, 1, G * N * D, h_prev.const_data_ptr(), D,
       N * D, 1, dweight.mutable_data_ptr(), D * D, D, nullptr},
      host());
  return dweight;
}

}  // namespace flashcell
