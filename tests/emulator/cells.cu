// Runs fused-rnn's kernel for one step on tensor cores, and the same by a loop on the host. Prints
// "<gates> gates, <bytes read at once>, <dtype>: right", or what differs, for every case. The cells
// are sums and products, because the approximate functions of the real ones are PTX.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

namespace flashcell::cuda {
using std::min;  // of CUDA's headers
}

#include "fused-rnn/csrc/cuda/cell/tiles.cuh"

namespace flashcell::cuda {

// Has the sizes of an LSTM, a GRU or an Elman cell. Every result depends on every gate.
template <int kGateCount, int kBiasRows, int kStateCount>
struct SumCell {
  static constexpr int kGates = kGateCount, kBias = kBiasRows, kStates = kStateCount;
  static constexpr int kSaved = kGates + 1;

  template <typename V>
  DEVICE static void forward(const V (&x)[kGates], const V (&r)[kGates], const V (&s)[kStates],
                             V (&next)[kStates], V (&saved)[kSaved]) {
    V sum = s[kStates - 1];
    for (int g = 0; g < kGates; ++g) {
      saved[g] = x[g] + r[g];
      sum += V(g + 1) * saved[g];
    }
    // Only where the last gate has two biases does its r stay apart from x.
    saved[kGates] = kBias > kGates ? r[kGates - 1] - x[kGates - 1] : saved[kGates - 1];
    for (int k = 0; k < kStates; ++k) next[k] = sum * V(k + 0.5f) + s[k] * saved[kGates];
  }
};

struct Draw {
  std::mt19937 engine{1};
  float operator()() { return std::uniform_real_distribution<float>(-1, 1)(engine); }
};

// Rows with NaN behind each, which nothing may read.
template <typename IO>
struct Matrix {
  int64_t rows, columns, pitch;
  std::vector<IO> values;

  Matrix(Draw& draw, int64_t rows, int64_t columns, int64_t gap)
      : rows(rows),
        columns(columns),
        pitch(columns + gap),
        values(rows * pitch + 8, from_float<IO>(NAN)) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) values[r * pitch + c] = from_float<IO>(draw());
    }
  }
  double operator()(int64_t r, int64_t c) const { return to_float(values[r * pitch + c]); }
  StateView view() const { return {values.data(), pitch, 1, true}; }
};

template <typename Cell, typename IO, int kPiece>
struct Case {
  using Tile = CellTile<Cell>;
  static constexpr int kGates = Cell::kGates, kStates = Cell::kStates, kSaved = Cell::kSaved;
  static constexpr int64_t kElements = kPiece / 2;
  // More than one block's sequences and units, more than one stage; none of them whole.
  static constexpr int64_t B = Tile::kColumns + 6, D = Tile::kUnits + kElements;
  static constexpr int64_t I = Tile::kDepth + kElements;
  Draw draw;
  Matrix<IO> x{draw, B, I, 8}, w_ih{draw, kGates * D, I, 0}, w_hh{draw, kGates * D, D, 0};
  Matrix<IO> h{draw, B, D, 8}, c{draw, B, D, 8}, biases{draw, 2, kGates * D, 0};
  std::vector<IO> nan = std::vector<IO>(B * D, from_float<IO>(NAN));
  std::vector<IO> next[2] = {nan, nan}, h_prev = nan;
  std::vector<IO> saved = std::vector<IO>(B * kSaved * D, from_float<IO>(NAN));
  bool with_state;

  explicit Case(bool with_state) : with_state(with_state) {}

  CellForward params() {
    CellForward p{};
    p.B = B, p.D = D, p.piece = kPiece;
    p.input = {w_ih.values.data(), x.view(), I};
    p.b_ih = biases.values.data(), p.b_hh = biases.values.data() + kGates * D;
    if (with_state) {
      p.recurrent = {w_hh.values.data(), h.view(), D};
      p.initial[0] = h.view(), p.initial[1] = c.view(), p.h_prev = h_prev.data();
    }
    p.next[0] = next[0].data(), p.next[1] = kStates > 1 ? next[1].data() : nullptr;
    p.saved = saved.data();
    return p;
  }

  bool differs(const char* what, double got, double want) {
    if (std::fabs(got - want) <= 2e-2 * (1 + std::fabs(want))) return false;
    std::printf("%d gates: %s is %g, must be %g\n", kGates, what, got, want);
    return true;
  }

  bool is_wrong() {
    constexpr int kSummed = 2 * kGates - Cell::kBias;
    bool wrong = false;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t d = 0; d < D; ++d) {
        double xs[kGates], rs[kGates], state[kStates] = {}, after[kStates], values[kSaved];
        for (int g = 0; g < kGates; ++g) {
          xs[g] = biases(0, g * D + d), rs[g] = 0;
          (g < kSummed ? xs : rs)[g] += biases(1, g * D + d);
          for (int64_t i = 0; i < I; ++i) xs[g] += w_ih(g * D + d, i) * x(b, i);
          for (int64_t i = 0; i < D && with_state; ++i) rs[g] += w_hh(g * D + d, i) * h(b, i);
        }
        if (with_state) state[0] = h(b, d);
        if (with_state && kStates > 1) state[kStates - 1] = c(b, d);
        Cell::forward(xs, rs, state, after, values);
        const int64_t at = b * D + d;
        for (int k = 0; k < kStates; ++k) {
          wrong |= differs("a next state", to_float(next[k][at]), after[k]);
        }
        if (with_state) wrong |= differs("h_prev", to_float(h_prev[at]), state[0]);
        for (int v = 0; v < kSaved; ++v) {
          wrong |= differs("a saved value", to_float(saved[(b * kSaved + v) * D + d]), values[v]);
        }
      }
    }
    return wrong;
  }
};

template <typename Cell, typename IO, int kPiece>
void run(const char* dtype) {
  using Tile = CellTile<Cell>;
  bool wrong = false;
  for (const bool with_state : {false, true}) {
    Case<Cell, IO, kPiece> problem(with_state);
    cudaLaunchConfig_t config{};
    config.gridDim = 2 * 2, config.blockDim = Tile::kThreads;
    config.dynamicSmemBytes = Tile::kBytes;
    const auto kernel = &tile_kernel<Cell, IO, kPiece>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes);
    cudaLaunchKernelEx(&config, kernel, problem.params(), 2);
    wrong |= problem.is_wrong();
  }
  if (!wrong) std::printf("%d gates, %d, %s: right\n", Cell::kGates, kPiece, dtype);
}

template <typename Cell>
void run_cell() {
  run<Cell, bf16, 16>("bf16"), run<Cell, bf16, 8>("bf16"), run<Cell, bf16, 4>("bf16");
  run<Cell, fp16, 16>("fp16"), run<Cell, fp16, 8>("fp16"), run<Cell, fp16, 4>("fp16");
}

}  // namespace flashcell::cuda

int main() {
  using namespace flashcell::cuda;
  run_cell<SumCell<4, 4, 2>>(), run_cell<SumCell<3, 4, 1>>(), run_cell<SumCell<1, 1, 1>>();
}
