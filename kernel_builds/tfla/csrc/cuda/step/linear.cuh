// y = W x for few rows of x, as fast as W can be read: it is read once for every 16 rows of x, on
// Turing for every 8.
//
// W is tiles of 16 rows, and tiles are pieces of the depth. Every thread block has an equal number
// of pieces, up to a whole tile, and every warp an equal number of these, one after the other
// (linear_shape.cuh). It copies its own pieces to shared memory, up to 256 bytes of a row at once,
// and waits for no other warp. Copies run ahead across tiles and start before the preceding kernel
// has ended, because no kernel of a decoding step writes weights. The order in which the depth is
// summed is free, so a lane's operands are 16 contiguous bytes of a row (of int4 4), where the
// layout of the matrix instruction would be 4 times 4. The few rows of x are the right operand,
// most of whose columns stay empty.
//
// The sums of a tile are in the registers of the warp that begins it. A warp that goes on with a
// tile leaves its own in shared memory, and at the end of its pieces the first warp adds them.
//
// x stays in shared memory, in the order in which lanes take it, if it fits beside the rings. A
// norm costs little then: its weight multiplies x once, and its factor the sums at the end. So does
// the scale of a row of 8 bits, which are widened exactly on their way to the matrix instruction
// (widen.cuh). Those of int4's groups come through shared memory, after the 128 bytes of a row that
// they belong to, and multiply the sums of their group.
//
// Of weights of 8 and 4 bits the instructions are the limit, and not the memory; so is the start of
// a launch, which is why the host divides the pieces. Where x has one row, int4 is multiplied as
// integers, by fewer instructions (linear_digits.cuh).
#pragma once
#include "common/cuda/ptx/mma.cuh"
#include "common/cuda/ptx/programmatic_launch.cuh"
#include "linear_copy.cuh"
#include "linear_digits.cuh"
#include "linear_inputs.cuh"
#include "widen.cuh"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

DEVICE float silu(float x) { return x / (1 + expf(-x)); }

// Adds the product of step s of a warp's piece of int4, W at `from`, and x to the two parts of d,
// in turns, so that fewer instructions wait for one before. A group's sums are exact, but for
// fp32's rounding, before its factor multiplies them.
template <typename IO, typename Own>
DEVICE void multiply_int4(const char* from, int s,
                          const Vectors<Format::kInt4, Own::kSteps, Own::kTiles>& v,
                          const uint32_t (&less)[4], float (&d)[2][Own::kTiles][4]) {
  const Int4Words<Own> words(from, s);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = words.low(j), high = words.high(j);
    const uint32_t first[] = {widen_int4<IO, 0>(low), widen_int4<IO, 0>(high),
                              widen_int4<IO, 2>(low), widen_int4<IO, 2>(high)};
    const uint32_t second[] = {widen_int4<IO, 1>(low), widen_int4<IO, 1>(high),
                               widen_int4<IO, 3>(low), widen_int4<IO, 3>(high)};
    const float low_scale = words.low_scale(j), high_scale = words.high_scale(j);
#pragma unroll
    for (int t = 0; t < Own::kTiles; ++t) {
      const uint4& x = v[j][t];
      float sums[4] = {};
      mma<IO>(sums, less, x.x, x.y);
      mma<IO>(sums, less, x.z, x.w);
      mma<IO>(sums, first, x.x, x.y);
      mma<IO>(sums, second, x.z, x.w);
      float (&own)[4] = d[j % 2][t];
      own[0] = fmaf(low_scale, sums[0], own[0]), own[1] = fmaf(low_scale, sums[1], own[1]);
      own[2] = fmaf(high_scale, sums[2], own[2]), own[3] = fmaf(high_scale, sums[3], own[3]);
    }
  }
}

// The same for other formats: kFormat says what the matrix of this tile is, Own what the ring is
// for.
template <typename IO, Format kFormat, typename Own>
DEVICE void multiply(const char* from, int s, const Vectors<kFormat, Own::kSteps, Own::kTiles>& v,
                     const uint32_t (&less)[4], float (&d)[2][Own::kTiles][4]) {
  if constexpr (kFormat == Format::kInt4) {
    return multiply_int4<IO, Own>(from, s, v, less, d);
  } else {
    constexpr int kTiles = Own::kTiles;
    const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    from += row * Own::kStride;
    const int at = ((4 * s + quarter) * 16) ^ (row % 2 * Own::kSwap);
    const uint4 low = *reinterpret_cast<const uint4*>(from + at);
    const uint4 high = *reinterpret_cast<const uint4*>(from + kRows / 2 * Own::kStride + at);
    if constexpr (kFormat == Format::kPlain) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        mma<IO>(d[0][t], {low.x, high.x, low.y, high.y}, v[0][t].x, v[0][t].y);
        mma<IO>(d[1][t], {low.z, high.z, low.w, high.w}, v[0][t].z, v[0][t].w);
      }
    } else {
      const uint32_t lows[] = {low.x, low.y, low.z, low.w};
      const uint32_t highs[] = {high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // four weights of each row
        const uint2 a = widen<IO, kFormat>(lows[i]), b = widen<IO, kFormat>(highs[i]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4& word = v[i / 2][t];
          const uint32_t x = i % 2 ? word.z : word.x, next = i % 2 ? word.w : word.y;
          mma<IO>(d[i % 2][t], {a.x, b.x, a.y, b.y}, x, next);
        }
      }
    }
  }
}

template <typename IO, typename Own, bool kNorm>
__global__ void __launch_bounds__(Own::kThreads, 1) linear_step_kernel(
    const __grid_constant__ LinearStepParams p, const __grid_constant__ Order order, bool keeps) {
  constexpr Format kFormat = Own::kFormat;
  constexpr int kSteps = Own::kSteps, kTiles = Own::kTiles, kStages = Own::kStages;
  constexpr int kWarps = Own::kWarps, kMostColumns = kTiles * kColumns;
  __shared__ __align__(16) float others[kWarps][kTiles * kSums];
  __shared__ __align__(16) float squares[kWarps][kTiles * kColumns];
  if constexpr (!Own::kRuns) {
    __trap();  // launch_linear_step chooses by the code
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const int K = int(p.K);
  const char* ring = memory + warp * kStages * Own::kBytes;
  const uint32_t ring_address = shared_address(ring);

  int block = int(blockIdx.x), first_pass = 0, side_by_side = 1;  // passes over the rows of x
  if (int(gridDim.x) > order.blocks) {
    first_pass = block / order.blocks, block %= order.blocks;
    side_by_side = int(gridDim.x) / order.blocks;
  }
  const int first_of_block = order.start(block);
  const int of_block = order.start(block + 1) - first_of_block;
  const auto start_of = [&](int warp) { return first_of_block + of_block * warp / kWarps; };
  const int end = start_of(warp + 1), count = end - start_of(warp);
  const Place first = count > 0 ? order.find(start_of(warp)) : Place{};

  const int passes = (int(p.B) + kMostColumns - 1) / kMostColumns;
  int own_passes = 0;
  for (int pass = first_pass; pass < passes; pass += side_by_side) ++own_passes;
  Copier<Own> copier{p, order, first, count, own_passes};
  copier.find_rows();
  for (int s = 0; s < kStages; ++s) copier.copy(ring_address);
  if constexpr (kNorm) fetch_norm(p.norm, K * int(sizeof(IO)));
  pdl_wait();
  pdl_launch_dependents();

  const KeptOf<Own> kept{memory + Own::kRingBytes,
                         Own::kTakesDigits ? K : smaller(int(p.B), kMostColumns)};
  uint32_t less[4];  // takes away what widened int4 weights have too much
#pragma unroll
  for (uint32_t& word : less) word = keep(less_of_int4<IO>());
  [[maybe_unused]] int zeros[4];
#pragma unroll
  for (int& word : zeros) word = int(keep(kZero));
  int stage = 0;
  for (int pass = first_pass; pass < passes; pass += side_by_side) {
    const int first_column = pass * kMostColumns;
    const int B = smaller(int(p.B) - first_column, kMostColumns);
    [[maybe_unused]] float factor[kTiles][2];  // of the norm, for the lane's columns
    if (pass > first_pass) __syncthreads();    // until then x and sums are read
    if constexpr (Own::kTakesDigits) {
      squares[warp][0] = read_digits<IO, Own, kNorm>(p, kept);
      __syncthreads();
    } else if (keeps || kNorm) {
      if (keeps) kept.write_zeros();
      read_x<IO, Own, kNorm>(p, kept, keeps, first_column, B, squares[warp]);
      __syncthreads();
    }
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int own = i / 2 * kColumns + 2 * quarter + i % 2;
        if (own >= B) continue;
        float sum = 0;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) sum += squares[other][own];
        factor[i / 2][i % 2] = rsqrtf(sum / float(p.K) + float(p.eps));
      }
    }
    // Writes the outputs of a tile from its sums.
    const auto finish = [&](const Place& place, float (&d)[kTiles][4]) {
      const Linear& linear = p.linears[place.which];
      if constexpr (Own::kTakesDigits) {
        if (linear.scale != nullptr) join_digits(d[0]);
      }
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const int t = i / 4, element = i % 4, column = t * kColumns + 2 * quarter + element % 2;
        const int r = place.row + row + (p.gated ? 0 : element / 2 * (kRows / 2));
        if (column >= B || r >= int(linear.rows) || (p.gated && element >= 2)) continue;
        float value = d[t][element], gated = d[t][(element + 2) % 4];
        if constexpr (kNorm) value *= factor[t][element % 2], gated *= factor[t][element % 2];
        if (!Own::kPlain && !Own::kInt4 && linear.scale != nullptr) {
          value *= static_cast<const float*>(linear.scale)[r];
          if (p.gated) gated *= static_cast<const float*>(p.linears[1].scale)[r];
        }
        if (linear.bias != nullptr) value += to_float(static_cast<const IO*>(linear.bias)[r]);
        const int64_t b = first_column + column, out = b * linear.out_stride + r;
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
    };
    // Where the lane leaves its sums of a tile that another warp began.
    const auto others_of = [&](int warp, int t) {
      return reinterpret_cast<float4*>(&others[warp][t * kSums + 4 * lane]);
    };

    Place place = first;
    float d[kTiles][4];
    bool began = false, ended = true;  // whether this warp did the tile's first piece, and its last
    for (int left = count; left > 0;) {
      if (ended && left < count) order.next_tile(place);
      const Linear& linear = p.linears[place.which];
      const int last = smaller(place.pieces, place.piece + left);
      began = place.piece == 0, ended = last == place.pieces;
      left -= last - place.piece;
      float parts[2][kTiles][4] = {};
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
        for (int piece = place.piece; piece < last; ++piece) {
          Vectors<kThis, kSteps, kTiles> v[kSteps];
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            load_x<IO, kThis, kSteps, kTiles, kNorm>(
                p, first_column, B, piece * Values<kThis, kSteps>::kOfPiece, s, v[s]);
          }
          const char* from = arrived();
#pragma unroll
          for (int s = 0; s < kSteps; ++s) multiply<IO, kThis, Own>(from, s, v[s], less, parts);
          next_piece();
        }
      };
      if (!Own::kPlain && linear.scale == nullptr) {
        add(Constant<Format::kPlain>{});
      } else if constexpr (Own::kTakesDigits) {
        for (int piece = place.piece; piece < last; ++piece) {
          const char* from = arrived();
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            multiply_digits<Own>(from, s, piece * kSteps + s, kept, zeros, parts);
          }
          next_piece();
        }
      } else if (!keeps) {
        add(Constant<kFormat>{});
      } else {
        // More instructions that widen weights would be slower to fetch than to run.
        constexpr int kAtOnce = Own::kPlain ? kSteps : 2;
        for (int piece = place.piece; piece < last; ++piece) {
          const char* from = arrived();
#pragma unroll kAtOnce
          for (int s = 0; s < kSteps; ++s) {
            Vectors<kFormat, kSteps, kTiles> v;
            kept.load(piece, s, v);
            multiply<IO, kFormat, Own>(from, s, v, less, parts);
          }
          next_piece();
        }
      }
      place.piece = last;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[t][i] = parts[0][t][i] + parts[1][t][i];
        if (!began) *others_of(warp, t) = make_float4(d[t][0], d[t][1], d[t][2], d[t][3]);
      }
      if (began && ended) finish(place, d);
    }
    __syncthreads();
    if (!began || ended) continue;
    const int end_of_tile = end + place.pieces - place.piece;
    for (int other = warp + 1; other < kWarps && start_of(other) < end_of_tile; ++other) {
      if (start_of(other) == start_of(other + 1)) continue;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float4 sums = *others_of(other, t);
        d[t][0] += sums.x, d[t][1] += sums.y, d[t][2] += sums.z, d[t][3] += sums.w;
      }
    }
    finish(place, d);
  }
}

// Launches a kernel, unless it takes digits and those do not fit; returns whether it did.
template <typename IO, typename Own>
bool launch_tiles(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  const Order order = Order::make<Own>(p, device.sms);
  if (order.blocks == 0 || p.B == 0) return true;
  const int64_t columns = Own::kTiles * kColumns, rows = p.B < columns ? p.B : columns;
  const int64_t kept = KeptOf<Own>::bytes(p.K, rows);
  const int64_t most = device.shared_bytes - Own::kSumBytes;
  const bool keeps = p.K > 0 && Own::kRingBytes + kept <= most;
  if (Own::kTakesDigits && (!keeps || p.B > 1)) return false;
  // Passes over a small matrix run side by side.
  const int64_t passes = (p.B + columns - 1) / columns, most_at_once = device.sms / order.blocks;
  const int64_t at_once = passes < most_at_once ? passes : most_at_once;
  const Grid grid{.blocks = order.blocks * at_once,
                  .threads = Own::kThreads,
                  .shared_bytes = int(Own::kRingBytes + (keeps ? kept : 0)),
                  .stream = stream,
                  .pdl = device.code.arch >= 90,
                  .most_shared_bytes = int(most)};
  const bool norm = p.norm != nullptr && p.K > 0;  // zero columns have no mean
  const auto kernel = norm ? linear_step_kernel<IO, Own, true> : linear_step_kernel<IO, Own, false>;
  launch(kernel, grid, p, order, keeps);
  return true;
}

}  // namespace

template <typename IO, Format kFormat>
void launch_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  constexpr bool kInt4 = kFormat == Format::kInt4;
  constexpr int kOwnSteps = kInt4 ? kInt4Steps : kSteps, kOwnStages = kInt4 ? kInt4Stages : kStages;
  if (device.code.is_turing()) {
    using Turing = Shape<kFormat, kTuringSteps, kTuringStages, 1, kFewWarps>;
    launch_tiles<IO, Turing>(p, device, stream);
  } else if (p.B > kColumns) {
    launch_tiles<IO, Shape<kFormat, kOwnSteps, kOwnStages, 2, kFewWarps>>(p, device, stream);
  } else if (device.shared_bytes >= kSharedOfMany && device.code.arch < 120) {
    if constexpr (kInt4) {  // GPUs since 10.0 may be slow at int8: none was measured
      using Integers = Shape<kFormat, kOwnSteps, kOwnStages, 1, kManyWarps, true>;
      if (device.code.arch < 100 && launch_tiles<IO, Integers>(p, device, stream)) return;
    }
    launch_tiles<IO, Shape<kFormat, kOwnSteps, kOwnStages, 1, kManyWarps>>(p, device, stream);
  } else {
    launch_tiles<IO, Shape<kFormat, kOwnSteps, kOwnStages, 1, kFewWarps>>(p, device, stream);
  }
}

}  // namespace flashcell::cuda
