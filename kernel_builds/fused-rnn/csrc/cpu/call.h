// How ops.cpp runs a sequence op on the CPU. cuda/call.h has the same functions.
#pragma once
#include <algorithm>
#include <vector>

#include "../checks.h"
#include "host.h"

namespace flashcell {

inline Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype) {
  Tensor tensor = torch::stable::new_empty(like, shape, dtype);
  prefer_huge_pages(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
  return tensor;
}

inline ScalarType saved_dtype(const Tensor& x) { return state_dtype(x); }

inline bool takes_bias_in(ScalarType, int64_t) { return false; }

inline Tensor input(const Tensor& x) {  // x as the engine reads it
  return x.stride(4) != 1 && x.size(4) > 1 ? torch::stable::contiguous(x) : x;
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
inline std::vector<Sequence> sequences(const Tensor& /*like*/, int64_t B, int64_t T,
                                       const OptionalTensor& lengths,
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

template <typename Cell>
void run(const ForwardParams& params, Dtype dtype, bool /*tf32*/, const Tensor& /*like*/) {
  backend().forward(AllCells::index_of<Cell>(), dtype, params, host());
}

template <typename Cell>
void run(const BackwardParams& params, Dtype dtype, bool /*tf32*/, const Tensor& /*like*/) {
  backend().backward(AllCells::index_of<Cell>(), dtype, params, host());
}

}  // namespace flashcell
