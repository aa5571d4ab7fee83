// Runs the copies and products of ../stack/params.h on the CPU.
#pragma once
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>
#include <vector>

#include "../stack/params.h"
#include "call.h"

namespace flashcell {

// Calls `function` with a value of the type that `dtype` names.
template <typename Function>
void with_type(Dtype dtype, Function function) {
  switch (dtype) {
    case Dtype::kFloat:
      return function(float());
    case Dtype::kDouble:
      return function(double());
    case Dtype::kHalf:
      return function(c10::Half());
    case Dtype::kBFloat16:
      return function(c10::BFloat16());
  }
}

template <typename Out, typename In>
void copy_rows(const Copy& c, int64_t begin, int64_t end) {
  using Wide = std::conditional_t<std::is_same_v<In, double>, double, float>;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t k = row % c.size[2], j = row / c.size[2] % c.size[1];
    const int64_t i = row / (c.size[1] * c.size[2]);
    int64_t to = i * c.out_stride[0], from = i * c.in_stride[0];
    if (c.packed.begins != nullptr) {
      const int64_t length = c.packed.lengths[j];
      if (k >= length) continue;
      const int64_t packed = c.packed.begins[k] + j;
      const int64_t engine = c.packed.firsts[j] + (c.turns ? length - 1 - k : k);
      to += (c.out_is_engine ? engine : packed) * c.out_stride[2];
      from += (c.out_is_engine ? packed : engine) * c.in_stride[2];
    } else {
      to += j * c.out_stride[1] + k * c.out_stride[2];
      from += j * c.in_stride[1] + k * c.in_stride[2];
    }
    Out* out = static_cast<Out*>(c.out) + to;
    const In* in = static_cast<const In*>(c.in) + from;
    const int64_t n = c.size[3], to_next = c.out_stride[3], next = c.in_stride[3];
    if (c.plus != nullptr) {
      const int64_t* strides = c.plus_stride;
      const In* plus =
          static_cast<const In*>(c.plus) + i * strides[0] + j * strides[1] + k * strides[2];
      for (int64_t x = 0; x < n; ++x) {
        out[x * to_next] = Out(Wide(in[x * next]) + Wide(plus[x * strides[3]]));
      }
    } else if (std::is_same_v<Out, In> && to_next == 1 && next == 1) {
      std::memcpy(out, in, size_t(n) * sizeof(In));
    } else {
      for (int64_t x = 0; x < n; ++x) out[x * to_next] = Out(Wide(in[x * next]));
    }
    for (int64_t x = n; x < c.padded; ++x) out[x * to_next] = Out(Wide(0));
  }
}

inline void run_copies(const std::vector<Copy>& copies, const Tensor& /*like*/) {
  constexpr int64_t kElementsOfThread = 32768;
  for (const Copy& c : copies) {
    const int64_t rows = c.size[0] * c.size[1] * c.size[2];
    if (c.count() == 0) continue;
    with_type(c.out_type, [&](auto out) {
      with_type(c.in_type, [&](auto in) {
        const auto run = [&c](int64_t begin, int64_t end) {
          copy_rows<decltype(out), decltype(in)>(c, begin, end);
        };
        if (c.count() <= kElementsOfThread) return run(0, rows);
        torch::stable::parallel_for(0, rows, (kElementsOfThread + c.size[3] - 1) / c.size[3], run);
      });
    });
  }
}

// Fills `begins` [T], `firsts` [B] and `lengths` [B]; the engines have one document after another.
inline void write_packed_rows(const std::vector<int64_t>& batch_sizes, Tensor& begins,
                              Tensor& firsts, Tensor& lengths) {
  const int64_t T = int64_t(batch_sizes.size()), B = batch_sizes[0];
  auto* const begin = (int64_t*)begins.mutable_data_ptr();
  auto* const first = (int64_t*)firsts.mutable_data_ptr();
  auto* const length = (int64_t*)lengths.mutable_data_ptr();
  int64_t row = 0;
  for (int64_t t = 0; t < T; ++t) {
    begin[t] = row, row += batch_sizes[t];
    const int64_t next = t + 1 < T ? batch_sizes[t + 1] : 0;
    for (int64_t b = next; b < batch_sizes[t]; ++b) length[b] = t + 1;
  }
  row = 0;
  for (int64_t b = 0; b < B; ++b) first[b] = row, row += length[b];
}

inline int64_t engine_rows(int64_t /*B*/, int64_t /*T*/, int64_t total) { return total; }

// The sequences of a packed call, as sequences() makes those of a batch; `stride` is that between
// rows of x.
inline std::vector<Sequence> packed_sequences(const Tensor& firsts, const Tensor& lengths,
                                              int64_t /*T*/, int64_t stride) {
  std::vector<Sequence> list;
  const auto* first = (const int64_t*)firsts.const_data_ptr();
  const auto* length = (const int64_t*)lengths.const_data_ptr();
  for (int64_t b = 0; b < firsts.numel(); ++b) {
    list.push_back({b, first[b], first[b] * stride, length[b], 0});
  }
  return list;
}

inline bool copies_rows(const Product& /*p*/, Dtype /*dtype*/, bool /*tf32*/) { return false; }

inline void multiply(const Product& p, Dtype dtype, bool /*tf32*/, const Tensor& /*like*/) {
  backend().gemm(dtype,
                 {p.M, p.N, p.K, p.batch, 1, p.a, p.a_batch, p.a_m, p.a_k, p.b, 0, p.b_k, p.b_n,
                  p.c, p.c_batch, p.c_m, nullptr},
                 host());
}

}  // namespace flashcell
