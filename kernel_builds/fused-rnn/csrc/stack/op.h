// The layers of a torch.nn LSTM, GRU or RNN as one op, and their gradients as another: projections,
// recurrences, directions, dropout, and torch's layouts of parameters and states.
// L layers, N directions, B batch, T time, I input width, D hidden width; G gates, K states, R bias
// rows. The directions of a layer are heads of one recurrence. The second one runs on an input that is
// turned around in time, and its outputs are turned back. The recurrence may be wider than D, with P
// units a head: the others have zeros as parameters, and stay zero.
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

// x [B,T,I], or [T,B,I] unless batch_first · state: K tensors [L N,B,D], or none · weights: for each
// layer and direction w_ih [G D,I], w_hh [G D,D] and, if has_bias, b_ih [G D], b_hh [G D]; all in the
// dtype of x, but the states may be in the state dtype · width: P, at least D · dropout: probability,
// between layers
// -> y as x, N D wide · last: K tensors [L N,B,D] in the dtype of x · kept: what the backward reads,
// empty unless `save`
inline constexpr char kLayersForwardSchema[] =
    "_layers_fwd(Tensor x, Tensor[] state, Tensor[] weights, bool has_bias, int directions, "
    "bool batch_first, int width, float dropout, bool tf32, bool save) "
    "-> (Tensor y, Tensor[] last, Tensor[] kept)";

// dy as y · dlast: K tensors as last, or none · wants_dx, wants_dstate: whether to compute these
// -> the gradients of x ([0] if not wanted), of the states in the state dtype (K tensors, or none), and
// of the weights
inline constexpr char kLayersBackwardSchema[] =
    "_layers_bwd(Tensor? dy, Tensor[] dlast, Tensor x, Tensor[] weights, Tensor[] kept, "
    "bool has_bias, int directions, bool batch_first, int width, float dropout, bool tf32, "
    "bool wants_dx, bool wants_dstate) -> (Tensor dx, Tensor[] dstate, Tensor[] dweights)";

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
    Copy copy{at(out, out_at),          at(in, in_at),          plus ? at(*plus, in_at) : nullptr,
              io_dtype(out, "a result"), io_dtype(in, "a copy"), {}, {}, {}};
    for (int i = 0; i < 4; ++i) {
      copy.size[i] = sizes.of[i];
      copy.out_stride[i] = out_strides.of[i], copy.in_stride[i] = in_strides.of[i];
    }
    copies_.push_back(copy);
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
  int64_t x_batch, x_time;  // strides of the rows of x
  ScalarType io, unrounded;
  Dtype dtype;
  bool has_bias, batch_first;
  Tensors weights;

  Layers(const Tensor& x, const Tensors& given, bool bias, int64_t directions, bool by_batch,
         int64_t width)
      : N(directions), P(width), each(bias ? 4 : 2), has_bias(bias), batch_first(by_batch),
        weights(given) {
    check_rank(x, "x", 3, batch_first ? "[B, T, I]" : "[T, B, I]");
    STD_TORCH_CHECK(N == 1 || N == 2, "directions must be 1 or 2, got ", N);
    const int64_t count = int64_t(weights.size());
    STD_TORCH_CHECK(count > 0 && count % (N * each) == 0, "weights must be ", each,
                    " for each layer and direction, got ", count);
    L = count / (N * each);
    B = x.size(batch_first ? 0 : 1), T = x.size(batch_first ? 1 : 0), I = x.size(2);
    x_batch = batch_first ? T : 1, x_time = batch_first ? 1 : B;
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
    for (int64_t i = 0; i < count; ++i) {
      const Shape shape = i % each == 0   ? Shape{G * D, width_of(i / (N * each))}
                          : i % each == 1 ? Shape{G * D, D}
                                          : Shape{G * D};
      weights[i] = operand(weights[i], ("weights[" + std::to_string(i) + "]").c_str(), shape, io);
    }
  }

  int64_t width_of(int64_t layer) const { return layer == 0 ? I : N * D; }
  int64_t rows() const { return B * T; }
  int64_t states() const { return K * B * N * P; }  // elements of a layer's states
  bool is_padded() const { return P != D; }
  // Whether the rows of x lie as [B, T].
  bool in_batch_order() const { return batch_first || B == 1 || T == 1; }
  Shape shape(int64_t width) const {  // of x and y
    return batch_first ? Shape{B, T, width} : Shape{T, B, width};
  }

  const Tensor& weight(int64_t layer, int64_t direction, int64_t which) const {
    return weights[index(layer, direction, which)];
  }
  size_t index(int64_t layer, int64_t direction, int64_t which) const {
    return size_t((layer * N + direction) * each + which);
  }

  // The weights as the engines and products read them. They are torch's own, or lie in one tensor:
  // for each layer w_hh [G, N, P, P] and, if padded, w_ih [N, G P, I].
  bool packs() const { return N == 2 || is_padded(); }
  static int64_t aligned(int64_t elements) { return (elements + 63) / 64 * 64; }
  int64_t place_of(int64_t layer, int64_t direction, bool is_input) const {
    int64_t place = 0;
    for (int64_t l = 0; l < layer; ++l) {
      place += aligned(G * N * P * P);
      if (is_padded()) place += N * aligned(G * P * width_of(l));
    }
    if (!is_input) return place;
    return place + aligned(G * N * P * P) + direction * aligned(G * P * width_of(layer));
  }
  const void* w_hh(const Tensor& packed, int64_t layer) const {
    return packs() ? at(packed, place_of(layer, 0, false)) : weight(layer, 0, 1).const_data_ptr();
  }
  const void* w_ih(const Tensor& packed, int64_t layer, int64_t direction) const {
    return is_padded() ? at(packed, place_of(layer, direction, true))
                       : weight(layer, direction, 0).const_data_ptr();
  }
  void bring_weights(Copies& copies, Tensor& packed) const {
    for (int64_t l = 0; l < L; ++l) {
      for (int64_t n = 0; n < N; ++n) {
        copies.add(packed, place_of(l, 0, false) + n * P * P, {0, N * P * P, P, 1}, weight(l, n, 1),
                   0, {0, D * D, D, 1}, {1, G, D, D});
        if (!is_padded()) continue;
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

  // Adds a copy of C elements of every row, whose neighbours in the batch and in time are `batch` and
  // `time` elements apart; `turns` the sequences around in time.
  struct Rows {
    int64_t begin, batch, time, unit = 1;
  };
  void copy_rows(Copies& copies, Tensor& out, Rows to, const Tensor& in, Rows from, int64_t C,
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

template <typename Cell>
std::tuple<Tensor, Tensors, Tensors> layers_fwd(Tensor x, Tensors state, Tensors weights,
                                                bool has_bias, int64_t directions, bool batch_first,
                                                int64_t width, double dropout, bool tf32,
                                                bool save) {
  const Layers<Cell> s(x, weights, has_bias, directions, batch_first, width);
  const int64_t L = s.L, N = s.N, B = s.B, T = s.T, D = s.D, P = s.P, rows = s.rows();
  constexpr int64_t G = Cell::kGates;
  state = s.check_states(state, "state");
  STD_TORCH_CHECK(0 <= dropout && dropout <= 1, "dropout must be from 0 to 1, got ", dropout);
#if defined(CUDA_KERNEL)
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
#endif
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

  Tensor input = x, turned;
  // Where the rows of the layer's input are, in rows; later layers read [B, T, N D].
  int64_t batch = s.x_batch, time = s.x_time;
  if (N == 2) {
    const typename Layers<Cell>::Rows place{0, batch * s.I, time * s.I};
    turned = new_tensor(x, shape_of(x), s.io);
    s.copy_rows(copies, turned, place, x, place, s.I, true);
  }
  for (int64_t l = 0; l < L; ++l, batch = T, time = 1) {
    copies.run();
    const bool is_top = l == L - 1;
    const int64_t I = s.width_of(l);
    Tensor gates = new_tensor(x, {N, rows, 1, G, P}, s.io);
    for (int64_t n = 0; n < N; ++n) {
      multiply({rows, G * P, I, 1, (n == 0 ? input : turned).const_data_ptr(), 0, I, 1,
                s.w_ih(packed, l, n), 1, I, at(gates, n * rows * G * P), 0, G * P},
               s.dtype, tf32, x);
    }
    // Whether the outputs of the recurrence are those of the layer.
    const bool is_done = N == 1 && P == D && (!is_top || s.in_batch_order());
    Tensor h = new_tensor(x, is_done && is_top ? s.shape(D) : Shape{B, T, N * P}, s.io);
    Tensor saved = new_tensor(x, save ? Shape{B, T, Cell::kSaved, N, P} : Shape{0}, saved_dtype(x));
    Tensor h_prev = new_tensor(x, save ? Shape{B, T, N, P} : Shape{0}, s.io);
    ForwardParams p{};
    p.S = B, p.N = N, p.D = P, p.T = T;
    p.weight = s.w_hh(packed, l), p.x = gates.const_data_ptr();
    p.x_batch = batch * G * P, p.x_time = time * G * P, p.x_gate = P, p.x_head = rows * G * P;
    const auto list = sequences(gates, B, T, std::nullopt, std::nullopt, p.x_batch, p.x_time);
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
      input = new_tensor(x, is_top ? s.shape(N * D) : Shape{B, T, N * D}, s.io);
      const int64_t to_batch = is_top ? s.x_batch : T, to_time = is_top ? s.x_time : 1;
      for (int64_t n = 0; n < N; ++n) {
        s.copy_rows(copies, input, {n * D, to_batch * N * D, to_time * N * D}, h,
                    {n * P, T * N * P, N * P}, D, n == 1);
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
    if (N == 2) {
      turned = new_tensor(x, {B, T, N * D}, s.io);
      for (int64_t n = 0; n < N; ++n) {
        const typename Layers<Cell>::Rows place{n * D, T * N * D, N * D};
        if (dropout > 0) {
          s.copy_rows(copies, turned, place, input, place, D, true);
        } else {
          s.copy_rows(copies, turned, place, h, {n * P, T * N * P, N * P}, D, n == 0);
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
                   bool tf32, Tensors& dweights, [[maybe_unused]] Copies& copies,
                   [[maybe_unused]] Tensors& alive) {
  constexpr int64_t G = Cell::kGates;
  const int64_t N = s.N, D = s.D, P = s.P;
#if defined(CUDA_KERNEL)
  if (P <= kWidestOwnDweight) {
    Tensor whole = s.packs() ? new_tensor(dr, {G, N, P, P}, s.io) : dweights[s.index(layer, 0, 1)];
    write_recurrent_dweight(dr, h_prev, s.rows(), G, N, P, tf32, whole);
    for (int64_t n = 0; n < N && s.packs(); ++n) {
      copies.add(dweights[s.index(layer, n, 1)], 0, {0, D * D, D, 1}, whole, n * P * P,
                 {0, N * P * P, P, 1}, {1, G, D, D});
    }
    alive.push_back(whole);
    return;
  }
#endif
  for (int64_t n = 0; n < N; ++n) {
    multiply({D, D, s.rows(), G, at(dr, n * P), N * P, 1, G * N * P, at(h_prev, n * P), N * P, 1,
              dweights[s.index(layer, n, 1)].mutable_data_ptr(), D * D, D},
             s.dtype, tf32, dr);
  }
}

template <typename Cell>
std::tuple<Tensor, Tensors, Tensors> layers_bwd(OptionalTensor dy, Tensors dlast, Tensor x,
                                                Tensors weights, Tensors kept, bool has_bias,
                                                int64_t directions, bool batch_first, int64_t width,
                                                double dropout, bool tf32, bool wants_dx,
                                                bool wants_dstate) {
  const Layers<Cell> s(x, weights, has_bias, directions, batch_first, width);
  const int64_t L = s.L, N = s.N, B = s.B, T = s.T, D = s.D, P = s.P, rows = s.rows();
  constexpr int64_t G = Cell::kGates;
  dlast = s.check_states(dlast, "dlast");
#if defined(CUDA_KERNEL)
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
#endif
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
  for (const Tensor& weight : s.weights) dweights.push_back(new_tensor(x, shape_of(weight), s.io));

  // The gradient of a layer's outputs, and where its rows are.
  Tensor upper;
  typename Layers<Cell>::Rows place{0, T * N * D, N * D};
  if (dy) {
    check_shape(*dy, "dy", s.shape(N * D));
    check_dtype(*dy, "dy", s.io);
    upper = *dy;
    place = {0, upper.stride(batch_first ? 0 : 1), upper.stride(batch_first ? 1 : 0),
             upper.stride(2)};
  } else {
    upper = new_tensor(x, {B, T, N * D}, s.io);
    torch::stable::zero_(upper);
  }
  for (int64_t l = L - 1; l >= 0; --l) {
    const int64_t I = s.width_of(l);
    const Tensor h_prev = take("kept h_prev", {B, T, N, P}, s.io);
    const Tensor saved = take("kept saved", {B, T, Cell::kSaved, N, P}, saved_dtype(x));
    const Tensor input = l > 0 ? take("kept input", {B, T, I}, s.io) : x;
    Tensor dh = upper;
    const bool is_dense = (place.batch == T * N * D || B == 1) &&
                          (place.time == N * D || T == 1) && (place.unit == 1 || D == 1);
    if (s.packs() || !is_dense) {
      dh = s.new_heads(x, {B, T, N * P}, s.io);
      for (int64_t n = 0; n < N; ++n) {
        s.copy_rows(copies, dh, {n * P, T * N * P, N * P}, upper,
                    {n * D * place.unit, place.batch, place.time, place.unit}, D, n == 1);
      }
    }
    copies.run();
    dh = dense(dh);  // a slice of another tensor may not be aligned

    Tensor dgates = new_tensor(x, {B, T, G, N, P}, s.io);
    Tensor dr = Cell::kSplitGrad ? new_tensor(x, {B, T, G, N, P}, s.io) : dgates;
    BackwardParams p{};
    p.S = B, p.N = N, p.D = P, p.T = T;
    const auto list = sequences(dh, B, T, std::nullopt, std::nullopt, 0, 0);
    p.sequences = list.data();
    p.weight = s.w_hh(packed, l), p.dh = dh.const_data_ptr();
    p.dlast = dlast.empty() ? nullptr : at(last, l * s.states());
    p.saved = saved.const_data_ptr(), p.grad_clip = std::numeric_limits<double>::infinity();
    p.dx = dgates.mutable_data_ptr(), p.dr = Cell::kSplitGrad ? dr.mutable_data_ptr() : nullptr;
    p.dbias = at(dbias, l * Cell::kBias * N * P), p.dstate = at(dinitial, l * s.states());
    run<Cell>(p, s.dtype, tf32, dh);

    // The gradients of each direction's gates, [N, rows, G, P], with rows as those of the input.
    Tensor ordered = dgates;
    if (N == 2 || (l == 0 && !s.in_batch_order())) {
      ordered = new_tensor(x, {N, rows, G * P}, s.io);
      const int64_t to_batch = (l == 0 ? s.x_batch : T) * G * P;
      const int64_t to_time = (l == 0 ? s.x_time : 1) * G * P;
      for (int64_t n = 0; n < N; ++n) {
        const int64_t begin = n * rows * G * P + (n == 1 ? (T - 1) * to_time : 0);
        copies.add(ordered, begin, {to_batch, n == 1 ? -to_time : to_time, P, 1}, dgates, n * P,
                   {T * G * N * P, G * N * P, N * P, 1}, {B, T, G, P});
      }
      copies.run();
    }
    write_dweight<Cell>(s, dr, h_prev, l, tf32, dweights, copies, alive);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t batch = s.is_padded() ? G : 1;  // without the padded units of each gate
      multiply({batch == 1 ? G * D : D, I, rows, batch, at(ordered, n * rows * G * P), P, 1, G * P,
                input.const_data_ptr(), I, 1, dweights[s.index(l, n, 0)].mutable_data_ptr(), D * I,
                I},
               s.dtype, tf32, x);
    }
    if (l == 0 && !wants_dx) {
      upper = new_tensor(x, {0}, s.io);
      break;
    }
    upper = new_tensor(x, l == 0 ? shape_of(x) : Shape{B, T, I}, s.io);
    place = {0, T * I, I};
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
      upper = drop_gradient(upper, take("kept mask", {B, T, I}, ScalarType::Bool), dropout);
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
