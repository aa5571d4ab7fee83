// The layers of a torch.nn LSTM, GRU or RNN as one op, and their gradients as another: projections,
// recurrences, directions, dropout, and torch's layouts of parameters and states.
// L layers, N directions, B batch, T time, I input width, D hidden width; G gates, K states, R bias
// rows. The directions of a layer are heads of one recurrence. The second one runs on an input that is
// turned around in time, and its outputs are turned back. The recurrence may be wider than D, with P
// units a head: the others have zeros as parameters, and stay zero. Of a PackedSequence, x and y are the
// rows; the engines have rows of their own (PackedRows).
#pragma once
#include "../cells/all.h"
#include "common/torch/op.h"
#include "params.h"
#if defined(CUDA_KERNEL)
#include "../cuda/stack.h"
#else
#include "../cpu/linear.h"
#include "../cpu/stack.h"
#endif

#include <limits>
#include <tuple>

namespace flashcell {

// x [B,T,I], or [T,B,I] unless batch_first, or, with batch_sizes, [rows,I] · state: K tensors [L N,B,D],
// in the dtype of x or in the state dtype, or none · weights: for each layer and direction w_ih [G D,I],
// w_hh [G D,D] and, if has_bias, b_ih [G D], b_hh [G D], in the dtype of x or in fp32 · batch_sizes: of a
// PackedSequence, or none · width: P, at least D · dropout: probability, between layers
// -> y as x, N D wide · last: K tensors [L N,B,D] in the dtype of x · kept: what the backward reads,
// empty unless `save`
inline constexpr char kLayersForwardSchema[] =
    "_layers_fwd(Tensor x, Tensor[] state, Tensor[] weights, int[] batch_sizes, bool has_bias, "
    "int directions, bool batch_first, int width, float dropout, bool tf32, bool save) "
    "-> (Tensor y, Tensor[] last, Tensor[] kept)";

// dy as y · dlast: K tensors as last, or none · wants_dx, wants_dstate: whether to compute these
// -> the gradients of x ([0] if not wanted), of the states in the state dtype (K tensors, or none), and
// of the weights
inline constexpr char kLayersBackwardSchema[] =
    "_layers_bwd(Tensor? dy, Tensor[] dlast, Tensor x, Tensor[] weights, Tensor[] kept, "
    "int[] batch_sizes, bool has_bias, int directions, bool batch_first, int width, float dropout, "
    "bool tf32, bool wants_dx, bool wants_dstate) -> (Tensor dx, Tensor[] dstate, Tensor[] dweights)";

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

  struct Strides {
    int64_t of[4];
  };

  void add(Tensor& out, int64_t out_at, Strides out_strides, const Tensor& in, int64_t in_at,
           Strides in_strides, Strides sizes, const Tensor* plus = nullptr) {
    Copy copy{};
    copy.out = at(out, out_at), copy.in = at(in, in_at);
    copy.plus = plus ? at(*plus, in_at) : nullptr;
    copy.out_type = io_dtype(out, "a result"), copy.in_type = io_dtype(in, "a copy");
    for (int i = 0; i < 4; ++i) {
      copy.size[i] = sizes.of[i];
      copy.out_stride[i] = out_strides.of[i], copy.in_stride[i] = in_strides.of[i];
    }
    copies_.push_back(copy);
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

// The sizes of a call, checked, and its parameters as dense tensors.
template <typename Cell>
struct Layers {
  static constexpr int64_t G = Cell::kGates, K = Cell::kStates, R = Cell::kBias;
  static constexpr int64_t kSummed = 2 * G - R;  // rows of b_ih and b_hh that are added up
  int64_t L, N, B, T, I, D, P, each;
  int64_t rows, engine_rows;  // of x and y, and of the engines' tensors
  int64_t x_batch, x_time;    // strides of the rows of x
  ScalarType io, unrounded, stored;  // of x, of the states and of the weights
  Dtype dtype;
  bool has_bias, batch_first, is_packed;
  Tensors weights;
  Tensor begins, firsts, lengths;  // the arrays of packed_rows
  PackedRows packed_rows{};

  Layers(const Tensor& x, const Tensors& given, const std::vector<int64_t>& batch_sizes, bool bias,
         int64_t directions, bool by_batch, int64_t width)
      : N(directions), P(width), each(bias ? 4 : 2), has_bias(bias), batch_first(by_batch),
        is_packed(!batch_sizes.empty()), weights(given) {
    STD_TORCH_CHECK(N == 1 || N == 2, "directions must be 1 or 2, got ", N);
    const int64_t count = int64_t(weights.size());
    STD_TORCH_CHECK(count > 0 && count % (N * each) == 0, "weights must be ", each,
                    " for each layer and direction, got ", count);
    L = count / (N * each);
    if (is_packed) {
      check_rank(x, "x", 2, "[rows, I]");
      check_batch_sizes(batch_sizes, x.size(0));
      B = batch_sizes[0], T = int64_t(batch_sizes.size()), I = x.size(1), rows = x.size(0);
      x_batch = 0, x_time = 1;
    } else {
      check_rank(x, "x", 3, batch_first ? "[B, T, I]" : "[T, B, I]");
      B = x.size(batch_first ? 0 : 1), T = x.size(batch_first ? 1 : 0), I = x.size(2), rows = B * T;
      x_batch = batch_first ? T : 1, x_time = batch_first ? 1 : B;
    }
    engine_rows = is_packed ? flashcell::engine_rows(B, T, rows) : rows;
    check_rank(weights[1], "weights[1]", 2, "[G D, D]");
    D = weights[1].size(1);
    STD_TORCH_CHECK(B > 0 && T > 0 && I > 0 && D > 0, "x must not be empty, got shape ",
                    to_string(shape_of(x)));
    STD_TORCH_CHECK(D <= P && P < int64_t(1) << 31, "width must be from ", D,
                    " to 2147483647, got ", P);
    dtype = io_dtype(x, "x"), io = x.scalar_type(), unrounded = state_dtype(x);
#if defined(CUDA_KERNEL)
    STD_TORCH_CHECK(dtype != Dtype::kDouble, "x must be float32, float16 or bfloat16 on CUDA");
#endif
    stored = weights[0].scalar_type();
    if (stored != io) check_dtype(weights[0], "weights[0]", ScalarType::Float);
    for (int64_t i = 0; i < count; ++i) {
      const Shape shape = i % each == 0   ? Shape{G * D, width_of(i / (N * each))}
                          : i % each == 1 ? Shape{G * D, D}
                                          : Shape{G * D};
      weights[i] = operand(weights[i], ("weights[" + std::to_string(i) + "]").c_str(), shape,
                           stored);
    }
    if (!is_packed) return;
    begins = new_tensor(x, {T}, ScalarType::Long);
    firsts = new_tensor(x, {B}, ScalarType::Long);
    lengths = new_tensor(x, {B}, ScalarType::Long);
    packed_rows = {(const int64_t*)begins.const_data_ptr(), (const int64_t*)firsts.const_data_ptr(),
                   (const int64_t*)lengths.const_data_ptr()};
  }

  static void check_batch_sizes(const std::vector<int64_t>& sizes, int64_t rows) {
    int64_t total = 0, before = int64_t(1) << 31;
    for (const int64_t size : sizes) {
      STD_TORCH_CHECK(0 < size && size <= before && size < int64_t(1) << 31,
                      "batch_sizes must be positive and never increase, got ", to_string(sizes));
      before = size, total += size;
    }
    STD_TORCH_CHECK(total == rows, "batch_sizes must sum up to the rows of x, ", rows, ", got ",
                    total);
  }

  int64_t width_of(int64_t layer) const { return layer == 0 ? I : N * D; }
  int64_t states() const { return K * B * N * P; }  // elements of a layer's states
  bool is_padded() const { return P != D; }
  bool casts() const { return stored != io; }
  // Whether the rows of x are those of the engines.
  bool has_engine_rows() const { return !is_packed && (batch_first || B == 1 || T == 1); }
  Shape shape(int64_t width) const {  // of x and y
    return is_packed ? Shape{rows, width} : batch_first ? Shape{B, T, width} : Shape{T, B, width};
  }
  Shape inner_shape(int64_t width) const {  // of what layers pass to each other
    return is_packed ? Shape{rows, width} : Shape{B, T, width};
  }

  const Tensor& weight(int64_t layer, int64_t direction, int64_t which) const {
    return weights[index(layer, direction, which)];
  }
  size_t index(int64_t layer, int64_t direction, int64_t which) const {
    return size_t((layer * N + direction) * each + which);
  }

  // The weights as the engines and products read them. They are torch's own, or lie in one tensor:
  // for each layer w_hh [G, N, P, P] and, if padded or cast, w_ih [N, G P, I].
  bool packs() const { return N == 2 || is_padded() || casts(); }
  bool packs_w_ih() const { return is_padded() || casts(); }
  static int64_t aligned(int64_t elements) { return (elements + 63) / 64 * 64; }
  int64_t place_of(int64_t layer, int64_t direction, bool is_input) const {
    int64_t place = 0;
    for (int64_t l = 0; l < layer; ++l) {
      place += aligned(G * N * P * P);
      if (packs_w_ih()) place += N * aligned(G * P * width_of(l));
    }
    if (!is_input) return place;
    return place + aligned(G * N * P * P) + direction * aligned(G * P * width_of(layer));
  }
  const void* w_hh(const Tensor& packed, int64_t layer) const {
    return packs() ? at(packed, place_of(layer, 0, false)) : weight(layer, 0, 1).const_data_ptr();
  }
  const void* w_ih(const Tensor& packed, int64_t layer, int64_t direction) const {
    return packs_w_ih() ? at(packed, place_of(layer, direction, true))
                       : weight(layer, direction, 0).const_data_ptr();
  }
  void bring_weights(Copies& copies, Tensor& packed) const {
    for (int64_t l = 0; l < L; ++l) {
      for (int64_t n = 0; n < N; ++n) {
        copies.add(packed, place_of(l, 0, false) + n * P * P, {0, N * P * P, P, 1}, weight(l, n, 1),
                   0, {0, D * D, D, 1}, {1, G, D, D});
        if (!packs_w_ih()) continue;
        const int64_t width = width_of(l);
        copies.add(packed, place_of(l, n, true), {0, 0, P * width, 1}, weight(l, n, 0), 0,
                   {0, 0, D * width, 1}, {1, 1, G, D * width});
      }
    }
  }

  // A new tensor of heads, with zeros where units are padded.
  Tensor new_heads(const Tensor& like, const Shape& shape, ScalarType type) const {
    Tensor heads = new_tensor(like, shape, type);
    if (is_padded()) torch::stable::zero_(heads);
    return heads;
  }

  // Adds copies between torch's states, K tensors [L N, B, D], and [L, K, B, N, P].
  void bring_states(Copies& copies, Tensor& packed, const Tensors& from) const {
    for (int64_t k = 0; k < K; ++k) {
      const int64_t next = from[k].stride(0);
      copies.add(packed, k * B * N * P, {states(), P, N * P, 1}, from[k], 0,
                 {N * next, next, from[k].stride(1), from[k].stride(2)}, {L, N, B, D});
    }
  }
  void return_states(Copies& copies, Tensors& to, const Tensor& packed) const {
    for (int64_t k = 0; k < K; ++k) {
      copies.add(to[k], 0, {N * B * D, B * D, D, 1}, packed, k * B * N * P,
                 {states(), P, N * P, 1}, {L, N, B, D});
    }
  }
  Tensors check_states(const Tensors& given, const char* name) const {
    STD_TORCH_CHECK(given.empty() || int64_t(given.size()) == K, name, " must be ", K,
                    " tensors or none, got ", given.size());
    for (const Tensor& state : given) {
      check_shape(state, name, {L * N, B, D});
      if (state.scalar_type() != io) check_dtype(state, name, unrounded);
    }
    return given;
  }
  Tensors new_states(const Tensor& like, ScalarType type) const {
    Tensors states;
    for (int64_t k = 0; k < K; ++k) states.push_back(new_tensor(like, {L * N, B, D}, type));
    return states;
  }

  // Adds the copies between torch's biases and [L, R, N, P].
  void bring_bias(Copies& copies, Tensor& bias) const {
    const int64_t row = N * P;
    for (int64_t i = 0; i < L * N; ++i) {
      const Tensor &ih = weight(0, i, 2), &hh = weight(0, i, 3);
      const int64_t to = i / N * R * row + i % N * P;
      copies.add(bias, to, {0, 0, row, 1}, ih, 0, {0, 0, D, 1}, {1, 1, kSummed, D}, &hh);
      if (kSummed == G) continue;
      copies.add(bias, to + kSummed * row, {0, 0, row, 1}, ih, kSummed * D, {0, 0, D, 1},
                 {1, 1, G - kSummed, D});
      copies.add(bias, to + G * row, {0, 0, row, 1}, hh, kSummed * D, {0, 0, D, 1},
                 {1, 1, G - kSummed, D});
    }
  }
  void return_bias(Copies& copies, Tensors& dweights, const Tensor& dbias) const {
    const int64_t row = N * P;
    for (int64_t i = 0; i < L * N; ++i) {
      Tensor &ih = dweights[index(0, i, 2)], &hh = dweights[index(0, i, 3)];
      const int64_t from = i / N * R * row + i % N * P;
      copies.add(ih, 0, {0, 0, D, 1}, dbias, from, {0, 0, row, 1}, {1, 1, G, D});
      copies.add(hh, 0, {0, 0, D, 1}, dbias, from, {0, 0, row, 1}, {1, 1, kSummed, D});
      if (kSummed == G) continue;
      copies.add(hh, kSummed * D, {0, 0, D, 1}, dbias, from + G * row, {0, 0, row, 1},
                 {1, 1, G - kSummed, D});
    }
  }

  // Calls `write` with a tensor for a weight's gradient in the dtype of x, and adds the copy to `out`,
  // which may have another.
  template <typename Write>
  void write_gradient(Copies& copies, Tensors& alive, Tensor& out, Write write) const {
    if (!casts()) return write(out);
    Tensor rounded = new_tensor(out, shape_of(out), io);
    write(rounded);
    copies.add(out, 0, {0, 0, 0, 1}, rounded, 0, {0, 0, 0, 1}, {1, 1, 1, out.numel()});
    alive.push_back(rounded);
  }

  // A new tensor of the engines' rows, with zeros where no copy writes.
  Tensor new_rows(const Tensor& like, const Shape& shape) const {
    Tensor tensor = new_tensor(like, shape, io);
    if (is_padded() || engine_rows != rows) torch::stable::zero_(tensor);
    return tensor;
  }

  // Where a tensor's rows are, in elements.
  struct Rows {
    int64_t begin, batch, time, unit = 1;
  };
  // The rows of x and y if they are `width` apart, and those between layers.
  Rows outer(int64_t width, int64_t begin = 0) const {
    return {begin, x_batch * width, x_time * width};
  }
  Rows inner(int64_t width, int64_t begin = 0) const {
    return {begin, is_packed ? 0 : T * width, width};
  }

  // Adds copies of C elements of every row, from [G, rows of x or y] to [rows of the engines, G], and
  // back; `turns` the sequences around in time.
  void enter(Copies& copies, Tensor& engine, int64_t begin, int64_t width, const Tensor& x, Rows from,
             int64_t C, bool turns) const {
    if (is_packed) {
      copies.add(engine, begin, {0, 0, width, 1}, x, from.begin, {0, 0, from.time, from.unit},
                 {1, B, T, C});
      copies.map_rows(packed_rows, true, turns);
    } else {
      move(copies, engine, {begin, T * width, width}, x, from, C, turns);
    }
  }
  void leave(Copies& copies, Tensor& y, Rows to, const Tensor& engine, int64_t begin, int64_t width,
             int64_t C, bool turns) const {
    if (is_packed) {
      copies.add(y, to.begin, {0, 0, to.time, to.unit}, engine, begin, {0, 0, width, 1},
                 {1, B, T, C});
      copies.map_rows(packed_rows, false, turns);
    } else {
      move(copies, y, to, engine, {begin, T * width, width}, C, turns);
    }
  }
  // Does the same between rows that are in the order of the batch and of time.
  void move(Copies& copies, Tensor& out, Rows to, const Tensor& in, Rows from, int64_t C,
            bool turns) const {
    const int64_t begin = turns ? to.begin + (T - 1) * to.time : to.begin;
    copies.add(out, begin, {0, to.batch, turns ? -to.time : to.time, to.unit}, in, from.begin,
               {0, from.batch, from.time, from.unit}, {1, B, T, C});
  }
};

inline Tensor drop(const Tensor& x, double probability, Tensor& mask) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(probability),
                                    torch::stable::detail::from(std::optional<bool>(true))};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::native_dropout", "", stack.data(), TORCH_ABI_VERSION));
  mask = torch::stable::detail::to<Tensor>(stack[1]);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor drop_gradient(const Tensor& dy, const Tensor& mask, double probability) {
  const double scale = probability < 1 ? 1 / (1 - probability) : 0;
  std::array<StableIValue, 3> stack{torch::stable::detail::from(dy),
                                    torch::stable::detail::from(mask),
                                    torch::stable::detail::from(scale)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::native_dropout_backward", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The list of sequences for an engine whose x has rows `stride` elements apart, or batch and time.
template <typename Cell>
auto list_sequences(const Layers<Cell>& s, const Tensor& like, int64_t batch, int64_t time) {
  return s.is_packed ? packed_sequences(s.firsts, s.lengths, s.T, time)
                     : sequences(like, s.B, s.T, std::nullopt, std::nullopt, batch, time);
}

template <typename Cell>
std::tuple<Tensor, Tensors, Tensors> layers_fwd(Tensor x, Tensors state, Tensors weights,
                                                std::vector<int64_t> batch_sizes, bool has_bias,
                                                int64_t directions, bool batch_first, int64_t width,
                                                double dropout, bool tf32, bool save) {
#if defined(CUDA_KERNEL)
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
#endif
  Layers<Cell> s(x, weights, batch_sizes, has_bias, directions, batch_first, width);
  using Rows = typename Layers<Cell>::Rows;
  const int64_t L = s.L, N = s.N, D = s.D, P = s.P, rows = s.rows, E = s.engine_rows;
  constexpr int64_t G = Cell::kGates;
  state = s.check_states(state, "state");
  STD_TORCH_CHECK(0 <= dropout && dropout <= 1, "dropout must be from 0 to 1, got ", dropout);
  if (s.is_packed) write_packed_rows(batch_sizes, s.begins, s.firsts, s.lengths);
  x = dense(x);
  Copies copies(x);
  Tensors alive, kept;  // `alive` holds what copies read until they have run

  Tensor initial, bias, packed;
  if (!state.empty()) {
    initial = s.new_heads(x, {L * s.states()}, s.unrounded);
    s.bring_states(copies, initial, state);
  }
  if (has_bias) {
    bias = s.new_heads(x, {L * Cell::kBias * N * P}, s.unrounded);
    s.bring_bias(copies, bias);
  }
  if (s.packs()) {
    packed = s.new_heads(x, {s.place_of(L, 0, false)}, s.io);
    s.bring_weights(copies, packed);
    if (save) kept.push_back(packed);
  }
  Tensor last = new_tensor(x, {L * s.states()}, s.unrounded);

  // The input of a layer, and the same turned around in time. That of a PackedSequence is turned
  // around when its gates are brought to the engines' rows.
  Tensor input = x, turned;
  if (N == 2 && !s.is_packed) {
    turned = new_tensor(x, shape_of(x), s.io);
    s.move(copies, turned, s.outer(s.I), x, s.outer(s.I), s.I, true);
  }
  for (int64_t l = 0; l < L; ++l) {
    copies.run();
    const bool is_top = l == L - 1;
    const int64_t I = s.width_of(l);
    Tensor gates = new_tensor(x, {N, rows, 1, G, P}, s.io);
    for (int64_t n = 0; n < N; ++n) {
      const Tensor& read = n == 0 || s.is_packed ? input : turned;
      multiply({rows, G * P, I, 1, read.const_data_ptr(), 0, I, 1, s.w_ih(packed, l, n), 1, I,
                at(gates, n * rows * G * P), 0, G * P},
               s.dtype, tf32, x);
    }
    Rows at_gates = l == 0 ? s.outer(G * P) : s.inner(G * P);
    if (s.is_packed) {
      Tensor brought = s.new_rows(x, {N, E, 1, G, P});
      for (int64_t n = 0; n < N; ++n) {
        s.enter(copies, brought, n * E * G * P, G * P, gates, {n * rows * G * P, 0, G * P}, G * P,
                n == 1);
      }
      copies.run();
      gates = brought, at_gates = {0, s.T * G * P, G * P};
    }
    // Whether the outputs of the recurrence are those of the layer.
    const bool is_done = N == 1 && P == D && !s.is_packed && (!is_top || s.has_engine_rows());
    const Shape done = is_top ? s.shape(D) : s.inner_shape(D);
    Tensor h = new_tensor(x, is_done ? done : Shape{E, N * P}, s.io);
    Tensor saved = new_tensor(x, save ? Shape{E, Cell::kSaved, N, P} : Shape{0}, saved_dtype(x));
    Tensor h_prev = new_tensor(x, save ? Shape{E, N, P} : Shape{0}, s.io);
    ForwardParams p{};
    p.S = s.B, p.N = N, p.D = P, p.T = s.T;
    p.weight = s.w_hh(packed, l), p.x = gates.const_data_ptr();
    p.x_batch = at_gates.batch, p.x_time = at_gates.time, p.x_gate = P, p.x_head = E * G * P;
    const auto list = list_sequences(s, gates, p.x_batch, p.x_time);
    p.sequences = list.data();
    if (has_bias) p.bias = at(bias, l * Cell::kBias * N * P);
    if (!state.empty()) p.initial = at(initial, l * s.states());
    p.h = h.mutable_data_ptr(), p.last = at(last, l * s.states());
    p.saved = save ? saved.mutable_data_ptr() : nullptr;
    p.h_prev = save ? h_prev.mutable_data_ptr() : nullptr;
    run<Cell>(p, s.dtype, tf32, gates);
    if (save) kept.push_back(saved), kept.push_back(h_prev);

    if (is_done) {
      input = h;
    } else {
      input = new_tensor(x, is_top ? s.shape(N * D) : s.inner_shape(N * D), s.io);
      for (int64_t n = 0; n < N; ++n) {
        const Rows to = is_top ? s.outer(N * D, n * D) : s.inner(N * D, n * D);
        s.leave(copies, input, to, h, n * P, N * P, D, n == 1);
      }
      alive.push_back(h);
    }
    if (is_top) break;
    if (dropout > 0) {
      Tensor mask;
      copies.run();
      input = drop(input, dropout, mask);
      if (save) kept.push_back(mask);
    }
    if (N == 2 && !s.is_packed) {
      turned = new_tensor(x, s.inner_shape(N * D), s.io);
      for (int64_t n = 0; n < N; ++n) {
        const Rows place = s.inner(N * D, n * D);
        if (dropout > 0) {
          s.move(copies, turned, place, input, place, D, true);
        } else {
          s.move(copies, turned, place, h, s.inner(N * P, n * P), D, n == 0);
        }
      }
    }
    if (save) kept.push_back(input);
  }
  Tensors returned = s.new_states(x, s.io);
  s.return_states(copies, returned, last);
  copies.run();
  return {input, returned, kept};
}

// Writes the gradients of a layer's recurrent weights, or adds the copies that do.
template <typename Cell>
void write_dweight(const Layers<Cell>& s, const Tensor& dr, const Tensor& h_prev, int64_t layer,
                   bool tf32, Tensors& dweights, Copies& copies, Tensors& alive) {
  constexpr int64_t G = Cell::kGates;
  const int64_t N = s.N, D = s.D, P = s.P, rows = s.engine_rows;
#if defined(CUDA_KERNEL)
  if (P <= kWidestOwnDweight) {
    const bool is_apart = N == 2 || s.is_padded() || s.casts();
    Tensor whole = is_apart ? new_tensor(dr, {G, N, P, P}, s.io) : dweights[s.index(layer, 0, 1)];
    write_recurrent_dweight(dr, h_prev, rows, G, N, P, tf32, whole);
    for (int64_t n = 0; n < N && is_apart; ++n) {
      copies.add(dweights[s.index(layer, n, 1)], 0, {0, D * D, D, 1}, whole, n * P * P,
                 {0, N * P * P, P, 1}, {1, G, D, D});
    }
    alive.push_back(whole);
    return;
  }
#endif
  for (int64_t n = 0; n < N; ++n) {
    s.write_gradient(copies, alive, dweights[s.index(layer, n, 1)], [&](Tensor& to) {
      multiply({D, D, rows, G, at(dr, n * P), N * P, 1, G * N * P, at(h_prev, n * P), N * P, 1,
                to.mutable_data_ptr(), D * D, D},
               s.dtype, tf32, dr);
    });
  }
}

template <typename Cell>
std::tuple<Tensor, Tensors, Tensors> layers_bwd(OptionalTensor dy, Tensors dlast, Tensor x,
                                                Tensors weights, Tensors kept,
                                                std::vector<int64_t> batch_sizes, bool has_bias,
                                                int64_t directions, bool batch_first, int64_t width,
                                                double dropout, bool tf32, bool wants_dx,
                                                bool wants_dstate) {
#if defined(CUDA_KERNEL)
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
#endif
  Layers<Cell> s(x, weights, batch_sizes, has_bias, directions, batch_first, width);
  using Rows = typename Layers<Cell>::Rows;
  const int64_t L = s.L, N = s.N, B = s.B, T = s.T, D = s.D, P = s.P, rows = s.rows;
  const int64_t E = s.engine_rows;
  constexpr int64_t G = Cell::kGates;
  dlast = s.check_states(dlast, "dlast");
  if (s.is_packed) write_packed_rows(batch_sizes, s.begins, s.firsts, s.lengths);
  x = dense(x);
  Copies copies(x);
  Tensors alive;  // what copies read until they have run

  size_t first = 0, next = kept.size();
  const auto take = [&](const char* name, const Shape& shape, ScalarType type) {
    STD_TORCH_CHECK(next > first, "kept must have what the forward kept, got ", kept.size(),
                    " tensors");
    return operand(kept[--next], name, shape, type);
  };
  Tensor packed;
  if (s.packs()) {
    STD_TORCH_CHECK(!kept.empty(), "kept must have what the forward kept, got no tensors");
    packed = operand(kept[first++], "kept weights", {s.place_of(L, 0, false)}, s.io);
  }
  Tensor last;
  if (!dlast.empty()) {
    last = s.new_heads(x, {L * s.states()}, s.unrounded);
    s.bring_states(copies, last, dlast);
  }
  Tensor dbias = new_tensor(x, {L * Cell::kBias * N * P}, s.unrounded);
  Tensor dinitial = new_tensor(x, {L * s.states()}, s.unrounded);
  Tensors dweights;
  for (const Tensor& weight : s.weights) {
    dweights.push_back(new_tensor(x, shape_of(weight), s.stored));
  }

  Tensor upper;  // the gradient of a layer's outputs
  Rows place = s.inner(N * D);
  if (dy) {
    check_shape(*dy, "dy", s.shape(N * D));
    check_dtype(*dy, "dy", s.io);
    upper = *dy;
    place.batch = s.is_packed ? 0 : upper.stride(batch_first ? 0 : 1);
    place.time = upper.stride(batch_first && !s.is_packed ? 1 : 0);
    place.unit = upper.stride(s.is_packed ? 1 : 2);
  } else {
    upper = new_tensor(x, s.inner_shape(N * D), s.io);
    torch::stable::zero_(upper);
  }
  for (int64_t l = L - 1; l >= 0; --l) {
    const int64_t I = s.width_of(l);
    const Tensor h_prev = take("kept h_prev", {E, N, P}, s.io);
    const Tensor saved = take("kept saved", {E, Cell::kSaved, N, P}, saved_dtype(x));
    const Tensor input = l > 0 ? take("kept input", s.inner_shape(I), s.io) : x;
    Tensor dh = upper;
    const bool is_dense = (place.batch == T * N * D || B == 1) &&
                          (place.time == N * D || T == 1) && (place.unit == 1 || D == 1);
    if (N == 2 || P != D || s.is_packed || !is_dense) {
      dh = s.new_rows(x, {E, N * P});
      for (int64_t n = 0; n < N; ++n) {
        const Rows from{n * D * place.unit, place.batch, place.time, place.unit};
        s.enter(copies, dh, n * P, N * P, upper, from, D, n == 1);
      }
    }
    copies.run();
    dh = dense(dh);  // a slice of another tensor may not be aligned

    Tensor dgates = new_tensor(x, {E, G, N, P}, s.io);
    Tensor dr = Cell::kSplitGrad ? new_tensor(x, {E, G, N, P}, s.io) : dgates;
    BackwardParams p{};
    p.S = B, p.N = N, p.D = P, p.T = T;
    const auto list = list_sequences(s, dh, 0, 0);
    p.sequences = list.data();
    p.weight = s.w_hh(packed, l), p.dh = dh.const_data_ptr();
    p.dlast = dlast.empty() ? nullptr : at(last, l * s.states());
    p.saved = saved.const_data_ptr(), p.grad_clip = std::numeric_limits<double>::infinity();
    p.dx = dgates.mutable_data_ptr(), p.dr = Cell::kSplitGrad ? dr.mutable_data_ptr() : nullptr;
    p.dbias = at(dbias, l * Cell::kBias * N * P), p.dstate = at(dinitial, l * s.states());
    run<Cell>(p, s.dtype, tf32, dh);

    // The gradients of each direction's gates, [N, rows, G, P], with rows as those of the input.
    Tensor ordered = dgates;
    if (N == 2 || s.is_packed || (l == 0 && !s.has_engine_rows())) {
      ordered = new_tensor(x, {N, rows, G * P}, s.io);
      for (int64_t n = 0; n < N; ++n) {
        for (int64_t g = 0; g < G; ++g) {
          const int64_t begin = n * rows * G * P + g * P;
          const Rows to = l == 0 ? s.outer(G * P, begin) : s.inner(G * P, begin);
          s.leave(copies, ordered, to, dgates, (g * N + n) * P, G * N * P, P, n == 1);
        }
      }
      copies.run();
    }
    write_dweight<Cell>(s, dr, h_prev, l, tf32, dweights, copies, alive);
    for (int64_t n = 0; n < N; ++n) {
      s.write_gradient(copies, alive, dweights[s.index(l, n, 0)], [&](Tensor& to) {
        const int64_t batch = s.is_padded() ? G : 1;  // without the padded units of each gate
        multiply({batch == 1 ? G * D : D, I, rows, batch, at(ordered, n * rows * G * P), P, 1,
                  G * P, input.const_data_ptr(), I, 1, to.mutable_data_ptr(), D * I, I},
                 s.dtype, tf32, x);
      });
    }
    if (l == 0 && !wants_dx) {
      upper = new_tensor(x, {0}, s.io);
      break;
    }
    upper = new_tensor(x, l == 0 ? shape_of(x) : s.inner_shape(I), s.io);
    place = s.inner(I);
    for (int64_t n = 0; n < N; ++n) {
      Tensor part = n == 0 ? upper : new_tensor(x, {rows, I}, s.io);
      multiply({rows, I, G * P, 1, at(ordered, n * rows * G * P), 0, G * P, 1,
                s.w_ih(packed, l, n), I, 1, part.mutable_data_ptr(), 0, I},
               s.dtype, tf32, x);
      if (n == 0) continue;
      copies.add(upper, 0, {0, 0, 0, 1}, upper, 0, {0, 0, 0, 1}, {1, 1, 1, rows * I}, &part);
      copies.run();
    }
    if (l > 0 && dropout > 0) {
      upper = drop_gradient(upper, take("kept mask", s.inner_shape(I), ScalarType::Bool), dropout);
    }
  }
  Tensors dstate;
  if (wants_dstate) {
    dstate = s.new_states(x, s.unrounded);
    s.return_states(copies, dstate, dinitial);
  }
  if (has_bias) s.return_bias(copies, dweights, dbias);
  copies.run();
  return {upper, dstate, dweights};
}

}  // namespace flashcell
