// One step of a torch.nn cell on the CPU whose tensors are dense and have the dtype of the states:
// the engine and the product read them where they are, so that the call takes few allocations.
#pragma once
#include <cstring>

#include "../cpu/call.h"

namespace flashcell {

template <typename Cell>
class CellStep {
  static constexpr int64_t G = Cell::kGates, K = Cell::kStates, R = Cell::kBias;
  // The gates whose recurrent bias is added to the input's: the first ones.
  static constexpr int64_t kSummed = 2 * G - R;

 public:
  // Whether the call is one of these. Of a call that is none, Layers checks every argument.
  bool fits(const Tensor& x, const std::vector<Tensor>& states,
            const std::vector<Tensor>& weights) {
    io_ = x.scalar_type();
    if (io_ != ScalarType::Float && io_ != ScalarType::Double) return false;
    B_ = x.size(0), I_ = x.size(1), D_ = weights[1].size(1);
    if (B_ == 0 || I_ == 0 || D_ == 0 || !is_plain(x, {B_, I_})) return false;
    if (!is_plain(weights[0], {G * D_, I_}) || !is_plain(weights[1], {G * D_, D_})) return false;
    for (size_t i = 2; i < weights.size(); ++i) {
      if (!is_plain(weights[i], {G * D_})) return false;
    }
    for (const Tensor& state : states) {
      if (!is_plain(state, {B_, D_})) return false;
    }
    return true;
  }

  // Returns the next states.
  std::vector<Tensor> run(const Tensor& x, const std::vector<Tensor>& states,
                          const std::vector<Tensor>& weights) const {
    const int64_t count = B_ * D_, bytes = count * x.element_size();
    std::vector<Tensor> next;
    for (int64_t k = 0; k < K; ++k) next.push_back(new_tensor(x, {B_, D_}, io_));
    // The gates [B, G, D], the states [K, B, D] and the biases [R, D].
    const bool has_bias = weights.size() > 2;
    const int64_t elements = (G + K) * count + (has_bias && R != G ? R * D_ : 0);
    Tensor scratch = new_tensor(x, {elements}, io_);
    char* const gates = (char*)scratch.mutable_data_ptr();
    char* const last = gates + G * bytes;
    for (size_t k = 0; k < states.size(); ++k) {
      std::memcpy(last + int64_t(k) * bytes, states[k].const_data_ptr(), bytes);
    }

    const Dtype dtype = io_dtype(x, "x");
    backend().gemm(dtype,
                   {B_, G * D_, I_, 1, 1, x.const_data_ptr(), 0, I_, 1, weights[0].const_data_ptr(),
                    0, 1, I_, gates, 0, G * D_, has_bias ? weights[2].const_data_ptr() : nullptr},
                   host());
    std::vector<Sequence> sequences;
    sequences.reserve(B_);
    for (int64_t b = 0; b < B_; ++b) sequences.push_back({b, b, b * G * D_, 1, 0});
    ForwardParams p{};
    p.S = B_, p.N = 1, p.D = D_, p.T = 1, p.sequences = sequences.data();
    p.weight = weights[1].const_data_ptr(), p.x = gates;
    p.x_batch = p.x_time = p.x_head = G * D_, p.x_gate = D_;
    if (has_bias) p.bias = recurrent_bias(weights[3], last + K * bytes);
    p.initial = states.empty() ? nullptr : last, p.last = last;
    p.h = next[0].mutable_data_ptr(), p.packs_one_step = true;
    backend().forward(AllCells::index_of<Cell>(), dtype, p, host());
    for (int64_t k = 1; k < K; ++k) {
      std::memcpy(next[k].mutable_data_ptr(), last + k * bytes, bytes);
    }
    return next;
  }

 private:
  int64_t B_ = 0, I_ = 0, D_ = 0;
  ScalarType io_{};

  bool is_plain(const Tensor& tensor, std::initializer_list<int64_t> shape) const {
    return tensor.scalar_type() == io_ && has_shape(tensor, shape) && tensor.is_contiguous();
  }

  // Returns the rows [R, D] that the engine adds. The product has added b_ih, so that they are
  // b_hh, with zeros for the gates of which the recurrent bias has a row of its own.
  static const void* recurrent_bias(const Tensor& b_hh, char* rows) {
    if (R == G) return b_hh.const_data_ptr();
    const int64_t gate = b_hh.numel() / G * b_hh.element_size();
    const char* const given = (const char*)b_hh.const_data_ptr();
    std::memcpy(rows, given, kSummed * gate);
    std::memset(rows + kSummed * gate, 0, (G - kSummed) * gate);
    std::memcpy(rows + G * gate, given + kSummed * gate, (G - kSummed) * gate);
    return rows;
  }
};

}  // namespace flashcell
