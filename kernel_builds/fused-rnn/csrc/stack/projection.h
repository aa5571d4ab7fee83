// The projections of an LSTM with proj_size, O units wide: h_p = W_hr h. On a GPU the recurrence
// stays in the hidden space, R h_p = (R W_hr) h, and W_hr is applied to all outputs at once, unless
// there are few steps. An initial h_p has no h that it comes from: the first step reads R h_p as
// part of its input, and h begins empty.
#pragma once
#include "projected_steps.h"

namespace flashcell {

// Writes R W_hr of every layer and direction.
template <typename Cell>
void multiply_projections(const Layers<Cell>& s, Tensor& packed, bool tf32) {
  const int64_t N = s.N, D = s.D, P = s.P, O = s.O;
  for (int64_t i = 0; i < s.L * N; ++i) {
    const int64_t l = i / N, n = i % N;
    // One product, which may run in halves, where the gates' results follow one another.
    const int64_t batch = N == 1 && !s.is_padded() ? 1 : s.G, rows = s.G / batch * D;
    multiply({rows, D, O, batch, s.weight(l, n, 1).const_data_ptr(), D * O, O, 1,
              s.w_hr(l, n).const_data_ptr(), D, 1, at(packed, s.place_of(l, 0, false) + n * P * P),
              N * P * P, P},
             s.dtype, tf32, packed);
  }
}

// Returns the initial h_p [L N, B, O] in the dtype of x, which the backward reads too.
template <typename Cell>
Tensor bring_projected(const Layers<Cell>& s, Copies& copies, const Tensor& x, const Tensors& state,
                       Tensors& kept, bool save) {
  const int64_t LN = s.L * s.N;
  Tensor projected = new_tensor(x, {state.empty() ? 0 : LN, s.B, s.O}, s.io);
  if (!state.empty()) {
    const Tensor& h = state[0];
    copies.add(projected, 0, {0, s.B * s.O, s.O, 1}, h, 0,
               {0, h.stride(0), h.stride(1), h.stride(2)}, {1, LN, s.B, s.O});
  }
  if (save) kept.push_back(projected);
  return projected;
}

// Adds R h_p to the gates of the first step.
template <typename Cell>
void add_projected(const Layers<Cell>& s, Copies& copies, Tensor& gates,
                   typename Layers<Cell>::Rows at_gates, const Tensor& projected, int64_t layer,
                   bool tf32) {
  const int64_t N = s.N, B = s.B, P = s.P, O = s.O, width = s.G * P;
  Tensor first = s.new_filled(gates, {N, B, width}, s.io, s.is_padded());
  const int64_t parts = s.is_padded() ? s.G : 1, units = s.G * s.D / parts;
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t g = 0; g < parts; ++g) {
      multiply({B, units, O, 1, at(projected, (layer * N + n) * B * O), 0, O, 1,
                at(s.weight(layer, n, 1), g * units * O), 1, O, at(first, n * B * width + g * P), 0,
                width},
               s.dtype, tf32, gates);
    }
    const int64_t begin = n * s.rows * width;
    copies.add(gates, begin, {0, 0, at_gates.batch, 1}, gates, begin, {0, 0, at_gates.batch, 1},
               {1, 1, B, width});
    copies.plus(first, n * B * width, {0, 0, width, 1});
  }
  copies.run();
}

// Returns the projected outputs, [rows, N O].
template <typename Cell>
Tensor project_outputs(const Layers<Cell>& s, const Tensor& h, const Shape& shape, int64_t layer,
                       bool tf32) {
  const int64_t N = s.N, O = s.O;
  Tensor y = new_tensor(h, shape, s.io);
  for (int64_t n = 0; n < N; ++n) {
    multiply({s.rows, O, s.D, 1, at(h, n * s.P), 0, N * s.P, 1, s.w_hr(layer, n).const_data_ptr(),
              1, s.D, at(y, n * O), 0, N * O},
             s.dtype, tf32, h);
  }
  return y;
}

// Runs the recurrence of a layer of few steps in inference: instead of R W_hr, which is a larger
// product than those of the steps, it multiplies R by h_p and W_hr by h at every step. Arguments
// and result as of run_projected_steps.
template <typename Cell>
Tensor run_few_steps(const Layers<Cell>& s, ForwardParams p, Tensor& gates,
                     typename Layers<Cell>::Rows at_gates, const Shape& shape, int64_t layer,
                     bool tf32) {
  const int64_t B = s.B, T = s.T, D = s.D, O = s.O, width = s.G * D;
  Tensor y = new_tensor(gates, shape, s.io), h = new_tensor(gates, {B, D}, s.io);
  p.T = 1, p.sequences = nullptr, p.h = h.mutable_data_ptr(), p.h_begins_as_zero = true;
  for (int64_t t = 0; t < T; ++t) {
    void* const of_step = at(gates, t * at_gates.time);
    if (t > 0) {
      add_product({B, width, O, 1, at(y, (t - 1) * O), 0, T * O, 1,
                   s.weight(layer, 0, 1).const_data_ptr(), 1, O, of_step, 0, at_gates.batch},
                  s.dtype, tf32, gates);
    }
    p.x = of_step;
    run<Cell>(p, s.dtype, tf32, gates);
    p.initial = p.last;
    multiply({B, O, D, 1, h.const_data_ptr(), 0, D, 1, s.w_hr(layer, 0).const_data_ptr(), 1, D,
              at(y, t * O), 0, T * O},
             s.dtype, tf32, gates);
  }
  return y;
}

// Adds the copies of the last projected outputs of a layer to `last`.
template <typename Cell>
void return_projected(const Layers<Cell>& s, Copies& copies, const Tensor& y, Tensor& last,
                      int64_t layer) {
  const int64_t N = s.N, B = s.B, T = s.T, O = s.O;
  for (int64_t n = 0; n < N; ++n) {
    copies.add(last, (layer * N + n) * B * O, {0, 0, O, 1}, y, ((T - 1) * N + n) * O,
               {0, 0, T * N * O, 1}, {1, 1, B, O});
  }
}

// Adds the gradient of a layer's last h_p to that of its outputs, dy [rows, N O].
template <typename Cell>
void add_last(const Layers<Cell>& s, Copies& copies, Tensor& dy, const Tensor& dlast,
              int64_t layer) {
  const int64_t N = s.N, O = s.O;
  copies.run();
  for (int64_t n = 0; n < N; ++n) {
    const int64_t begin = ((s.T - 1) * N + n) * O;
    copies.add(dy, begin, {0, 0, s.T * N * O, 1}, dy, begin, {0, 0, s.T * N * O, 1},
               {1, 1, s.B, O});
    copies.plus(dlast, (layer * N + n) * dlast.stride(0), {0, 0, dlast.stride(1), dlast.stride(2)});
  }
  copies.run();
}

// Returns the gradient of h from that of h_p, dy, and writes the outputs' part of dW_hr.
template <typename Cell>
Tensor project_back(const Layers<Cell>& s, const Tensor& dy, const Tensor& h, int64_t layer,
                    bool tf32, Tensors& dweights) {
  const int64_t N = s.N, D = s.D, P = s.P, O = s.O;
  Tensor dh = s.new_filled(dy, {s.rows, N * P}, s.io, s.is_padded());
  for (int64_t n = 0; n < N; ++n) {
    multiply({s.rows, D, O, 1, at(dy, n * O), 0, N * O, 1, s.w_hr(layer, n).const_data_ptr(), D, 1,
              at(dh, n * P), 0, N * P},
             s.dtype, tf32, dy);
    multiply({O, D, s.rows, 1, at(dy, n * O), 0, 1, N * O, at(h, n * P), N * P, 1,
              dweights[s.index(layer, n, s.each - 1)].mutable_data_ptr(), 0, D},
             s.dtype, tf32, dy);
  }
  return dh;
}

// Adds `part` to `sum`.
inline void accumulate(Copies& copies, Tensors& alive, Tensor& sum, const Tensor& part) {
  copies.add(sum, 0, {0, 0, 0, 1}, sum, 0, {0, 0, 0, 1}, {1, 1, 1, sum.numel()});
  copies.plus(part, 0, {0, 0, 0, 1});
  alive.push_back(part);
}

// Turns d(R W_hr) of each direction, [G D, D], into dR and the rest of dW_hr.
template <typename Cell>
void split_dweight(const Layers<Cell>& s, Copies& copies, Tensors& alive, const Tensors& products,
                   int64_t layer, bool tf32, Tensors& dweights) {
  const int64_t D = s.D, O = s.O, rows = s.G * D;
  for (int64_t n = 0; n < s.N; ++n) {
    const void* product = products[n].const_data_ptr();
    multiply({rows, O, D, 1, product, 0, D, 1, s.w_hr(layer, n).const_data_ptr(), 1, D,
              dweights[s.index(layer, n, 1)].mutable_data_ptr(), 0, O},
             s.dtype, tf32, products[n]);
    Tensor part = new_tensor(products[n], {O, D}, s.io);
    multiply({O, D, rows, 1, s.weight(layer, n, 1).const_data_ptr(), 0, 1, O, product, D, 1,
              part.mutable_data_ptr(), 0, D},
             s.dtype, tf32, products[n]);
    accumulate(copies, alive, dweights[s.index(layer, n, s.each - 1)], part);
  }
}

// Writes the gradients of the initial h_p [L N, B, O] from those of the first step's gates, and
// adds their part of dR. `ordered` has the gates' gradients with rows as those of the layer's
// input.
template <typename Cell>
void differentiate_projected(const Layers<Cell>& s, Copies& copies, Tensors& alive,
                             const Tensor& ordered, typename Layers<Cell>::Rows rows,
                             const Tensor& projected, Tensor& dprojected, int64_t layer, bool tf32,
                             Tensors& dweights) {
  const int64_t N = s.N, B = s.B, P = s.P, D = s.D, O = s.O;
  const int64_t parts = s.is_padded() ? s.G : 1, units = s.G * D / parts;
  for (int64_t n = 0; n < N; ++n) {
    const int64_t begin = n * s.rows * s.G * P + (n == 1 ? (s.T - 1) * rows.time : 0);
    const int64_t state = (layer * N + n) * B * O;
    Tensor dr = new_tensor(ordered, {s.G * D, O}, s.io);
    for (int64_t g = 0; g < parts; ++g) {
      Tensor part = g == 0 ? dprojected : new_tensor(ordered, {B, O}, s.io);
      multiply({B, O, units, 1, at(ordered, begin + g * P), 0, rows.batch, 1,
                at(s.weight(layer, n, 1), g * units * O), O, 1, at(part, g == 0 ? state : 0), 0, O},
               s.dtype, tf32, ordered);
      multiply({units, O, B, 1, at(ordered, begin + g * P), 0, 1, rows.batch, at(projected, state),
                O, 1, at(dr, g * units * O), 0, O},
               s.dtype, tf32, ordered);
      if (g == 0) continue;
      copies.add(dprojected, state, {0, 0, 0, 1}, dprojected, state, {0, 0, 0, 1},
                 {1, 1, 1, B * O});
      copies.plus(part, 0, {0, 0, 0, 1});
      alive.push_back(part);
      copies.run();
    }
    accumulate(copies, alive, dweights[s.index(layer, n, 1)], dr);
  }
}

}  // namespace flashcell
