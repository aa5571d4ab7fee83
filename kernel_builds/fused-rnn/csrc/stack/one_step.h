// The ops of forward.h and backward.h on CUDA, for one step in one direction: calls of torch.nn's
// cells, and of its sequence modules with T = 1. Nothing is brought into an engine's layout:
// kernels read parameters and states, and write gradients, as torch has them. Without a state
// nothing reads the recurrent weights.
#pragma once
#include <cmath>
#include <cstdlib>
#include <optional>

#include "../cuda/cell/call.h"
#include "../cuda/run.h"
#include "layers.h"

namespace flashcell {

// Up to these numbers of multiplications a kernel without tensor cores multiplies by itself, for at
// most kSomeSequences; otherwise cuBLAS's products are faster. For kFewSequences, whose rows it
// reads once, there may be more of them.
inline constexpr int64_t kFewSequences = 8, kSomeSequences = 32;
inline constexpr int64_t kMostProducts = 70'000'000, kSomeProducts = 30'000'000;

// Rows that are no whole vectors are read element by element, which takes longer than multiplying
// these. So the limit of such a call is on the elements that it reads: for every kFewSequences
// sequences each unit reads G rows of the weights and kFewSequences operands, and for a single
// sequence one operand. A launch less saves the host 15 us. On an H200 in fp16, our kernel and
// cuBLAS with a kernel for the cells take, at so many reads: LSTM of 500 units, B 16, 12 M: 16.5 us
// and 10.6; RNN of 650, B 16, 15 M: 32 and 12.5; LSTM of 1500, B 1, 22 M: 18 and 18.6.
inline constexpr int64_t kUnalignedReads = 12'000'000, kUnalignedReadsOfOne = 25'000'000;

// The limits except while a CUDA graph is recorded: the GPU waits for the host, so one launch less
// is worth more multiplications. The first two are for the forward pass, with any number of
// sequences; kWeightProducts is for the gradients of the weights, of at most kMostSummed sequences.
inline constexpr int64_t kHostProducts = 100'000'000, kUnalignedHostReads = 15'000'000;
inline constexpr int64_t kWeightProducts = 300'000'000;

// The us of the GPU that the kernel on tensor cores may take longer than cuBLAS and a kernel for
// the cells, whose launches take the host longer: without a state and with one.
inline constexpr double kHostMicroseconds[2] = {30, 40};

// Products of rows that are no whole vectors go through padded copies from this many
// multiplications on: below it, the host takes longer to launch the copies than the GPU saves.
inline constexpr int64_t kPaddedStep = 20'000'000'000;

// The sizes and the parameters of a call of one step.
template <typename Cell>
class OneStep {
 public:
  static constexpr int64_t G = Cell::kGates, K = Cell::kStates;
  int64_t L = 0, B = 0, I = 0, D = 0, each = 0;  // `each`: parameters of a layer
  bool is_cell = false, batch_first = false, has_bias = false, tf32 = false;
  ScalarType io{};
  Dtype dtype{};

  // Whether this class can run the call. If not, Layers runs it, and checks every argument.
  bool fits(const Tensor& x, const Tensors& weights, const std::vector<int64_t>& batch_sizes,
            bool bias, bool projects, int64_t directions, bool by_batch, int64_t width,
            double dropout) {
    has_bias = bias, batch_first = by_batch, is_cell = x.dim() == 2, each = bias ? 4 : 2;
    if (!batch_sizes.empty() || projects || directions != 1) return false;
    L = int64_t(weights.size()) / each;
    if (L == 0 || int64_t(weights.size()) != L * each || weights[1].dim() != 2) return false;
    if (is_cell ? L > 1 : x.dim() != 3 || x.size(batch_first ? 1 : 0) != 1) return false;
    if (L == 1 ? !(0 <= dropout && dropout <= 1) : dropout != 0) return false;
    B = x.size(axis()), I = x.size(is_cell ? 1 : 2), D = weights[1].size(1);
    if (B == 0 || I == 0 || D == 0 || D != width || B * D >= int64_t(1) << 38) return false;
    io = x.scalar_type();
    if (io != ScalarType::Float && io != ScalarType::Half && io != ScalarType::BFloat16) {
      return false;
    }
    dtype = io_dtype(x, "x");
    for (int64_t i = 0; i < L * each; ++i) {
      const Tensor& weight = weights[i];
      if (weight.scalar_type() != io || !weight.is_contiguous()) return false;
      const int64_t which = i % each;
      const bool has = which > 1 ? has_shape(weight, {G * D})
                                 : has_shape(weight, {G * D, which == 0 ? width_of(i / each) : D});
      if (!has) return false;
    }
    const char* engine = std::getenv("FLASHCELL_CUDA_ENGINE");
    return engine == nullptr || *engine == 0;
  }

  bool fits_states(const Tensors& states, int64_t count) const {
    if (states.empty()) return true;
    if (int64_t(states.size()) != count) return false;
    for (const Tensor& state : states) {
      const bool has = is_cell ? has_shape(state, {B, D}) : has_shape(state, {L, B, D});
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
  Shape state_shape() const { return is_cell ? Shape{B, D} : Shape{L, B, D}; }
  int64_t width_of(int64_t layer) const { return layer == 0 ? I : D; }

  // How a kernel reads rows of the batch along `axis`.
  cuda::StateView view(const Tensor& x, int64_t axis) const {
    const int64_t last = x.dim() - 1, width = x.size(last);
    const int64_t row = B > 1 ? x.stride(axis) : width, unit = width > 1 ? x.stride(last) : 1;
    return {x.const_data_ptr(), row, unit, x.scalar_type() == io};
  }
  cuda::StateView view_state(const Tensor& state, int64_t layer) const {
    if (is_cell) return view(state, 0);
    cuda::StateView one = view(state, 1);
    one.data = at(state, L > 1 ? layer * state.stride(0) : 0);
    return one;
  }
  // The input of a layer, [B, 1, D] between layers; one that cuBLAS cannot read becomes dense.
  cuda::StateView view_input(Tensor& x, int64_t layer) const {
    const int64_t rows = layer == 0 ? axis() : 0;
    const cuda::StateView as_it_is = view(x, rows);
    if (is_matrix(as_it_is, width_of(layer))) return as_it_is;
    x = dense(x);
    return view(x, rows);
  }
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

  std::tuple<Tensor, Tensors, Tensors> forward(const Tensor& x, const Tensors& state,
                                               const Tensors& weights, bool save) const {
    Tensor y = new_tensor(x, shape(D), io), input = x;
    Tensors last, kept;
    for (int64_t k = is_cell; k < K; ++k) last.push_back(new_tensor(x, state_shape(), io));
    for (int64_t l = 0; l < L; ++l) {
      if (save && l > 0) kept.push_back(input);
      Tensor output = l == L - 1 ? y : new_tensor(x, {B, 1, D}, io);
      forward_layer(l, input, output, state, weights.data() + l * each, last, save, kept);
      input = output;
    }
    return {y, last, kept};
  }

  // Each layer but the first keeps its input, and each its saved values and the h it has read.
  static int64_t saved_of(int64_t layer) { return 3 * layer; }

  bool fits_kept(const OptionalTensor& dy, const Tensors& kept) const {
    if (int64_t(kept.size()) != 3 * L - 1) return false;
    const bool has_state = kept[1].numel() > 0;
    for (int64_t l = 0; l < L; ++l) {
      const int64_t at = saved_of(l);
      if (l > 0 && !has_shape(kept[at - 1], {B, 1, D})) return false;
      if (!has_shape(kept[at], {B, Cell::kSaved, 1, D})) return false;
      if (!has_shape(kept[at + 1], {has_state ? B : 0, 1, D})) return false;
    }
    for (const Tensor& tensor : kept) {
      if (tensor.scalar_type() != io || !tensor.is_contiguous()) return false;
    }
    return !dy || (shape_of(*dy) == shape(D) && dy->scalar_type() == io);
  }

  std::tuple<Tensor, Tensors, Tensors> backward(const OptionalTensor& dy, const Tensors& dlast,
                                                const Tensor& x, const Tensors& weights,
                                                const Tensors& kept, bool wants_dx,
                                                bool wants_dstate) const {
    Tensors dweights, dstate;
    for (const Tensor& weight : weights) dweights.push_back(new_tensor(x, shape_of(weight), io));
    for (int64_t k = 0; wants_dstate && k < K; ++k) {
      dstate.push_back(new_tensor(x, state_shape(), ScalarType::Float));
    }
    Tensor upper;  // the gradient of a layer's outputs
    cuda::StateView dh{};
    if (dy) dh = view(*dy, axis());
    for (int64_t l = L - 1; l >= 0; --l) {
      const bool wants_input = l > 0 || wants_dx;
      Tensor dinput = new_tensor(x, l > 0 ? Shape{B, 1, D} : wants_dx ? shape(I) : Shape{0}, io);
      backward_layer(l, dh, dlast, l > 0 ? kept[saved_of(l) - 1] : x, weights.data() + l * each,
                     kept[saved_of(l)], kept[saved_of(l) + 1], dstate, dweights.data() + l * each,
                     wants_input ? dinput.mutable_data_ptr() : nullptr);
      upper = dinput, dh = {upper.const_data_ptr(), D, 1, true};
    }
    return {upper, dstate, dweights};
  }

 private:
  // Runs a layer, whose parameters are `weights`; writes its part of `last`, and adds to `kept`.
  void forward_layer(int64_t l, Tensor x, Tensor& y, const Tensors& state, const Tensor* weights,
                     Tensors& last, bool save, Tensors& kept) const {
    const bool has_state = !state.empty();
    cuda::CellForward p{};
    p.B = B, p.D = D;
    p.input = {weights[0].const_data_ptr(), view_input(x, l), width_of(l)};
    if (has_bias) p.b_ih = weights[2].const_data_ptr(), p.b_hh = weights[3].const_data_ptr();
    for (size_t k = 0; k < state.size(); ++k) p.initial[k] = view_state(state[k], l);
    if (has_state) p.recurrent = {weights[1].const_data_ptr(), p.initial[0], D};

    p.next[0] = y.mutable_data_ptr();
    for (int64_t k = is_cell; k < K; ++k) {
      (k == 0 ? p.h : p.next[k]) = at(last[k - is_cell], l * B * D);
    }
    if (save) {
      kept.push_back(new_tensor(x, {B, Cell::kSaved, 1, D}, io));
      p.saved = kept.back().mutable_data_ptr();
      kept.push_back(new_tensor(x, {has_state ? B : 0, 1, D}, io));
      p.h_prev = has_state ? kept.back().mutable_data_ptr() : nullptr;
    }
    Tensor gates, rounded;  // alive until the launch
    const bool waits = !cuda::is_recording(current_stream(x));
    p.piece = piece(p, waits);
    if (p.piece == 0 && !is_small(width_of(l), has_state, waits)) {
      multiply_gates(p, gates, rounded, x);
    }
    cuda::cell_forward(AllCells::index_of<Cell>(), p, dtype, launch(x));
  }

  // Writes the gradients of a layer: of its parameters, its part of `dstate` and, unless null, of
  // its input.
  void backward_layer(int64_t l, const cuda::StateView& dh, const Tensors& dlast, Tensor x,
                      const Tensor* weights, const Tensor& saved, const Tensor& h_prev,
                      Tensors& dstate, Tensor* dweights, void* dx) const {
    const int64_t width = width_of(l);
    const bool has_state = h_prev.numel() > 0;
    cuda::CellBackward p{};
    p.B = B, p.D = D, p.saved = saved.const_data_ptr(), p.dh = dh;
    for (size_t k = 0; k < dlast.size(); ++k) p.dlast[k + is_cell] = view_state(dlast[k], l);
    const cuda::StateView rows = view_input(x, l);
    for (size_t k = 0; k < dstate.size(); ++k) {
      p.dstate[k] = reinterpret_cast<float*>(at(dstate[k], l * B * D));
    }
    const bool multiplies = B <= cuda::kMostSummed &&
                            products(width, has_state) <= kWeightProducts &&
                            !cuda::is_recording(current_stream(x));
    Tensor dgates, dr, partial;
    if (!multiplies || !dstate.empty() || dx != nullptr) {
      dgates = new_tensor(x, {B * G * D}, io);
      p.dx = dgates.mutable_data_ptr();
    }
    if (Cell::kSplitGrad && has_state && (!multiplies || !dstate.empty())) {
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
    if (multiplies) {
      p.weights = {dweights[0].mutable_data_ptr(), dweights[1].mutable_data_ptr(), rows, {}, width};
      if (has_state) p.weights.h = {h_prev.const_data_ptr(), D, 1, true};
    } else if (!has_state) {
      p.zeros = dweights[1].mutable_data_ptr();
      p.zero_bytes = G * D * D * dweights[1].element_size();
    }
    cuda::cell_backward(AllCells::index_of<Cell>(), p, dtype, launch(x));

    const void* recurrent = p.dr != nullptr ? p.dr : p.dx;
    if (!multiplies) {
      multiply_rounded({G * D, width, B, 1, p.dx, 0, 1, G * D, rows.data, rows.row, 1,
                        dweights[0].mutable_data_ptr(), 0, width},
                       x);
    }
    if (has_state && !multiplies) {
      multiply_rounded({G * D, D, B, 1, recurrent, 0, 1, G * D, h_prev.const_data_ptr(), D, 1,
                        dweights[1].mutable_data_ptr(), 0, D},
                       x);
    }
    if (!dstate.empty()) {
      multiply_wide({B, D, G * D, 1, recurrent, 0, G * D, 1, weights[1].const_data_ptr(), D, 1,
                     p.dstate[0], 0, D},
                    dtype, tf32, true, x);
    }
    if (dx != nullptr) {
      multiply_rounded({B, width, G * D, 1, p.dx, 0, G * D, 1, weights[0].const_data_ptr(), width,
                        1, dx, 0, width},
                       x);
    }
  }

  int64_t products(int64_t width, bool has_state) const {
    return B * G * D * (width + (has_state ? D : 0));
  }
  // The elements that our kernel reads one by one for units that are no whole vectors.
  int64_t unaligned_reads(int64_t width, bool has_state) const {
    const int64_t columns = B > 1 ? kFewSequences : 1, tiles = (B + columns - 1) / columns;
    return tiles * D * (width + (has_state ? D : 0)) * (G + columns);
  }
  // The bytes that the kernel on tensor cores reads at once, or 0 where it does not run.
  int piece(const cuda::CellForward& p, bool waits) const {
    if (io == ScalarType::Float || B <= kFewSequences) return 0;
    const cuda::Device device = cuda::current_device();
    if (device.code.arch < 80) return 0;
    const int bytes = std::min(cuda::piece_of(p.input), cuda::piece_of(p.recurrent));
    if (bytes == 0) return 0;
    // Fitted to calls of an H200 with a cold L2 cache (NOTEBOOK.md, "Cells on tensor cores"). A
    // thread block takes a time for each stage; three of them share a multiprocessor.
    const double stage = bytes == 16 ? 0.57 : bytes == 8 ? 1.0 : 1.5;
    const double more = bytes == 16 ? 1.4 : bytes == 8 ? 1.8 : 2.1;
    const auto divide_up = [](int64_t a, int64_t b) { return double((a + b - 1) / b); };
    const bool has_state = p.recurrent.weight != nullptr;
    const double stages = divide_up(p.input.depth, 64) + (has_state ? divide_up(D, 64) : 0);
    const double blocks = divide_up(D, G == 1 ? 64 : 16) * divide_up(B, 64);
    const double rounds = std::ceil(blocks / (3 * device.sms)) - 1;
    const double blas = 6 + double(products(p.input.depth, has_state)) / 250e6;
    const double most = blas + (waits ? kHostMicroseconds[has_state] : 0);
    return 3.5 + stages * (stage + more * rounds) <= most ? bytes : 0;
  }
  // Whether the kernel without tensor cores multiplies by itself. If the GPU waits for the host, it
  // may take longer.
  bool is_small(int64_t width, bool has_state, bool waits) const {
    if (width % io_vector() != 0 || D % io_vector() != 0) {
      const int64_t reads = unaligned_reads(width, has_state);
      if (waits && reads <= kUnalignedHostReads) return true;
      return B <= kSomeSequences && reads <= (B > 1 ? kUnalignedReads : kUnalignedReadsOfOne);
    }
    const int64_t count = products(width, has_state);
    if (waits && count <= kHostProducts) return true;
    if (B > kSomeSequences) return false;
    return count <= (B <= kFewSequences ? kMostProducts : kSomeProducts);
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
    const int64_t width = p.input.depth;
    Product product{B,      G * D, width,          1, in.data, 0,
                    in.row, 1,     p.input.weight, 1, width,   gates.mutable_data_ptr(),
                    0,      G * D};
    p.gates = gates.const_data_ptr(), p.gates_are_io = !has_state;
    if (!has_state) return multiply_rounded(product, x);
    multiply_wide(product, dtype, tf32, false, x);

    cuda::StateView h = p.recurrent.operand;
    if (!is_matrix(h, D)) {
      rounded = new_tensor(x, {B, D}, io);
      Copy copy{};
      copy.out = rounded.mutable_data_ptr(), copy.in = h.data;
      copy.out_type = dtype, copy.in_type = h.is_io ? dtype : Dtype::kFloat;
      copy.size[0] = copy.size[1] = 1, copy.size[2] = B, copy.size[3] = copy.padded = D;
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
