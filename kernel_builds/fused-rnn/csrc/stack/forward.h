// The op that runs all layers of a module (layers.h has its shapes).
#pragma once
#include "dropout.h"
#include "projection.h"
#if defined(CUDA_KERNEL)
#include "one_step.h"
#include "wavefront_forward.h"
#endif

namespace flashcell {

// x: [B,T,I], or [T,B,I] unless batch_first, or, with batch_sizes, [rows,I]; [B,I] for a cell.
// state: K tensors [L N,B,D], h [L N,B,O], of a cell [B,D], in the dtype of x or in the state
// dtype, or none. weights: for each layer and direction w_ih [G D,I], w_hh [G D,O], if has_bias
// b_ih, b_hh [G D], and if projects w_hr [O,D], in the dtype of x or in fp32. batch_sizes: those of
// a PackedSequence, or none. width: P. dropout: a probability. chunk: on CUDA, the steps of a chunk
// of layers that run side by side (wavefront.h); 0 for one layer after the other.
// -> y with the rows of x, N O wide. last: as state, in the dtype of x; of a cell without h, which
// is y. kept: what the backward reads; empty unless `save`.
inline constexpr char kLayersForwardSchema[] =
    "_layers_fwd(Tensor x, Tensor[] state, Tensor[] weights, int[] batch_sizes, bool has_bias, "
    "bool projects, int directions, bool batch_first, int width, float dropout, bool tf32, "
    "bool save, int chunk) -> (Tensor y, Tensor[] last, Tensor[] kept)";

// Returns the gates of a layer's input, [N, rows, 1, G, P] in the rows of `at_gates`, which it may
// change.
template <typename Cell>
Tensor multiply_inputs(const Layers<Cell>& s, Copies& copies, const Tensor& input,
                       const Tensor& turned, const Tensor& packed, int64_t layer, bool tf32,
                       typename Layers<Cell>::Rows& at_gates) {
  const int64_t N = s.N, T = s.T, rows = s.rows, E = s.engine_rows, I = s.input_of(layer);
  const int64_t width = s.G * s.P;
  Tensor gates = new_tensor(input, {N, rows, 1, s.G, s.P}, s.io);
  bool by_time = false;
  for (int64_t n = 0; n < N; ++n) {
    const Tensor& read = n == 0 || s.is_packed ? input : turned;
    Product product{rows,
                    width,
                    I,
                    1,
                    read.const_data_ptr(),
                    0,
                    I,
                    1,
                    s.w_ih(packed, layer, n),
                    1,
                    I,
                    at(gates, n * rows * width),
                    0,
                    width};
    // A step reads the gates of all sequences, so a copy of the input has the order of time.
    if (!s.is_packed && at_gates.batch > at_gates.time && copies_rows(product, s.dtype, tf32)) {
      product.group = s.B, product.a_group = I, product.a_m = T * I;
      by_time = true;
    }
    multiply(product, s.dtype, tf32, input);
  }
  if (by_time) at_gates = {0, width, s.B * width};
  if (!s.is_packed) return gates;
  Tensor brought = new_tensor(input, {N, E, 1, s.G, s.P}, s.io);
  for (int64_t n = 0; n < N; ++n) {
    s.enter(copies, brought, n * E * width, width, gates, {n * rows * width, 0, width}, width,
            n == 1);
  }
  copies.run();
  at_gates = {0, T * width, width};
  return brought;
}

template <typename Cell>
std::tuple<Tensor, Tensors, Tensors> layers_fwd(Tensor x, Tensors state, Tensors weights,
                                                std::vector<int64_t> batch_sizes, bool has_bias,
                                                bool projects, int64_t directions, bool batch_first,
                                                int64_t width, double dropout, bool tf32, bool save,
                                                int64_t chunk) {
#if defined(CUDA_KERNEL)
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  OneStep<Cell> step;
  if (step.fits(x, weights, batch_sizes, has_bias, projects, directions, batch_first, width,
                dropout) &&
      step.fits_states(state, Cell::kStates)) {
    step.tf32 = tf32;
    return step.forward(x, state, weights, save);
  }
#endif
  Layers<Cell> s(x, weights, batch_sizes, has_bias, projects, directions, batch_first, width);
  using Rows = typename Layers<Cell>::Rows;
  const int64_t L = s.L, N = s.N, T = s.T, D = s.D, P = s.P, O = s.O;
  const int64_t E = s.engine_rows;
  constexpr int64_t G = Cell::kGates;
  state = s.check_states(state, "state");
  // Padded units have outputs of 0. A product reads rows that contain them faster.
  if constexpr (!kProjectsBySteps) {
    s.few_steps = projects && !save && N == 1 && !s.is_padded() &&
                  is_faster_by_steps(s.B, T, G, D, O, s.dtype, tf32);
  }
  s.passes_padded = s.is_padded() && N == 1 && !s.is_packed && !projects && !save && dropout == 0;
  STD_TORCH_CHECK(0 <= dropout && dropout <= 1, "dropout must be from 0 to 1, got ", dropout);
#if defined(CUDA_KERNEL)
  if (chunk != 0) return Wavefront<Cell>(s, chunk, dropout, tf32).forward(dense(x), state, save);
#else
  STD_TORCH_CHECK(chunk == 0, "chunk must be 0 on the CPU, got ", chunk);
#endif
  if (s.is_packed) s.write_rows(batch_sizes, x, G * P);
  x = dense(x);
  Copies copies(x);
  Tensors alive, kept;  // `alive` holds what copies read until they have run

  Tensor initial, bias, packed;
  if (!state.empty()) {
    initial = s.new_filled(x, {L * s.states()}, s.unrounded, projects);  // nothing writes h_p
    s.bring_states(copies, initial, state);
  }
  if (has_bias) {
    bias = new_tensor(x, {L * Cell::kBias * N * P}, s.unrounded);
    s.bring_bias(copies, bias, s.bias_rows());
  }
  if (s.packs()) {
    // Without an h no step reads w_hh, but a backward pass does.
    const bool reads_h = save || s.has_h_prev(!state.empty());
    packed =
        s.new_filled(x, {s.place_of(L, 0, false)}, s.io, projects && (T == 1 || s.is_padded()));
    s.bring_weights(copies, packed, reads_h);
    if (projects && T > 1) multiply_projections(s, packed, tf32);  // or they stay zero
    if (save) kept.push_back(packed);
  }
  Tensor projected;  // the projected initial states, in the dtype of x
  if (projects) projected = bring_projected(s, copies, x, state, kept, save);
  Tensors returned = s.new_states(x, s.io, s.is_cell);
  // Whether a single state comes from the engines as torch has it.
  const bool is_last =
      !s.is_cell && s.io == s.unrounded && s.K == 1 && (N == 1 || s.B == 1) && P == D;
  Tensor last = is_last ? returned[0] : new_tensor(x, {L * s.states()}, s.unrounded);

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
    const int64_t I = s.input_of(l);
    ForwardParams p{};
    p.S = s.B, p.N = N, p.D = P, p.T = s.T;
    p.weight = s.w_hh(packed, l), p.x_gate = P, p.x_head = E * G * P;
    if (!state.empty()) p.initial = at(initial, l * s.states());
    Tensor gates;
    Rows at_gates = l == 0 ? s.outer(G * P) : s.inner(G * P);
    const Rows at_input = l == 0 ? s.outer(I) : s.inner(I);
    p.x_batch = at_gates.batch, p.x_time = at_gates.time;
    const LayerInput own{I, input.const_data_ptr(), at_input.batch, at_input.time,
                         s.w_ih(packed, l, 0)};
    const bool may_multiply =
        N == 1 && !s.is_packed && !(projects && (!state.empty() || s.few_steps));
    if (may_multiply && multiplies_input<Cell>(p, I, s.dtype, tf32)) {
      p.input = own;
    } else {
      gates = multiply_inputs(s, copies, input, turned, packed, l, tf32, at_gates);
      if (projects && !state.empty()) {
        add_projected(s, copies, gates, at_gates, projected, l, tf32);
      }
      p.x = gates.const_data_ptr();
    }
    p.x_batch = at_gates.batch, p.x_time = at_gates.time;
    const auto list = list_sequences(s, x, p.x_batch, p.x_time);
    p.sequences = list.data();
    if (has_bias) p.bias = at(bias, l * Cell::kBias * N * P);
    // Whether the outputs of the recurrence, or of its projection, are those of the layer, perhaps
    // with padded units for the next one.
    const bool has_rows = N == 1 && !s.is_packed && (!is_top || s.has_engine_rows());
    const bool is_dense = has_rows && (projects || P == D || (s.passes_padded && !is_top));
    const bool is_strided = !is_dense && !projects && !s.is_packed && D % 2 == 0 &&
                            writes_strided_h<Cell>(p, s.dtype, tf32, x);
    const bool is_done = is_dense || is_strided;
    const Shape done = is_top ? s.shape(O) : s.inner_shape(s.input_of(l + 1));
    Tensor h = new_tensor(x, is_done && !projects ? done : Shape{E, N * P}, s.io);
    if (is_strided) {
      const Rows to = is_top ? s.outer(D) : s.inner(D);
      p.h_batch = to.batch, p.h_time = to.time, p.h_units = D;
    }
    Tensor saved, h_prev;
    if (save) {
      saved = new_tensor(x, {E, Cell::kSaved, N, P}, saved_dtype(x));
      if (!s.steps()) h_prev = new_tensor(x, {s.has_h_prev(!state.empty()) ? E : 0, N, P}, s.io);
    }
    p.packs_one_step = true;
    p.h = h.mutable_data_ptr(), p.last = at(last, l * s.states());
    p.saved = save ? saved.mutable_data_ptr() : nullptr;
    if (s.few_steps) {
      const Shape shape = is_done ? done : Shape{E, O};
      if constexpr (!kProjectsBySteps) h = run_few_steps(s, p, gates, at_gates, shape, l, tf32);
    } else if (s.steps()) {
      const Tensor outputs = h;
      h = run_projected_steps(s, copies, p, gates, at_gates, h, is_done ? done : Shape{E, N * O}, l,
                              tf32);
      if (save) {
        const bool reads_h = s.has_h_prev(!state.empty());
        h_prev =
            reads_h ? projected_inputs(s, copies, h, projected, l) : new_tensor(x, {0, N, O}, s.io);
        kept.push_back(saved), kept.push_back(h_prev), kept.push_back(outputs);
      }
    } else {
      p.h_prev = save && h_prev.numel() > 0 ? h_prev.mutable_data_ptr() : nullptr;
      run<Cell>(p, s.dtype, tf32, x);
      if (save) kept.push_back(saved), kept.push_back(h_prev);
      if (projects) {
        if (save) kept.push_back(h);
        h = project_outputs(s, h, is_done ? done : Shape{E, N * O}, l, tf32);
      }
    }
    if (projects) return_projected(s, copies, h, returned[0], l);
    const int64_t pitch = projects ? O : P;  // from one head's outputs to the next head's

    alive.push_back(h);
    if (is_done) {
      input = h;
    } else {
      input = new_tensor(x, is_top ? s.shape(N * O) : s.inner_shape(N * O), s.io);
      for (int64_t n = 0; n < N; ++n) {
        const Rows to = is_top ? s.outer(N * O, n * O) : s.inner(N * O, n * O);
        s.leave(copies, input, to, h, n * pitch, N * pitch, O, n == 1);
      }
    }
    if (is_top) break;
    if (dropout > 0) {
      Tensor mask;
      copies.run();
      input = drop(input, dropout, mask);
      if (save) kept.push_back(mask);
    }
    if (N == 2 && !s.is_packed) {
      turned = new_tensor(x, s.inner_shape(N * O), s.io);
      for (int64_t n = 0; n < N; ++n) {
        const Rows place = s.inner(N * O, n * O);
        if (dropout > 0) {
          s.move(copies, turned, place, input, place, O, true);
        } else {
          s.move(copies, turned, place, h, s.inner(N * pitch, n * pitch), O, n == 0);
        }
      }
    }
    if (save) kept.push_back(input);
  }
  if (!is_last) s.return_states(copies, returned, last, s.is_cell);
  copies.run();
  if (s.is_cell) returned.erase(returned.begin());
  return {input, returned, kept};
}

}  // namespace flashcell
