// Argument checks at the door: every message names the argument, what it was and what it must be.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "cpu/host.h"

namespace flashcell {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

inline std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

inline Shape shape_of(const Tensor& tensor) {
  Shape shape;
  for (int64_t i = 0; i < tensor.dim(); ++i) shape.push_back(tensor.size(i));
  return shape;
}

inline void check_rank(const Tensor& tensor, const char* name, int64_t rank, const char* layout) {
  STD_TORCH_CHECK(tensor.dim() == rank, name, " must be ", layout, ", got shape ",
                  to_string(shape_of(tensor)));
}

inline void check_shape(const Tensor& tensor, const char* name, const Shape& expected) {
  STD_TORCH_CHECK(shape_of(tensor) == expected, name, " must have shape ", to_string(expected),
                  ", got ", to_string(shape_of(tensor)));
}

inline void check_dtype(const Tensor& tensor, const char* name, ScalarType expected) {
  STD_TORCH_CHECK(tensor.scalar_type() == expected, name, " must have dtype ",
                  torch::headeronly::toString(expected), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
}

inline Dtype io_dtype(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat;
    case ScalarType::Double:
      return Dtype::kDouble;
    case ScalarType::Half:
      return Dtype::kHalf;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      break;
  }
  STD_TORCH_CHECK(false, name, " must be float32, float64, float16 or bfloat16, got ",
                  torch::headeronly::toString(tensor.scalar_type()));
}

inline ScalarType state_dtype(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A contiguous operand of the given shape and dtype.
inline Tensor operand(const Tensor& tensor, const char* name, const Shape& shape,
                      ScalarType dtype) {
  check_shape(tensor, name, shape);
  check_dtype(tensor, name, dtype);
  return dense(tensor);
}

inline OptionalTensor operand(const OptionalTensor& tensor, const char* name, const Shape& shape,
                              ScalarType dtype) {
  if (!tensor) return std::nullopt;
  return operand(*tensor, name, shape, dtype);
}

inline const void* pointer(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

inline Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype) {
  Tensor tensor = torch::stable::new_empty(like, shape, dtype);
  prefer_huge_pages(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
  return tensor;
}

inline Shape read_integers(const Tensor& tensor, const char* name, int64_t count) {
  check_rank(tensor, name, 1, "one-dimensional");
  STD_TORCH_CHECK(count < 0 || tensor.size(0) == count, name, " must have ", count,
                  " entries, got ", tensor.size(0));
  const bool is_int = tensor.scalar_type() == ScalarType::Int;
  STD_TORCH_CHECK(is_int || tensor.scalar_type() == ScalarType::Long, name,
                  " must be int32 or int64, got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  const Tensor values = dense(tensor);
  Shape result(values.numel());
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = is_int ? values.const_data_ptr<int32_t>()[i] : values.const_data_ptr<int64_t>()[i];
  }
  return result;
}

// Rows, documents and padded rows become one list of sequences, longest first.
inline std::vector<Sequence> sequences(int64_t B, int64_t T, const OptionalTensor& lengths,
                                       const OptionalTensor& cu_seqlens, int64_t x_batch,
                                       int64_t x_time) {
  std::vector<Sequence> list;
  if (cu_seqlens) {
    STD_TORCH_CHECK(!lengths, "lengths and cu_seqlens exclude each other");
    STD_TORCH_CHECK(B == 1, "cu_seqlens needs x of shape [1, total, ...], got batch ", B);
    const Shape at = read_integers(*cu_seqlens, "cu_seqlens", -1);
    STD_TORCH_CHECK(!at.empty() && at.front() == 0, "cu_seqlens must start with 0");
    STD_TORCH_CHECK(at.back() == T, "cu_seqlens must end with the total length ", T, ", got ",
                    at.back());
    for (size_t s = 0; s + 1 < at.size(); ++s) {
      STD_TORCH_CHECK(at[s] <= at[s + 1], "cu_seqlens must not decrease, got ", at[s], " before ",
                      at[s + 1]);
      list.push_back({int64_t(s), at[s], at[s] * x_time, at[s + 1] - at[s], 0});
    }
  } else {
    Shape steps(B, T);
    if (lengths) steps = read_integers(*lengths, "lengths", B);
    for (int64_t b = 0; b < B; ++b) {
      STD_TORCH_CHECK(0 <= steps[b] && steps[b] <= T, "lengths must be in 0..", T, ", got ",
                      steps[b], " at ", b);
      list.push_back({b, b * T, b * x_batch, steps[b], T - steps[b]});
    }
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const Sequence& a, const Sequence& b) { return a.length > b.length; });
  return list;
}

}  // namespace flashcell
