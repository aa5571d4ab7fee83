// The ops of forward.h and backward.h on CUDA, for one step of one layer in one direction: calls of
// torch.nn's cells, and of its sequence modules with T = 1. Nothing is brought into an engine's
// layout: kernels read parameters and states, and write gradients, as torch has them. Without a
// state nothing reads the recurrent weight.
#pragma once
#include <cstdlib>
#include <optional>

#include "../cuda/cell/call.h"
#include "layers.h"

namespace flashcell {

// Our kernel multiplies by itself for at most kSomeSequences, while the products have few
// multiplications; otherwise cuBLAS's products are faster. For kFewSequences, whose rows it reads
// once, these may be more. Rows that are no whole vectors are read slowly.
inline constexpr int64_t kFewSequences = 8, kSomeSequences = 32;
inline constexpr int64_t kMostProducts = 70'000'000, kSomeProducts = 30'000'000;
inline constexpr int64_t kUnalignedProducts = 8'000'000;

// Products of rows that are no whole vectors go through padded copies from this many
// multiplications on: below it, the host takes longer to launch the copies than the GPU saves.
inline constexpr int64_t kPaddedStep = 20'000'000'000;

// The sizes and the parameters of a call of one step.
template <typename Cell>
class OneStep {
 public:
  static constexpr int64_t G = Cell::kGates, K = Cell::kStates;
  int64_t B = 0, I = 0, D = 0;
  bool is_cell = false, batch_first = false, has_bias = false, tf32 = false;
  ScalarType io{};
  Dtype dtype{};

  // Whether the call is one of these. Of a call that is none, Layers checks every argument.
  bool fits(const Tensor& x, const Tensors& weights, const std::vector<int64_t>& batch_sizes,
            bool bias, bool projects, int64_t directions, bool by_batch, int64_t width) {
    has_bias = bias, batch_first = by_batch, is_cell = x.dim() == 2;
    if (!batch_sizes.empty() || projects || directions != 1) return false;
    if (weights.size() != (bias ? 4u : 2u) || weights[1].dim() != 2) return false;
    if (!is_cell && (x.dim() != 3 || x.size(batch_first ? 1 : 0) != 1)) return false;
    B = x.size(axis()), I = x.size(is_cell ? 1 : 2), D = weights[1].size(1);
    if (B == 0 || I == 0 || D == 0 || D != width || B * D >= int64_t(1) << 38) return false;
    io = x.scalar_type();
    if (io != ScalarType::Float && io != ScalarType::Half && io != ScalarType::BFloat16) {
      return false;
    }
    dtype = io_dtype(x, "x");
    for (const Tensor& weight : weights) {
      if (weight.scalar_type() != io || !weight.is_contiguous()) return false;
    }
    if (!has_shape(weights[0], {G * D, I}) || !has_shape(weights[1], {G * D, D})) return false;
    if (bias && !(has_shape(weights[2], {G * D}) && has_shape(weights[3], {G * D}))) return false;
    const char* engine = std::getenv("FLASHCELL_CUDA_ENGINE");
    return engine == nullptr || *engine == 0;
  }

  bool fits_states(const Tensors& states, int64_t count) const {
    if (states.empty()) return true;
    if (int64_t(states.size()) != count) return false;
    for (const Tensor& state : states) {
      const bool has = is_cell ? has_shape(state, {B, D}) : has_shape(state, {1, B, D});
      const ScalarType type = state.scalar_type();
      if (!has || (type != io && type != ScalarType::Float)) return false;
    }
    return true;
  }

  // The batch's axis of x and y.
  int64_t axis() const { return is_cell || batch_first ? 0 : 1; }
  Shape shape(int64_t width) const {
    return is_cell ? Shape{B, width} : batch_first ? Shape{B, 1, width} : Shape{1, B, width};
  }
  Shape state_shape() const { return is_cell ? Shape{B, D} : Shape{1, B, D}; }

  // How a kernel reads rows of the batch along `axis`.
  cuda::StateView view(const Tensor& x, int64_t axis) const {
    const int64_t last = x.dim() - 1, width = x.size(last);
    const int64_t row = B > 1 ? x.stride(axis) : width, unit = width > 1 ? x.stride(last) : 1;
    return {x.const_data_ptr(), row, unit, x.scalar_type() == io};
  }
  cuda::StateView view_state(const Tensor& state) const { return view(state, is_cell ? 0 : 1); }
  // Whether cuBLAS can read rows of this width.
  bool is_matrix(const cuda::StateView& view, int64_t width) const {
    return view.is_io && view.unit == 1 && view.row >= width && view.row < int64_t(1) << 31;
  }

  void multiply_rounded(const Product& p, const Tensor& like) const {
    const bool is_large = p.M * p.N * p.K >= kPaddedStep;
    return is_large ? multiply(p, dtype, tf32, like) : multiply_as_is(p, dtype, tf32);
  }

  cuda::Launch launch(const Tensor& x) const {
    return {
        cuda::current_device(), current_stream(x), tf32, cuda::Engine::kStep, 8, nullptr, nullptr};
  }

  std::tuple<Tensor, Tensors, Tensors> forward(Tensor x, const Tensors& state,
                                               const Tensors& weights, bool save) const {
    const bool has_state = !state.empty();
    cuda::CellForward p{};
    p.B = B, p.D = D;
    p.input = {weights[0].const_data_ptr(), view(x, axis()), I};
    if (!is_matrix(p.input.operand, I)) x = dense(x), p.input.operand = view(x, axis());
    if (has_bias) p.b_ih = weights[2].const_data_ptr(), p.b_hh = weights[3].const_data_ptr();
    for (size_t k = 0; k < state.size(); ++k) p.initial[k] = view_state(state[k]);
    if (has_state) p.recurrent = {weights[1].const_data_ptr(), p.initial[0], D};

    Tensor y = new_tensor(x, shape(D), io);
    Tensors last, kept;
    p.next[0] = y.mutable_data_ptr();
    for (int64_t k = is_cell; k < K; ++k) {
      last.push_back(new_tensor(x, state_shape(), io));
      (k == 0 ? p.h : p.next[k]) = last.back().mutable_data_ptr();
    }
    if (save) {
      kept.push_back(new_tensor(x, {B, Cell::kSaved, 1, D}, io));
      kept.push_back(new_tensor(x, {has_state ? B : 0, 1, D}, io));
      p.saved = kept[0].mutable_data_ptr();
      p.h_prev = has_state ? kept[1].mutable_data_ptr() : nullptr;
    }
    Tensor gates, rounded;  // alive until the launch
    if (!is_small(has_state)) multiply_gates(p, gates, rounded, x);
    cuda::cell_forward(AllCells::index_of<Cell>(), p, dtype, launch(x));
    return {y, last, kept};
  }

  bool fits_kept(const OptionalTensor& dy, const Tensors& kept) const {
    if (kept.size() != 2 || !has_shape(kept[0], {B, Cell::kSaved, 1, D})) return false;
    if (!has_shape(kept[1], {kept[1].numel() > 0 ? B : 0, 1, D})) return false;
    for (const Tensor& tensor : kept) {
      if (tensor.scalar_type() != io || !tensor.is_contiguous()) return false;
    }
    if (!dy) return true;
    const bool has = is_cell       ? has_shape(*dy, {B, D})
                     : batch_first ? has_shape(*dy, {B, 1, D})
                                   : has_shape(*dy, {1, B, D});
    return has && dy->scalar_type() == io;
  }

  std::tuple<Tensor, Tensors, Tensors> backward(const OptionalTensor& dy, const Tensors& dlast,
                                                Tensor x, const Tensors& weights,
                                                const Tensors& kept, bool wants_dx,
                                                bool wants_dstate) const {
    const Tensor& h_prev = kept[1];
    const bool has_state = h_prev.numel() > 0;
    cuda::CellBackward p{};
    p.B = B, p.D = D, p.saved = kept[0].const_data_ptr();
    if (dy) p.dh = view(*dy, axis());
    for (size_t k = 0; k < dlast.size(); ++k) p.dlast[k + is_cell] = view_state(dlast[k]);
    cuda::StateView rows = view(x, axis());
    if (!is_matrix(rows, I)) x = dense(x), rows = view(x, axis());

    Tensors dweights, dstate;
    for (const Tensor& weight : weights) dweights.push_back(new_tensor(x, shape_of(weight), io));
    for (int64_t k = 0; wants_dstate && k < K; ++k) {
      dstate.push_back(new_tensor(x, state_shape(), ScalarType::Float));
      p.dstate[k] = static_cast<float*>(dstate.back().mutable_data_ptr());
    }
    Tensor dgates = new_tensor(x, {B * G * D}, io), dr, partial;
    p.dx = dgates.mutable_data_ptr();
    if (Cell::kSplitGrad && has_state) {
      dr = new_tensor(x, {B * G * D}, io);
      p.dr = dr.mutable_data_ptr();
    }
    if (has_bias) {
      p.db_ih = dweights[2].mutable_data_ptr(), p.db_hh = dweights[3].mutable_data_ptr();
      if (cuda::cell_chunks(B) > 1) {
        partial = new_tensor(x, {cuda::cell_chunks(B) * Cell::kBias * D}, ScalarType::Float);
        p.partial = static_cast<float*>(partial.mutable_data_ptr());
      }
    }
    if (!has_state) {
      p.zeros = dweights[1].mutable_data_ptr();
      p.zero_bytes = G * D * D * dweights[1].element_size();
    }
    cuda::cell_backward(AllCells::index_of<Cell>(), p, dtype, launch(x));

    const void* recurrent = p.dr != nullptr ? p.dr : p.dx;
    multiply_rounded({G * D, I, B, 1, p.dx, 0, 1, G * D, rows.data, rows.row, 1,
                      dweights[0].mutable_data_ptr(), 0, I},
                     x);
    if (has_state) {
      multiply_rounded({G * D, D, B, 1, recurrent, 0, 1, G * D, h_prev.const_data_ptr(), D, 1,
                        dweights[1].mutable_data_ptr(), 0, D},
                       x);
    }
    if (wants_dstate) {
      multiply_wide({B, D, G * D, 1, recurrent, 0, G * D, 1, weights[1].const_data_ptr(), D, 1,
                     p.dstate[0], 0, D},
                    dtype, tf32, true, x);
    }
    Tensor dx = new_tensor(x, wants_dx ? shape(I) : Shape{0}, io);
    if (wants_dx) {
      multiply_rounded({B, I, G * D, 1, p.dx, 0, G * D, 1, weights[0].const_data_ptr(), I, 1,
                        dx.mutable_data_ptr(), 0, I},
                       x);
    }
    return {dx, dstate, dweights};
  }

 private:
  bool is_small(bool has_state) const {
    const int64_t products = B * G * D * (I + (has_state ? D : 0)), vector = io_vector();
    if (I % vector != 0 || D % vector != 0) {
      return B <= kSomeSequences && products <= kUnalignedProducts;
    }
    return B <= kSomeSequences && products <= (B <= kFewSequences ? kMostProducts : kSomeProducts);
  }
  int64_t io_vector() const { return io == ScalarType::Float ? 4 : 8; }  // elements of 16 bytes

  // Computes the gates' products by cuBLAS: the input's in io or, if there is a state, both in fp32
  // and, unless the cell needs them apart, as one sum.
  void multiply_gates(cuda::CellForward& p, Tensor& gates, Tensor& rounded, const Tensor& x) const {
    const cuda::StateView& in = p.input.operand;
    const bool has_state = p.recurrent.weight != nullptr;
    const int64_t count = B * G * D;
    gates = new_tensor(x, {count * (has_state && Cell::kSplitGrad ? 2 : 1)},
                       has_state ? ScalarType::Float : io);
    Product product{
        B, G * D, I, 1, in.data, 0, in.row, 1, p.input.weight, 1, I, gates.mutable_data_ptr(),
        0, G * D};
    p.gates = gates.const_data_ptr(), p.gates_are_io = !has_state;
    if (!has_state) return multiply_rounded(product, x);
    multiply_wide(product, dtype, tf32, false, x);

    cuda::StateView h = p.recurrent.operand;
    if (!is_matrix(h, D)) {
      rounded = new_tensor(x, {B, D}, io);
      Copy copy{};
      copy.out = rounded.mutable_data_ptr(), copy.in = h.data;
      copy.out_type = dtype, copy.in_type = h.is_io ? dtype : Dtype::kFloat;
      copy.size[0] = copy.size[1] = 1, copy.size[2] = B, copy.size[3] = D;
      copy.out_stride[2] = D, copy.out_stride[3] = 1;
      copy.in_stride[2] = h.row, copy.in_stride[3] = h.unit;
      run_copies({copy}, x);
      h = {rounded.const_data_ptr(), D, 1, true};
    }
    float* sums = static_cast<float*>(gates.mutable_data_ptr());
    if (Cell::kSplitGrad) p.sums = sums += count;
    multiply_wide({B, G * D, D, 1, h.data, 0, h.row, 1, p.recurrent.weight, 1, D, sums, 0, G * D},
                  dtype, tf32, !Cell::kSplitGrad, x);
  }
};

}  // namespace flashcell
