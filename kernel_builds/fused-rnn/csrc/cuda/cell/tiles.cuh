// The forward kernel for more than a few sequences in 16 bits: the products on tensor cores and the
// cells behind them, in one launch. For products of moderate size the host takes longer to launch
// two products of cuBLAS and a kernel of cells than the GPU to run them.
#pragma once
#include "cell.cuh"
#include "common/cuda/stages.cuh"

namespace flashcell::cuda {

// A thread block has the rows of kUnits units, one for each gate, and kColumns sequences; a warp
// multiplies all of these rows by 16 of the sequences. 16 rows, what one instruction takes, are one
// gate of 16 units. A stage has kDepth elements of every row and column.
template <typename Cell>
struct CellTile {
  static constexpr int kGates = Cell::kGates, kGroups = kGates == 1 ? 4 : 1;
  static constexpr int kUnits = 16 * kGroups, kRows = kGates * kUnits;
  static constexpr int kThreads = 128, kColumns = kThreads / 32 * 16;
  static constexpr int kDepth = 64, kPitch = 2 * kDepth + 16;  // bytes from a row to the next one
  static constexpr int kStages = 4, kStage = (kRows + kColumns) * kPitch;
  static constexpr int kBytes = kStages * kStage;
  // The last gate's product with h stays apart if the cell has one bias row more than gates.
  static constexpr bool kApart = Cell::kBias > kGates;
  static constexpr int kTiles = kGates * kGroups, kSums = kTiles + kApart;
  static constexpr int kSumPitch = kSums * 16 + 4;  // fp32, from a sequence to the next one
  static_assert(kColumns * kSumPitch * int(sizeof(float)) <= kBytes);
};

// What a thread copies of a stage: from every kStep-th row a piece of kPiece bytes, at one place.
template <typename Cell, typename IO, int kPiece>
struct CellPieces {
  using Tile = CellTile<Cell>;
  static constexpr int kElements = kPiece / 2, kOfRow = Tile::kDepth / kElements;
  static constexpr int kStep = Tile::kThreads / kOfRow;
  static_assert(Tile::kUnits % kStep == 0 && Tile::kColumns % kStep == 0);
  int row = int(threadIdx.x) / kOfRow, place = int(threadIdx.x) % kOfRow * kElements;

  // Starts the copies of kDepth elements of each row and column, from element `at` on. What the
  // product does not have becomes 0.
  DEVICE void copy(uint32_t stage, const CellProduct& product, int64_t at, int units, int columns,
                   int64_t D) const {
    const auto* weight = static_cast<const IO*>(product.weight);
    const auto* operand = static_cast<const IO*>(product.operand.data);
    const bool inside = at + place < product.depth;
    const uint32_t to = stage + uint32_t(row * Tile::kPitch + place * 2);
    const IO* of_unit = weight + row * product.depth + at + place;
    const IO* of_column = operand + row * product.operand.row + at + place;
#pragma unroll
    for (int i = 0; i < Tile::kRows; i += kStep) {
      const int gate = i / Tile::kUnits, unit = i % Tile::kUnits;
      const bool copies = inside && row + unit < units;
      const IO* from = of_unit + (gate * D + unit) * product.depth;
      copy_or_zero<kPiece>(to + i * Tile::kPitch, copies ? from : weight, copies);
    }
#pragma unroll
    for (int i = 0; i < Tile::kColumns; i += kStep) {
      const bool copies = inside && row + i < columns;
      const IO* from = of_column + i * product.operand.row;
      copy_or_zero<kPiece>(to + (Tile::kRows + i) * Tile::kPitch, copies ? from : operand, copies);
    }
  }
};

// The sums of a warp's tiles, of 16 rows by 16 columns each.
template <typename Cell, typename IO>
struct CellSums {
  using Tile = CellTile<Cell>;
  float of[Tile::kSums][2][4] = {};

  // Exchanges the last gate's sums with those that stay apart.
  DEVICE void exchange_apart() {
    if constexpr (Tile::kApart) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float &last = of[Tile::kTiles - 1][i / 4][i % 4], &apart = of[Tile::kTiles][i / 4][i % 4];
        const float was = last;
        last = apart, apart = was;
      }
    }
  }

  // Adds the products of a stage, whose operands are loaded a step ahead. `weight` and `operand`
  // are the addresses of the rows that the lane supplies of the first matrices.
  DEVICE void add(uint32_t weight, uint32_t operand) {
    constexpr int kSteps = Tile::kDepth / 16;
    uint32_t a[2][Tile::kTiles][4], b[2][4];
    const auto load = [&](int step) {
      load_vectors(b[step % 2], operand + step * 32);
#pragma unroll
      for (int m = 0; m < Tile::kTiles; ++m) {
        load_vectors(a[step % 2][m], weight + m * 16 * Tile::kPitch + step * 32);
      }
    };
    load(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) load(step + 1);
      const auto& right = b[step % 2];
#pragma unroll
      for (int m = 0; m < Tile::kTiles; ++m) {
        mma<IO>(of[m][0], a[step % 2][m], right[0], right[1]);
        mma<IO>(of[m][1], a[step % 2][m], right[2], right[3]);
      }
    }
  }
};

template <typename Cell, typename IO, int kPiece>
__global__ void __launch_bounds__(CellTile<Cell>::kThreads) tile_kernel(
    const __grid_constant__ CellForward p, int unit_blocks) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Tile = CellTile<Cell>;
  constexpr int kGates = Cell::kGates;
  extern __shared__ __align__(16) char memory[];
  const uint32_t stages = shared_address(memory);
  pdl_wait();
  const int64_t first_unit = int64_t(blockIdx.x % unit_blocks) * Tile::kUnits;
  const int64_t first = int64_t(blockIdx.x / unit_blocks) * Tile::kColumns;
  const int units = int(min(p.D - first_unit, int64_t(Tile::kUnits)));
  const int columns = int(min(p.B - first, int64_t(Tile::kColumns)));
  // A product that begins with the block's own rows and columns.
  const auto part_of = [&](CellProduct product) {
    product.weight = static_cast<const IO*>(product.weight) + first_unit * product.depth;
    product.operand.data =
        static_cast<const IO*>(product.operand.data) + first * product.operand.row;
    return product;
  };
  const CellProduct input = part_of(p.input), recurrent = part_of(p.recurrent);
  const auto stages_of = [](int64_t depth) {
    return int((depth + Tile::kDepth - 1) / Tile::kDepth);
  };
  const bool has_state = p.recurrent.weight != nullptr;
  const int of_input = stages_of(p.input.depth);
  const int count = of_input + (has_state ? stages_of(p.D) : 0);
  const CellPieces<Cell, IO, kPiece> pieces;
  const auto start = [&](int i) {
    if (i < count) {
      const bool of_h = i >= of_input;
      pieces.copy(stages + i % Tile::kStages * Tile::kStage, of_h ? recurrent : input,
                  int64_t(of_h ? i - of_input : i) * Tile::kDepth, units, columns, p.D);
    }
    copy_commit();
  };
  for (int i = 0; i < Tile::kStages - 1; ++i) start(i);

  const int lane = threadIdx.x % 32, first_column = int(threadIdx.x) / 32 * 16;
  const int operand_row = Tile::kRows + first_column + lane % 8 + lane / 16 * 8;
  const uint32_t weight = lane % 16 * Tile::kPitch + lane / 16 * 16;
  const uint32_t operand = operand_row * Tile::kPitch + lane / 8 % 2 * 16;
  CellSums<Cell, IO> sums;
  for (int i = 0; i < count; ++i) {
    next_stage<Tile::kStages>([&] { start(i + Tile::kStages - 1); });
    if (i == of_input) sums.exchange_apart();
    const uint32_t stage = stages + i % Tile::kStages * Tile::kStage;
    sums.add(stage + weight, stage + operand);
  }
  if (has_state) sums.exchange_apart();

  // The sums cross shared memory, so that neighbouring threads run the cells of neighbouring units.
  copy_wait<0>();
  __syncthreads();
  float* shared = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int m = 0; m < Tile::kSums; ++m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = first_column + i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int row = m * 16 + lane / 4 + i / 2 % 2 * 8;
      shared[column * Tile::kSumPitch + row] = sums.of[m][i / 4][i % 4];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Tile::kColumns * Tile::kUnits; i += Tile::kThreads) {
    const int unit = i % Tile::kUnits, column = i / Tile::kUnits;
    if (unit >= units || column >= columns) continue;
    const float* of_cell = shared + column * Tile::kSumPitch + unit;
    float x[kGates], r[kGates] = {};
#pragma unroll
    for (int g = 0; g < kGates; ++g) x[g] = of_cell[g * Tile::kUnits];
    if (Tile::kApart) r[kGates - 1] = of_cell[kGates * Tile::kUnits];
    run_cell<Cell, IO>(p, first + column, first_unit + unit, x, r);
  }
#else
  __trap();  // the caller asks for it only where it is compiled
#endif
}

}  // namespace flashcell::cuda
