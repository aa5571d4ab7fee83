// The CPU's forward pass over time. The carried state is kept in `last`, unrounded.
#pragma once
#include "channel_blocks.h"

namespace flashcell::FLASHCELL_ISA {

template <typename Cell, typename IO>
struct Forward {
  using T = State<IO>;
  using V = Vec<T>;
  static constexpr int kGates = Cell::kGates, kStates = Cell::kStates, kWeights = Cell::kWeights;

  const ForwardParams& p;
  const Host& host;
  const Walk walk{p, host};

  Forward(const ForwardParams& params, const Host& h) : p(params), host(h) {}

  T* state(int k, const Sequence& s) const { return (T*)p.last + (k * p.S + s.index) * p.D; }
  IO* h(int64_t row) const { return (IO*)p.h + row * p.D; }
  IO* saved(int64_t row, int64_t v) const { return (IO*)p.saved + (row * p.V + v) * p.D; }

  void run() {
    for (int i = 0; i < 3; ++i) p.report[i] = 0;
    walk.run([&](const Block& block) { sequence(block); });
  }

  void sequence(const Block& block) const {
    const auto& [s, begin, end, head] = block;
    start(block);
    for (int64_t t = 0; t < s.length; ++t) {
      if (walk.reset(s, t)) {
        for (int k = 0; k < kStates; ++k) fill_zero(state(k, s), begin, end);
      }
      if (walk.hold(s, t)) {
        fill_zero(h(s.row + t), begin, end);
      } else {
        step(block, t);
      }
      if (p.saved) save(block, t);
    }
    for (int64_t row = s.row + s.length; row < s.row + s.length + s.padding; ++row) {
      fill_zero(h(row), begin, end);
      for (int64_t v = 0; p.saved && v < p.V; ++v) fill_zero(saved(row, v), begin, end);
    }
  }

  void start(const Block& block) const {
    const auto& [s, begin, end, head] = block;
    for (int k = 0; k < kStates; ++k) {
      T* to = state(k, s);
      const T* from = (const T*)p.initial + (k * p.S + s.index) * p.D;
      if (p.initial == nullptr)
        fill_zero(to, begin, end);
      else
        memcpy(to + begin, from + begin, (end - begin) * sizeof(T));
    }
  }

  void step(const Block& block, int64_t t) const {
    const Sequence& s = block.s;
    const IO* x_row = (const IO*)p.x + s.x_offset + t * p.x_time + block.head * (p.x_head - p.J);
    const T* bias = (const T*)p.bias;
    for_vectors<T>(block.begin, block.end,
                   [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
                     constexpr bool kWhole = decltype(whole)::value;
                     V x[kGates], w[kWeights], before[kStates], after[kStates];
                     for (int g = 0; g < kGates; ++g) {
                       x[g] = load_part<kWhole>(x_row + g * p.x_gate + c, lanes);
                       if (bias) x[g] += load_part<kWhole>(bias + g * p.D + c, lanes);
                     }
                     for (int q = 0; q < kWeights; ++q) {
                       w[q] = load_part<kWhole>((const T*)p.weight + q * p.D + c, lanes);
                     }
                     for (int k = 0; k < kStates; ++k)
                       before[k] = load_part<kWhole>(state(k, s) + c, lanes);
                     Cell::forward(x, w, before, after);
                     for (int k = 0; k < kStates; ++k)
                       store_part<kWhole>(state(k, s) + c, after[k], lanes);
                     store_part<kWhole>(h(s.row + t) + c, after[0], lanes);
                   });
  }

  // Saves the states after step t that are not in h: row v is state v + 1, and the row after the
  // last of them is state 0.
  void save(const Block& block, int64_t t) const {
    const auto& [s, begin, end, head] = block;
    for (int64_t v = 0; v < p.V; ++v) {
      const T* from = state(v + 1 < kStates ? v + 1 : 0, s);
      IO* to = saved(s.row + t, v);
      for_vectors<T>(begin, end,
                     [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
                       constexpr bool kWhole = decltype(whole)::value;
                       store_part<kWhole>(to + c, load_part<kWhole>(from + c, lanes), lanes);
                     });
    }
  }
};

}  // namespace flashcell::FLASHCELL_ISA
