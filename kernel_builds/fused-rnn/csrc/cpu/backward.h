// The CPU's backward pass over time, from the last step to the first. Step t first completes the
// gradient of h_t with the recurrent product of step t + 1 (it needs dr of all units, which is
// double-buffered by the parity of t), then runs the cell's backward on the same units. The carried
// gradient is kept in `dstate`, unrounded.
#pragma once
#include "schedules.h"

namespace flashcell::FLASHCELL_ISA {

template <typename Cell, typename IO>
struct Backward {
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<IO>;
  static constexpr int kGates = Cell::kGates, kStates = Cell::kStates, kSaved = Cell::kSaved;
  static constexpr int kVectors = 4, kPanelUnits = kVectors * V::kWidth;
  static constexpr int kStride = kPanelUnits;

  // A cell takes as long as so many multiply-adds (lstm, fp32, 8 x 1024 units: 1.2 ns).
  static constexpr int64_t kCellCost = 32;

  const BackwardParams& p;
  const bool cut;              // no gradient reaches h through the recurrent product
  const int64_t step_cost;     // multiply-adds of a head and a sequence
  const int64_t weight_bytes;  // of a head
  const Host host;
  const int64_t gate_depth = padded_depth<IO>(p.D), depth = kGates * gate_depth;
  const int64_t panels = (p.D + kPanelUnits - 1) / kPanelUnits;
  const int64_t groups = (p.S + kRowGroup - 1) / kRowGroup;
  const Plan plan;
  const bool multiplies;  // whether any step has a recurrent product: never where `cut`
  // [N][panels], stored in parts (common/cpu/microkernel.h); the depth is (gate, to).
  Scratch<E> weights;
  Scratch<E> operands;  // [2][S][N][G][gate_depth]
  Scratch<T> partial;   // [groups][R][N][D]

  Backward(const BackwardParams& params, const Host& h)
      : p(params),
        cut(p.grad_clip == 0),
        step_cost(cut ? kCellCost * p.D : kGates * p.D * p.D),
        weight_bytes(cut ? 0 : kGates * p.D * p.D * sizeof(E)),
        host(fitting(h, total_steps(p) * p.N * step_cost)),
        plan(make_plan(p.S, p.N, weight_bytes, step_cost, host.threads)),
        multiplies(p.S && !cut && (p.sequences[0].length > 1 || !p.skips_initial)),
        weights(host, multiplies ? p.N * panels * depth * kStride : 0),
        operands(host, multiplies ? 2 * p.S * p.N * depth : 0),
        partial(host, groups * Cell::kBias * p.N * p.D) {}

  E* operand(int64_t t, int64_t s, int64_t head) const {
    return operands + (((t & 1) * p.S + s) * p.N + head) * depth;
  }
  T* state(int k, int64_t s, int64_t head) const {
    return (T*)p.dstate + ((k * p.S + p.sequences[s].index) * p.N + head) * p.D;
  }
  int lanes(int64_t unit) const {
    return p.D - unit >= V::kWidth ? V::kWidth : p.D > unit ? int(p.D - unit) : 0;
  }
  int vectors_of(int64_t panel) const {
    const int64_t left = (p.D - panel * kPanelUnits + V::kWidth - 1) / V::kWidth;
    return left < kVectors ? int(left) : kVectors;
  }
  bool reset(const Sequence& s, int64_t t) const { return Walk{p, host}.reset(s, t); }
  bool hold(const Sequence& s, int64_t t) const { return Walk{p, host}.hold(s, t); }

  void run() {
    prepare();
    Walk{p, host}.run(plan, panels, true,
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
    parallel_for(host, Cell::kBias * p.N, [&](int64_t i) {
      T* out = (T*)p.dbias + i * p.D;
      memset(out, 0, p.D * sizeof(T));
      for (int64_t group = 0; group < groups; ++group) {
        const T* in = partial + (group * Cell::kBias * p.N + i) * p.D;
        for (int64_t d = 0; d < p.D; ++d) out[d] += in[d];
      }
    });
  }

  void prepare() {
    const int64_t one = p.S * p.N * p.D;
    const int64_t carried = p.dlast ? Cell::kGradStates * one : 0;
    if (carried && p.dlast != p.dstate) memcpy(p.dstate, p.dlast, carried * sizeof(T));
    memset((T*)p.dstate + carried, 0, (kStates * one - carried) * sizeof(T));
    if (multiplies) {
      parallel_for(host, 2 * p.S * p.N,
                   [&](int64_t i) { memset(operands + i * depth, 0, depth * sizeof(E)); });
    }
    parallel_for(host, groups, [&](int64_t i) {
      const int64_t count = Cell::kBias * p.N * p.D;
      memset(partial + i * count, 0, count * sizeof(T));
    });
    if (!multiplies) return;
    parallel_for(host, p.N * panels, [&](int64_t i) {
      const int vectors = vectors_of(i % panels), part = part_of(vectors);
      for (int v = 0; v < vectors * kGates; ++v) {
        const int64_t gate = v / vectors, head = i / panels;
        const int64_t unit = i % panels * kPanelUnits + v % vectors * V::kWidth;
        pack_vector<IO>(panel_vector<IO>(weights + i * depth * kStride, depth, v % vectors, part) +
                            gate * gate_depth * part * V::kWidth,
                        part, (const IO*)p.weight + (gate * p.N + head) * p.D * p.D + unit, p.D, 1,
                        p.D, lanes(unit));
      }
    });
  }

  void step(int64_t head, int64_t panel, int64_t t, int64_t begin, int64_t end) const {
    if (t < 0 && p.skips_initial) return;
    const E* rows[kChunk];
    int count = 0;
    for (int64_t s = begin; s < end; ++s) {
      const Sequence& sequence = p.sequences[s];
      if (t + 1 >= sequence.length || reset(sequence, t + 1) || hold(sequence, t + 1)) continue;
      rows[count++] = operand(t + 1, s, head);
    }
    alignas(kVectorBytes) T products[kChunk * kStride];
    if (multiplies) {
      narrow_product<IO, kStride>(vectors_of(panel), rows, count, depth,
                                  weights + (head * panels + panel) * depth * kStride, products);
    }
    for (int u = 0; u < kVectors; ++u) {
      const int64_t unit = panel * kPanelUnits + u * V::kWidth;
      const T* product = products + u * V::kWidth;
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

  template <bool Whole, typename Bounds>
  void cells(int64_t head, int64_t unit, int64_t t, int64_t begin, int64_t end, const T* product,
             const Bounds& bound) const {
    const int n = lanes(unit);
    const int64_t at = head * p.D + unit, ND = p.N * p.D;
    constexpr int64_t kAhead = 8;  // sequences
    V d_bias[Cell::kBias];
    for (int64_t s = begin; s < end; ++s) {
      if (s % kRowGroup == 0) {
        for (int g = 0; g < Cell::kBias; ++g) d_bias[g] = V(0);
      }
      const Sequence& sequence = p.sequences[s];
      V d[kStates];
      for (int k = 0; k < kStates; ++k) d[k] = load_part<Whole>(state(k, s, head) + unit, n);
      if (t + 1 < sequence.length) {
        if (reset(sequence, t + 1)) {
          for (int k = 0; k < kStates; ++k) d[k] = V(0);
        } else if (multiplies && !hold(sequence, t + 1)) {
          d[0] += clip(load(product));
          product += kStride;
        }
      }
      const Sequence& ahead = p.sequences[s + kAhead < end ? s + kAhead : s];
      prefetch((ahead.row + t) * ND, at);
      if (t >= 0 && hold(sequence, t)) {
        clear(sequence.row + t, at, n);
      } else if (t >= 0) {
        cell<Whole>(sequence.row + t, at, n, d, operand(t, s, head) + unit, d_bias, bound);
      }
      for (int k = 0; k < kStates; ++k) store_part<Whole>(state(k, s, head) + unit, d[k], n);
      if (t >= 0 && (s % kRowGroup == kRowGroup - 1 || s == end - 1)) {
        T* to = partial + s / kRowGroup * Cell::kBias * ND + at;
        for (int g = 0; g < Cell::kBias; ++g, to += ND) {
          store_part<Whole>(to, load_part<Whole>(to, n) + d_bias[g], n);
        }
      }
    }
  }

  template <bool Whole, typename Bounds>
  FN void cell(int64_t row, int64_t at, int n, V (&d)[kStates], E* dr_operand,
               V (&d_bias)[Cell::kBias], const Bounds& bound) const {
    const int64_t ND = p.N * p.D;
    V saved[kSaved], dx[kGates], dr[kGates];
    const T* from = (const T*)p.saved + row * kSaved * ND + at;
    for (int v = 0; v < kSaved; ++v) saved[v] = load_part<Whole>(from + v * ND, n);
    prefetch((row - 1) * ND, at);  // the step before in time, which comes next
    d[0] += load_part<Whole>((const IO*)p.dh + row * ND + at, n);
    if constexpr (kHasBound<Cell>) {
      Cell::backward(saved, d, dx, dr, bound);
    } else {
      Cell::backward(saved, d, dx, dr);
    }
    for (int g = 0; g < kGates; ++g) {
      const int64_t to = (row * kGates + g) * ND + at;
      store_part<Whole>((IO*)p.dx + to, dx[g], n);
      if (Cell::kSplitGrad) store_part<Whole>((IO*)p.dr + to, dr[g], n);
      d_bias[g] += dx[g];
      if (!multiplies) {
        continue;
      } else if (Whole) {
        store_operand<IO>(dr_operand + g * gate_depth, dr[g]);
      } else {
        store_operand_part<IO>(dr_operand + g * gate_depth, dr[g], n);
      }
    }
    if (Cell::kBias > kGates) d_bias[Cell::kBias - 1] += dr[kGates - 1];
  }

  // Prefetches what a cell will read: rows lie far apart.
  FN void prefetch(int64_t begin, int64_t at) const {
    const T* const from = (const T*)p.saved + begin * kSaved + at;
    for (int v = 0; v < kSaved; ++v) __builtin_prefetch(from + v * p.N * p.D);
    __builtin_prefetch((const IO*)p.dh + begin + at);
  }

  FN V clip(V v) const {  // NaN fails both comparisons and is returned
    const V bound = V(T(p.grad_clip));
    return select(bound < v, bound, select(v < -bound, -bound, v));
  }

  void clear(int64_t row, int64_t at, int64_t n) const {
    const int64_t ND = p.N * p.D;
    for (int g = 0; g < kGates; ++g) {
      memset((IO*)p.dx + (row * kGates + g) * ND + at, 0, n * sizeof(IO));
      if (p.dr) memset((IO*)p.dr + (row * kGates + g) * ND + at, 0, n * sizeof(IO));
    }
  }
};

}  // namespace flashcell::FLASHCELL_ISA
