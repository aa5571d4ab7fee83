// The gate pre-pass of one chunk: everything that depends on the gates alone, before any product.
//
// b_t is the sum of the document's log forget gates up to t, and m_t comes from a max-plus scan.
// The decay of a pair is e^(b_t - b_j + li_j - m_t) = e^(u_t + w_j) with u = b - m and w = li - b.
// Both are summed in double and split into an integer and a remainder, so that the sum of two is
// exact however large they are.
#pragma once
#include "../params.h"
#include "common/cpu/load_store.h"
#include "common/cpu/scratch.h"
#include "common/cpu/vec_math.h"

namespace flashcell::FLASHCELL_ISA {

// Lower bound of log gates: its exponential is 0, and sums stay finite.
constexpr double kShut = -1000;

template <typename T>
FN double round_to(double x) {
  return double(T(x));
}

FN double larger(double a, double b) { return a < b || b != b ? b : a; }  // NaN if either is

template <typename T>
struct Gates {
  static constexpr int kWidth = Vec<double>::kWidth;
  static constexpr int kArrays = 5;

  Scratch<double> wide;    // [kArrays][chunk + kWidth]
  Scratch<T> narrow;       // [7][chunk + a vector]
  Scratch<int64_t> start;  // [chunk] for each step, the first step of its document in this chunk
  const int64_t pitch;
  double *log_f, *log_i, *u, *w, *exponent;
  T *u_whole, *u_rest, *w_whole, *w_rest, *inflow, *outflow, *floor;
  double m;        // m after the chunk; before scan(), m before it
  double keep;     // the factor with which the state before the chunk enters the state after it
  bool has_reset;  // whether a step of the chunk resets the state

  Gates(const Host& host, int64_t chunk)
      : wide(host, kArrays * (chunk + 64)),
        narrow(host, 7 * (chunk + 64)),
        start(host, chunk),
        pitch(chunk + 64) {
    double** wides[kArrays] = {&log_f, &log_i, &u, &w, &exponent};
    for (int i = 0; i < kArrays; ++i) *wides[i] = wide + i * pitch;
    T** narrows[7] = {&u_whole, &u_rest, &w_whole, &w_rest, &inflow, &outflow, &floor};
    for (int i = 0; i < 7; ++i) *narrows[i] = narrow + i * pitch;
  }

  // M is -inf if nothing was ever added.
  static double shift(double m) { return m < kNever ? 0 : m; }

  // Computes all values for `count` steps of head `head`, from row b T + t = `row` on.
  void scan(const MlstmParams& p, int64_t row, int64_t head, int64_t count) {
    read(p.f, p, row, head, count, log_f);
    read(p.i, p, row, head, count, log_i);
    for_lanes(count, [&](int64_t t) __attribute__((always_inline)) {
      store(log_f + t, at_least(logsigmoid(load(log_f + t)), kShut));
      const Vec<double> i = load(log_i + t);
      store(log_i + t, p.exponential ? at_least(i, kNever) : at_least(logsigmoid(i), kShut));
    });
    const double before = p.exponential ? shift(m) : 0;
    const bool absent = p.exponential && m < kNever;
    double b = 0;
    int64_t document = 0;
    has_reset = false;
    for (int64_t t = 0; t < count; ++t) {
      if (p.reset && p.reset[row + t]) has_reset = true, document = t, m = 0, b = 0;
      const bool held = p.hold && p.hold[row + t];
      if (!held) {
        b += log_f[t];
        const double carried = log_f[t] + m;
        if (p.exponential) m = round_to<T>(larger(carried, log_i[t]));
      }
      const double scale = p.exponential ? shift(m) : 0;
      start[t] = document;
      w[t] = held ? kNever : log_i[t] - b;
      u[t] = held ? kNever : b - scale;
      exponent[t] = held || has_reset || absent ? kNever : b - scale + before;
      floor[t] = held ? T(0) : T(-scale);
    }
    const double scale = p.exponential ? shift(m) : 0;
    split(u, u_whole, u_rest, count);
    split(w, w_whole, w_rest, count);
    exponentials(exponent, inflow, count);
    const double out = b - scale;
    for (int64_t t = 0; t < count; ++t) exponent[t] = t < document ? kNever : w[t] + out;
    exponentials(exponent, outflow, count);
    exponent[0] = has_reset || absent ? kNever : out + before;
    T kept[Vec<double>::kWidth];
    exponentials(exponent, kept, 1);
    keep = kept[0];
    if (p.normalized) {
      for (int64_t t = 0; t < count; ++t) exponent[t] = floor[t];
      exponentials(exponent, floor, count);
    }
  }

  // Overwrites log_f and log_i with their derivatives by f and i.
  void slopes(const MlstmParams& p, int64_t row, int64_t head, int64_t count) {
    read(p.f, p, row, head, count, log_f);
    read(p.i, p, row, head, count, log_i);
    for_lanes(count, [&](int64_t t) __attribute__((always_inline)) {
      store(log_f + t, sigmoid(-load(log_f + t)));
      const Vec<double> i = load(log_i + t), zero(0), one(1);
      store(log_i + t, p.exponential ? select(i < Vec<double>(kNever), zero, one) : sigmoid(-i));
    });
  }

 private:
  template <typename Body>
  FN static void for_lanes(int64_t count, const Body& body) {
    for (int64_t t = 0; t < count; t += kWidth) body(t);
  }

  FN static Vec<double> at_least(Vec<double> x, double least) {
    return select(x < Vec<double>(least), Vec<double>(least), x);
  }

  static void read(const Strided& from, const MlstmParams& p, int64_t row, int64_t head,
                   int64_t count, double* to) {
    const T* gate =
        (const T*)from.data + row / p.T * from.batch + row % p.T * from.time + head * from.head;
    for (int64_t t = 0; t < count; ++t) to[t] = gate[t * from.time];
    for (int64_t t = count; t < (count + kWidth - 1) / kWidth * kWidth; ++t) to[t] = 0;
  }

  static void split(const double* x, T* whole, T* rest, int64_t count) {
    constexpr double kShifter = 0x1.8p52;  // adding it rounds to an integer
    for (int64_t t = 0; t < count; ++t) {
      const bool small = x[t] > -1e15 && x[t] < 1e15;
      const double near = small ? (x[t] + kShifter) - kShifter : x[t];
      whole[t] = T(near);
      rest[t] = T(x[t] - near);
    }
  }

  static void exponentials(double* x, T* to, int64_t count) {
    for (int64_t t = count; t < (count + kWidth - 1) / kWidth * kWidth; ++t) x[t] = 0;
    for_lanes(count, [&](int64_t t) __attribute__((always_inline)) {
      double lanes[kWidth];
      store(lanes, exp(load(x + t)));
      for (int lane = 0; lane < kWidth; ++lane) to[t + lane] = T(lanes[lane]);
    });
  }
};

}  // namespace flashcell::FLASHCELL_ISA
