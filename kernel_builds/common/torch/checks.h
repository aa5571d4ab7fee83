// Argument checks: every message names the argument, what it was and what it must be.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "common/sequence.h"

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

// The description of a tensor that every check reads.
struct TensorView {
  int64_t rank = 0;
  int64_t *sizes = nullptr, *strides = nullptr;

  // Returns false without sizes and strides, or if elements are no numbers by themselves.
  bool read(const Tensor& tensor) {
    const AtenTensorHandle handle = tensor.get();
    int32_t layout = -1;
    if (aoti_torch_get_layout(handle, &layout) || layout != aoti_torch_layout_strided()) {
      return false;
    }
    try {
      tensor.scalar_type();
    } catch (const std::exception&) {
      return false;
    }
    return !aoti_torch_get_dim(handle, &rank) && !aoti_torch_get_sizes(handle, &sizes) &&
           !aoti_torch_get_strides(handle, &strides);
  }
};

inline void check_rank(const Tensor& tensor, const char* name, int64_t rank, const char* layout) {
  STD_TORCH_CHECK(tensor.dim() == rank, name, " must be ", layout, ", got shape ",
                  to_string(shape_of(tensor)));
}

inline bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != int64_t(sizes.size())) return false;
  int64_t i = 0;
  for (const int64_t size : sizes) {
    if (tensor.size(i++) != size) return false;
  }
  return true;
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

// Whether new memory is filled with bytes of 255, which are NaN in every floating-point dtype. The
// tests ask for it, so that elements which are read but never written show up.
inline bool fills_memory() {
  static const bool fills = [] {
    const char* wanted = std::getenv("FLASHCELL_FILL_MEMORY");
    return wanted != nullptr && *wanted != 0 && *wanted != '0';
  }();
  return fills;
}

inline void fill(Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  const bool integer =
      dtype == ScalarType::Byte || dtype == ScalarType::Int || dtype == ScalarType::Long;
  torch::stable::fill_(tensor, dtype == ScalarType::Byte ? 255 : integer ? -1 : std::nan(""));
}

// Returns a new tensor. torch::stable::new_empty would look the op up by name at every call.
inline Tensor empty(const Shape& shape, ScalarType dtype, int32_t device_type,
                    int32_t device_index) {
  namespace detail = torch::stable::detail;
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i] > 0 ? shape[i] : 1) strides[i] = stride;
  AtenTensorHandle tensor = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      int64_t(shape.size()), shape.data(), strides.data(), detail::to<int32_t>(detail::from(dtype)),
      device_type, device_index, &tensor);
  if (error) throw std::bad_alloc();
  Tensor result(tensor);
  if (fills_memory()) fill(result);
  return result;
}

// Returns a contiguous tensor that, on CUDA, is aligned for the widest loads: a slice of another
// tensor may not be.
inline Tensor dense(const Tensor& tensor) {
#if defined(CUDA_KERNEL)
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  if (tensor.is_contiguous() && !aligned) return torch::stable::clone(tensor);
#endif
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Checks shape and dtype, and returns the operand as a contiguous tensor.
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

}  // namespace flashcell
