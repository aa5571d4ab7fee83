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
    const int64_t k = row % c.padded_rows, j = row / c.padded_rows % c.size[1];
    const int64_t i = row / (c.size[1] * c.padded_rows);
    int64_t to = i * c.out_stride[0], from = i * c.in_stride[0];
    if (c.packed.begins != nullptr) {
      const int64_t length = c.packed.lengths[j];
      if (k >= length) continue;  // the engines have no row there either
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
    const int64_t n = k < c.size[2] ? c.size[3] : 0;
    const int64_t to_next = c.out_stride[3], next = c.in_stride[3];
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
    const int64_t rows = c.size[0] * c.size[1] * c.padded_rows;
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

// Writes the arrays of `rows` and the table of the sequences, [B]; the engines have one document
// after another. `stride` is that between rows of x.
inline void write_packed_rows(const std::vector<int64_t>& batch_sizes, const PackedRows& rows,
                              Sequence* table, int64_t stride, const Tensor& /*like*/) {
  const int64_t T = int64_t(batch_sizes.size()), B = batch_sizes[0];
  int64_t row = 0;
  for (int64_t t = 0; t < T; ++t) {
    rows.begins[t] = row, row += batch_sizes[t];
    const int64_t next = t + 1 < T ? batch_sizes[t + 1] : 0;
    for (int64_t b = next; b < batch_sizes[t]; ++b) rows.lengths[b] = t + 1;
  }
  row = 0;
  for (int64_t b = 0; b < B; ++b) {
    rows.firsts[b] = row, row += rows.lengths[b];
    table[b] = {b, rows.firsts[b], rows.firsts[b] * stride, rows.lengths[b], 0};
  }
}

inline int64_t engine_rows(int64_t /*B*/, int64_t /*T*/, int64_t total) { return total; }

// The sequences of a packed call, as sequences() makes those of a batch.
inline std::vector<Sequence> packed_sequences(const Tensor& table) {
  const auto* first = (const Sequence*)table.const_data_ptr();
  return {first, first + table.size(0)};
}

inline bool copies_rows(const Product& /*p*/, Dtype /*dtype*/, bool /*tf32*/) { return false; }

inline void multiply(const Product& p, Dtype dtype, bool /*tf32*/, const Tensor& /*like*/) {
  backend().gemm(dtype,
                 {p.M, p.N, p.K, p.batch, 1, p.a, p.a_batch, p.a_m, p.a_k, p.b, 0, p.b_k, p.b_n,
                  p.c, p.c_batch, p.c_m, nullptr},
                 host());
}

}  // namespace flashcell
