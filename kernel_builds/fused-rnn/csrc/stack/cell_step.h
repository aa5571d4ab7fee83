// One step of a torch.nn cell on the CPU whose tensors are dense and have the dtype of the states:
// the engine and the products read them where they are, so that a call takes few allocations.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "../cpu/call.h"
#include "../cpu/stack.h"

namespace flashcell {

template <typename Cell>
class CellStep {
  static constexpr int64_t G = Cell::kGates, K = Cell::kStates, R = Cell::kBias;
  static constexpr int64_t V = Cell::kSaved;
  // The gates whose recurrent bias is added to the input's: the first ones.
  static constexpr int64_t kSummed = 2 * G - R;

 public:
  using Tensors = std::vector<Tensor>;

  // Whether this class can run the call. Shapes have been checked.
  bool fits(const Tensor& x, const Tensors& weights) {
    io_ = x.scalar_type();
    if (io_ != ScalarType::Float && io_ != ScalarType::Double) return false;
    B_ = x.size(0), I_ = x.size(1), D_ = weights[1].size(1);
    if (B_ == 0 || I_ == 0 || D_ == 0 || !x.is_contiguous()) return false;
    dtype_ = io_dtype(x, "x"), bytes_ = B_ * D_ * x.element_size(), has_bias_ = weights.size() > 2;
    return are_dense(weights);
  }
  // Whether a call also has these tensors.
  static bool are_dense(const Tensors& tensors) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [](const Tensor& tensor) { return tensor.is_contiguous(); });
  }
  static bool are_dense(const std::vector<OptionalTensor>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [](const OptionalTensor& tensor) {
      return !tensor || tensor->is_contiguous();
    });
  }

  // Returns the next states; if `kept` is given, it gets the saved values and the h of before.
  Tensors forward(const Tensor& x, const Tensors& states, const Tensors& weights,
                  Tensors* kept) const {
    Tensors next;
    for (int64_t k = 0; k < K; ++k) next.push_back(new_tensor(x, {B_, D_}, io_));
    // The gates [B, G, D], the states [K, B, D] and the biases [R, D].
    Tensor scratch = new_tensor(x, {(G + K) * B_ * D_ + R * D_}, io_);
    char* const gates = bytes_of(scratch);
    char* const last = gates + G * bytes_;
    for (size_t k = 0; k < states.size(); ++k) {
      std::memcpy(last + int64_t(k) * bytes_, states[k].const_data_ptr(), bytes_);
    }
    multiply({B_, G * D_, I_, 1, 1, x.const_data_ptr(), 0, I_, 1, weights[0].const_data_ptr(), 0, 1,
              I_, gates, 0, G * D_, nullptr});

    const auto sequences = list_sequences();
    ForwardParams p = params<ForwardParams>(sequences, weights);
    p.x = gates, p.x_batch = p.x_time = p.x_head = G * D_, p.x_gate = D_;
    if (has_bias_) {
      char* const biases = last + K * bytes_;
      add_biases(weights[2], weights[3], biases);
      p.bias = biases;
    }
    p.initial = states.empty() ? nullptr : last, p.last = last;
    p.h = next[0].mutable_data_ptr(), p.packs_one_step = true;
    if (kept != nullptr) {
      kept->push_back(new_tensor(x, {B_, V, 1, D_}, io_));
      p.saved = (*kept)[0].mutable_data_ptr();
      kept->push_back(new_tensor(x, {states.empty() ? 0 : B_, 1, D_}, io_));
      p.h_prev = states.empty() ? nullptr : (*kept)[1].mutable_data_ptr();
    }
    backend().forward(AllCells::index_of<Cell>(), dtype_, p, host());
    for (int64_t k = 1; k < K; ++k) {
      std::memcpy(next[k].mutable_data_ptr(), last + k * bytes_, bytes_);
    }
    return next;
  }

  // Returns the gradients of x ([0] if not wanted), of the K states ([0] if not wanted) and of the
  // weights. `dnext` are those of the next states, none for zeros.
  Tensors backward(const std::vector<OptionalTensor>& dnext, const Tensor& x,
                   const Tensors& weights, const Tensors& kept, bool wants_dx,
                   bool wants_dstate) const {
    Tensors found{new_tensor(x, wants_dx ? Shape{B_, I_} : Shape{0}, io_)};
    const Shape state = wants_dstate ? Shape{B_, D_} : Shape{0};
    for (int64_t k = 0; k < K; ++k) found.push_back(new_tensor(x, state, io_));
    const int64_t at = 1 + K;  // of the weights
    found.push_back(new_tensor(x, {G * D_, I_}, io_));
    found.push_back(new_tensor(x, {G * D_, D_}, io_));
    for (int64_t i = 0; i < 2; ++i) {
      found.push_back(new_tensor(x, has_bias_ ? Shape{G * D_} : Shape{0}, io_));
    }
    // The gradients of the gates [B, G, D], twice if the recurrent products' differ, of the states
    // before and after [K, B, D], and of the biases [R, D].
    constexpr int64_t kGateRows = Cell::kSplitGrad ? 2 * G : G;
    Tensor scratch = new_tensor(x, {(kGateRows + 2 * K) * B_ * D_ + R * D_}, io_);
    char* const gates = bytes_of(scratch);
    char* const products = Cell::kSplitGrad ? gates + G * bytes_ : gates;
    char* const before = gates + kGateRows * bytes_;
    char* const after = before + K * bytes_;
    char* const biases = after + K * bytes_;
    for (int64_t k = 0; k < K; ++k) {
      if (dnext[k] && k > 0) {
        std::memcpy(after + k * bytes_, dnext[k]->const_data_ptr(), bytes_);
      } else {
        std::memset(after + k * bytes_, 0, bytes_);
      }
    }
    const auto sequences = list_sequences();
    BackwardParams p = params<BackwardParams>(sequences, weights);
    p.dh = dnext[0] ? dnext[0]->const_data_ptr() : after;  // whose first rows are zeros
    p.dlast = K > 1 ? after : nullptr;
    p.saved = kept[0].const_data_ptr(), p.grad_clip = std::numeric_limits<double>::infinity();
    p.dx = gates, p.dr = Cell::kSplitGrad ? products : nullptr;
    p.dbias = biases, p.dstate = before, p.skips_initial = !wants_dstate;
    backend().backward(AllCells::index_of<Cell>(), dtype_, p, host());

    const auto weight = [&](const char* d, const Tensor& rows, int64_t width, Tensor& out) {
      multiply({G * D_, width, B_, 1, 1, d, 0, 1, G * D_, rows.const_data_ptr(), 0, width, 1,
                out.mutable_data_ptr(), 0, width, nullptr});
    };
    weight(gates, x, I_, found[at]);
    if (kept[1].numel() > 0) {
      weight(products, kept[1], D_, found[at + 1]);
    } else {
      std::memset(found[at + 1].mutable_data_ptr(), 0, G * D_ * (bytes_ / B_));
    }
    if (wants_dx) {
      multiply({B_, I_, G * D_, 1, 1, gates, 0, G * D_, 1, weights[0].const_data_ptr(), 0, I_, 1,
                found[0].mutable_data_ptr(), 0, I_, nullptr});
    }
    for (int64_t k = 0; k < K && wants_dstate; ++k) {
      std::memcpy(found[1 + k].mutable_data_ptr(), before + k * bytes_, bytes_);
    }
    if (has_bias_) {
      const int64_t gate = bytes_ / B_;
      char* const b_hh = bytes_of(found[at + 3]);
      std::memcpy(found[at + 2].mutable_data_ptr(), biases, G * gate);
      std::memcpy(b_hh, biases, kSummed * gate);
      std::memcpy(b_hh + kSummed * gate, biases + G * gate, (G - kSummed) * gate);
    }
    return found;
  }

 private:
  int64_t B_ = 0, I_ = 0, D_ = 0, bytes_ = 0;  // bytes of a state
  bool has_bias_ = false;
  ScalarType io_{};
  Dtype dtype_{};

  static char* bytes_of(Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

  void multiply(const GemmParams& p) const { backend().gemm(dtype_, p, host()); }

  std::vector<Sequence> list_sequences() const {
    std::vector<Sequence> list;
    list.reserve(B_);
    for (int64_t b = 0; b < B_; ++b) list.push_back({b, b, b * G * D_, 1, 0});
    return list;
  }

  template <typename Params>
  Params params(const std::vector<Sequence>& sequences, const Tensors& weights) const {
    Params p{};
    p.S = B_, p.N = 1, p.D = D_, p.T = 1, p.sequences = sequences.data();
    p.weight = weights[1].const_data_ptr();
    return p;
  }

  // Writes the rows [R, D] that the engine adds: sums, and the two biases of gates whose recurrent
  // one has a row of its own.
  template <typename T>
  static void add_biases(const T* b_ih, const T* b_hh, int64_t D, T* rows) {
    for (int64_t i = 0; i < kSummed * D; ++i) rows[i] = b_ih[i] + b_hh[i];
    std::copy_n(b_ih + kSummed * D, (G - kSummed) * D, rows + kSummed * D);
    std::copy_n(b_hh + kSummed * D, (G - kSummed) * D, rows + G * D);
  }
  void add_biases(const Tensor& b_ih, const Tensor& b_hh, void* rows) const {
    const auto add = [&](auto zero) {
      using T = decltype(zero);
      add_biases(static_cast<const T*>(b_ih.const_data_ptr()),
                 static_cast<const T*>(b_hh.const_data_ptr()), D_, static_cast<T*>(rows));
    };
    io_ == ScalarType::Float ? add(float()) : add(double());
  }
};

}  // namespace flashcell
