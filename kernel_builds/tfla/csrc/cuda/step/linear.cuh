// y = W x for few rows of x, as fast as W can be read: it is read once for every 16 rows.
//
// A thread block takes tiles of 16 rows of W, and its warps take pieces of the depth. Every warp
// copies its own pieces to shared memory, up to 512 bytes of a row at once, and waits for no other
// warp. Copies run ahead across tiles and start before the preceding kernel has ended, because no
// kernel of a decoding step writes weights. The order in which the depth is summed is free, so a
// lane's operands are 16 contiguous bytes of a row, where the layout of the matrix instruction
// would be 4 times 4. The few rows of x are the right operand, most of whose columns stay empty.
//
// x stays in shared memory, in the order in which lanes take it, if it fits beside the rings. A
// norm costs little then: its weight multiplies x once, and its factor the sums at the end. So does
// the scale of a row of 8 bits, which are widened exactly on their way to the matrix instruction
// (widen.cuh). Those of int4's groups come through shared memory, after the 128 bytes of a row that
// they belong to, and multiply the weights: the instruction adds four groups up.
//
// Of weights of 8 and 4 bits the instructions are the limit, and not the memory: two teams of eight
// warps, each with tiles of its own, hide their latency, and the sums of a tile are added up by
// half of a team while the other half goes on.
#pragma once
#include "common/cuda/ptx/mma.cuh"
#include "common/cuda/ptx/named_barrier.cuh"
#include "common/cuda/ptx/programmatic_launch.cuh"
#include "linear_copy.cuh"
#include "linear_inputs.cuh"
#include "widen.cuh"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

DEVICE float silu(float x) { return x / (1 + expf(-x)); }

// Adds the product of step s of a warp's piece, W at `from`, and x to the two parts of d, in turns,
// so that fewer instructions wait for one before. kFormat says what the matrix of this tile is, Own
// what the ring is for.
template <typename IO, Format kFormat, typename Own>
DEVICE void multiply(const char* from, int s, const Vectors<kFormat, Own::kSteps, Own::kTiles>& v,
                     float (&d)[2][Own::kTiles][4]) {
  constexpr int kTiles = Own::kTiles;
  using Parts = Values<kFormat, Own::kSteps>;
  const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  from += row * Own::kStride;
  const char* const from_high = from + kRows / 2 * Own::kStride;
  const int at = (Parts::part(s, quarter) * 16) ^ (row % 2 * Own::kSwap);
  const uint4 low = *reinterpret_cast<const uint4*>(from + at);
  const uint4 high = *reinterpret_cast<const uint4*>(from_high + at);
  if constexpr (kFormat == Format::kPlain) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      mma<IO>(d[0][t], {low.x, high.x, low.y, high.y}, v[0][t].x, v[0][t].y);
      mma<IO>(d[1][t], {low.z, high.z, low.w, high.w}, v[0][t].z, v[0][t].w);
    }
  } else {
    const uint32_t lows[] = {low.x, low.y, low.z, low.w};
    const uint32_t highs[] = {high.x, high.y, high.z, high.w};
    uint32_t low_scale = 0, high_scale = 0;
    if constexpr (Parts::kInt4) {
      const int factor = Own::kRowBytes + Parts::part(s, quarter) * 2;
      low_scale = twice_scale<IO>(*reinterpret_cast<const uint16_t*>(from + factor));
      high_scale = twice_scale<IO>(*reinterpret_cast<const uint16_t*>(from_high + factor));
    }
    // four weights of each row
    const auto add = [&](uint2 a, uint2 b, int i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4& word = v[i / 2][t];
        const uint32_t x = i % 2 ? word.z : word.x, next = i % 2 ? word.w : word.y;
        mma<IO>(d[i % 2][t], {a.x, b.x, a.y, b.y}, x, next);
      }
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Parts::kInt4) {
        add(widen_int4<IO>(lows[i], low_scale), widen_int4<IO>(highs[i], high_scale), i);
        add(widen_int4<IO>(lows[i] >> 4, low_scale), widen_int4<IO>(highs[i] >> 4, high_scale),
            4 + i);
      } else {
        add(widen<IO, kFormat>(lows[i]), widen<IO, kFormat>(highs[i]), i);
      }
    }
  }
}

template <typename IO, Format kFormat, typename Own, bool kNorm>
__global__ void __launch_bounds__(Own::kTeams* Own::kThreads, 1) linear_step_kernel(
    const __grid_constant__ LinearStepParams p, int count, int blocks, bool keeps) {
  constexpr int kSteps = Own::kSteps, kTiles = Own::kTiles, kTeams = Own::kTeams;
  constexpr int kWarps = Own::kWarps, kStages = Own::kStages, kBuffers = Own::kBuffers;
  __shared__ __align__(16) float all_sums[kTeams][kBuffers][kWarps][kTiles * kSums];
  __shared__ __align__(16) float all_squares[kTeams][kBuffers][kWarps][kTiles * kColumns];
  if constexpr (kIsTuring != Own::kTuring) {
    __trap();  // run_linear_step chooses by the code
    return;
  }
  const int team = threadIdx.x / Own::kThreads, thread = threadIdx.x % Own::kThreads;
  const int warp = thread / 32, lane = thread % 32;
  const int K = int(p.K);
  auto& sums = all_sums[team];
  auto& squares = all_squares[team];
  const char* ring = memory + (team * kWarps + warp) * kStages * Own::kBytes;
  const uint32_t ring_address = shared_address(ring);

  constexpr int kMostColumns = kTiles * kColumns;
  const int block = blockIdx.x % blocks;  // among those of the same passes
  const Tiles tiles{team * blocks + block,
                    kTeams * blocks,
                    count,
                    int(blockIdx.x) / blocks,
                    int(gridDim.x) / blocks,
                    (int(p.B) + kMostColumns - 1) / kMostColumns};
  Copier<kFormat, Own> copier{p, tiles, warp};
  copier.find_rows();
  for (int s = 0; s < kStages; ++s) copier.copy(ring_address);
  if constexpr (kNorm) fetch_norm(p.norm, K * int(sizeof(IO)));
  pdl_wait();
  pdl_launch_dependents();

  const Kept<kFormat, kSteps, kTiles> kept{memory + Own::kRingBytes,
                                           smaller(int(p.B), kMostColumns)};
  [[maybe_unused]] float factor = 1;  // of the norm, for the thread's output
  const int own_output = thread % Own::kOutputs, element = own_output % 4;
  const int own_column = own_output / kSums * kColumns + own_output / 4 % 4 * 2 + element % 2;

  int stage = 0, buffer = 0, turn = 0;
  for (int pass = tiles.first_pass; pass < tiles.passes; pass += tiles.pass_stride) {
    const int first_column = pass * kMostColumns;
    const int B = smaller(int(p.B) - first_column, kMostColumns);
    if (keeps) {
      __syncwarp();
      if (pass > tiles.first_pass) __syncthreads();
      float square[kTiles] = {};
      kept.write_zeros();
      keep_x<IO, kFormat, Own, kNorm>(p, kept, first_column, B, square);
      if constexpr (kNorm) {
        write_squares(square, all_squares[team][0][warp]);
        __syncthreads();
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kTeams * kWarps; ++i) {
          sum += all_squares[i / kWarps][0][i % kWarps][own_column];
        }
        factor = rsqrtf(sum / float(p.K) + float(p.eps));
      } else {
        __syncthreads();
      }
    }
    for (int tile = tiles.first; tile < count; tile += tiles.stride) {
      const Place place = find(p, tile);
      const Linear& linear = p.linears[place.which];
      const bool scaled = !Own::kPlain && linear.scale != nullptr;
      const int pieces = pieces_of<kFormat, Own::kRowBytes>(linear, K);
      float d[2][kTiles][4] = {}, square[kTiles] = {};
      const auto arrived = [&] {  // the oldest piece of the ring
        copy_wait<kStages - 1>();
        __syncwarp();
        return ring + stage * Own::kBytes;
      };
      const auto next_piece = [&] {
        stage = stage + 1 == kStages ? 0 : stage + 1;
        __syncwarp();
        copier.copy(ring_address);
      };
      // Adds the pieces of a matrix, with x from memory.
      const auto add = [&]<Format kThis>(Constant<kThis>) {
        for (int piece = warp; piece < pieces; piece += kWarps) {
          Vectors<kThis, kSteps, kTiles> v[kSteps];
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            load_x<IO, kThis, kSteps, kTiles, kNorm>(
                p, first_column, B, piece * Values<kThis, kSteps>::kOfPiece, s, v[s], square);
          }
          const char* from = arrived();
#pragma unroll
          for (int s = 0; s < kSteps; ++s) multiply<IO, kThis, Own>(from, s, v[s], d);
          next_piece();
        }
      };
      if (!Own::kPlain && !scaled) {
        add(Constant<Format::kPlain>{});
      } else if (!keeps) {
        add(Constant<kFormat>{});
      } else {
        // So many instructions as widen weights would be slower to fetch than to run.
        constexpr int kAtOnce = Own::kPlain ? kSteps : 1;
        for (int piece = warp; piece < pieces; piece += kWarps) {
          const char* from = arrived();
#pragma unroll kAtOnce
          for (int s = 0; s < kSteps; ++s) {
            Vectors<kFormat, kSteps, kTiles> v;
            kept.load(piece, s, v);
            multiply<IO, kFormat, Own>(from, s, v, d);
          }
          next_piece();
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        *reinterpret_cast<float4*>(&sums[buffer][warp][t * kSums + 4 * lane]) =
            make_float4(d[0][t][0] + d[1][t][0], d[0][t][1] + d[1][t][1], d[0][t][2] + d[1][t][2],
                        d[0][t][3] + d[1][t][3]);
      }
      if (kNorm && !keeps) write_squares(square, squares[buffer][warp]);

      const int from = buffer, barrier = 1 + team * kBuffers + buffer;
      const bool writes = thread / Own::kOutputs == turn;
      buffer = buffer + 1 == kBuffers ? 0 : buffer + 1;
      turn = turn + 1 == Own::kGroups ? 0 : turn + 1;
      __syncwarp();  // lanes that had no output may still be behind
      if (!writes) {
        named_barrier_arrive<Own::kThreads>(barrier);
        continue;
      }
      named_barrier_sync<Own::kThreads>(barrier);
      const int r = place.row + own_output % kSums / 16 + (p.gated ? 0 : element / 2 * (kRows / 2));
      if (own_column >= B || r >= linear.rows || (p.gated && element >= 2)) continue;
      float value = 0, gated = 0, square_sum = 0;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        value += sums[from][other][own_output];
        if (p.gated) gated += sums[from][other][own_output + 2];
        if (kNorm && !keeps) square_sum += squares[from][other][own_column];
      }
      if constexpr (kNorm) {
        if (!keeps) factor = rsqrtf(square_sum / float(p.K) + float(p.eps));
        value *= factor, gated *= factor;
      }
      if (scaled && kFormat != Format::kInt4) {
        value *= static_cast<const float*>(linear.scale)[r];
        if (p.gated) gated *= static_cast<const float*>(p.linears[1].scale)[r];
      }
      if (linear.bias != nullptr) value += to_float(static_cast<const IO*>(linear.bias)[r]);
      const int64_t b = first_column + own_column, out = b * linear.out_stride + r;
      if (linear.capped) {
        const float cap = float(p.cap);
        static_cast<float*>(linear.out)[out] = cap > 0 ? cap * tanhf(value / cap) : value;
        continue;
      }
      if (p.gated) value = silu(value) * gated;
      if (p.residual != nullptr) {
        value += to_float(static_cast<const IO*>(p.residual)[b * p.residual_stride + r]);
      }
      static_cast<IO*>(linear.out)[out] = from_float<IO>(value);
    }
  }
}

template <typename IO, Format kFormat, typename Own>
void launch_tiles(const LinearStepParams& p, int64_t tiles, const Device& device,
                  cudaStream_t stream) {
  const int64_t columns = Own::kTiles * kColumns, rows = p.B < columns ? p.B : columns;
  const int64_t kept = Kept<kFormat, Own::kSteps, Own::kTiles>::bytes(p.K, rows);
  const int64_t most = device.shared_bytes - Own::kSumBytes;
  const bool keeps = Own::kRingBytes + kept <= most;
  // Passes over a small matrix run side by side.
  const int64_t blocks = tiles < device.sms ? tiles : device.sms;
  const int64_t passes = (p.B + columns - 1) / columns, most_at_once = device.sms / blocks;
  const int64_t at_once = passes < most_at_once ? passes : most_at_once;
  const Grid grid{.blocks = blocks * at_once,
                  .threads = Own::kTeams * Own::kThreads,
                  .shared_bytes = int(Own::kRingBytes + (keeps ? kept : 0)),
                  .stream = stream,
                  .pdl = device.code.arch >= 90,
                  .most_shared_bytes = int(most)};
  const bool norm = p.norm != nullptr && p.K > 0;  // zero columns have no mean
  const auto kernel = norm ? linear_step_kernel<IO, kFormat, Own, true>
                           : linear_step_kernel<IO, kFormat, Own, false>;
  launch(kernel, grid, p, int(tiles), int(blocks), keeps);
}

template <typename IO, Format kFormat, int kSteps, int kStages = 2, int kTeams = 1>
void launch_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  using Narrow = Shape<kFormat, kSteps, kStages, 1, kTeams>;
  int64_t tiles = 0;
  const int rows = p.gated ? kRows / 2 : kRows;
  for (int s = 0; s < (p.gated ? 1 : p.count); ++s) tiles += (p.linears[s].rows + rows - 1) / rows;
  if (tiles == 0 || p.B == 0) return;
  if constexpr (!Narrow::kTuring) {
    // 16 rows of x take shared memory, which the ring of short pieces leaves.
    using Wide = std::conditional_t<kFormat == Format::kInt4,
                                    Shape<kFormat, kInt4Steps, kShortInt4Stages, 2, 1>,
                                    Shape<kFormat, kShortSteps, 2, 2, 1>>;
    if (p.B > kColumns) return launch_tiles<IO, kFormat, Wide>(p, tiles, device, stream);
  }
  launch_tiles<IO, kFormat, Narrow>(p, tiles, device, stream);
}

}  // namespace

}  // namespace flashcell::cuda
