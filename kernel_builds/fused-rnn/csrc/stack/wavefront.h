// Layers that run side by side. One layer after the other leaves most of a GPU idle while its few
// sequences wait for each other's steps. Here time is cut into chunks, and one launch runs, for
// every layer l, its chunk w - l: in wave w, layer l reads what layer l - 1 wrote in wave w - 1.
//
//     wave      0    1    2    3    4
//     layer 0   c0   c1   c2                 three chunks c0, c1, c2
//     layer 1        c0   c1   c2
//     layer 2             c0   c1   c2
//
// The layers are heads of one recurrence, the top layer first. If T is no multiple of a chunk, the
// first steps run before the waves, one layer after the other: the rest.
//
// Tensors of the recurrence have a row for each sequence, step and wave, [.., L, P]. A wave has
// B `steps` rows, and a layer the B T rows from its number times those on: its rest, [B, rest],
// and its chunks, [chunks, B, steps].
#pragma once
#include "layers.h"

namespace flashcell {

template <typename Cell>
struct Wavefront {
  static constexpr int64_t G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, V = Cell::kSaved;
  using Rows = typename Layers<Cell>::Rows;

  const Layers<Cell>& s;
  const int64_t L, B, D, P, I, steps, chunks, rest, waves;
  const int64_t rows, rest_rows, layer_rows, all_rows;
  const double dropout;
  const bool tf32;

  Wavefront(const Layers<Cell>& sizes, int64_t chunk, double probability, bool rounds)
      : s(sizes),
        L(s.L),
        B(s.B),
        D(s.D),
        P(s.P),
        I(s.I),
        steps(chunk),
        chunks(s.T / std::max<int64_t>(chunk, 1)),
        rest(s.T % std::max<int64_t>(chunk, 1)),
        waves(chunks + L - 1),
        rows(B * steps),
        rest_rows(B * rest),
        layer_rows(B * s.T),
        all_rows(rest_rows + waves * rows),
        dropout(probability),
        tf32(rounds) {
    STD_TORCH_CHECK(L > 1 && s.N == 1 && !s.is_packed && !s.projects,
                    "chunk must be 0 for one layer, both directions, a PackedSequence and "
                    "projections, got ",
                    chunk);
    STD_TORCH_CHECK(0 < chunk && chunk <= s.T, "chunk must be from 0 to the steps of x, ", s.T,
                    ", got ", chunk);
  }

  int64_t head_of(int64_t layer) const { return L - 1 - layer; }
  int64_t row_of_layer(int64_t layer) const { return layer * rows; }
  int64_t row_of_wave(int64_t wave) const { return rest_rows + wave * rows; }
  int64_t first_head(int64_t wave) const { return head_of(std::min(L - 1, wave)); }
  int64_t end_head(int64_t wave) const {
    return head_of(std::max<int64_t>(0, wave - chunks + 1)) + 1;
  }

  // Sets what a launch of one wave, or of the rest of a layer, has in common in both passes.
  // Returns its first row.
  int64_t choose_wave(SequenceParams& p, int64_t wave) const {
    p.T = steps, p.first_head = first_head(wave), p.heads = end_head(wave) - p.first_head;
    return row_of_wave(wave);
  }
  int64_t choose_rest(SequenceParams& p, int64_t layer) const {
    p.T = rest, p.first_head = head_of(layer), p.heads = 1;
    return row_of_layer(layer);
  }

  // The weights: w_hh [G, L, P, P], w_ih [G P, P] of each layer but the first and, if padded or
  // cast, the first layer's [G P, I].
  int64_t w_ih_size() const { return Layers<Cell>::aligned(G * P * P); }
  int64_t w_ih_place(int64_t head) const {
    return Layers<Cell>::aligned(G * L * P * P) + head * w_ih_size();
  }
  const void* w_ih(const Tensor& packed, int64_t head) const {
    const bool is_own = head == L - 1 && !s.packs_w_ih();
    return is_own ? s.weight(0, 0, 0).const_data_ptr() : at(packed, w_ih_place(head));
  }
  int64_t packed_size() const { return w_ih_place(L - 1) + (s.packs_w_ih() ? G * P * I : 0); }
  void bring_weights(Copies& copies, Tensor& packed) const {
    for (int64_t l = 0; l < L; ++l) {
      const int64_t head = head_of(l);
      copies.add(packed, head * P * P, {0, L * P * P, P, 1}, s.weight(l, 0, 1), 0, {0, D * D, D, 1},
                 {1, G, D, D});
      copies.pad(P, P);
      if (l > 0) {
        copies.add(packed, w_ih_place(head), {0, P * P, P, 1}, s.weight(l, 0, 0), 0,
                   {0, D * D, D, 1}, {1, G, D, D});
        copies.pad(P, P);
      } else if (s.packs_w_ih()) {
        copies.add(packed, w_ih_place(head), {0, 0, P * I, 1}, s.weight(0, 0, 0), 0,
                   {0, 0, D * I, 1}, {1, 1, G, D * I});
        copies.pad(P * I);
      }
    }
  }

  // The rows of biases, [R, L, P].
  typename Layers<Cell>::BiasRows bias_rows() const { return {head_of(0) * P, -P, L * P}; }

  // The states between the launches, blocks of [K, B, L, P]. Wave w reads block w and writes block
  // w + 1 (backward: the other way round). The rest of a layer begins with the block behind those
  // of the waves.
  int64_t block() const { return K * B * L * P; }
  int64_t state_blocks() const { return waves + 1 + (rest > 0); }
  // Where the first layer's states are, and how far from there the next layer's.
  struct StatePlace {
    int64_t begin, layer;
  };
  StatePlace initial_place() const {
    if (rest > 0) return {(waves + 1) * block() + head_of(0) * P, -P};
    return {head_of(0) * P, block() - P};
  }
  StatePlace last_place() const { return {chunks * block() + head_of(0) * P, block() - P}; }
  // Adds copies between the states at a place and torch's, [L, B, D].
  void bring_states(Copies& copies, Tensor& blocks, StatePlace to, const Tensors& from) const {
    for (size_t k = 0; k < from.size(); ++k) {
      copies.add(blocks, to.begin + int64_t(k) * B * L * P, {0, to.layer, L * P, 1}, from[k], 0,
                 {0, from[k].stride(0), from[k].stride(1), from[k].stride(2)}, {1, L, B, D});
    }
  }
  void return_states(Copies& copies, Tensors& to, const Tensor& blocks, StatePlace from) const {
    for (size_t k = 0; k < to.size(); ++k) {
      copies.add(to[k], 0, {0, B * D, D, 1}, blocks, from.begin + int64_t(k) * B * L * P,
                 {0, from.layer, L * P, 1}, {1, L, B, D});
    }
  }

  // Where the rows of a layer are: of its rest, or of its chunks.
  struct Part {
    int64_t count, length, first_row, first_step;  // parts [count, B, length], their place in each
  };
  std::array<Part, 2> parts() const {
    return {{{1, rest, 0, 0}, {chunks, steps, rest_rows, rest}}};
  }
  // Adds copies of C elements of every row between a tensor with rows of batch and time, and one
  // with the rows of a layer, `pitch` elements apart from `begin` on.
  void enter(Copies& copies, Tensor& to, int64_t begin, int64_t pitch, const Tensor& from,
             Rows rows, int64_t C, int64_t padded) const {
    for (const Part& p : parts()) {
      if (p.length == 0) continue;
      copies.add(
          to, begin + p.first_row * pitch, {B * p.length * pitch, p.length * pitch, pitch, 1}, from,
          rows.begin + p.first_step * rows.time,
          {p.length * rows.time, rows.batch, rows.time, rows.unit}, {p.count, B, p.length, C});
      copies.pad(padded);
    }
  }
  void leave(Copies& copies, Tensor& to, Rows rows, const Tensor& from, int64_t begin,
             int64_t pitch, int64_t C) const {
    for (const Part& p : parts()) {
      if (p.length == 0) continue;
      copies.add(to, rows.begin + p.first_step * rows.time,
                 {p.length * rows.time, rows.batch, rows.time, rows.unit}, from,
                 begin + p.first_row * pitch, {B * p.length * pitch, p.length * pitch, pitch, 1},
                 {p.count, B, p.length, C});
    }
  }

  std::tuple<Tensor, Tensors, Tensors> forward(const Tensor& x, const Tensors& state,
                                               bool save) const;
  std::tuple<Tensor, Tensors, Tensors> backward(const OptionalTensor& dy, const Tensors& dlast,
                                                const Tensor& x, const Tensors& kept, bool wants_dx,
                                                bool wants_dstate) const;
};

}  // namespace flashcell
