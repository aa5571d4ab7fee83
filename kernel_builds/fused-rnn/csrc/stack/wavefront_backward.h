// The gradients of wavefront.h: the waves in reverse order.
#pragma once
#include <limits>

#include "dropout.h"
#include "wavefront.h"

namespace flashcell {

template <typename Cell>
std::tuple<Tensor, Tensors, Tensors> Wavefront<Cell>::backward(const OptionalTensor& dy,
                                                               const Tensors& dlast,
                                                               const Tensor& x, const Tensors& kept,
                                                               bool wants_dx,
                                                               bool wants_dstate) const {
  const int64_t GP = G * P, LP = L * P, GLP = G * L * P;
  // Masks of the rest of the layers but the top one, and of the waves but the last.
  const int64_t masks = dropout > 0 ? (rest > 0 ? L - 1 : 0) + waves - 1 : 0;
  const int64_t count = 5 + (dropout > 0) + masks;
  STD_TORCH_CHECK(int64_t(kept.size()) == count, "kept must have what the forward kept, ", count,
                  " tensors, got ", kept.size());
  const Tensor packed = operand(kept[0], "kept weights", {packed_size()}, s.io);
  const Tensor first_input = operand(kept[1], "kept x", {layer_rows, I}, s.io);
  const Tensor saved = operand(kept[2], "kept saved", {all_rows, V, L, P}, saved_dtype(x));
  const Tensor h = operand(kept[3], "kept h", {all_rows, L, P}, s.io);
  const Tensor h_prev = operand(kept[4], "kept h_prev", {all_rows, L, P}, s.io);
  const Tensor inputs = dropout > 0 ? operand(kept[5], "kept input", {all_rows, L, P}, s.io) : h;
  const auto mask_of = [&](int64_t i, int64_t rows_of_mask) {
    return operand(kept[6 + i], "kept mask", {rows_of_mask, L, P}, ScalarType::Bool);
  };

  Copies copies(x);
  Tensors alive;  // what copies read until they have run
  Tensor blocks = new_tensor(x, {state_blocks() * block()}, s.unrounded);
  torch::stable::zero_(blocks);
  bring_states(copies, blocks, last_place(), dlast);
  Tensor dh = new_tensor(x, {all_rows, L, P}, s.io);  // of the outputs of all layers
  if (dy) {
    check_shape(*dy, "dy", s.shape(D));
    check_dtype(*dy, "dy", s.io);
    const Rows from{0, dy->stride(s.batch_first ? 0 : 1), dy->stride(s.batch_first ? 1 : 0),
                    dy->stride(2)};
    enter(copies, dh, row_of_layer(L - 1) * LP, LP, *dy, from, D, P);
  } else {
    torch::stable::zero_(dh);
  }
  copies.run();

  Tensor dgates = new_tensor(x, {all_rows, G, L, P}, s.io);
  Tensor dr = Cell::kSplitGrad ? new_tensor(x, {all_rows, G, L, P}, s.io) : dgates;
  // The gradients of the gates with those of a layer side by side: of one launch for the layers
  // above the first, and for the first of all its rows.
  Tensor ordered = new_tensor(x, {L - 1, rows, GP}, s.io);
  Tensor first = new_tensor(x, {layer_rows, GP}, s.io);

  BackwardParams p{};
  p.S = B, p.N = L, p.D = P, p.weight = packed.const_data_ptr();
  p.grad_clip = std::numeric_limits<double>::infinity();
  std::vector<int64_t> tiles(L + 1);  // of a launch, by the number of its heads
  int64_t all_tiles = 0, tile = 0;
  const auto count_tiles = [&] {
    if (tiles[p.heads] == 0) tiles[p.heads] = bias_tiles<Cell>(p, s.dtype, tf32, x);
    all_tiles += tiles[p.heads];
  };
  for (int64_t w = 0; w < waves; ++w) choose_wave(p, w), count_tiles();
  for (int64_t l = 0; l < L && rest > 0; ++l) choose_rest(p, l), count_tiles();
  Tensor partial = new_tensor(x, {all_tiles, R, L, P}, s.unrounded);
  torch::stable::zero_(partial);
  // Computes dh of `heads` heads from `ordered` of the heads before, which are the layers above.
  const auto descend = [&](int64_t row, int64_t count, int64_t head, int64_t heads, int64_t mask) {
    Product product{count,
                    P,
                    GP,
                    heads,
                    at(ordered, (head - 1) * rows * GP),
                    rows * GP,
                    GP,
                    1,
                    w_ih(packed, head - 1),
                    P,
                    1,
                    at(dh, (row * L + head) * P),
                    P,
                    LP};
    product.b_batch = w_ih_size();
    multiply(product, s.dtype, tf32, x);
    if (dropout == 0) return;
    const Tensor all = torch::stable::narrow(dh, 0, row, count);
    const Tensor kept_part = drop_gradient(all, mask_of(mask, count), dropout);
    copies.add(dh, (row * L + head) * P, {0, LP, P, 1}, kept_part, head * P, {0, LP, P, 1},
               {1, count, heads, P});
    copies.run();
  };
  const auto run_rows = [&](int64_t row, int64_t last, int64_t initial, int64_t first_row) {
    p.dh = at(dh, row * LP), p.saved = at(saved, row * V * LP);
    p.dlast = at(blocks, last * block()), p.dstate = at(blocks, initial * block());
    p.dx = at(dgates, row * GLP), p.dr = Cell::kSplitGrad ? at(dr, row * GLP) : nullptr;
    p.dbias_partial = at(partial, tile * R * LP);
    tile += tiles[p.heads];
    run<Cell>(p, s.dtype, tf32, dh);
    const int64_t count = B * p.T, end = p.first_head + p.heads;
    const int64_t from = row * GLP, above = std::min(end, L - 1) - p.first_head;
    if (above > 0) {
      copies.add(ordered, p.first_head * rows * GP, {rows * GP, GP, P, 1}, dgates,
                 from + p.first_head * P, {P, GLP, LP, 1}, {above, count, G, P});
    }
    if (end == L) {
      copies.add(first, first_row * GP, {0, GP, P, 1}, dgates, from + (L - 1) * P, {0, GLP, LP, 1},
                 {1, count, G, P});
    }
    copies.run();
  };
  const int64_t rest_masks = rest > 0 ? L - 1 : 0;
  for (int64_t w = waves - 1; w >= 0; --w) {
    const int64_t row = choose_wave(p, w);
    const int64_t head = std::max<int64_t>(p.first_head, 1), heads = end_head(w) - head;
    if (heads > 0) descend(row, rows, head, heads, rest_masks + w);
    run_rows(row, w + 1, w, row);
  }
  for (int64_t l = L - 1; l >= 0 && rest > 0; --l) {
    const int64_t row = choose_rest(p, l);
    if (l < L - 1) descend(row, rest_rows, head_of(l), 1, l);
    run_rows(row, l, waves + 1, 0);
  }

  Tensors dweights;
  for (const Tensor& weight : s.weights) {
    dweights.push_back(new_tensor(x, shape_of(weight), s.stored));
  }
  // The products of the gradients of gates and what the gates were computed from: the first layer's
  // input, and one of heads for the others' and one for h.
  s.write_padded(copies, alive, dweights[s.index(0, 0, 0)], I, I, [&](Tensor& to) {
    multiply({GP, I, layer_rows, 1, first.const_data_ptr(), 0, 1, GP, first_input.const_data_ptr(),
              I, 1, to.mutable_data_ptr(), 0, I},
             s.dtype, tf32, x);
  });
  const auto write = [&](int64_t which, const Tensor& of_gates, const Tensor& read, int64_t heads,
                         int64_t row, int64_t head) {
    // The gates of a layer are not next to each other, so not even one layer is a single product.
    const DweightBy by = dweight_by(L, G, P, layer_rows, s.dtype, tf32);
    if (by != DweightBy::kKernel) {
      const int64_t products = by == DweightBy::kGates ? G : 1;
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t l = L - 1 - n;
        s.write_padded(copies, alive, dweights[s.index(l, 0, which)], P, D, [&](Tensor& to) {
          for (int64_t g = 0; g < products; ++g) {
            multiply({P, P, layer_rows, G / products,
                      at(of_gates, row_of_layer(l) * GLP + g * LP + n * P), LP, 1, GLP,
                      at(read, ((row - n * rows) * L + head + n) * P), LP, 1, at(to, g * P * P),
                      P * P, P},
                     s.dtype, tf32, x);
          }
        });
      }
      return;
    }
    Tensor whole = new_tensor(x, {G, heads, P, P}, s.io);
    write_dweight({layer_rows, G, heads, P, at(of_gates, row_of_layer(L - 1) * GLP),
                   at(read, (row * L + head) * P), whole.mutable_data_ptr(), nullptr, L, -rows},
                  tf32, x);
    for (int64_t n = 0; n < heads; ++n) {
      copies.add(dweights[s.index(L - 1 - n, 0, which)], 0, {0, D * D, D, 1}, whole, n * P * P,
                 {0, heads * P * P, P, 1}, {1, G, D, D});
    }
    alive.push_back(whole);
  };
  write(0, dgates, inputs, L - 1, row_of_layer(L - 2), 1);
  write(1, dr, h_prev, L, row_of_layer(L - 1), 0);
  Tensor dbias = new_tensor(x, {R, L, P}, s.unrounded);
  if (s.has_bias) {
    add_up_bias(partial, all_tiles, dbias);
    s.return_bias(copies, dweights, dbias, bias_rows());
  }
  Tensors dstate;
  if (wants_dstate) {
    dstate = s.new_states(x, s.unrounded);
    return_states(copies, dstate, blocks, initial_place());
  }
  Tensor dx = new_tensor(x, wants_dx ? shape_of(x) : Shape{0}, s.io), by_chunk;
  if (wants_dx) {
    by_chunk = new_tensor(x, {layer_rows, I}, s.io);
    multiply({layer_rows, I, GP, 1, first.const_data_ptr(), 0, GP, 1, w_ih(packed, L - 1), I, 1,
              by_chunk.mutable_data_ptr(), 0, I},
             s.dtype, tf32, x);
    leave(copies, dx, s.outer(I), by_chunk, 0, I, I);
  }
  copies.run();
  return {dx, dstate, dweights};
}

}  // namespace flashcell
