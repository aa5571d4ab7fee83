// Services a CUDA engine needs from torch: memory, the stream, and the table of sequences.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/checks.h"

// Declared as in CUDA's headers, so that ops.cpp need not include them.
using cudaStream_t = struct CUstream_st*;

namespace flashcell::cuda {

// Launches the kernel that makes the table of sequences, longest first, from a batch's lengths or
// from cu_seqlens. Values out of range are clamped, so nothing is read or written out of bounds.
void sequence_table(Sequence* table, int64_t S, int64_t T, const void* values, bool is_int32,
                    bool is_cu_seqlens, int64_t x_batch, int64_t x_time, cudaStream_t stream);

}  // namespace flashcell::cuda

namespace flashcell {

inline Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype) {
  return empty(shape, dtype, aoti_torch_device_type_cuda(), like.get_device_index());
}

inline cudaStream_t current_stream(const Tensor& like) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// torch's cuBLAS handle of this thread, on the current stream, with torch's workspace.
inline void* current_blas_handle() {
  void* handle = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
  return handle;
}

// Makes the table of sequences on the device, so that the host never waits for lengths or offsets.
struct SequenceTable {
  int64_t count;
  OptionalTensor table;  // [S] Sequence, or none if every row is one whole sequence
  int64_t size() const { return count; }
  const Sequence* data() const {
    return table ? static_cast<const Sequence*>(table->const_data_ptr()) : nullptr;
  }
};

inline SequenceTable sequences(const Tensor& like, int64_t B, int64_t T,
                               const OptionalTensor& lengths, const OptionalTensor& cu_seqlens,
                               int64_t x_batch, int64_t x_time) {
  if (!lengths && !cu_seqlens) return {B, std::nullopt};
  STD_TORCH_CHECK(!lengths || !cu_seqlens, "lengths and cu_seqlens exclude each other");
  const char* name = lengths ? "lengths" : "cu_seqlens";
  const Tensor values = dense(lengths ? *lengths : *cu_seqlens);
  check_rank(values, name, 1, "one-dimensional");
  const bool is_int = values.scalar_type() == ScalarType::Int;
  STD_TORCH_CHECK(is_int || values.scalar_type() == ScalarType::Long, name,
                  " must be int32 or int64, got ",
                  torch::headeronly::toString(values.scalar_type()));
  if (lengths) check_shape(values, name, {B});
  if (cu_seqlens) {
    STD_TORCH_CHECK(B == 1, "cu_seqlens needs x of shape [1, total, ...], got batch ", B);
    STD_TORCH_CHECK(values.numel() > 0, "cu_seqlens must start with 0");
  }
  const int64_t S = lengths ? B : values.numel() - 1;
  Tensor table = new_tensor(like, {S * int64_t(sizeof(Sequence))}, ScalarType::Byte);
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  cuda::sequence_table(static_cast<Sequence*>(table.mutable_data_ptr()), S, T,
                       values.const_data_ptr(), is_int, bool(cu_seqlens), x_batch, x_time,
                       current_stream(like));
  return {S, table};
}

}  // namespace flashcell
