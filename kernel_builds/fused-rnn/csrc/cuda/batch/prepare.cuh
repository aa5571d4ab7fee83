// The kernel that brings a call's operands into the layout of layout.cuh, once a call.
#pragma once
#include "common/cuda/ptx/wgmma.cuh"
#include "layout.cuh"

namespace flashcell::cuda::batch {

constexpr int kPrepareThreads = 256;

// 16 bytes of elements of an operand.
template <typename IO>
union Piece {
  static constexpr int kCount = 16 / sizeof(IO), kOfPanel = depth_of_panel(sizeof(IO));
  uint4 whole;
  uint32_t words[4];
  IO elements[kCount];

  // Reads a tensor of the caller's, which need not be aligned.
  DEVICE static Piece load(const IO* from) {
    Piece piece;
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      piece.whole = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) piece.elements[i] = from[i];
    }
    return piece;
  }
  // Reads the first `count` elements, and zeros behind them.
  DEVICE static Piece load(const IO* from, int64_t count) {
    if (count >= kCount) return load(from);
    Piece piece;
    piece.whole = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) piece.elements[i] = from[i];
    }
    return piece;
  }
  DEVICE static Piece round(const float* from) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < kCount; ++i) piece.elements[i] = from_float<IO>(from[i]);
    return piece;
  }
  DEVICE uint4 operand() const {
    return make_uint4(cuda::operand<IO>(words[0]), cuda::operand<IO>(words[1]),
                      cuda::operand<IO>(words[2]), cuda::operand<IO>(words[3]));
  }
};

struct Threads {  // of a launch; calls body(i) for all i below count
  template <typename Body>
  DEVICE static void for_each(int64_t count, Body body) {
    const int64_t first = blockIdx.x * int64_t(kPrepareThreads) + threadIdx.x;
    for (int64_t i = first; i < count; i += gridDim.x * int64_t(kPrepareThreads)) body(i);
  }
};

// Writes the panels of a layer's input. A thread block takes 64 rows of a panel at a time.
template <typename IO>
DEVICE void prepare_input(const LayerInput& input, int64_t S, int64_t T, const Work& work) {
  constexpr int kPiece = Piece<IO>::kCount, kDepth = Piece<IO>::kOfPanel, kRows = 64;
  const int64_t groups = work.row_capacity / kRows, count = T * work.input_panels * groups;
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t first = i % groups * kRows, plane = i / groups;
    const int64_t t = plane / work.input_panels, panel = plane % work.input_panels;
#pragma unroll
    for (int j = threadIdx.x; j < kRows * 8; j += kPrepareThreads) {
      const int piece = j % 8, row = j / 8;
      const int64_t s = first + row, depth = panel * kDepth + piece * kPiece;
      uint4 words = make_uint4(0, 0, 0, 0);
      if (s < S && depth < input.I) {
        const IO* from =
            static_cast<const IO*>(input.data) + s * input.batch + t * input.time + depth;
        words = Piece<IO>::load(from, input.I - depth).operand();
      }
      char* to = work.input + (plane * work.row_capacity + s) * kRowBytes;
      *reinterpret_cast<uint4*>(to + (piece ^ row % 8) * 16) = words;
    }
  }
}

// Besides the weight it writes the states before the first step and their h, rounded, zeros past
// the depth, the bias, and the counters. States are 0 before a step that resets.
template <typename Cell, typename IO>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const
                                                                  __grid_constant__ ForwardParams p,
                                                                  const Work work, int tile_units) {
#if FLASHCELL_WGMMA_CODE
  constexpr int G = Cell::kGates, R = Cell::kBias;
  constexpr int kPiece = Piece<IO>::kCount, kDepth = Piece<IO>::kOfPanel;
  const int64_t D = work.D, ND = work.N * D;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  const int columns = tile_units * G;
  const int64_t rows = int64_t(work.N) * work.unit_tiles * work.all_panels * columns;
  Threads::for_each(rows * 8, [&](int64_t i) {
    const int piece = int(i % 8), column = int(i / 8 % columns);
    const int64_t block = i / 8 / columns, tile = block / work.all_panels;
    const Place place = place_of_column(column, G, tile_units);
    const int64_t head = tile / work.unit_tiles;
    const int64_t unit = tile % work.unit_tiles * tile_units + place.unit;
    const int64_t panel = block % work.all_panels;
    const bool is_input = panel < work.input_panels;
    const int64_t depth = (panel - (is_input ? 0 : work.input_panels)) * kDepth + piece * kPiece;
    const int64_t row = (place.gate * work.N + head) * D + unit, most = is_input ? p.input.I : D;
    const void* weight = is_input ? p.input.weight : p.weight;
    const IO* from = static_cast<const IO*>(weight) + row * most + depth;
    char* to = work.weight + i / 8 * kRowBytes + (piece ^ column % 8) * 16;
    *reinterpret_cast<uint4*>(to) =
        unit < D && depth < most ? Piece<IO>::load(from, most - depth).operand() : zeros;
  });
  if (work.input_panels > 0) prepare_input<IO>(p.input, p.S, p.T, work);
  Threads::for_each(work.operand_bytes / 16, [&](int64_t i) {
    const int piece = int(i % 8);
    const int64_t s = i / 8 % work.row_capacity, panel = i / 8 / work.row_capacity;
    const int unit = int(panel % work.panels) * kDepth + piece * kPiece;
    const int64_t head = panel / work.panels;
    uint4 before = zeros;
    const Column column(p, s);
    if (p.initial != nullptr && s < p.S && unit < D && !column.resets(p, 0)) {
      const int64_t from = column.index * ND + head * D + unit;
      before = Piece<IO>::round(static_cast<const float*>(p.initial) + from).operand();
    }
    char* to = work.operand + i / 8 * kRowBytes + (piece ^ int(s % 8)) * 16;
    *reinterpret_cast<uint4*>(to) = zeros;
    *reinterpret_cast<uint4*>(to + work.operand_bytes) = before;
  });
  Threads::for_each(Cell::kStates * p.S * ND, [&](int64_t i) {
    const Column column(p, i / ND % p.S);
    const int64_t place = (i / ND / p.S * p.S + column.index) * ND + i % ND;
    const bool given = p.initial != nullptr && !column.resets(p, 0);
    static_cast<float*>(p.last)[place] = given ? static_cast<const float*>(p.initial)[place] : 0.f;
  });
  const int units = work.unit_tiles * tile_units;
  Threads::for_each(int64_t(work.N) * R * units, [&](int64_t i) {
    const int unit = int(i % units), row = int(i / units % R);
    const int64_t from = row * ND + i / units / R * D + unit;
    const bool inside = p.bias != nullptr && unit < D;
    work.bias[i] = !inside        ? 0.f
                   : p.bias_is_io ? to_float(static_cast<const IO*>(p.bias)[from])
                                  : static_cast<const float*>(p.bias)[from];
  });
  Threads::for_each(int64_t(work.N) * work.row_tiles, [&](int64_t i) { work.published[i] = 0; });
#else
  __trap();  // the planner chooses this engine only where it is compiled for 9.0a
#endif
}

}  // namespace flashcell::cuda::batch
