// Every diagonal cell's backward and jacobian against central differences, in double: no torch, no
// kernel, no GPU.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cells/all.h"

namespace {

double uniform(double lo, double hi) { return lo + (hi - lo) * std::rand() / RAND_MAX; }

template <typename Cell>
bool check() {
  constexpr int G = Cell::kGates, P = Cell::kWeights, K = Cell::kStates, N = G + P + K;
  double worst = 0;
  for (int trial = 0; trial < 500; ++trial) {
    double in[N], up[K];
    for (double& v : in) v = uniform(-2, 2);
    for (double& v : up) v = uniform(-1, 1);
    auto run = [&](double (&next)[K]) {
      double x[G], w[P], s[K];
      for (int g = 0; g < G; ++g) x[g] = in[g];
      for (int q = 0; q < P; ++q) w[q] = in[G + q];
      for (int k = 0; k < K; ++k) s[k] = in[G + P + k];
      Cell::forward(x, w, s, next);
    };
    double x[G], w[P], s[K], d_state[K], dx[G], dw[P] = {}, next[K], jacobian[K][K], same[K];
    for (int g = 0; g < G; ++g) x[g] = in[g];
    for (int q = 0; q < P; ++q) w[q] = in[G + q];
    for (int k = 0; k < K; ++k) s[k] = in[G + P + k], d_state[k] = up[k];
    Cell::backward(x, w, s, d_state, dx, dw);
    Cell::jacobian(x, w, s, next, jacobian);
    run(same);
    for (int k = 0; k < K; ++k) worst = std::fmax(worst, std::fabs(next[k] - same[k]));
    for (int i = 0; i < N; ++i) {
      constexpr double h = 1e-6;
      const double keep = in[i];
      double above[K], below[K], slope = 0;
      in[i] = keep + h, run(above);
      in[i] = keep - h, run(below);
      in[i] = keep;
      for (int k = 0; k < K; ++k) {
        const double along = (above[k] - below[k]) / (2 * h);
        slope += up[k] * along;
        if (i >= G + P) worst = std::fmax(worst, std::fabs(jacobian[k][i - G - P] - along));
      }
      const double got = i < G ? dx[i] : i < G + P ? dw[i - G] : d_state[i - G - P];
      worst = std::fmax(worst, std::fabs(got - slope));
    }
  }
  std::printf("%-10s max |analytic - numeric| = %.2e\n", Cell::kName, worst);
  return worst < 2e-8;  // central differences at 1e-6 leave about 1e-9
}

template <typename... Cells>
bool check_all(flashcell::CellList<Cells...>) {
  return (int(check<Cells>()) & ...);
}

}  // namespace

int main() { return check_all(flashcell::AllCells{}) ? 0 : 1; }
