// The CPU's backward pass over time. Gates are recomputed from x and the saved states. The carried
// gradient is kept in `dstate`. Every sequence sums its own dweight, and the sums are then added in
// a fixed order.
#pragma once
#include "channel_blocks.h"

namespace flashcell::FLASHCELL_ISA {

template <typename Cell, typename IO>
struct Backward {
  using T = State<IO>;
  using V = Vec<T>;
  static constexpr int kGates = Cell::kGates, kStates = Cell::kStates, kWeights = Cell::kWeights;

  const BackwardParams& p;
  const Host& host;
  const Walk walk{p, host};
  const int64_t rows;  // rows of dweight: those of the weight, then those of the bias, if any
  Scratch<T> partial;  // [S][rows][D]
  Scratch<T> zeros;    // [D]: stands in for a state that was reset or not given

  Backward(const BackwardParams& params, const Host& h)
      : p(params),
        host(h),
        rows(kWeights + (p.bias ? kGates : 0)),
        partial(h, p.S * rows * p.D),
        zeros(h, p.D) {
    fill_zero(zeros.data, 0, p.D);
  }

  T* d_state(int k, const Sequence& s) const { return (T*)p.dstate + (k * p.S + s.index) * p.D; }
  T* dweight(int q, const Sequence& s) const { return partial + (s.index * rows + q) * p.D; }
  IO* dx(const Block& block, int64_t row, int g) const {
    return (IO*)p.dx + block.head * (p.dx_head - p.J) + (row * kGates + g) * p.J;
  }

  // Returns state k after the step in `row`, as the forward pass saved it.
  const IO* kept(int k, int64_t row) const {
    if (k == 0 && p.hold == nullptr) return (const IO*)p.h + row * p.D;
    return (const IO*)p.saved + (row * p.V + (k == 0 ? kStates - 1 : k - 1)) * p.D;
  }

  void run() {
    walk.run([&](const Block& block) { sequence(block); });
    for (int64_t i = 0; i < rows * p.D; ++i) {
      T sum = 0;
      for (int64_t s = 0; s < p.S; ++s) sum += partial[s * rows * p.D + i];
      ((T*)p.dweight)[i] = sum;
    }
  }

  void sequence(const Block& block) const {
    const auto& [s, begin, end, head] = block;
    for (int q = 0; q < rows; ++q) fill_zero(dweight(q, s), begin, end);
    for (int k = 0; k < kStates; ++k) {
      const T* from = (const T*)p.dlast + (k * p.S + s.index) * p.D;
      if (p.dlast == nullptr)
        fill_zero(d_state(k, s), begin, end);
      else
        memcpy(d_state(k, s) + begin, from + begin, (end - begin) * sizeof(T));
    }
    for (int64_t row = s.row + s.length; row < s.row + s.length + s.padding; ++row) {
      for (int g = 0; g < kGates; ++g) fill_zero(dx(block, row, g), begin, end);
    }
    for (int64_t t = s.length - 1; t >= 0; --t) {
      if (walk.hold(s, t)) {
        for (int g = 0; g < kGates; ++g) fill_zero(dx(block, s.row + t, g), begin, end);
      } else {
        step(block, t);
      }
      if (walk.reset(s, t)) {
        for (int k = 0; k < kStates; ++k) fill_zero(d_state(k, s), begin, end);
      }
    }
  }

  void step(const Block& block, int64_t t) const {
    const Sequence& s = block.s;
    if (t > 0 && !walk.reset(s, t)) {
      const IO* before[kStates];
      for (int k = 0; k < kStates; ++k) before[k] = kept(k, s.row + t - 1);
      return step_from(before, block, t);
    }
    const T* before[kStates];
    const bool empty = p.initial == nullptr || walk.reset(s, t);
    for (int k = 0; k < kStates; ++k) {
      before[k] = empty ? zeros.data : (const T*)p.initial + (k * p.S + s.index) * p.D;
    }
    step_from(before, block, t);
  }

  template <typename From>
  void step_from(const From* const (&before)[kStates], const Block& block, int64_t t) const {
    const Sequence& s = block.s;
    const IO* x_row = (const IO*)p.x + s.x_offset + t * p.x_time + block.head * (p.x_head - p.J);
    const T* bias = (const T*)p.bias;
    const IO* dh = (const IO*)p.dh + (s.row + t) * p.D;
    for_vectors<T>(block.begin, block.end,
                   [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
                     constexpr bool kWhole = decltype(whole)::value;
                     V x[kGates], w[kWeights], state[kStates], d[kStates], dx_row[kGates],
                         dw[kWeights];
                     for (int g = 0; g < kGates; ++g) {
                       x[g] = load_part<kWhole>(x_row + g * p.x_gate + c, lanes);
                       if (bias) x[g] += load_part<kWhole>(bias + g * p.D + c, lanes);
                     }
                     for (int q = 0; q < kWeights; ++q) {
                       w[q] = load_part<kWhole>((const T*)p.weight + q * p.D + c, lanes);
                       dw[q] = load_part<kWhole>(dweight(q, s) + c, lanes);
                     }
                     for (int k = 0; k < kStates; ++k) {
                       state[k] = load_part<kWhole>(before[k] + c, lanes);
                       d[k] = load_part<kWhole>(d_state(k, s) + c, lanes);
                     }
                     d[0] += load_part<kWhole>(dh + c, lanes);
                     Cell::backward(x, w, state, d, dx_row, dw);
                     for (int g = 0; g < kGates; ++g) {
                       store_part<kWhole>(dx(block, s.row + t, g) + c, dx_row[g], lanes);
                       if (!bias) continue;
                       T* sum = dweight(kWeights + g, s) + c;
                       store_part<kWhole>(sum, load_part<kWhole>(sum, lanes) + dx_row[g], lanes);
                     }
                     for (int q = 0; q < kWeights; ++q)
                       store_part<kWhole>(dweight(q, s) + c, dw[q], lanes);
                     for (int k = 0; k < kStates; ++k)
                       store_part<kWhole>(d_state(k, s) + c, d[k], lanes);
                   });
  }
};

}  // namespace flashcell::FLASHCELL_ISA
