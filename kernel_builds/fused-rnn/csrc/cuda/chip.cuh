// The whole-chip engine, for heads wider than one thread block: ceil(D / 16) thread blocks make a
// group, which runs one head for some tiles of eight sequences. Each block keeps the weight of 16
// units on chip for the whole call and, after every step, hands its part of h (backward: of dr) to
// the others through L2 (exchange.cuh). The eight warps of a block split the depth of the product:
// what a warp polls are its operands, straight from L2 to the matrix instruction.
//
// The floor of a step (H200, 16 x 1024 LSTM, bf16): 0.25-0.35 us from a store to the poll that sees
// it, as much again for the poll that came too early, and to L2 bandwidth (16 KB a tile and block);
// 0.15 us of matrix instructions, 0.15 us for the partial sums, 0.1 us for the cell. The exchange
// of a tile passes while the group works on its other tiles.
#pragma once
#include <algorithm>

#include "chip_pass.cuh"
#include "launch.h"

namespace flashcell::cuda {
namespace chip {

struct Range {  // of a launch
  int first_head;
  int groups, members;  // groups of a head, thread blocks of a group
  int depth_blocks;     // of the product
  unsigned panel;       // elements of the medium from a gate to the next
};

template <typename Pass>
struct Group {
  using Params = typename Pass::Params;
  using IO = typename Pass::IO;
  static constexpr Shape kShape = Pass::kShape;
  static constexpr int kRows = Pass::kRows, kPanels = kShape.panels, kStates = kShape.states;
  static constexpr int kVector = Lane<IO>::kVector, kUnitVectors = kUnits / kVector;
  static constexpr int kBlocks = max_blocks(kShape), kHeld = held_chunks(kShape);
  static constexpr int kBlockDepth = kWarps * 4 * kVector;  // one chunk for every warp
  static constexpr int kAhead = std::min(kBlocks, kPanels == 1 ? 16 : 4);  // on their way to a lane
  static constexpr int kChains = kRows >= 3 ? 1 : 4;  // sums apart: mma has a latency

  struct Walk {  // through the steps; within a step through the tiles of the round; -1 at the end
    int t, tile;
  };
  struct alignas(16) Shared {  // and behind it the weight that is not in registers
    float partials[2][kWarps][kRows][kColumns][kPartialRow];
    IO inputs[kStages][kShape.inputs][kColumns][kUnits];
    float carried[kTiles][kStates + kShape.sums][kPlane];
    float bias[kRows + 1][kUnits];
    Column columns[kTiles][kColumns];
    Walk walk[kStages];  // of the steps in the ring
    int lengths[kTiles], first_tile, tiles, end;
  };
  static_assert(sizeof(Column) == kColumnBytes && sizeof(Shared) <= shared_bytes(kShape, 0));
  static_assert(kShape.inputs * kColumns * kUnitVectors <= kThreads, "a thread copies one vector");

  struct Look {  // at the operand of the lane's column
    const IO* from;
    unsigned flags;
  };

  const Params& p;
  const Range& range;
  Shared& shared;
  const int D, head, first_unit;
  unsigned thread = threadIdx.x;
  uint32_t weight[kHeld][kRows][2][4];  // [chunk][row tile][mma step]

  DEVICE Group(const Params& params, const Range& r, unsigned char* memory)
      : p(params),
        range(r),
        shared(*reinterpret_cast<Shared*>(memory)),
        D(int(p.D)),
        head(r.first_head + blockIdx.x / (r.members * r.groups)),
        first_unit(blockIdx.x % r.members * kUnits) {}

  DEVICE int warp() const { return int(thread / 32); }
  DEVICE int lane() const { return int(thread % 32); }
  // As a thread of the product: its first element of the depth.
  DEVICE int depth() const { return (warp() * 4 + lane() % 4) * kVector; }
  // As a thread of the cell: half of the threads run it for tile 0, 2, .., the others for 1, 3, ..
  DEVICE bool has_cell(int tile) const { return tile % 2 == warp() / 4; }
  DEVICE int place() const { return int(thread % kPlane); }
  DEVICE int column() const { return warp() % 4 + lane() / 16 * 4; }
  DEVICE int unit() const { return first_unit + lane() % 16; }
  DEVICE int64_t at() const { return int64_t(head) * D + unit(); }  // in [N, D]

  DEVICE int64_t sequence(int tile, int c) const {
    return (shared.first_tile + int64_t(tile) * range.groups) * kColumns + c;
  }

  DEVICE void run() {
    load_weight();
    const int groups = range.groups, group = blockIdx.x / range.members % groups;
    const int count = (int((p.S + kColumns - 1) / kColumns) - group + groups - 1) / groups;
    const int rounds = (count + kTiles - 1) / kTiles;
    for (int round = 0, begin = 0; round < rounds; ++round) {
      const int tiles = (count - begin) / (rounds - round);
      begin_round(group + begin * groups, tiles);
      run_round();
      end_round();
      begin += tiles;
    }
  }

  DEVICE void load_weight() {
#pragma unroll
    for (int i = 0; i < kHeld * kRows * 8; ++i) {
      weight[i / 8 / kRows][i / 8 % kRows][i / 4 % 2][i % 4] = 0;
    }
    const int row = first_unit + lane() / 4;
#pragma unroll 1
    for (int chunk = 0; chunk < range.depth_blocks * kPanels; ++chunk) {
      const int panel = chunk % kPanels, from = depth() + chunk / kPanels * kBlockDepth;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        uint4 low{}, high{};
        if (from < D && row < D) low = Pass::weight(p, head, m, panel, row, from);
        if (from < D && row + 8 < D) high = Pass::weight(p, head, m, panel, row + 8, from);
        const uint32_t words[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t a[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) a[w] = operand<IO>(words[j * 4 + w]);
          if (chunk >= kHeld) shared_weight(chunk, m, j) = make_uint4(a[0], a[1], a[2], a[3]);
#pragma unroll
          for (int held = 0; held < kHeld; ++held) {  // registers have no index
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              if (held == chunk) weight[held][m][j][w] = a[w];
            }
          }
        }
      }
    }
  }

  DEVICE uint4& shared_weight(int chunk, int m, int j) const {
    uint4* weights = reinterpret_cast<uint4*>(&shared + 1);
    return weights[(((chunk - kHeld) * kRows + m) * 2 + j) * kThreads + thread];
  }

  DEVICE void begin_round(int first_tile, int tiles) {
    __syncthreads();  // the round before is over
    if (thread == 0) shared.first_tile = first_tile, shared.tiles = tiles;
    if constexpr (!Pass::kDescends) {
      if (place() < Pass::kBias * kUnits) {
        const bool used = p.bias != nullptr && unit() < D;
        const int64_t from = place() / kUnits * p.N * D + at();
        shared.bias[0][place()] = used ? static_cast<const float*>(p.bias)[from] : 0.0f;
      }
    }
    __syncthreads();
    if (int(thread) < tiles * kColumns) {
      int64_t x_batch = 0;
      if constexpr (!Pass::kDescends) x_batch = p.x_batch;
      const int tile = thread / kColumns, c = thread % kColumns;
      shared.columns[tile][c] = Column(p, sequence(tile, c), x_batch);
    }
    __syncthreads();
    for (int tile = 0; tile < tiles; ++tile) {
      if (!has_cell(tile)) continue;
      const bool exists = unit() < D && sequence(tile, column()) < p.S;
      const int64_t from = shared.columns[tile][column()].index * p.N * D + at();
#pragma unroll
      for (int k = 0; k < kStates + kShape.sums; ++k) {
        const bool is_state = exists && k < kStates;
        shared.carried[tile][k][place()] = is_state ? Pass::first_state(p, k, from) : 0.0f;
      }
    }
    if (thread == 0) {
      int longest = 0;
      for (int tile = 0; tile < tiles; ++tile) {
        int length = 0;
        for (const Column& c : shared.columns[tile]) length = max(length, c.length);
        shared.lengths[tile] = length;
        longest = max(longest, length);
      }
      shared.end = Pass::kDescends ? -2 : longest;
      Walk walk{Pass::kDescends ? longest - 1 : 0, -1};
      for (int i = 0; i < kStages - 1; ++i) shared.walk[i] = walk = following(walk);
    }
    __syncthreads();
  }

  DEVICE void run_round() {
    for (int stage = 0; stage < kStages - 2; ++stage) copy(stage);
    Walk at = shared.walk[0];
    Look now = look(at);
    for (int stage = 0; at.tile >= 0; stage = after(stage)) {
      // What depends on it is computed anew: the registers belong to the weight.
      asm volatile("" : "+r"(thread));
      float sums[kRows][4];
      Look next;
      product(sums, now, at.tile, [&] {  // what there is to do while the operands come
        next = look(shared.walk[after(stage)]);
        const int ahead = after(stage, kStages - 2);
        copy(ahead);
        if (thread == 0) shared.walk[after(ahead)] = following(shared.walk[ahead]);
      });
      const int r = lane() / 4, q = lane() % 4;
#pragma unroll
      for (int i = 0; i < kRows * 4; ++i) {
        auto& plane = shared.partials[stage % 2][warp()][i / 4];
        plane[2 * q + i % 2][r + i / 2 % 2 * 8] = sums[i / 4][i % 4];
      }
      // One barrier a step. Before it, every thread is done with the cell of the step before, and
      // so with the other half of the partial sums and with the stage that is copied to next.
      copy_wait<kStages - 2>();
      __syncthreads();
      if (has_cell(at.tile)) cell(at, now, stage);
      at = shared.walk[after(stage)], now = next;
    }
  }

  DEVICE static int after(int stage, int steps = 1) {
    return stage + steps - (stage + steps >= kStages ? kStages : 0);
  }

  DEVICE Walk following(Walk walk) const {
    if (walk.tile < 0 && walk.t == shared.end) return walk;
    do {
      if (++walk.tile < shared.tiles) continue;
      walk.tile = 0, walk.t += Pass::kDescends ? -1 : 1;
      if (walk.t == shared.end) walk.tile = -1;
    } while (walk.tile >= 0 && walk.t >= shared.lengths[walk.tile]);
    return walk;
  }

  // The inputs of a step of ours to the ring, and its line of the medium to L2.
  DEVICE void copy(int stage) {
    const Walk walk = shared.walk[stage];
    if (walk.tile >= 0) {
      const auto& columns = shared.columns[walk.tile];
      const int part = thread % kUnitVectors * kVector, c = thread / kUnitVectors % kColumns;
      const int row = thread / kUnitVectors / kColumns;
      if (row < kShape.inputs && first_unit + part < D && columns[c].runs(walk.t)) {
        copy_async(&shared.inputs[stage][row][c][part],
                   Pass::input(p, columns[c], head, row, walk.t) + first_unit + part);
      }
      const Column& to = columns[thread % kColumns];
      if (thread < kPanels * kColumns && to.runs(walk.t)) {
        const int64_t panel = (to.row + walk.t) * kPanels + thread / kColumns;
        prefetch_l2(Pass::medium(p) + (panel * p.N + head) * D + first_unit);
      }
    }
    copy_commit();
  }

  DEVICE Look look(const Walk& walk) const {
    if (walk.tile < 0) return {nullptr, 0};
    const Column& c = shared.columns[walk.tile][lane() / 4];
    const Operand operand = Pass::operand(p, c, walk.t);
    const int64_t panel = (c.row + operand.step) * kPanels;
    return {Pass::medium(p) + (panel * p.N + head) * D + depth(), operand.flags};
  }

  // Sums of the warp's part of the depth, in a fixed order whatever comes first.
  template <typename Meanwhile>
  DEVICE void product(float (&sums)[kRows][4], const Look& look, int tile,
                      const Meanwhile& meanwhile) {
    const IO* from[kPanels];
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      from[panel] = look.from + uint64_t(panel) * range.panel;
    }
    const int blocks = (max(D - depth(), 0) + kBlockDepth - 1) / kBlockDepth;
    const int polled = look.flags & kPolls ? blocks : 0;
    uint32_t words[kAhead][kPanels][4];
    const auto ask = [&](int block) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        uint32_t (&to)[4] = words[block % kAhead][panel];
        to[0] = to[1] = to[2] = to[3] = 0;
        request(to, from[panel] + block * kBlockDepth, block < polled);
      }
    };
#pragma unroll
    for (int block = 0; block < kAhead; ++block) {
      if (block < range.depth_blocks) ask(block);
    }
    if constexpr (!Pass::kDescends) {
      static_assert(kAhead == kBlocks);
      if (__any_sync(~0u, look.flags & kInitial)) {
        const int64_t row = shared.columns[tile][lane() / 4].index * p.N + head;
        const float* initial = Pass::initial(p) + row * D + depth();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          if ((look.flags & kInitial) && block < blocks) {
            convert(words[block][0], initial + block * kBlockDepth);
          }
        }
      }
    }
    meanwhile();
    float parts[kChains][kRows][4] = {};
    // Bits of the blocks not yet multiplied; what is late is asked for again, all at once.
    unsigned waiting = (1u << range.depth_blocks) - 1;
    while (waiting != 0) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const unsigned bit = 1u << block;
        if (waiting < bit || (waiting & bit >> kAhead)) break;
        if (!(waiting & bit)) continue;
        auto& operands = words[block % kAhead];
        bool missing = false;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) missing |= unwritten(operands[panel]);
        if (__any_sync(~0u, missing)) {
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            request(operands[panel], from[panel] + block * kBlockDepth, unwritten(operands[panel]));
          }
        } else if (!(waiting & bit >> 1)) {
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            multiply(parts, block * kPanels + panel, operands[panel]);
          }
          if (block + kAhead < kBlocks && block + kAhead < range.depth_blocks) ask(block + kAhead);
          waiting -= bit;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows * 4; ++i) {
      float sum = parts[0][i / 4][i % 4];
#pragma unroll
      for (int chain = 1; chain < kChains; ++chain) sum += parts[chain][i / 4][i % 4];
      sums[i / 4][i % 4] = sum;
    }
  }

  DEVICE static void convert(uint32_t (&words)[4], const float* from) {
    constexpr int kWord = Lane<IO>::kWord;
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      const auto pair = Pair<IO>::of(from[i], from[i + 1]);
#pragma unroll
      for (int w = 0; w < 2 / kWord; ++w) {
        words[i / kWord + w] = min(pair.word[w], kUnwritten - 1);
      }
    }
  }

  DEVICE void multiply(float (&parts)[kChains][kRows][4], int chunk, uint32_t (&words)[4]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = operand<IO>(words[w]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        float (&sum)[4] = parts[(2 * chunk + j) % kChains][m];
        if (chunk < kHeld) {
          mma<IO>(sum, weight[chunk < kHeld ? chunk : 0][m][j], words[2 * j], words[2 * j + 1]);
        } else {
          const uint4 a = shared_weight(chunk, m, j);
          mma<IO>(sum, {a.x, a.y, a.z, a.w}, words[2 * j], words[2 * j + 1]);
        }
      }
    }
  }

  DEVICE void cell(const Walk& walk, const Look& look, int stage) {
    const auto& partials = shared.partials[stage % 2];
    const int u = lane() % 16;
    float sums[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      sums[m] = partials[0][m][column()][u];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sums[m] += partials[w][m][column()][u];
    }
    const unsigned flags = __shfl_sync(~0u, look.flags, column() * 4);
    const int64_t row = shared.columns[walk.tile][column()].row + walk.t;
    const Spot spot{row, at(), flags, unit() < D && (flags & kRuns)};
    float* carried = &shared.carried[walk.tile][0][place()];
    Pass::cell(p, spot, sums, &shared.inputs[stage][0][column()][u], &shared.bias[0][u], carried,
               carried + kStates * kPlane);
  }

  DEVICE void end_round() {
    __syncthreads();
    const int tiles = shared.tiles;
    for (int tile = 0; tile < tiles; ++tile) {
      if (!has_cell(tile) || unit() >= D || sequence(tile, column()) >= p.S) continue;
      const int64_t to = shared.columns[tile][column()].index * p.N * D + at();
#pragma unroll
      for (int k = 0; k < kStates; ++k) {
        Pass::last_state(p, k, to, shared.carried[tile][k][place()]);
      }
    }
    if constexpr (Pass::kDescends) {
      for (int i = int(thread); i < tiles * kShape.sums * kUnits; i += kThreads) {
        const int u = i % kUnits, row = i / kUnits % kShape.sums, tile = i / kUnits / kShape.sums;
        const float* of_unit = &shared.carried[tile][kStates + row][u];
        float sum = 0.0f;
        for (int c = 0; c < kColumns; ++c) sum += of_unit[c % 4 * 32 + c / 4 * 16];
        const int64_t to = (sequence(tile, 0) / kColumns * kShape.sums + row) * p.N + head;
        if (first_unit + u < D) {
          static_cast<float*>(p.dbias_partial)[to * D + first_unit + u] = sum;
        }
      }
    }
    Pass::pad(p, [&](IO* tensor, int rows) {
      for (int i = 0; i < tiles * kColumns; ++i) {
        const Column& c = shared.columns[i / kColumns][i % kColumns];
        for (int64_t j = thread; j < int64_t(c.padding) * rows * kUnitVectors; j += kThreads) {
          const int64_t row = (c.row + c.length) * rows + j / kUnitVectors;
          const int to = first_unit + int(j % kUnitVectors) * kVector;
          if (to < D) *reinterpret_cast<uint4*>(tensor + (row * p.N + head) * D + to) = uint4{};
        }
      }
    });
  }
};

template <typename Pass, typename Params = typename Pass::Params>
__global__ void __launch_bounds__(kThreads, 1) chip_kernel(const __grid_constant__ Params p,
                                                           const __grid_constant__ Range range) {
  extern __shared__ __align__(16) unsigned char memory[];
  Group<Pass>(p, range, memory).run();
}

template <typename Pass>
void run(const typename Pass::Params& p, const Launch& launch) {
  using IO = typename Pass::IO;
  const int64_t tiles = divide_up(p.S, kColumns), units = divide_up(p.D, kUnits);
  if (tiles * units * p.N == 0) return;
  const int processors = launch.device.processors;
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error("fused_rnn: the chip engine cannot run heads of width " +
                             std::to_string(p.D) + ": " + why);
  };
  const int bytes = int(shared_bytes(Pass::kShape, p.D));
  if (!fits(Pass::kShape, p.D, launch.device)) {
    refuse("they take " + std::to_string(units) + " thread blocks of " + std::to_string(bytes) +
           " bytes of shared memory each, there are " + std::to_string(processors) +
           " processors of " + std::to_string(launch.device.shared_bytes) + " bytes");
  }
  const auto kernel = chip_kernel<Pass>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int per_processor = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kThreads, bytes));
  if (per_processor == 0)
    refuse("no thread block of " + std::to_string(bytes) + " bytes can start");

  if (Pass::kDescends || p.T > 1) {  // nothing polls h in a single step
    const int parts = int(std::clamp<int64_t>(8 * processors / p.S, 1, 4096));
    fill_kernel<IO><<<dim3(unsigned(p.S), parts), 256, 0, launch.stream>>>(
        p, Pass::medium(p), Pass::kShape.panels * p.N * p.D);
    check(cudaGetLastError());
  }
  const int64_t launches = divide_up(p.N, processors / units), heads = divide_up(p.N, launches);
  for (int64_t head = 0; head < p.N; head += heads) {
    const int64_t count = std::min(heads, p.N - head);
    const int64_t groups = std::clamp<int64_t>(processors / (count * units), 1, tiles);
    Range range{int(head), int(groups), int(units), int(blocks_of_depth(Pass::kShape, p.D)),
                unsigned(p.N * p.D)};
    void* arguments[] = {const_cast<typename Pass::Params*>(&p), &range};
    check(cudaLaunchCooperativeKernel(kernel, dim3(unsigned(count * groups * units)),
                                      dim3(kThreads), arguments, bytes, launch.stream));
  }
}

}  // namespace chip

template <typename Cell, typename IO>
void forward_chip(const ForwardParams& p, const Launch& launch) {
  chip::run<chip::ForwardPass<Cell, IO>>(p, launch);
}

template <typename Cell, typename IO>
void backward_chip(const BackwardParams& p, const Launch& launch) {
  chip::run<chip::BackwardPass<Cell, IO>>(p, launch);
}

}  // namespace flashcell::cuda
