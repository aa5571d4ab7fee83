// An LSTM with proj_size on the CPU, step by step in the projected space: the recurrent product
// reads h_p, which is O units wide, instead of h, which has D. A step is a product with R, the cell
// (the engine's step, without a product of its own), and a product with W_hr. On a GPU, where a
// launch costs more than the wider product, projection.h runs the recurrence in the hidden space,
// but for few steps in inference.
#pragma once
#include "layers.h"

#include <cstring>

namespace flashcell {

// The list of sequences for an engine whose x has these strides of batch and time.
template <typename Cell>
auto list_sequences(const Layers<Cell>& s, const Tensor& like, int64_t batch, int64_t time) {
  return s.is_packed ? packed_sequences(s.table)
                     : sequences(like, s.B, s.T, std::nullopt, std::nullopt, batch, time);
}

// The sequences of one step, for an engine whose tensors have rows in the order of batch and time.
template <typename Cell>
std::vector<Sequence> sequences_of_step(const Layers<Cell>& s, int64_t t, int64_t x_batch,
                                        int64_t x_time) {
  std::vector<Sequence> list;
  for (int64_t b = 0; b < s.B; ++b) {
    list.push_back({b, b * s.T + t, b * x_batch + t * x_time, 1, 0});
  }
  return list;
}

// Adds `part` [B, width] to the rows of step t of `sum`, whose elements begin at `begin`.
inline void add_step(Copies& copies, Tensor& sum, int64_t begin, int64_t pitch, const Tensor& part,
                     int64_t B, int64_t width) {
  copies.add(sum, begin, {0, 0, pitch, 1}, sum, begin, {0, 0, pitch, 1}, {1, 1, B, width});
  copies.plus(part, 0, {0, 0, width, 1});
  copies.run();
}

// Runs the recurrence of a layer. `p` has its tensors; gates [N, rows, G, P] have rows as
// `at_gates` says, and those of the first step include R h_p of an initial h_p. Returns the
// projected outputs [B, T, N, O].
template <typename Cell>
Tensor run_projected_steps(const Layers<Cell>& s, Copies& copies, ForwardParams p, Tensor& gates,
                           typename Layers<Cell>::Rows at_gates, Tensor& h, const Shape& shape,
                           int64_t layer, bool tf32) {
  const int64_t N = s.N, B = s.B, T = s.T, P = s.P, O = s.O, width = s.G * P;
  Tensor y = new_tensor(h, shape, s.io), part = new_tensor(h, {B, width}, s.io);
  p.h_begins_as_zero = true;
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t n = 0; n < N && t > 0; ++n) {
      multiply({B, width, O, 1, at(y, ((t - 1) * N + n) * O), 0, T * N * O, 1,
                s.weight(layer, n, 1).const_data_ptr(), 1, O, at(part, 0), 0, width},
               s.dtype, tf32, h);
      add_step(copies, gates, n * s.rows * width + t * at_gates.time, at_gates.batch, part, B,
               width);
    }
    const auto list = sequences_of_step(s, t, p.x_batch, p.x_time);
    p.sequences = list.data();
    run<Cell>(p, s.dtype, tf32, gates);
    p.initial = p.last;
    for (int64_t n = 0; n < N; ++n) {
      multiply({B, O, s.D, 1, at(h, (t * N + n) * P), 0, T * N * P, 1,
                s.w_hr(layer, n).const_data_ptr(), 1, s.D, at(y, (t * N + n) * O), 0, T * N * O},
               s.dtype, tf32, h);
    }
  }
  return y;
}

// Returns the h_p that each step reads, [B, T, N, O]; `projected` [L N, B, O] has the initial ones,
// or is empty for zeros.
template <typename Cell>
Tensor projected_inputs(const Layers<Cell>& s, Copies& copies, const Tensor& y,
                        const Tensor& projected, int64_t layer) {
  const int64_t N = s.N, B = s.B, T = s.T, O = s.O, row = N * O;
  Tensor inputs = new_tensor(y, {B * T, N, O}, s.io);
  if (T > 1) {
    copies.add(inputs, row, {0, T * row, row, 1}, y, 0, {0, T * row, row, 1}, {1, B, T - 1, row});
  }
  if (projected.numel() > 0) {
    copies.add(inputs, 0, {0, O, T * row, 1}, projected, layer * N * B * O, {0, B * O, O, 1},
               {1, N, B, O});
  } else {
    Tensor zeros = new_tensor(y, {row}, s.io);
    torch::stable::zero_(zeros);
    copies.add(inputs, 0, {0, 0, T * row, 1}, zeros, 0, {0, 0, 0, 1}, {1, 1, B, row});
    copies.run();
  }
  copies.run();
  return inputs;
}

// Runs the backward pass of a layer. dy [B, T, N, O] has the gradients of the projected outputs,
// and on return those that their later use adds too; `p` has the layer's tensors. Writes the
// gradients of the initial h_p to `dprojected` [L N, B, O].
template <typename Cell>
void differentiate_projected_steps(const Layers<Cell>& s, Copies& copies, BackwardParams p,
                                   Tensor& dy, Tensor& dgates, Tensor& dprojected, int64_t layer,
                                   bool tf32) {
  const int64_t N = s.N, B = s.B, T = s.T, D = s.D, O = s.O, G = s.G, width = G * D;
  Tensor dh = new_tensor(dy, {B * T, N * D}, s.io), part = new_tensor(dy, {B, O}, s.io);
  Tensor ordered = new_tensor(dy, {B, width}, s.io);  // a head's gates at one step
  Tensor dbias = new_tensor(dy, {Cell::kBias * N * D}, s.unrounded);
  torch::stable::zero_(dbias);
  void* const total = p.dbias;
  Tensor of_step = new_tensor(dy, {Cell::kBias * N * D}, s.unrounded);
  p.dbias = of_step.mutable_data_ptr(), p.dh = dh.const_data_ptr(), p.skips_initial = true;
  for (int64_t t = T - 1; t >= 0; --t) {
    for (int64_t n = 0; n < N; ++n) {
      multiply({B, D, O, 1, at(dy, (t * N + n) * O), 0, T * N * O, 1,
                s.w_hr(layer, n).const_data_ptr(), D, 1, at(dh, (t * N + n) * D), 0, T * N * D},
               s.dtype, tf32, dy);
    }
    const auto list = sequences_of_step(s, t, 0, 0);
    p.sequences = list.data();
    run<Cell>(p, s.dtype, tf32, dh);
    p.dlast = p.dstate;
    copies.add(dbias, 0, {0, 0, 0, 1}, dbias, 0, {0, 0, 0, 1}, {1, 1, 1, dbias.numel()});
    copies.plus(of_step, 0, {0, 0, 0, 1});
    for (int64_t n = 0; n < N; ++n) {
      copies.add(ordered, 0, {0, width, D, 1}, dgates, (t * G * N + n) * D,
                 {0, T * G * N * D, N * D, 1}, {1, B, G, D});
      copies.run();
      Tensor& to = t == 0 ? dprojected : part;
      multiply({B, O, width, 1, at(ordered, 0), 0, width, 1, s.weight(layer, n, 1).const_data_ptr(),
                O, 1, at(to, t == 0 ? (layer * N + n) * B * O : 0), 0, O},
               s.dtype, tf32, dy);
      if (t > 0) add_step(copies, dy, ((t - 1) * N + n) * O, T * N * O, part, B, O);
    }
  }
  memcpy(total, dbias.const_data_ptr(), dbias.numel() * dbias.element_size());
}

// Writes the gradients of R and W_hr of a layer. `inputs` has no rows if all of them are zeros.
template <typename Cell>
void write_projected_dweights(const Layers<Cell>& s, const Tensor& dy, const Tensor& h,
                              const Tensor& inputs, const Tensor& dgates, int64_t layer, bool tf32,
                              Tensors& dweights) {
  const int64_t N = s.N, D = s.D, O = s.O, G = s.G, rows = s.rows;
  for (int64_t n = 0; n < N; ++n) {
    Tensor& dr = dweights[s.index(layer, n, 1)];
    if (inputs.numel() > 0) {
      multiply({D, O, rows, G, at(dgates, n * D), N * D, 1, G * N * D, at(inputs, n * O), N * O, 1,
                dr.mutable_data_ptr(), D * O, O},
               s.dtype, tf32, dy);
    } else {
      torch::stable::zero_(dr);
    }
    multiply({O, D, rows, 1, at(dy, n * O), 0, 1, N * O, at(h, n * D), N * D, 1,
              dweights[s.index(layer, n, s.each - 1)].mutable_data_ptr(), 0, D},
             s.dtype, tf32, dy);
  }
}

}  // namespace flashcell
