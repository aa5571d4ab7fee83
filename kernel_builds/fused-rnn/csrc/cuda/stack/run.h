// Runs the copies and products of ../../stack/params.h on CUDA.
#pragma once
#include <array>
#include <limits>

#include "../../stack/params.h"
#include "../call.h"
#include "../gemm/blas.h"
#include "../gemm/split.h"

namespace flashcell {

inline void run_copies(const std::vector<Copy>& copies, const Tensor& like) {
  cuda::copy_all(copies.data(), int64_t(copies.size()), current_stream(like));
}

// Writes the arrays of `rows` and the table of the sequences, [B]; for the engines each of them has
// T rows. `stride` is that between rows of x.
inline void write_packed_rows(const std::vector<int64_t>& batch_sizes, const PackedRows& rows,
                              Sequence* table, int64_t stride, const Tensor& like) {
  cuda::write_packed_rows(batch_sizes.data(), int64_t(batch_sizes.size()), rows, table, stride,
                          current_stream(like));
}

inline int64_t engine_rows(int64_t B, int64_t T, int64_t /*total*/) { return B * T; }

// The sequences of a packed call, as sequences() makes those of a batch.
inline SequenceTable packed_sequences(const Tensor& table) { return {table.size(0), table}; }

// Products of this many multiplications take an H100 about 2 us in exact fp32; TF32 saves time from
// here on.
inline constexpr int64_t kTf32Products = 50'000'000;

// What computes the gradients of the recurrent weights of all heads [G, P, P]: our kernel, or
// cuBLAS in one product for each head or in one for each head and gate.
enum class DweightBy { kKernel, kHeads, kGates };

// cuBLAS computes the gates of one head, or a single gate, as one product, which is faster than our
// kernel everywhere. The gates of several heads are a batch of products, whose sums it does not
// divide among thread blocks, so they are fast with few rows or wide heads only. One product for
// each gate pays off from `least` multiplications on. Fitted to 2,551 calls of two heads on an H200
// (NOTEBOOK.md, "The gradient of the recurrent weight").
inline DweightBy dweight_by(int64_t heads, int64_t gates, int64_t P, int64_t rows, Dtype dtype,
                            bool tf32) {
  if (rows > std::numeric_limits<int>::max()) return DweightBy::kKernel;  // cuBLAS takes an int
  if (heads == 1 || gates == 1) return DweightBy::kHeads;
  const bool has_16_bits = dtype != Dtype::kFloat, is_narrow = P <= 256;
  const double wide_least = has_16_bits ? 4e9 : tf32 ? 1.4e9 : 3e8;
  const double least = is_narrow ? (has_16_bits ? 2.6e9 : 1.5e9) : wide_least;
  const bool is_large = double(P) * double(P) * double(rows) >= least;
  if (is_large && !(has_16_bits && P > 448)) return DweightBy::kGates;
  const int64_t few_rows = has_16_bits ? (P > 160 ? 16384 : 1024) : 256;
  return is_narrow && rows > few_rows ? DweightBy::kKernel : DweightBy::kHeads;
}

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

inline cuda::gemm::DataType blas_type(Dtype dtype) {
  using namespace cuda::gemm;
  return dtype == Dtype::kFloat ? kFloat32 : dtype == Dtype::kHalf ? kFloat16 : kBFloat16;
}

// Computes the product with c of the type `out`, or adds it to c.
inline void multiply_into(const Product& p, cuda::gemm::DataType out, bool adds, Dtype dtype,
                          bool tf32) {
  using namespace cuda::gemm;
  check_has_blas();
  const bool fp32 = dtype == Dtype::kFloat;
  const DataType io = blas_type(dtype);
  const bool rounds = fp32 && tf32 && p.M * p.N * p.K * p.batch >= kTf32Products &&
                      cuda::has_blas_tf32(cuda::current_device());
  const float one = 1, before = adds ? 1 : 0;
  // cuBLAS stores matrices column by column, so that it reads ours as their transposes: this is
  // c^T = b^T a^T.
  const Matrix b(p.K, p.N, p.b_k, p.b_n), a(p.M, p.K, p.a_m, p.a_k);
  check_blas(
      "cublasGemmStridedBatchedEx",
      cublasGemmStridedBatchedEx(current_blas_handle(), b.transposed, a.transposed, int(p.N),
                                 int(p.M), int(p.K), &one, p.b, io, int(b.next), p.b_batch, p.a, io,
                                 int(a.next), p.a_batch, &before, p.c, out, int(p.c_m), p.c_batch,
                                 int(p.batch), rounds ? kTf32 : kFp32, kDefaultAlgorithm));
}

// Computes large products of exact fp32 in halves, where that is faster. Returns whether it did.
inline bool multiply_split(const Product& p, Dtype dtype, bool tf32, bool adds,
                           const Tensor& like) {
  if (dtype != Dtype::kFloat || tf32 || p.M * p.N * p.K * p.batch == 0) return false;
  const cuda::Device device = cuda::current_device();
  const auto of = [](const void* data, int64_t i) { return static_cast<const float*>(data) + i; };
  std::vector<cuda::gemm::Matrices> products;
  for (int64_t i = 0; i < p.batch; ++i) {
    products.push_back({p.M, p.N, p.K, of(p.a, i * p.a_batch), p.a_m, p.a_k, of(p.b, i * p.b_batch),
                        p.b_k, p.b_n, static_cast<float*>(p.c) + i * p.c_batch, p.c_m, adds});
  }
  if (!products[0].split_is_faster(device)) return false;
  Tensor scratch = new_tensor(like, {products[0].scratch_bytes(device)}, ScalarType::Byte);
  for (const auto& one : products) {
    multiply_matrices(one, device, scratch.mutable_data_ptr(), current_stream(like));
  }
  return true;
}

inline void multiply_as_is(const Product& p, Dtype dtype, bool tf32) {
  multiply_into(p, blas_type(dtype), false, dtype, tf32);
}

// Does the same with c in fp32, or adds the product to c.
inline void multiply_wide(const Product& p, Dtype dtype, bool tf32, bool adds, const Tensor& like) {
  if (multiply_split(p, dtype, tf32, adds, like)) return;
  multiply_into(p, cuda::gemm::kFloat32, adds, dtype, tf32);
}

// Adds the product to c.
inline void add_product(const Product& p, Dtype dtype, bool tf32, const Tensor& like) {
  if (multiply_split(p, dtype, tf32, true, like)) return;
  multiply_into(p, blas_type(dtype), true, dtype, tf32);
}

// Whether an LSTM with a projection of O units is faster in inference if every step multiplies by R
// [G D, O] and W_hr [O, D], than if all steps multiply by R W_hr, a product of [G D, O] and [O, D].
// A step's products take 12 us more than the recurrence's (H200), and read R.
inline bool is_faster_by_steps(int64_t B, int64_t T, int64_t G, int64_t D, int64_t O, Dtype dtype,
                               bool tf32) {
  constexpr int64_t kMostSequences = 64;  // the step engine's cells are slow with more
  if (T == 1 || B > kMostSequences || dtype == Dtype::kDouble) return false;
  const bool fp32 = dtype == Dtype::kFloat;
  const double per_us = fp32 ? (tf32 ? 300e6 : 100e6) : 500e6;  // floating-point operations
  const double R = double(G * D * O);
  const double whole = 2 * R * double(D) / per_us;
  const double step = 12 + R * (fp32 ? 4 : 2) / 3e6;
  return double(T) * step < whole;
}

// Rows of contiguous elements, `pitch` elements apart; matrices of a batch are `next` apart.
struct Rows {
  const void* data;
  int64_t batch, next, rows, columns, pitch;
};

// Large products of matrices whose rows are no whole vectors of 16 bytes, which slows cuBLAS's
// kernels down, go through copies that are padded with zeros, from this many multiplications on.
inline constexpr int64_t kPaddedProducts = 500'000'000;

// The length of a copied row: a multiple of 32 bytes, which is what the L2 cache reads. Rows that
// are whole vectors stay as they are.
inline int64_t padded_length(int64_t n, Dtype dtype) {
  const int64_t vector = dtype == Dtype::kFloat ? 4 : 8;
  return n % vector == 0 ? n : (n + 2 * vector - 1) / (2 * vector) * (2 * vector);
}

// Whether a product of rows of a, which are contiguous, goes through a copy of a.
inline bool copies_rows(const Product& p, Dtype dtype, bool tf32) {
  const bool splits = dtype == Dtype::kFloat && !tf32;  // exact products may read them as they are
  return p.a_k == 1 && !splits && padded_length(p.K, dtype) != p.K &&
         p.M * p.N * p.K * p.batch >= kPaddedProducts;
}

// Returns a copy of rows to `out`, which gets zeros up to `padded` elements of a row, and up to
// `padded_rows` rows.
inline Copy copy_of(const Rows& from, void* out, int64_t next, int64_t pitch, int64_t padded,
                    int64_t padded_rows, Dtype dtype) {
  Copy copy{};
  copy.out = out, copy.in = from.data, copy.out_type = copy.in_type = dtype;
  copy.size[0] = 1, copy.size[1] = from.batch, copy.size[2] = from.rows;
  copy.size[3] = from.columns, copy.padded = padded, copy.padded_rows = padded_rows;
  copy.in_stride[1] = from.next, copy.in_stride[2] = from.pitch, copy.in_stride[3] = 1;
  copy.out_stride[1] = next, copy.out_stride[2] = pitch, copy.out_stride[3] = 1;
  return copy;
}

// Returns dense matrices with zeros up to `rows` rows of `columns`, which a copy will write.
inline Tensor padded(const Rows& from, int64_t rows, int64_t columns, Dtype dtype,
                     std::vector<Copy>& copies, const Tensor& like) {
  Tensor to = new_tensor(like, {from.batch * rows * columns}, like.scalar_type());
  void* const out = to.mutable_data_ptr();
  copies.push_back(copy_of(from, out, rows * columns, columns, columns, rows, dtype));
  return to;
}

inline void multiply(const Product& p, Dtype dtype, bool tf32, const Tensor& like) {
  if (multiply_split(p, dtype, tf32, false, like)) return;
  const bool by_depth = p.a_k == 1 || p.b_k == 1;  // whether K runs along rows
  const int64_t K = by_depth ? padded_length(p.K, dtype) : p.K, N = padded_length(p.N, dtype);
  if ((K == p.K && N == p.N) || p.M * p.N * p.K * p.batch < kPaddedProducts) {
    return multiply_as_is(p, dtype, tf32);
  }
  Product q = p;
  q.K = K, q.N = N;
  std::vector<Copy> copies;
  Tensor a, b, c;
  if (K != p.K) {
    const bool along = p.a_k == 1;
    if (p.group > 0) {
      const Rows rows{p.a, p.M / p.group, p.a_group, p.group, p.K, p.a_m};
      a = padded(rows, p.group, K, dtype, copies, like);
    } else {
      const Rows rows = along ? Rows{p.a, p.batch, p.a_batch, p.M, p.K, p.a_m}
                              : Rows{p.a, p.batch, p.a_batch, p.K, p.M, p.a_k};
      a = padded(rows, along ? p.M : K, along ? K : p.M, dtype, copies, like);
    }
    q.a = a.const_data_ptr(), q.a_batch = p.M * K;
    q.a_m = along ? K : 1, q.a_k = along ? 1 : p.M;
  }
  const bool along = p.b_k == 1;
  const Rows rows = along ? Rows{p.b, 1, 0, p.N, p.K, p.b_n} : Rows{p.b, 1, 0, p.K, p.N, p.b_k};
  b = padded(rows, along ? N : K, along ? K : N, dtype, copies, like);
  q.b = b.const_data_ptr(), q.b_k = along ? 1 : N, q.b_n = along ? K : 1;
  if (N != p.N) {
    c = new_tensor(like, {p.batch * p.M * N}, like.scalar_type());
    q.c = c.mutable_data_ptr(), q.c_batch = p.M * N, q.c_m = N;
  }
  run_copies(copies, like);
  multiply_as_is(q, dtype, tf32);
  if (N == p.N) return;
  const Rows product{q.c, p.batch, q.c_batch, p.M, p.N, N};
  run_copies({copy_of(product, p.c, p.c_batch, p.c_m, p.N, p.M, dtype)}, like);
}

}  // namespace flashcell
