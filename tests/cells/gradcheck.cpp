// Every cell's backward against central differences, in double: no torch, no kernel, no GPU.
// States that carry no gradient (stabilisers) are held fixed on both sides.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "cells/all.h"

namespace {

double uniform(double lo, double hi) { return lo + (hi - lo) * std::rand() / RAND_MAX; }

template <typename Cell, typename Bounds, int G, int K, int V>
void forward(const double (&x)[G], const double (&r)[G], const double (&s)[K], double (&next)[K],
             double (&saved)[V], const Bounds& bound) {
  if constexpr (flashcell::kHasBound<Cell>) {
    Cell::forward(x, r, s, next, saved, bound);
  } else {
    Cell::forward(x, r, s, next, saved);
  }
}

template <typename Cell, typename Bounds>
bool check(const Bounds& bound) {
  constexpr int G = Cell::kGates, K = Cell::kStates, V = Cell::kSaved;
  constexpr bool stabilised = Cell::kGradStates < K;  // states h, c, n, m
  double worst = 0;
  for (int trial = 0; trial < 500; ++trial) {
    double in[2 * G + K], up[K];
    for (double& v : in) v = uniform(-2, 2);
    for (double& v : up) v = uniform(-1, 1);
    if (stabilised) in[2 * G + 2] = uniform(0.5, 2), up[3] = 0;
    double fixed_m = 0;
    // loss = <up, next>; with a stabiliser, c' and n' are rescaled to the m' of the unperturbed
    // point
    auto loss = [&](const double* v) {
      double x[G], r[G], s[K], next[K], saved[V];
      for (int g = 0; g < G; ++g) x[g] = v[g], r[g] = v[G + g];
      for (int k = 0; k < K; ++k) s[k] = v[2 * G + k];
      forward<Cell>(x, r, s, next, saved, bound);
      if (stabilised) {
        const double scale = std::exp(next[3] - fixed_m);
        next[1] *= scale, next[2] *= scale, next[3] = 0;
      }
      double sum = 0;
      for (int k = 0; k < K; ++k) sum += up[k] * next[k];
      return sum;
    };
    double x[G], r[G], s[K], next[K], saved[V], d_state[K], dx[G], dr[G];
    for (int g = 0; g < G; ++g) x[g] = in[g], r[g] = in[G + g];
    for (int k = 0; k < K; ++k) s[k] = in[2 * G + k], d_state[k] = up[k];
    forward<Cell>(x, r, s, next, saved, bound);
    if (stabilised) fixed_m = next[3];
    if constexpr (flashcell::kHasBound<Cell>) {
      Cell::backward(saved, d_state, dx, dr, bound);
    } else {
      Cell::backward(saved, d_state, dx, dr);
    }
    for (int i = 0; i < 2 * G + K; ++i) {
      if (stabilised && i == 2 * G + 3) continue;
      constexpr double h = 1e-6;
      const double keep = in[i];
      in[i] = keep + h;
      const double above = loss(in);
      in[i] = keep - h;
      const double below = loss(in);
      in[i] = keep;
      const double got = i < G ? dx[i] : i < 2 * G ? dr[i - G] : d_state[i - 2 * G];
      worst = std::fmax(worst, std::fabs(got - (above - below) / (2 * h)));
    }
  }
  constexpr bool kBounded = !std::is_same_v<Bounds, flashcell::NoBound>;
  std::printf("%-9s%s max |analytic - numeric| = %.2e\n", Cell::kName, kBounded ? ", bounded:" : "",
              worst);
  return worst < 2e-8;  // central differences at 1e-6 leave about 1e-9
}

}  // namespace

template <typename Cell>
bool check_bounds() {
  bool good = check<Cell>(flashcell::NoBound());
  // Half of the states lie outside: their gradients are 0.
  if (flashcell::kHasBound<Cell>) good &= check<Cell>(flashcell::Bound<double>{0.5});
  return good;
}

template <typename... Cells>
bool check_all(flashcell::CellList<Cells...>) {
  return (int(check_bounds<Cells>()) & ...);
}

int main() { return check_all(flashcell::AllCells{}) ? 0 : 1; }
