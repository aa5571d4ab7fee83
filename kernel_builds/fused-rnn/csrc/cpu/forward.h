// The CPU's forward pass over time: for one block of units, the recurrent product of every gate,
// then the cell on the same units while the product is in cache. The carried state is kept in
// `last`, unrounded. The operand of the product is double-buffered by the parity of t, because
// other units still read the old one.
#pragma once
#include "dot.h"
#include "schedules.h"

namespace flashcell::FLASHCELL_ISA {

template <typename Cell, typename IO>
struct Forward {
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<IO>;
  static constexpr int kGates = Cell::kGates, kStates = Cell::kStates, kSaved = Cell::kSaved;
  // Vectors of units in a panel: one cache line of x or, with a single gate, enough for the
  // product.
  static constexpr int kUnits = kGates == 1 ? 4 : 64 / kVectorBytes;
  static constexpr int kVectors = kGates * kUnits, kStride = kVectors * V::kWidth;
  static constexpr int kPanelUnits = kUnits * V::kWidth;

  const ForwardParams& p;
  const Host host;
  const int64_t depth = padded_depth<IO>(p.D);
  const int64_t panels = (p.D + kPanelUnits - 1) / kPanelUnits;
  const bool begins_with_zeros;  // no recurrent product in the first step
  const bool multiplies;         // whether any step has one
  const bool packed;             // whether the weights are packed: they are read often enough
  const Plan plan;
  const int64_t state_stride = p.S * p.N * p.D;
  Scratch<E> weights;   // [N][panels], stored in parts (common/cpu/microkernel.h)
  Scratch<E> operands;  // [2][S][N][depth]
  Scratch<E> zeros;     // [depth]

  static int64_t longest(const ForwardParams& p) { return p.S ? p.sequences[0].length : 0; }

  Forward(const ForwardParams& params, const Host& h)
      : p(params),
        host(fitting(h, total_steps(p) * p.N * kGates * p.D * p.D)),
        begins_with_zeros(p.initial == nullptr || p.h_begins_as_zero),
        multiplies(longest(p) > 1 || !begins_with_zeros),
        packed(longest(p) > 1 || (p.packs_one_step && !begins_with_zeros &&
                                  p.S > most_dot_rows(kGates * p.D * p.D * sizeof(IO)))),
        plan(make_plan(p.S, p.N, kGates * p.D * p.D * sizeof(E), kGates * p.D * p.D, host.threads)),
        weights(host, packed ? p.N * panels * depth * kStride : 0),
        operands(host, multiplies ? 2 * p.S * p.N * depth : 0),
        zeros(host, depth) {}

  E* operand(int64_t t, int64_t s, int64_t head) const {
    return operands + (((t & 1) * p.S + s) * p.N + head) * depth;
  }
  const E* panel_weights(int64_t head, int64_t panel) const {
    return weights + (head * panels + panel) * depth * kStride;
  }
  // With one gate the last panel may have fewer vectors; with several, a panel has all gates.
  int vectors_of(int64_t panel) const {
    const int64_t left = (p.D - panel * kPanelUnits + V::kWidth - 1) / V::kWidth;
    return kGates == 1 && left < kVectors ? int(left) : kVectors;
  }
  const IO* weight_rows(int64_t head, int gate) const {
    return (const IO*)p.weight + (gate * p.N + head) * p.D * p.D;
  }
  T* state(int k, int64_t s, int64_t head) const {
    return (T*)p.last + ((k * p.S + p.sequences[s].index) * p.N + head) * p.D;
  }
  int lanes(int64_t unit) const {
    return p.D - unit >= V::kWidth ? V::kWidth : p.D > unit ? int(p.D - unit) : 0;
  }

  void run() {
    prepare();
    Walk{p, host}.run(plan, panels, false,
                      [&](int64_t head, int64_t panel, int64_t t, int64_t begin, int64_t end) {
                        for (; begin < end; begin += kChunk) {
                          step(head, panel, t, begin, end < begin + kChunk ? end : begin + kChunk);
                        }
                      });
    parallel_for(host, p.S, [&](int64_t s) {
      const Sequence& sequence = p.sequences[s];
      for (int64_t i = 0; i < sequence.padding; ++i) {
        clear(sequence.row + sequence.length + i, 0, p.N * p.D);
      }
    });
  }

  void prepare() {
    const int64_t state_count = kStates * p.S * p.N * p.D;
    if (p.initial && p.initial != p.last) memcpy(p.last, p.initial, state_count * sizeof(T));
    if (!p.initial) memset(p.last, 0, state_count * sizeof(T));
    if (!multiplies) return;
    memset(zeros, 0, depth * sizeof(E));
    parallel_for(host, p.S * p.N, [&](int64_t i) {
      const int64_t s = i / p.N, head = i % p.N;
      memset(operand(1, s, head), 0, depth * sizeof(E));
      E* to = operand(0, s, head);
      memset(to, 0, depth * sizeof(E));
      const T* h = state(0, s, head);
      for (int64_t unit = 0; unit < p.D; unit += V::kWidth) {
        const int n = lanes(unit);
        store_operand_part<IO>(to + unit, load_part<false>(h + unit, n), n);
      }
    });
    if (!packed) return;
    parallel_for(host, p.N * panels, [&](int64_t i) {
      const int vectors = vectors_of(i % panels);
      const int part = vectors == kVectors ? kPartVectors<kVectors> : part_of(vectors);
      for (int v = 0; v < vectors; ++v) {
        const int64_t head = i / panels, unit = i % panels * kPanelUnits + v / kGates * V::kWidth;
        pack_vector<IO>(panel_vector<IO>(weights + i * depth * kStride, depth, v, part), part,
                        weight_rows(head, v % kGates) + unit * p.D, 1, p.D, p.D, lanes(unit));
      }
    });
  }

  void step(int64_t head, int64_t panel, int64_t t, int64_t begin, int64_t end) const {
    const E* rows[kChunk];
    int count = 0;
    for (int64_t s = begin; s < end; ++s) {
      const Sequence& sequence = p.sequences[s];
      if (hold(sequence, t)) continue;
      rows[count++] = reset(sequence, t) ? zeros : operand(t, s, head);
    }
    alignas(kVectorBytes) T products[kChunk * kStride];
    if (t == 0 && begins_with_zeros) {
      memset(products, 0, count * kStride * sizeof(T));
    } else if (packed && kGates == 1) {
      narrow_product<IO, kStride>(vectors_of(panel), rows, count, depth, panel_weights(head, panel),
                                  products);
    } else if (packed) {
      parts_product<IO, kVectors>(rows, count, depth, panel_weights(head, panel), products);
    } else {
      dot_panel<IO, kGates, kUnits, kChunk>(rows, count, (const IO*)p.weight + head * p.D * p.D,
                                            p.N * p.D * p.D, p.D, panel * kPanelUnits, products);
    }
    for (int u = 0; u < kUnits; ++u) {
      const int64_t unit = panel * kPanelUnits + u * V::kWidth;
      const T* product = products + u * kGates * V::kWidth;
      if (lanes(unit) == V::kWidth) {
        cells<true>(head, unit, t, begin, end, product);
      } else if (lanes(unit) > 0) {
        cells<false>(head, unit, t, begin, end, product);
      }
    }
  }

  template <bool Whole>
  void cells(int64_t head, int64_t unit, int64_t t, int64_t begin, int64_t end,
             const T* product) const {
    if constexpr (kHasBound<Cell>) {
      if (p.bound > 0) {
        return cells<Whole>(head, unit, t, begin, end, product, Bound<V>{V(T(p.bound))});
      }
    }
    cells<Whole>(head, unit, t, begin, end, product, NoBound());
  }

  bool reset(const Sequence& s, int64_t t) const { return Walk{p, host}.reset(s, t); }
  bool hold(const Sequence& s, int64_t t) const { return Walk{p, host}.hold(s, t); }

  template <bool Whole, typename Bounds>
  void cells(int64_t head, int64_t unit, int64_t t, int64_t begin, int64_t end, const T* product,
             const Bounds& bound) const {
    // A local copy: stores cannot alias it, so its members stay in registers.
    const ForwardParams p = this->p;
    const int n = lanes(unit);
    const int64_t at = head * p.D + unit, ND = p.N * p.D;
    V bias[Cell::kBias];
    for (int g = 0; g < Cell::kBias; ++g) {
      bias[g] = p.bias ? load_part<Whole>((const T*)p.bias + g * ND + at, n) : V(0);
    }
    // The part of addresses that does not depend on the sequence, computed once.
    const IO* const x_here = (const IO*)p.x + t * p.x_time + head * p.x_head + unit;
    T* const states = (T*)p.last + at;
    constexpr int64_t kAhead = 8;  // sequences whose rows are prefetched: rows lie far apart
    E* operand_here = operand(t + 1, begin, head) + unit;
    const int64_t operand_stride = p.N * depth;
    for (int64_t s = begin; s < end; ++s, operand_here += operand_stride) {
      const Sequence sequence = p.sequences[s];
      const int64_t row = (sequence.row + t) * ND + at;
      T* const state_here = states + sequence.index * ND;
      V now[kStates], next[kStates], x[kGates], r[kGates], saved[kSaved];
      for (int k = 0; k < kStates; ++k) {
        now[k] = reset(sequence, t) ? V(0) : load_part<Whole>(state_here + k * state_stride, n);
      }
      if (hold(sequence, t)) {
        clear(sequence.row + t, at, n);
        pass<Whole>(now, state_here, operand_here, n);
        continue;
      }
      const IO* in = x_here + sequence.x_offset;
      const IO* ahead = x_here + p.sequences[s + kAhead < end ? s + kAhead : s].x_offset;
      for (int g = 0; g < kGates; ++g, in += p.x_gate, ahead += p.x_gate) {
        x[g] = load_part<Whole>(in, n) + bias[g];
        __builtin_prefetch(ahead);
        __builtin_prefetch(in + p.x_time);  // next step: `ahead` skips its first kAhead rows
        r[g] = load(product + g * V::kWidth);
      }
      if (Cell::kBias > kGates) r[kGates - 1] += bias[Cell::kBias - 1];
      product += kStride;
      if constexpr (kHasBound<Cell>) {
        Cell::forward(x, r, now, next, saved, bound);
      } else {
        Cell::forward(x, r, now, next, saved);
      }
      pass<Whole>(next, state_here, operand_here, n);
      store_part<Whole>((IO*)p.h + row, next[0], n);
      if (p.h_prev) store_part<Whole>((IO*)p.h_prev + row, now[0], n);
      if (p.saved) {
        T* to = (T*)p.saved + (sequence.row + t) * kSaved * ND + at;
        for (int v = 0; v < kSaved; ++v) store_part<Whole>(to + v * ND, saved[v], n);
      }
    }
  }

  template <bool Whole>
  FN void pass(const V (&next)[kStates], T* state_here, E* operand_here, int n) const {
    for (int k = 0; k < kStates; ++k) {
      store_part<Whole>(state_here + k * state_stride, next[k], n);
    }
    if (!multiplies) return;
    if (Whole) return store_operand<IO>(operand_here, next[0]);
    store_operand_part<IO>(operand_here, next[0], n);
  }

  // Zeros the outputs of a step that does not run: units [at, at + n) of a row.
  void clear(int64_t row, int64_t at, int64_t n) const {
    const int64_t ND = p.N * p.D;
    memset((IO*)p.h + row * ND + at, 0, n * sizeof(IO));
    if (p.h_prev) memset((IO*)p.h_prev + row * ND + at, 0, n * sizeof(IO));
    for (int v = 0; p.saved && v < kSaved; ++v) {
      memset((T*)p.saved + (row * kSaved + v) * ND + at, 0, n * sizeof(T));
    }
  }
};

}  // namespace flashcell::FLASHCELL_ISA
