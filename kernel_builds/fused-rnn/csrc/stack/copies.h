// Collects the copies that a stack of layers asks of its device (params.h).
#pragma once
#include "common/torch/op.h"
#include "params.h"
#if defined(CUDA_KERNEL)
#include "../cuda/stack/run.h"
#else
#include "../cpu/linear.h"
#include "../cpu/stack.h"
#endif

#include <array>
#include <vector>

namespace flashcell {

using Tensors = std::vector<Tensor>;

inline char* at(Tensor& tensor, int64_t element) {
  return (char*)tensor.mutable_data_ptr() + element * tensor.element_size();
}
inline const char* at(const Tensor& tensor, int64_t element) {
  return (const char*)tensor.const_data_ptr() + element * tensor.element_size();
}

// Collects copies, and runs those that it has when `run` is called. A tensor must live until then.
class Copies {
 public:
  explicit Copies(const Tensor& like) : like_(like) {}

  using Strides = std::array<int64_t, 4>;

  void add(Tensor& out, int64_t out_at, Strides out_strides, const Tensor& in, int64_t in_at,
           Strides in_strides, Strides sizes) {
    Copy copy{};
    copy.out = at(out, out_at), copy.in = at(in, in_at);
    copy.out_type = io_dtype(out, "a result"), copy.in_type = io_dtype(in, "a copy");
    for (int i = 0; i < 4; ++i) {
      copy.size[i] = sizes[i];
      copy.out_stride[i] = out_strides[i], copy.in_stride[i] = in_strides[i];
    }
    copy.padded = copy.size[3], copy.padded_rows = copy.size[2], copies_.push_back(copy);
  }

  // Makes the last copy write zeros behind each of its rows, up to so many elements, and behind its
  // rows, up to so many of them.
  void pad(int64_t elements) { copies_.back().padded = elements; }
  void pad(int64_t elements, int64_t rows) {
    copies_.back().padded = elements, copies_.back().padded_rows = rows;
  }
  // Makes the last copy add elements of `plus`.
  void plus(const Tensor& plus, int64_t plus_at, Strides strides) {
    Copy& copy = copies_.back();
    STD_TORCH_CHECK(io_dtype(plus, "a summand") == copy.in_type,
                    "summands must have one dtype, got ",
                    torch::headeronly::toString(plus.scalar_type()), " for one of them");
    copy.plus = at(plus, plus_at);
    for (int i = 0; i < 4; ++i) copy.plus_stride[i] = strides[i];
  }
  // Makes the last copy one between rows of a PackedSequence and the engines'.
  void map_rows(const PackedRows& packed, bool out_is_engine, bool turns) {
    Copy& copy = copies_.back();
    copy.packed = packed, copy.out_is_engine = out_is_engine, copy.turns = turns;
  }

  void run() {
    if (!copies_.empty()) run_copies(copies_, like_);
    copies_.clear();
  }

 private:
  const Tensor& like_;
  std::vector<Copy> copies_;
};

}  // namespace flashcell
