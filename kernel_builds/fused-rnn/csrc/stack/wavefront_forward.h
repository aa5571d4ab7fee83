// The forward pass of wavefront.h.
#pragma once
#include "dropout.h"
#include "wavefront.h"

namespace flashcell {

template <typename Cell>
std::tuple<Tensor, Tensors, Tensors> Wavefront<Cell>::forward(const Tensor& x, const Tensors& state,
                                                              bool save) const {
  const int64_t GP = G * P, LP = L * P;
  Copies copies(x);
  Tensor packed = new_tensor(x, {packed_size()}, s.io), bias;
  bring_weights(copies, packed);
  if (s.has_bias) {
    bias = new_tensor(x, {R * LP}, s.unrounded);
    s.bring_bias(copies, bias, bias_rows());
  }
  Tensor blocks = new_tensor(x, {state_blocks() * block()}, s.unrounded);
  torch::stable::zero_(blocks);
  bring_states(copies, blocks, initial_place(), state);
  Tensor input = new_tensor(x, {layer_rows, I}, s.io);
  enter(copies, input, 0, I, x, s.outer(I), I, I);
  copies.run();

  // The gates' inputs of a layer, in its rows. Those of a chunk take the place of the layer
  // below's, which a wave has read before they are written.
  Tensor gates = new_tensor(x, {layer_rows, GP}, s.io);
  multiply({layer_rows, GP, I, 1, input.const_data_ptr(), 0, I, 1, w_ih(packed, L - 1), 1, I,
            gates.mutable_data_ptr(), 0, GP},
           s.dtype, tf32, x);
  Tensor h = new_tensor(x, {all_rows, L, P}, s.io), saved, h_prev, dropped;
  Tensors masks;
  if (save) {
    saved = new_tensor(x, {all_rows, V, L, P}, saved_dtype(x));
    h_prev = new_tensor(x, {all_rows, L, P}, s.io);
    if (dropout > 0) dropped = new_tensor(x, {all_rows, L, P}, s.io);
  }

  ForwardParams p{};
  p.S = B, p.N = L, p.D = P, p.weight = packed.const_data_ptr();
  p.bias = s.has_bias ? bias.const_data_ptr() : nullptr;
  p.x_time = GP, p.x_gate = P;
  const auto run_rows = [&](int64_t row, int64_t initial, int64_t last) {
    p.x_batch = p.T * GP;
    p.initial = at(blocks, initial * block()), p.last = at(blocks, last * block());
    p.h = at(h, row * LP);
    p.saved = save ? at(saved, row * V * LP) : nullptr;
    p.h_prev = save ? at(h_prev, row * LP) : nullptr;
    run<Cell>(p, s.dtype, tf32, gates);
  };
  // What `heads` layers read of `count` rows of h of the layers below, whose first head is `head`:
  // those themselves, or the same with dropout.
  Tensor of_rows;  // owns the latter
  const auto outputs = [&](int64_t row, int64_t count, int64_t head, int64_t heads) {
    if (dropout == 0) return (const char*)at(h, (row * L + head) * P);
    masks.emplace_back();
    of_rows = drop(torch::stable::narrow(h, 0, row, count), dropout, masks.back());
    if (save) {
      copies.add(dropped, (row * L + head) * P, {0, LP, P, 1}, of_rows, head * P, {0, LP, P, 1},
                 {1, count, heads, P});
      copies.run();
    }
    return (const char*)at(of_rows, head * P);
  };

  for (int64_t l = 0; l < L && rest > 0; ++l) {
    const int64_t row = choose_rest(p, l), head = p.first_head;
    if (l > 0) {
      const char* below = outputs(row_of_layer(l - 1), rest_rows, head + 1, 1);
      multiply({rest_rows, GP, P, 1, below, 0, LP, 1, w_ih(packed, head), 1, P,
                gates.mutable_data_ptr(), 0, GP},
               s.dtype, tf32, x);
    }
    p.x = gates.const_data_ptr(), p.x_head = 0;
    run_rows(row, waves + 1, l);
  }
  for (int64_t w = 0; w < waves; ++w) {
    const int64_t row = choose_wave(p, w), head = p.first_head;
    // The rows of gates that head 0 would read.
    const int64_t gate_row = rest_rows + (w - L + 1) * rows;
    const int64_t above = std::min(end_head(w), L - 1) - head;  // layers but the first
    if (above > 0) {
      const char* below = outputs(row_of_wave(w - 1), rows, head + 1, above);
      Product product{rows,      GP,    P,
                      above,     below, P,
                      LP,        1,     w_ih(packed, head),
                      1,         P,     at(gates, (gate_row + head * rows) * GP),
                      rows * GP, GP};
      product.b_batch = w_ih_size();
      multiply(product, s.dtype, tf32, x);
    }
    p.x = at(gates, gate_row * GP), p.x_head = rows * GP;
    run_rows(row, w, w + 1);
  }

  Tensor y = new_tensor(x, s.shape(D), s.io);
  leave(copies, y, s.outer(D), h, row_of_layer(L - 1) * LP, LP, D);
  Tensors last = s.new_states(x, s.io);
  return_states(copies, last, blocks, last_place());
  copies.run();
  Tensors kept;
  if (save) {
    kept = {packed, input, saved, h, h_prev};
    if (dropout > 0) kept.push_back(dropped);
    kept.insert(kept.end(), masks.begin(), masks.end());
  }
  return {y, last, kept};
}

}  // namespace flashcell
