// Runs the copies and products of ../../stack/params.h on CUDA.
#pragma once
#include "../../stack/params.h"
#include "../call.h"
#include "../gemm/blas.h"

namespace flashcell {

inline void run_copies(const std::vector<Copy>& copies, const Tensor& like) {
  cuda::copy_all(copies.data(), int64_t(copies.size()), current_stream(like));
}

// Fills `begins` [T], `firsts` [B] and `lengths` [B]; for the engines every sequence has T rows.
inline void write_packed_rows(const std::vector<int64_t>& batch_sizes, Tensor& begins,
                              Tensor& firsts, Tensor& lengths) {
  cuda::write_packed_rows(batch_sizes.data(), int64_t(batch_sizes.size()),
                          (int64_t*)begins.mutable_data_ptr(), (int64_t*)firsts.mutable_data_ptr(),
                          (int64_t*)lengths.mutable_data_ptr(), current_stream(begins));
}

inline int64_t engine_rows(int64_t B, int64_t T, int64_t /*total*/) { return B * T; }

inline SequenceTable packed_sequences(const Tensor& /*firsts*/, const Tensor& lengths, int64_t T,
                                      int64_t stride) {
  return sequences(lengths, lengths.numel(), T, lengths, std::nullopt, T * stride, stride);
}

// Products of this many multiplications take an H100 about 2 us in exact fp32; TF32 saves time from
// here on.
inline constexpr int64_t kTf32Products = 50'000'000;

// dweight of wide heads is one large product per head, which cuBLAS does best. For narrow heads it
// is tall and thin, and our own kernel is faster.
inline constexpr int64_t kWidestOwnDweight = 256;

// How cuBLAS reads a matrix: the elements of a row are contiguous, or those of a column, and the
// next row or column begins `next` elements later, which must be at least its length.
struct Matrix {
  bool transposed;  // the elements of a column are contiguous
  int64_t next;

  Matrix(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
    transposed = column_stride != 1 || (columns > 1 && row_stride < columns);
    next = transposed ? column_stride : row_stride;
    const int64_t least = transposed ? rows : columns;
    if (next < least && (transposed ? columns : rows) == 1) next = least;  // it is not read
  }
};

inline void multiply(const Product& p, Dtype dtype, bool tf32, const Tensor& /*like*/) {
  using namespace cuda::gemm;
  check_has_blas();
  const bool fp32 = dtype == Dtype::kFloat;
  const DataType io = fp32 ? kFloat32 : dtype == Dtype::kHalf ? kFloat16 : kBFloat16;
  const bool rounds = fp32 && tf32 && p.M * p.N * p.K * p.batch >= kTf32Products;
  const float one = 1, zero = 0;
  // cuBLAS stores matrices column by column, so that it reads ours as their transposes: this is
  // c^T = b^T a^T.
  const Matrix b(p.K, p.N, p.b_k, p.b_n), a(p.M, p.K, p.a_m, p.a_k);
  check_blas("cublasGemmStridedBatchedEx",
             cublasGemmStridedBatchedEx(
                 current_blas_handle(), b.transposed, a.transposed, int(p.N), int(p.M), int(p.K),
                 &one, p.b, io, int(b.next), 0, p.a, io, int(a.next), p.a_batch, &zero, p.c, io,
                 int(p.c_m), p.c_batch, int(p.batch), rounds ? kTf32 : kFp32, kDefaultAlgorithm));
}

}  // namespace flashcell
