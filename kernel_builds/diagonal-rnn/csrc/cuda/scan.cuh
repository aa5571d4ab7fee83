// Any linear recurrence (linear.cuh) in one pass over its data, however few channels it has. A tile
// is 32 kN channels and kWarps kSteps steps: every warp takes consecutive steps and holds them in
// registers, composes their maps, and tells the others through shared memory. Tiles tell each other
// through L2: a tile publishes its map, then works out its first carry from what the tiles before
// it published. It composes them always in the same order, whoever came first, so that results do
// not depend on timing: from the carry into its group of tiles, map by map.
//
// What is published is its own flag: the host fills the words with a NaN that is never written.
// Tiles are numbered in the order in which blocks start, so a tile only waits for running ones.
#pragma once
#include "linear.cuh"

namespace flashcell::cuda {

constexpr int kTileGroup = 32;  // tiles between two published carries
constexpr uint32_t kUnwritten = 0xffffffffu;

struct Scan {
  int tiles;           // of the longest sequence
  int groups_of_row;   // of 32 kN channels
  int64_t columns;     // sequences x groups_of_row
  uint32_t* ticket;
  float* maps;      // [S, tiles, K K + K, D]
  float* carries;   // [S, groups of tiles, K, D]
  float* partial;   // [S, tiles, P, D] sums over a tile
};

DEVICE void publish(float* to, float value) {  // no NaN of ours is the flag
  const uint32_t bits = min(__float_as_uint(value), kUnwritten - 1);
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
DEVICE float peek(const float* from) {
  uint32_t bits;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return __uint_as_float(bits);
}
DEVICE float settled(float value, const float* from) {  // value was peeked
  while (__float_as_uint(value) == kUnwritten) value = peek(from);
  return value;
}

// carry = A carry + b
template <int K>
DEVICE void apply(const float (&A)[K][K], const float (&b)[K], float (&carry)[K]) {
  float next[K];
#pragma unroll
  for (int i = 0; i < K; ++i) {
    next[i] = b[i];
#pragma unroll
    for (int j = 0; j < K; ++j) next[i] = fmaf(A[i][j], carry[j], next[i]);
  }
#pragma unroll
  for (int i = 0; i < K; ++i) carry[i] = next[i];
}

// (A, b) = (A2, b2) after (A, b)
template <int K>
DEVICE void compose(const float (&A2)[K][K], const float (&b2)[K], float (&A)[K][K],
                    float (&b)[K]) {
#pragma unroll
  for (int j = 0; j < K; ++j) {
    float column[K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
      column[i] = 0;
#pragma unroll
      for (int k = 0; k < K; ++k) column[i] = fmaf(A2[i][k], A[k][j], column[i]);
    }
#pragma unroll
    for (int i = 0; i < K; ++i) A[i][j] = column[i];
  }
  apply(A2, b2, b);
}

template <typename Element, int kWarpsOf, int kStepsOf>
struct Tile {
  static constexpr int kWarps = kWarpsOf, kSteps = kStepsOf, kLength = kWarps * kSteps;
  static constexpr int K = Element::kStates, kN = Element::kN, kWords = K * K + K;
  static constexpr int kChannels = 32 * kN;
  // Maps of the warps, then their first carries, then their sums.
  static constexpr int kRows = kWords > Element::kSums ? kWords : Element::kSums;
  struct Shared {
    float rows[kWarps][kRows][kChannels];
    uint32_t ticket;
  };

  // Row r of map or carry `index` of what a column published.
  static DEVICE float* row(float* of, int64_t index, int rows, int r, int64_t D, int64_t d) {
    return of + (index * rows + r) * D + d;
  }

  // The carry into tile `tile`, from all tiles before it.
  static DEVICE void look_back(const Element& e, const Scan& scan, int64_t s, int tile,
                               float (&carry)[kN][K]) {
    const int64_t D = e.p.D;
    const int group = tile / kTileGroup, groups = (scan.tiles + kTileGroup - 1) / kTileGroup;
    if (group == 0) {
      e.begin(carry);
    } else {
#pragma unroll
      for (int c = 0; c < kN * K; ++c) {
        const float* from = row(scan.carries, s * groups + group, K, c % K, D, e.d) + c / K;
        carry[c / K][c % K] = settled(peek(from), from);
      }
    }
    constexpr int kBatch = kWords * kN <= 4 ? 8 : kWords * kN <= 12 ? 2 : 1;
    for (int first = group * kTileGroup; first < tile; first += kBatch) {
      float words[kBatch][kN][kWords];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int r = 0; r < kWords; ++r) {
#pragma unroll
          for (int c = 0; c < kN; ++c) {
            const float* from = row(scan.maps, s * scan.tiles + first + k, kWords, r, D, e.d) + c;
            words[k][c][r] = first + k < tile ? peek(from) : 0;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (first + k >= tile) break;
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          float A[K][K], b[K];
#pragma unroll
          for (int r = 0; r < kWords; ++r) {
            const float* from = row(scan.maps, s * scan.tiles + first + k, kWords, r, D, e.d) + c;
            (r < K * K ? A[r / K % K][r % K] : b[r % K]) = settled(words[k][c][r], from);
          }
          apply(A, b, carry[c]);
        }
      }
    }
  }
};

template <typename Element, int kWarps, int kSteps>
__global__ void __launch_bounds__(32 * kWarps)
    scan_kernel(const __grid_constant__ typename Element::Params p, const Scan scan) {
  using T = Tile<Element, kWarps, kSteps>;
  constexpr int K = T::K, kN = T::kN, kWords = T::kWords;
  __shared__ typename T::Shared shared;
  if (threadIdx.x == 0) shared.ticket = atomicAdd(scan.ticket, 1u) + 1;  // from kUnwritten on
  __syncthreads();
  const int tile = int(shared.ticket / scan.columns);
  const int64_t column = shared.ticket % scan.columns, s = column / scan.groups_of_row;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Element e(p, s, (column % scan.groups_of_row * 32 + lane) * kN);
  const int begin = tile * T::kLength;
  const int first = begin + warp * kSteps;

  typename Element::Raw raw[kSteps];
  Mark mark[kSteps];
  float A[kN][K][K], b[kN][K];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (first + k < e.steps) raw[k] = e.load(first + k), mark[k] = e.mark(first + k);
  }
#pragma unroll
  for (int c = 0; c < kN * K * K; ++c) A[c / (K * K)][c / K % K][c % K] = c / K % K == c % K;
#pragma unroll
  for (int c = 0; c < kN * K; ++c) b[c / K][c % K] = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (first + k >= e.steps) break;
    float step_A[kN][K][K], step_b[kN][K];
    e.map(raw[k], first + k, mark[k], step_A, step_b);
#pragma unroll
    for (int c = 0; c < kN; ++c) compose(step_A[c], step_b[c], A[c], b[c]);
  }
#pragma unroll
  for (int c = 0; c < kN; ++c) {
#pragma unroll
    for (int r = 0; r < kWords; ++r) {
      shared.rows[warp][r][lane * kN + c] = r < K * K ? A[c][r / K % K][r % K] : b[c][r % K];
    }
  }
  __syncthreads();

  if (warp == 0 && (begin < e.steps || tile == 0)) {
    auto map_of = [&](int w, int c, float (&A)[K][K], float (&b)[K]) {
#pragma unroll
      for (int r = 0; r < kWords; ++r) {
        (r < K * K ? A[r / K % K][r % K] : b[r % K]) = shared.rows[w][r][lane * kN + c];
      }
    };
    const bool is_last = begin + T::kLength >= e.steps;
    if (!is_last) {  // the map of the tile, for those that come after it
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          float next_A[K][K], next_b[K];
          map_of(w, c, next_A, next_b);
          compose(next_A, next_b, A[c], b[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < kN; ++c) {
#pragma unroll
        for (int r = 0; r < kWords; ++r) {
          float* to = T::row(scan.maps, s * scan.tiles + tile, kWords, r, p.D, e.d) + c;
          if (e.stored) publish(to, r < K * K ? A[c][r / K % K][r % K] : b[c][r % K]);
        }
      }
    }
    float carry[kN][K];
    T::look_back(e, scan, s, tile, carry);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int c = 0; c < kN; ++c) {
        float next_A[K][K], next_b[K];
        map_of(w, c, next_A, next_b);
#pragma unroll
        for (int i = 0; i < K; ++i) shared.rows[w][i][lane * kN + c] = carry[c][i];
        apply(next_A, next_b, carry[c]);
      }
    }
    if (is_last) {
      e.end(carry);
    } else if ((tile + 1) % kTileGroup == 0) {
      const int groups = (scan.tiles + kTileGroup - 1) / kTileGroup;
#pragma unroll
      for (int c = 0; c < kN * K; ++c) {
        const int64_t index = s * groups + (tile + 1) / kTileGroup;
        float* to = T::row(scan.carries, index, K, c % K, p.D, e.d) + c / K;
        if (e.stored) publish(to, carry[c / K][c % K]);
      }
    }
  }
  __syncthreads();

  float carry[kN][K];
#pragma unroll
  for (int c = 0; c < kN * K; ++c) carry[c / K][c % K] = shared.rows[warp][c % K][lane * kN + c / K];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (first + k < e.steps) e.advance(raw[k], first + k, mark[k], carry);
  }
  e.pad(max(first, e.steps), min(first + kSteps, e.steps + e.padding));

  if constexpr (Element::kSums > 0) {
    constexpr int P = Element::kSums;
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kN * P; ++c) shared.rows[warp][c % P][lane * kN + c / P] = e.sums[c / P][c % P];
    __syncthreads();
    const int64_t first_channel = column % scan.groups_of_row * T::kChannels;
    for (int i = threadIdx.x; i < P * T::kChannels; i += 32 * kWarps) {
      const int q = i / T::kChannels, channel = i % T::kChannels;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared.rows[w][q][channel];
      if (first_channel + channel < p.D) {
        scan.partial[((s * scan.tiles + tile) * P + q) * p.D + first_channel + channel] = sum;
      }
    }
  }
}

}  // namespace flashcell::cuda
