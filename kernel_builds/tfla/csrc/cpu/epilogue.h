// The epilogue on the CPU: the norm, weight and output gate that follow h, for every head on its
// own, and their gradients.
#pragma once
#include "matrix.h"

namespace flashcell::FLASHCELL_ISA {

// The epilogue of one head of one row. `x` is h in the state dtype, with zeros after `width`.
template <typename IO>
struct HeadEpilogue {
  using T = State<IO>;
  using V = Vec<T>;
  using M = Matrix<IO>;

  const Epilogue& p;
  int64_t width;
  const T* weight;  // the weight of this head, or null

  HeadEpilogue(const Epilogue& epilogue, int64_t head, int64_t V)
      : p(epilogue),
        width(V),
        weight(epilogue.weight ? (const T*)epilogue.weight + head * V : nullptr) {}

  // Centers x if the norm is centered, and returns the factor that completes the norm.
  T normalize(T* x) const {
    if (!p.norm) return T(1);
    if (p.centered) {
      const V mean(total(x, [](V h) { return h; }) / T(width));
      M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
        store_part<decltype(whole)::value>(x + c, load(x + c) - mean, lanes);
      });
    }
    const T squares = total(x, [](V h) { return h * h; });
    return T(1 / __builtin_sqrt(double(squares) / double(width) + p.eps));
  }

  template <typename Term>
  FN T total(const T* x, const Term& term) const {
    // Several sums: one would wait for each addition, and round more where a vector is short.
    V sums[4] = {V(0), V(0), V(0), V(0)};
    for (int64_t c = 0; c < width; c += 4 * M::kWidth) {
      for (int k = 0; k < 4; ++k) {
        if (c + k * M::kWidth < width) sums[k] += term(load(x + c + k * M::kWidth));
      }
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  void forward(T* x, const IO* gate, IO* out) const {
    const V inverse(normalize(x));
    M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
      constexpr bool kWhole = decltype(whole)::value;
      V y = load(x + c) * inverse;
      if (weight) y = y * load_part<kWhole>(weight + c, lanes);
      if (gate) y = y * sigmoid(load_part<kWhole>(gate + c, lanes));
      store_part<kWhole>(out + c, y, lanes);
    });
  }

  // With z = norm(h) and s = sigmoid(gate): dgate = dy z weight s (1 - s), dweight += dy s z, d =
  // dy s weight, dh = (d - mean(d) - z mean(d z)) / root; mean(d) is only subtracted if h is
  // centered. d is as long as x, with zeros after `width`.
  void backward(T* x, T* d, const IO* gate, const IO* dy, IO* dh, IO* dgate, T* dweight) const {
    const V inverse(normalize(x));
    V sums(0), products(0);
    M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
      constexpr bool kWhole = decltype(whole)::value;
      const V z = load(x + c) * inverse;
      const V w = weight ? load_part<kWhole>(weight + c, lanes) : V(1);
      V dz = load_part<kWhole>(dy + c, lanes);
      if (gate) {
        const V open = sigmoid(load_part<kWhole>(gate + c, lanes));
        store_part<kWhole>(dgate + c, dz * z * w * d_sigmoid(open), lanes);
        dz = dz * open;
      }
      if (dweight) store(dweight + c, load(dweight + c) + dz * z);
      dz = dz * w;
      sums += dz, products += dz * z;
      store_part<kWhole>(x + c, z, lanes), store_part<kWhole>(d + c, dz, lanes);
    });
    const V mean(p.centered ? sum(sums) / T(width) : T(0));
    const V along(p.norm ? sum(products) / T(width) : T(0));
    M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
      const V row = load(d + c) - mean - load(x + c) * along;
      store_part<decltype(whole)::value>(dh + c, row * inverse, lanes);
    });
  }
};

// The parts that both directions share: addresses of rows of h and of the gate, and widening.
template <typename IO, typename Params>
struct EpilogueRows {
  using T = State<IO>;
  using M = Matrix<IO>;
  const Params& p;
  const Host& caller;

  int64_t rows() const { return p.B * p.T; }
  Host host() const { return fitting(caller, 8 * rows() * p.H * p.V); }
  int64_t at(int64_t row, int64_t head) const { return (row * p.H + head) * p.V; }
  const IO* gate(int64_t row, int64_t head) const {
    const Strided& g = p.out_gate;
    if (!g.data) return nullptr;
    return (const IO*)g.data + row / p.T * g.batch + row % p.T * g.time + head * g.head;
  }
  void widen(T* x, int64_t row, int64_t head) const {
    const IO* h = (const IO*)p.h + at(row, head);
    M::for_columns(p.V, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
      store(x + c, load_part<decltype(whole)::value>(h + c, lanes));
    });
  }
};

template <typename IO>
struct EpilogueForward : EpilogueRows<IO, EpilogueParams> {
  using Rows = EpilogueRows<IO, EpilogueParams>;
  using Rows::p;

  void run() const {
    parallel_ranges(this->host(), this->rows() * p.H, [&](int64_t begin, int64_t end) {
      Scratch<State<IO>> x(this->caller, p.V + Rows::M::kWidth);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / p.H, head = i % p.H;
        this->widen(x, row, head);
        HeadEpilogue<IO>(p, head, p.V)
            .forward(x, this->gate(row, head), (IO*)p.y + this->at(row, head));
      }
    });
  }
};

// A task is one head of a block of rows. The gradient of the weight is summed block by block, so it
// does not depend on the threads.
template <typename IO>
struct EpilogueBackward : EpilogueRows<IO, EpilogueBackwardParams> {
  using Rows = EpilogueRows<IO, EpilogueBackwardParams>;
  using T = State<IO>;
  using Rows::p;
  static constexpr int64_t kBlock = 128, kPad = Rows::M::kWidth;

  void run() const {
    const int64_t blocks = (this->rows() + kBlock - 1) / kBlock, padded = p.V + kPad;
    Scratch<T> parts(this->caller, p.dweight ? blocks * p.H * padded : 0);
    parallel_ranges(this->host(), blocks * p.H, [&](int64_t begin, int64_t end) {
      Scratch<T> x(this->caller, 2 * padded);
      for (int64_t i = begin; i < end; ++i) {
        block(i / p.H, i % p.H, x, p.dweight ? parts + i * padded : nullptr);
      }
    });
    if (!p.dweight) return;
    for (int64_t head = 0; head < p.H; ++head) {
      T* sums = (T*)p.dweight + head * p.V;
      memset(sums, 0, p.V * sizeof(T));
      for (int64_t b = 0; b < blocks; ++b) {
        const T* part = parts + (b * p.H + head) * padded;
        for (int64_t c = 0; c < p.V; ++c) sums[c] += part[c];
      }
    }
  }

  void block(int64_t number, int64_t head, T* x, T* dweight) const {
    T* d = x + p.V + kPad;
    memset(d, 0, (p.V + kPad) * sizeof(T));
    if (dweight) memset(dweight, 0, (p.V + kPad) * sizeof(T));
    const HeadEpilogue<IO> epilogue(p, head, p.V);
    const int64_t first = number * kBlock, rows = this->rows();
    for (int64_t row = first; row < first + kBlock && row < rows; ++row) {
      const int64_t at = this->at(row, head);
      this->widen(x, row, head);
      IO* dgate = p.dout_gate ? (IO*)p.dout_gate + at : nullptr;
      epilogue.backward(x, d, this->gate(row, head), (const IO*)p.dy + at, (IO*)p.dh + at, dgate,
                        dweight);
    }
  }
};

}  // namespace flashcell::FLASHCELL_ISA
