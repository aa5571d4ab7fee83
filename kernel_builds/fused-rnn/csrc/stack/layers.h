// The sizes and the parameters of a torch.nn LSTM, GRU or RNN, all of whose layers run as one op
// (forward.h), and their gradients as another (backward.h): projections, recurrences, directions,
// dropout, and torch's layouts of parameters and states.
// L layers, N directions, B batch, T time, I input width, D hidden width, O output width of a
// direction (proj_size, or D); G gates, K states, R bias rows. The directions of a layer are heads
// of one recurrence. The second one runs on an input that is turned around in time, and its outputs
// are turned back. The recurrence may be wider than D, with P units a head: the others have zeros
// as parameters, and stay zero. Of a PackedSequence, x and y are the rows; the engines have rows of
// their own (PackedRows). A cell of torch.nn (LSTMCell, GRUCell, RNNCell) is one layer of one step:
// x is [B, I], its states are [B, D], and y is the next h.
#pragma once
#include "../cells/all.h"
#include "copies.h"

#include <algorithm>
#include <tuple>

namespace flashcell {

// The sizes of a call, checked, and its parameters as dense tensors.
template <typename Cell>
struct Layers {
  static constexpr int64_t G = Cell::kGates, K = Cell::kStates, R = Cell::kBias;
  static constexpr int64_t kSummed = 2 * G - R;  // rows of b_ih and b_hh that are added up
  int64_t L, N, B, T, I, D, P, O, each;
  int64_t rows, engine_rows;         // of x and y, and of the engines' tensors
  int64_t x_batch, x_time;           // strides of the rows of x
  ScalarType io, unrounded, stored;  // of x, of the states and of the weights
  Dtype dtype;
  bool has_bias, projects, batch_first, is_packed, is_cell;
  bool few_steps = false;      // CUDA: whether projections are computed step by step
  bool passes_padded = false;  // whether a layer reads P units of the one below, with zeros
  Tensors weights;
  Tensor arrays, table;  // those of packed_rows, and the table of the sequences
  PackedRows packed_rows{};

  Layers(const Tensor& x, const Tensors& given, const std::vector<int64_t>& batch_sizes, bool bias,
         bool projected, int64_t directions, bool by_batch, int64_t width)
      : N(directions),
        P(width),
        each((bias ? 4 : 2) + projected),
        has_bias(bias),
        projects(projected),
        batch_first(by_batch),
        is_packed(!batch_sizes.empty()),
        is_cell(!is_packed && x.dim() == 2),
        weights(given) {
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
    } else if (is_cell) {
      STD_TORCH_CHECK(L == 1 && N == 1 && !projects,
                      "x must be [B, T, I] or [T, B, I] for several layers, directions or a "
                      "projection, got shape ",
                      to_string(shape_of(x)));
      B = rows = x.size(0), T = 1, I = x.size(1);
      x_batch = x_time = 1;
    } else {
      check_rank(x, "x", 3, batch_first ? "[B, T, I]" : "[T, B, I]");
      B = x.size(batch_first ? 0 : 1), T = x.size(batch_first ? 1 : 0), I = x.size(2), rows = B * T;
      x_batch = batch_first ? T : 1, x_time = batch_first ? 1 : B;
    }
    engine_rows = is_packed ? flashcell::engine_rows(B, T, rows) : rows;
    check_rank(weights[1], "weights[1]", 2, "[G D, O]");
    D = weights[1].size(0) / G, O = weights[1].size(1);
    STD_TORCH_CHECK(B > 0 && T > 0 && I > 0 && D > 0 && O > 0, "x must not be empty, got shape ",
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
      const int64_t which = i % each;
      const bool fits = which == 0   ? has_shape(weights[i], {G * D, width_of(i / (N * each))})
                        : which == 1 ? has_shape(weights[i], {G * D, projects ? O : D})
                        : projects && which == each - 1 ? has_shape(weights[i], {O, D})
                                                        : has_shape(weights[i], {G * D});
      if (!fits || weights[i].scalar_type() != stored) refuse_weight(i);
      // Copies read a parameter wherever it lies.
      if (!is_copied(which) || !weights[i].is_contiguous()) weights[i] = dense(weights[i]);
    }
    if (projects) {
      STD_TORCH_CHECK(K == 2 && !is_packed && stored == io,
                      "weights must be an LSTM's of the dtype of x, and x no PackedSequence's, if "
                      "there are projections");
    }
  }

  // Whether only copies read a parameter: a bias, or a weight that is padded, cast or beside that
  // of another direction.
  bool is_copied(int64_t which) const {
    if (which > 1) return !projects || which < each - 1;
    return !projects && (packs_w_ih() || (which == 1 && N == 2));
  }

  // Writes the arrays of a PackedSequence's rows; `stride` is that between rows of x.
  void write_rows(const std::vector<int64_t>& batch_sizes, const Tensor& like, int64_t stride) {
    constexpr auto kFields = int64_t(sizeof(Sequence) / sizeof(int64_t));
    arrays = new_tensor(like, {T + 2 * B}, ScalarType::Long);
    table = new_tensor(like, {B, kFields}, ScalarType::Long);
    auto* const first = (int64_t*)arrays.mutable_data_ptr();
    packed_rows = {first, first + T, first + T + B};
    write_packed_rows(batch_sizes, packed_rows, (Sequence*)table.mutable_data_ptr(), stride, like);
  }

  // Says what is wrong with a weight's shape or dtype.
  void refuse_weight(int64_t i) const {
    const int64_t which = i % each;
    const Shape shape = which == 0                      ? Shape{G * D, width_of(i / (N * each))}
                        : which == 1                    ? Shape{G * D, projects ? O : D}
                        : projects && which == each - 1 ? Shape{O, D}
                                                        : Shape{G * D};
    operand(weights[i], ("weights[" + std::to_string(i) + "]").c_str(), shape, stored);
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

  int64_t width_of(int64_t layer) const { return layer == 0 ? I : N * O; }
  int64_t input_of(int64_t layer) const { return layer > 0 && passes_padded ? P : width_of(layer); }
  int64_t states() const { return K * B * N * P; }  // elements of a layer's states
  bool is_padded() const { return P != D; }
  // Whether a step of the engines reads an h; with projections the first one does not.
  bool has_h_prev(bool has_state) const { return (has_state && (!projects || steps())) || T > 1; }
  bool casts() const { return stored != io; }
  // Whether the rows of x are those of the engines.
  bool has_engine_rows() const { return !is_packed && (batch_first || B == 1 || T == 1); }
  Shape shape(int64_t width) const {  // of x and y
    if (is_packed || is_cell) return {rows, width};
    return batch_first ? Shape{B, T, width} : Shape{T, B, width};
  }
  Shape inner_shape(int64_t width) const {  // of what layers pass to each other
    return is_packed || is_cell ? Shape{rows, width} : Shape{B, T, width};
  }

  const Tensor& weight(int64_t layer, int64_t direction, int64_t which) const {
    return weights[index(layer, direction, which)];
  }
  const Tensor& w_hr(int64_t layer, int64_t direction) const {
    return weight(layer, direction, each - 1);
  }
  size_t index(int64_t layer, int64_t direction, int64_t which) const {
    return size_t((layer * N + direction) * each + which);
  }

  // Whether projections are computed step by step (projected_steps.h).
  bool steps() const { return (kProjectsBySteps && projects && !is_padded()) || few_steps; }

  // The weights as the engines and products read them. They are torch's own, or lie in one tensor:
  // for each layer w_hh [G, N, P, P] and, if padded or cast, w_ih [N, G P, input]. With
  // projections, w_hh is torch's times w_hr.
  bool packs() const { return !steps() && (N == 2 || is_padded() || casts() || projects); }
  bool packs_w_ih() const { return is_padded() || casts(); }
  static int64_t aligned(int64_t elements) { return (elements + 63) / 64 * 64; }
  int64_t place_of(int64_t layer, int64_t direction, bool is_input) const {
    int64_t place = 0;
    for (int64_t l = 0; l < layer; ++l) {
      place += aligned(G * N * P * P);
      if (packs_w_ih()) place += N * aligned(G * P * input_of(l));
    }
    if (!is_input) return place;
    return place + aligned(G * N * P * P) + direction * aligned(G * P * input_of(layer));
  }
  const void* w_hh(const Tensor& packed, int64_t layer) const {
    return packs() ? at(packed, place_of(layer, 0, false)) : weight(layer, 0, 1).const_data_ptr();
  }
  const void* w_ih(const Tensor& packed, int64_t layer, int64_t direction) const {
    return packs_w_ih() ? at(packed, place_of(layer, direction, true))
                        : weight(layer, direction, 0).const_data_ptr();
  }
  void bring_weights(Copies& copies, Tensor& packed, bool reads_h) const {
    for (int64_t l = 0; l < L; ++l) {
      for (int64_t n = 0; n < N; ++n) {
        if (!projects && reads_h) {
          copies.add(packed, place_of(l, 0, false) + n * P * P, {0, N * P * P, P, 1},
                     weight(l, n, 1), 0, {0, D * D, D, 1}, {1, G, D, D});
          copies.pad(P, P);
        }
        if (!packs_w_ih()) continue;
        const int64_t width = width_of(l), to = input_of(l);
        const int64_t rows = to == width ? D : 1;  // that are copied as one
        copies.add(packed, place_of(l, n, true), {0, P * to, rows * to, 1}, weight(l, n, 0), 0,
                   {0, D * width, rows * width, 1}, {1, G, D / rows, rows * width});
        copies.pad(rows == D ? P * to : to, rows == D ? 1 : P);
      }
    }
  }

  // A new tensor, filled with zeros if `zeros`: where not every element will be written.
  static Tensor new_filled(const Tensor& like, const Shape& shape, ScalarType type, bool zeros) {
    Tensor tensor = new_tensor(like, shape, type);
    if (zeros) torch::stable::zero_(tensor);
    return tensor;
  }

  int64_t state_width(int64_t k) const { return k == 0 ? O : D; }
  Shape state_shape(int64_t k) const {
    return is_cell ? Shape{B, D} : Shape{L * N, B, state_width(k)};
  }
  // Adds copies from torch's states, K tensors [L N, B, D or O], to `packed` [L, K, B, N, P]. The
  // engines have no projected states. `first` is 1 if `from` has no h.
  void bring_states(Copies& copies, Tensor& packed, const Tensors& from, int64_t first = 0) const {
    for (int64_t k = std::max<int64_t>(projects, first); k < K; ++k) {
      const Tensor& state = from[k - first];
      const int64_t next = is_cell ? 0 : state.stride(0), axis = is_cell ? 0 : 1;
      copies.add(packed, k * B * N * P, {states(), P, N * P, 1}, state, 0,
                 {N * next, next, state.stride(axis), state.stride(axis + 1)}, {L, N, B, D});
      copies.pad(P);
    }
  }
  // Adds the copies back, to the states that new_states has made: from number `first` on.
  void return_states(Copies& copies, Tensors& to, const Tensor& packed, int64_t first = 0) const {
    for (int64_t k = std::max<int64_t>(projects, first); k < K; ++k) {
      copies.add(to[k], 0, {N * B * D, B * D, D, 1}, packed, k * B * N * P, {states(), P, N * P, 1},
                 {L, N, B, D});
    }
  }
  // Checks the states that a caller gives, and returns them. `first` is 1 if there is no h.
  Tensors check_states(const Tensors& given, const char* name, int64_t first = 0) const {
    STD_TORCH_CHECK(given.empty() || int64_t(given.size()) == K - first, name, " must be ",
                    K - first, " tensors or none, got ", given.size());
    for (size_t k = 0; k < given.size(); ++k) {
      check_shape(given[k], name, state_shape(int64_t(k) + first));
      if (given[k].scalar_type() != io) check_dtype(given[k], name, unrounded);
    }
    return given;
  }
  // K new tensors; those before `first` are undefined.
  Tensors new_states(const Tensor& like, ScalarType type, int64_t first = 0) const {
    Tensors states(first);
    for (int64_t k = first; k < K; ++k) {
      states.push_back(new_tensor(like, state_shape(k), type));
    }
    return states;
  }

  // Where the biases of layers and directions are, in elements: [L, R, N, P] unless given.
  struct BiasRows {
    int64_t begin, layer, row;
  };
  BiasRows bias_rows() const { return {0, R * N * P, N * P}; }
  // Adds the copies from torch's biases to these rows of `bias`.
  void bring_bias(Copies& copies, Tensor& bias, BiasRows rows) const {
    const int64_t row = rows.row;
    for (int64_t i = 0; i < L * N; ++i) {
      const Tensor &ih = weight(0, i, 2), &hh = weight(0, i, 3);
      const int64_t to = rows.begin + i / N * rows.layer + i % N * P;
      copies.add(bias, to, {0, 0, row, 1}, ih, 0, {0, 0, D, 1}, {1, 1, kSummed, D});
      copies.plus(hh, 0, {0, 0, D, 1}), copies.pad(P);
      if (kSummed == G) continue;
      copies.add(bias, to + kSummed * row, {0, 0, row, 1}, ih, kSummed * D, {0, 0, D, 1},
                 {1, 1, G - kSummed, D});
      copies.pad(P);
      copies.add(bias, to + G * row, {0, 0, row, 1}, hh, kSummed * D, {0, 0, D, 1},
                 {1, 1, G - kSummed, D});
      copies.pad(P);
    }
  }
  void return_bias(Copies& copies, Tensors& dweights, const Tensor& dbias, BiasRows rows) const {
    const int64_t row = rows.row;
    for (int64_t i = 0; i < L * N; ++i) {
      Tensor &ih = dweights[index(0, i, 2)], &hh = dweights[index(0, i, 3)];
      const int64_t from = rows.begin + i / N * rows.layer + i % N * P;
      copies.add(ih, 0, {0, 0, D, 1}, dbias, from, {0, 0, row, 1}, {1, 1, G, D});
      copies.add(hh, 0, {0, 0, D, 1}, dbias, from, {0, 0, row, 1}, {1, 1, kSummed, D});
      if (kSummed == G) continue;
      copies.add(hh, kSummed * D, {0, 0, D, 1}, dbias, from + G * row, {0, 0, row, 1},
                 {1, 1, G - kSummed, D});
    }
  }

  // Calls `write` with a tensor [G, P, pitch] in the dtype of x for a weight's gradient, `out`
  // [G, D, width]: this one, or one from which a copy is added, without the padded units.
  template <typename Write>
  void write_padded(Copies& copies, Tensors& alive, Tensor& out, int64_t pitch, int64_t width,
                    Write write) const {
    if (!casts() && !is_padded()) return write(out);
    Tensor whole = new_tensor(out, {G, P, pitch}, io);
    write(whole);
    copies.add(out, 0, {0, D * width, width, 1}, whole, 0, {0, P * pitch, pitch, 1},
               {1, G, D, width});
    alive.push_back(whole);
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

  // Adds copies of C elements of every row, from [G, rows of x or y] to [rows of the engines, G],
  // and back; `turns` the sequences around in time. The engines' rows that no sequence has become
  // 0.
  void enter(Copies& copies, Tensor& engine, int64_t begin, int64_t width, const Tensor& x,
             Rows from, int64_t C, bool turns) const {
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

}  // namespace flashcell
