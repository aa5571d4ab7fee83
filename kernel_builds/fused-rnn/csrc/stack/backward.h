// The gradients of the op of forward.h.
#pragma once
#include <limits>

#include "dropout.h"
#include "projection.h"
#if defined(CUDA_KERNEL)
#include "one_step.h"
#include "wavefront_backward.h"
#endif

namespace flashcell {

// dy as y · dlast: tensors as last, or none · wants_dx, wants_dstate: whether to compute these ·
// chunk: the forward's
// -> the gradients of x ([0] if not wanted), of the states in the state dtype (K tensors, or none),
// and of the weights
inline constexpr char kLayersBackwardSchema[] =
    "_layers_bwd(Tensor? dy, Tensor[] dlast, Tensor x, Tensor[] weights, Tensor[] kept, "
    "int[] batch_sizes, bool has_bias, bool projects, int directions, bool batch_first, int width, "
    "float dropout, bool tf32, bool wants_dx, bool wants_dstate, int chunk) "
    "-> (Tensor dx, Tensor[] dstate, Tensor[] dweights)";

// Writes the gradients of a layer's recurrent weights, one tensor [G D, D] for each direction, or
// adds the copies that do.
template <typename Cell>
void write_dweight(const Layers<Cell>& s, const Tensor& dr, const Tensor& h_prev, bool tf32,
                   const std::vector<Tensor*>& dweights, Copies& copies, Tensors& alive) {
  constexpr int64_t G = Cell::kGates;
  const int64_t N = s.N, D = s.D, P = s.P, rows = s.engine_rows;
#if defined(CUDA_KERNEL)
  const DweightBy by = dweight_by(N, G, P, rows, s.dtype, tf32);
  if (by == DweightBy::kKernel) {
    const bool is_apart = N == 2 || s.is_padded() || s.casts();
    Tensor whole = is_apart ? new_tensor(dr, {G, N, P, P}, s.io) : *dweights[0];
    write_recurrent_dweight(dr, h_prev, rows, G, N, P, tf32, whole);
    for (int64_t n = 0; n < N && is_apart; ++n) {
      copies.add(*dweights[n], 0, {0, D * D, D, 1}, whole, n * P * P, {0, N * P * P, P, 1},
                 {1, G, D, D});
    }
    alive.push_back(whole);
    return;
  }
  const int64_t products = by == DweightBy::kGates ? G : 1;
#else
  constexpr int64_t products = 1;
#endif
  for (int64_t n = 0; n < N; ++n) {
    s.write_padded(copies, alive, *dweights[n], P, D, [&](Tensor& to) {
      // Of one head, the gates are one product; of two, a batch, or products of their own.
      const int64_t parts = N == 1 ? 1 : G / products, units = N == 1 ? G * P : P;
      for (int64_t g = 0; g < products; ++g) {
        multiply({units, P, rows, parts, at(dr, (g * N + n) * P), N * P, 1, G * N * P,
                  at(h_prev, n * P), N * P, 1, at(to, g * P * P), units * P, P},
                 s.dtype, tf32, dr);
      }
    });
  }
}

template <typename Cell>
std::tuple<Tensor, Tensors, Tensors> layers_bwd(OptionalTensor dy, Tensors dlast, Tensor x,
                                                Tensors weights, Tensors kept,
                                                std::vector<int64_t> batch_sizes, bool has_bias,
                                                bool projects, int64_t directions, bool batch_first,
                                                int64_t width, double dropout, bool tf32,
                                                bool wants_dx, bool wants_dstate, int64_t chunk) {
#if defined(CUDA_KERNEL)
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  OneStep<Cell> step;
  if (step.fits(x, weights, batch_sizes, has_bias, projects, directions, batch_first, width,
                dropout) &&
      step.fits_states(dlast, Cell::kStates - step.is_cell) && step.fits_kept(dy, kept)) {
    step.tf32 = tf32;
    return step.backward(dy, dlast, x, weights, kept, wants_dx, wants_dstate);
  }
#endif
  Layers<Cell> s(x, weights, batch_sizes, has_bias, projects, directions, batch_first, width);
  using Rows = typename Layers<Cell>::Rows;
  const int64_t L = s.L, N = s.N, B = s.B, T = s.T, D = s.D, P = s.P, O = s.O;
  const int64_t rows = s.rows, E = s.engine_rows;
  constexpr int64_t G = Cell::kGates;
  dlast = s.check_states(dlast, "dlast", s.is_cell);
#if defined(CUDA_KERNEL)
  if (chunk != 0) {
    const Wavefront<Cell> wavefront(s, chunk, dropout, tf32);
    return wavefront.backward(dy, dlast, x, kept, wants_dx, wants_dstate);
  }
#else
  STD_TORCH_CHECK(chunk == 0, "chunk must be 0 on the CPU, got ", chunk);
#endif
  if (s.is_packed) s.write_rows(batch_sizes, x, 0);
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
  Tensor projected, dprojected;
  if (projects) {
    STD_TORCH_CHECK(first < kept.size(), "kept must have what the forward kept, got ", kept.size(),
                    " tensors");
    const bool has_state = kept[first].numel() > 0;
    projected = operand(kept[first++], "kept states", {has_state ? L * N : 0, B, O}, s.io);
    dprojected = new_tensor(x, {L * N, B, O}, s.io);
    if (!has_state) torch::stable::zero_(dprojected);
  }
  Tensor last;
  if (!dlast.empty()) {
    // Zeros for states that no copy writes: a cell's h, whose only gradient is dy, and h_p, which
    // the engines do not have.
    last = s.new_filled(x, {L * s.states()}, s.unrounded, s.is_cell || projects);
    s.bring_states(copies, last, dlast, s.is_cell);
  }
  Tensor dbias = new_tensor(x, {L * Cell::kBias * N * P}, s.unrounded);
  Tensor dinitial = new_tensor(x, {L * s.states()}, s.unrounded);
  Tensors dweights;
  for (const Tensor& weight : s.weights) {
    dweights.push_back(new_tensor(x, shape_of(weight), s.stored));
  }

  Tensor upper;  // the gradient of a layer's outputs
  Rows place = s.inner(N * O);
  if (dy) {
    check_shape(*dy, "dy", s.shape(N * O));
    check_dtype(*dy, "dy", s.io);
    upper = *dy;
    place.batch = s.is_packed ? 0 : upper.stride(batch_first || s.is_cell ? 0 : 1);
    place.time = s.is_cell ? 0 : upper.stride(batch_first && !s.is_packed ? 1 : 0);
    place.unit = upper.stride(s.is_packed || s.is_cell ? 1 : 2);
  } else {
    upper = new_tensor(x, s.inner_shape(N * O), s.io);
    torch::stable::zero_(upper);
  }
  for (int64_t l = L - 1; l >= 0; --l) {
    const int64_t I = s.width_of(l);
    const Tensor h = projects ? take("kept h", {E, N * P}, s.io) : Tensor();
    STD_TORCH_CHECK(next > first, "kept must have what the forward kept, got ", kept.size(),
                    " tensors");
    const bool has_h_prev = s.has_h_prev(kept[next - 1].numel() > 0);
    const Tensor h_prev = take("kept h_prev", {has_h_prev ? E : 0, N, s.steps() ? O : P}, s.io);
    const Tensor saved = take("kept saved", {E, Cell::kSaved, N, P}, saved_dtype(x));
    const Tensor input = l > 0 ? take("kept input", s.inner_shape(I), s.io) : x;
    Tensor dh = upper;
    // Of time-first rows, the engine's order is not that of the tensor's own sizes, which dense()
    // has.
    const bool is_dense = upper.is_contiguous() && (place.batch == T * N * O || B == 1) &&
                          (place.time == N * O || T == 1) && (place.unit == 1 || O == 1);
    const int64_t pitch = projects ? O : P;  // from one head's outputs to the next head's
    const bool adds_last = projects && !dlast.empty();
    if (N == 2 || pitch != O || s.is_packed || !is_dense || adds_last || s.steps()) {
      dh = new_tensor(x, {E, N * pitch}, s.io);
      for (int64_t n = 0; n < N; ++n) {
        const Rows from{n * O * place.unit, place.batch, place.time, place.unit};
        s.enter(copies, dh, n * pitch, N * pitch, upper, from, O, n == 1);
        copies.pad(pitch);
      }
    }
    if (adds_last) add_last(s, copies, dh, dlast[0], l);
    copies.run();
    dh = dense(dh);  // a slice of another tensor may not be aligned
    if (projects && !s.steps()) dh = project_back(s, dh, h, l, tf32, dweights);

    Tensor dgates = new_tensor(x, {E, G, N, P}, s.io);
    Tensor dr = Cell::kSplitGrad ? new_tensor(x, {E, G, N, P}, s.io) : dgates;
    BackwardParams p{};
    p.S = B, p.N = N, p.D = P, p.T = T;
    const auto list = list_sequences(s, dh, 0, 0);
    p.sequences = list.data();
    p.weight = s.steps() ? nullptr : s.w_hh(packed, l), p.dh = dh.const_data_ptr();
    p.dlast = dlast.empty() ? nullptr : at(last, l * s.states());
    p.saved = saved.const_data_ptr(), p.grad_clip = std::numeric_limits<double>::infinity();
    p.dx = dgates.mutable_data_ptr(), p.dr = Cell::kSplitGrad ? dr.mutable_data_ptr() : nullptr;
    p.dbias = at(dbias, l * Cell::kBias * N * P), p.dstate = at(dinitial, l * s.states());
    p.skips_initial = !wants_dstate;
    if (s.steps()) {
      differentiate_projected_steps(s, copies, p, dh, dgates, dprojected, l, tf32);
    } else {
      run<Cell>(p, s.dtype, tf32, dh);
    }

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
    const bool splits =
        projects && has_h_prev && !s.steps();  // d(R W_hr) into dR and a part of dW_hr
    Tensors products;                          // d(R W_hr)
    std::vector<Tensor*> recurrent;
    for (int64_t n = 0; n < N && splits; ++n) {
      products.push_back(new_tensor(x, {G * D, D}, s.io));
    }
    for (int64_t n = 0; n < N; ++n) {
      recurrent.push_back(splits ? &products[n] : &dweights[s.index(l, n, 1)]);
    }
    if (s.steps()) {
      write_projected_dweights(s, dh, h, h_prev, dgates, l, tf32, dweights);
    } else if (has_h_prev) {
      write_dweight<Cell>(s, dr, h_prev, tf32, recurrent, copies, alive);
    } else {
      for (Tensor* dweight : recurrent) torch::stable::zero_(*dweight);
    }
    if (splits) {
      copies.run();
      split_dweight(s, copies, alive, products, l, tf32, dweights);
    }
    if (projects && !s.steps()) {
      copies.run();
      if (projected.numel() > 0) {
        const Rows gates = l == 0 ? s.outer(G * P) : s.inner(G * P);
        differentiate_projected(s, copies, alive, ordered, gates, projected, dprojected, l, tf32,
                                dweights);
        copies.run();
      }
    }
    for (int64_t n = 0; n < N; ++n) {
      s.write_padded(copies, alive, dweights[s.index(l, n, 0)], I, I, [&](Tensor& to) {
        multiply({G * P, I, rows, 1, at(ordered, n * rows * G * P), 0, 1, G * P,
                  input.const_data_ptr(), I, 1, to.mutable_data_ptr(), 0, I},
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
      multiply({rows, I, G * P, 1, at(ordered, n * rows * G * P), 0, G * P, 1, s.w_ih(packed, l, n),
                I, 1, part.mutable_data_ptr(), 0, I},
               s.dtype, tf32, x);
      if (n == 0) continue;
      accumulate(copies, alive, upper, part);
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
    if (projects) {
      copies.add(dstate[0], 0, {0, 0, 0, 1}, dprojected, 0, {0, 0, 0, 1},
                 {1, 1, 1, dprojected.numel()});
    }
  }
  if (has_bias) s.return_bias(copies, dweights, dbias, s.bias_rows());
  copies.run();
  return {upper, dstate, dweights};
}

}  // namespace flashcell
