// Runs the kernel of fused-rnn's backward pass without a recurrent product (grad_clip = 0), and the
// same by a loop on the host. Prints "<cell> <dtype>: right", or what differs, for every case.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "fused-rnn/csrc/cuda/cut/backward.cuh"

namespace flashcell::cuda {

constexpr int64_t kHeads = 3, kWidth = 15, kUnitsInAll = kHeads * kWidth;  // more than one block's
constexpr int64_t kSteps = 9;                                              // no multiple of kAhead

struct Draw {
  std::mt19937 engine{1};
  float operator()() { return std::uniform_real_distribution<float>(-1, 1)(engine); }
};

template <typename IO>
std::vector<IO> random(Draw& draw, int64_t count) {
  std::vector<IO> values(count);
  for (IO& v : values) v = from_float<IO>(draw());
  return values;
}

template <typename Cell, typename IO>
struct Case {
  static constexpr int64_t S = 11, ND = kUnitsInAll, rows = S * kSteps;
  static constexpr int kGates = Cell::kGates, kStates = Cell::kStates, kSaved = Cell::kSaved;
  Draw draw;
  std::vector<IO> saved = random<IO>(draw, rows * kSaved * ND), dh = random<IO>(draw, rows* ND);
  std::vector<float> dlast = random<float>(draw, kStates * S * ND);
  std::vector<uint8_t> reset = std::vector<uint8_t>(rows), hold = reset;
  std::vector<Sequence> sequences = std::vector<Sequence>(S);
  // NaN where nothing was written.
  std::vector<IO> dx = std::vector<IO>(rows * kGates * ND, from_float<IO>(NAN)), dr = dx;
  std::vector<float> dstate = std::vector<float>(kStates * S * ND, NAN);
  std::vector<float> partial = std::vector<float>(2 * Cell::kBias * ND, NAN);

  BackwardParams params(bool masked) {
    BackwardParams p{};
    p.S = S, p.N = kHeads, p.D = kWidth, p.T = kSteps;
    for (IO& v : saved) v = from_float<IO>(0.7f + 0.3f * to_float(v));  // n of slstm is not 0
    for (int64_t s = 0; s < S; ++s) {
      const int64_t length = masked ? s % (kSteps + 1) : kSteps;
      sequences[s] = {};
      sequences[s].index = S - 1 - s, sequences[s].row = s * kSteps;
      sequences[s].length = length, sequences[s].padding = kSteps - length;
    }
    for (int64_t i = 0; masked && i < rows; ++i) reset[i] = draw() > 0.5f, hold[i] = draw() > 0.5f;
    if (masked) p.sequences = sequences.data(), p.reset = reset.data(), p.hold = hold.data();
    p.dh = dh.data(), p.saved = saved.data(), p.dlast = masked ? dlast.data() : nullptr;
    p.dx = dx.data(), p.dr = Cell::kSplitGrad ? dr.data() : nullptr;
    p.dstate = dstate.data(), p.dbias_partial = partial.data();
    return p;
  }

  bool differs(const char* what, double got, double want) {
    if (std::fabs(got - want) <= 1e-2 * (sizeof(IO) == 2 ? 1 : 1e-3) * (1 + std::fabs(want))) {
      return false;
    }
    std::printf("%s: %s is %g, must be %g\n", Cell::kName, what, got, want);
    return true;
  }

  bool is_wrong(const BackwardParams& p) {
    bool wrong = false;
    std::vector<double> dbias(Cell::kBias * ND);
    for (int64_t s = 0; s < S; ++s) {
      const int64_t length = p.sequences ? sequences[s].length : kSteps;
      const int64_t index = p.sequences ? sequences[s].index : s, row = s * kSteps;
      for (int64_t u = 0; u < ND; ++u) {
        double d[kStates] = {};
        for (int k = 0; k < Cell::kGradStates && p.dlast; ++k) {
          d[k] = dlast[(k * S + index) * ND + u];
        }
        for (int64_t t = kSteps - 1; t >= 0; --t) {
          double kept[kSaved], x[kGates] = {}, r[kGates] = {};
          if (t < length && !(p.hold && hold[row + t])) {
            for (int v = 0; v < kSaved; ++v) {
              kept[v] = to_float(saved[((row + t) * kSaved + v) * ND + u]);
            }
            d[0] += to_float(dh[(row + t) * ND + u]);
            Cell::backward(kept, d, x, r);
          }
          for (int g = 0; g < kGates; ++g) {
            const int64_t at = ((row + t) * kGates + g) * ND + u;
            wrong |= differs("dx", to_float(dx[at]), x[g]);
            if (Cell::kSplitGrad) wrong |= differs("dr", to_float(dr[at]), r[g]);
            dbias[g * ND + u] += x[g];
          }
          if (Cell::kBias > kGates) dbias[(Cell::kBias - 1) * ND + u] += r[kGates - 1];
          for (double& of : d) of = t < length && p.reset && reset[row + t] ? 0 : of;
        }
        for (int k = 0; k < kStates; ++k) {
          wrong |= differs("dstate", dstate[(k * S + index) * ND + u], d[k]);
        }
      }
    }
    for (int64_t i = 0; i < Cell::kBias * ND; ++i) {
      wrong |= differs("dbias", partial[i] + partial[Cell::kBias * ND + i], dbias[i]);
    }
    return wrong;
  }
};

template <typename Cell, typename IO>
void run(const char* dtype, bool masked) {
  Case<Cell, IO> problem;
  const BackwardParams p = problem.params(masked);
  const int64_t unit_blocks = (kUnitsInAll + cut::kUnits - 1) / cut::kUnits;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(2 * unit_blocks), config.blockDim = cut::kUnits * cut::kSequences;
  cudaLaunchKernelEx(&config, &cut::backward_kernel<Cell, IO, float>, p, unit_blocks);
  if (!problem.is_wrong(p)) {
    std::printf("%s %s%s: right\n", Cell::kName, dtype, masked ? " masked" : "");
  }
}

template <typename... Cells>
void run_all(CellList<Cells...>) {
  for (const bool masked : {false, true}) {
    (run<Cells, float>("fp32", masked), ...);
    (run<Cells, fp16>("fp16", masked), ...);
  }
}

}  // namespace flashcell::cuda

int main() { flashcell::cuda::run_all(flashcell::AllCells()); }
