// Matrix products in TF32, whatever torch's setting for matrix products says. With torch's default
// settings cuDNN computes all products of recurrent networks in TF32, and torch's own are in fp32.
#pragma once
#include "common/torch/cuda.h"
#include "gemm/blas.h"
#include "run.h"

namespace flashcell {

// Matrices as cuBLAS takes them: the elements of a row are contiguous, or those of a column, and
// the next row or column begins `next` elements later.
struct Strided {
  Tensor x;
  bool transposed;  // the elements of a column are contiguous
  int64_t next;

  // Copies x [N, rows, columns] if cuBLAS cannot take it as it is.
  explicit Strided(const Tensor& given) : x(given) {
    const int64_t rows = x.size(1), columns = x.size(2);
    const auto fits = [](int64_t dense, int64_t apart, int64_t size) {
      return dense == 1 && apart >= size;
    };
    const bool by_rows = fits(x.stride(2), x.stride(1), columns);
    if (!by_rows && !fits(x.stride(1), x.stride(2), rows)) x = torch::stable::contiguous(x);
    transposed = !by_rows && x.stride(1) == 1 && x.stride(2) >= rows;
    next = transposed ? x.stride(2) : x.stride(1);
    if (next < (transposed ? rows : columns)) next = transposed ? rows : columns;
  }
};

// Returns c [N, M, P] with c[n] = a[n] b[n], for a [N, M, K] and b [N, K, P]; all are fp32.
inline Tensor tf32_matmul(Tensor a, Tensor b) {
  check_rank(a, "a", 3, "[N, M, K]");
  check_rank(b, "b", 3, "[N, K, P]");
  STD_TORCH_CHECK(a.scalar_type() == ScalarType::Float, "a must be float32, got ",
                  torch::headeronly::toString(a.scalar_type()));
  STD_TORCH_CHECK(b.scalar_type() == ScalarType::Float, "b must be float32, got ",
                  torch::headeronly::toString(b.scalar_type()));
  const int64_t N = a.size(0), M = a.size(1), K = a.size(2), P = b.size(2);
  check_shape(b, "b", {N, K, P});
  for (const int64_t size : {N, M, K, P}) {
    STD_TORCH_CHECK(size < int64_t(1) << 31, "a and b must have sizes below 2^31, got ", size);
  }
  Tensor c = new_tensor(a, {N, M, P}, ScalarType::Float);
  if (N * M * P == 0) return c;
  if (K == 0) return torch::stable::zero_(c);
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  // Besides, every op refuses a GPU without code of this library, though cuBLAS has its own.
  const bool rounds = cuda::has_blas_tf32(cuda::current_device());
  const Strided left(a), right(b);
  cuda::gemm::check_has_blas();
  // cuBLAS stores matrices column by column, so that it reads ours as their transposes: this is
  // c^T = b^T a^T.
  const float one = 1, zero = 0;
  cuda::gemm::check_blas(
      "cublasGemmStridedBatchedEx",
      cublasGemmStridedBatchedEx(
          current_blas_handle(), right.transposed, left.transposed, int(P), int(M), int(K), &one,
          right.x.const_data_ptr(), cuda::gemm::kFloat32, int(right.next), right.x.stride(0),
          left.x.const_data_ptr(), cuda::gemm::kFloat32, int(left.next), left.x.stride(0), &zero,
          c.mutable_data_ptr(), cuda::gemm::kFloat32, int(P), M * P, int(N),
          rounds ? cuda::gemm::kTf32 : cuda::gemm::kFp32, cuda::gemm::kDefaultAlgorithm));
  return c;
}

}  // namespace flashcell
