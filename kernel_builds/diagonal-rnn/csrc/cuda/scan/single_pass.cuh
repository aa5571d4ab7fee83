// Scan of any linear recurrence (sequential/linear.cuh) in one pass over its data, however few
// channels it has. A tile is 32 kN channels by kWarps * kSteps steps. Each warp composes the affine
// maps of its consecutive steps and shares the result through shared memory. Tiles communicate
// through L2: a tile publishes its map, and works out its first carry from the carry into its group
// of tiles and the maps of the tiles before it in the group. Maps are composed in a fixed order,
// whichever tile finishes first, so results do not depend on timing.
//
// The published data are their own flags: the host fills the words with a NaN that is never written
// as data. Blocks draw tiles by ticket, so a tile only waits for tiles that are already being
// worked on. The rows of the next tile are copied while a block works on the current one, except on
// Turing, whose copies are not asynchronous.
#pragma once
#include "../sequential/linear.cuh"

namespace flashcell::cuda {

constexpr uint32_t kUnwritten = 0xffffffffu;

struct Scan {
  int tiles;          // tiles of the longest sequence
  int groups_of_row;  // groups of 32 kN channels in a row
  int64_t columns;    // sequences x groups_of_row
  uint32_t* ticket;
  float* maps;        // [S, tiles, K K + K, D], published
  float* carries;     // [S, groups of tiles, K, D], published
  float* partial;     // [S, tiles, P, D] sums over a tile
  const int* wanted;  // if not null and 0, the scan returns without doing anything
};

// A NaN result is stored with other bits than the flag.
DEVICE void publish(float* to, float value) {
  const uint32_t bits = min(__float_as_uint(value), kUnwritten - 1);
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
DEVICE float peek(const float* from) {
  uint32_t bits;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return __uint_as_float(bits);
}

template <typename Element, int kWarpsOf, int kStepsOf>
struct Tile {
  using Word = typename Element::Word;
  static constexpr int kWarps = kWarpsOf, kSteps = kStepsOf, kLength = kWarps * kSteps;
  static constexpr int K = Element::kStates, kN = Element::kN, kMap = K * K + K;
  static constexpr int kChannels = 32 * kN, kThreads = 32 * kWarps, kRows = Element::kRows;
  // The number of tiles in a group, between two published carries: a group's maps are in shared
  // memory together.
  static constexpr int kGroup = K <= 2 ? 16 : K == 3 ? 8 : 4;
  static constexpr int kAhead = kIsTuring ? 0 : 1;  // tiles whose rows are copied ahead

  struct Shared {
    // Each thread's steps of the current tile and of those ahead.
    Word rows[1 + kAhead][kSteps][kRows][kThreads];
    union {
      struct {
        float warp_map[kWarps][kMap][kChannels];
        float tile_map[kGroup][kMap][kChannels];  // maps of the earlier tiles of the group
      };
      float sums[Element::kSums > 0 ? kWarps : 1][Element::kSums > 0 ? Element::kSums : 1]
                [kChannels];  // used after the maps, which it overwrites
    };
    float carry[K][kChannels];  // the carry into the group
    uint32_t ticket;
  };
  // Bytes of shared memory of a thread block that runs this code.
  static constexpr int bytes(const Code& code) {
    return int(sizeof(Shared)) +
           ((code.is_turing() ? 0 : 1) - kAhead) * int(sizeof(Shared::rows[0]));
  }

  struct Place {  // the tile that a ticket stands for
    int tile;
    int64_t s, channel;
    DEVICE Place(const Scan& scan, uint32_t ticket) {
      const int64_t column = ticket % scan.columns;
      tile = int(ticket / scan.columns), s = column / scan.groups_of_row;
      channel = column % scan.groups_of_row * kChannels;
    }
  };

  static DEVICE void request(const Element& e, int first, Word (&to)[kSteps][kRows][kThreads]) {
    const bool whole = first + kSteps < e.steps;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const char* from = static_cast<const char*>(e.first(r)) + int64_t(first) * e.bytes(r);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (whole || (first + k < e.steps && e.needs(r, first + k))) {
          copy_word<sizeof(Word)>(&to[k][r][threadIdx.x], from + int64_t(k) * e.bytes(r));
        }
      }
    }
  }

  // Calls body(k, raw) for every step from `first` on that exists. A full tile is a separate loop
  // without conditions, so that the compiler reads rows ahead.
  template <typename Body>
  static DEVICE void for_steps(const Element& e, int first,
                               const Word (&rows)[kSteps][kRows][kThreads], Body body) {
    auto step = [&](int k) {
      typename Element::Raw raw;
#pragma unroll
      for (int r = 0; r < kRows; ++r) raw[r] = rows[k][r][threadIdx.x];
      body(k, raw);
    };
    if (first + kSteps <= e.steps) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) step(k);
    } else {
#pragma unroll 1
      for (int k = 0; first + k < e.steps; ++k) step(k);
    }
  }

  static DEVICE void put(float (*rows)[kChannels], const float (&A)[kN][K][K],
                         const float (&b)[kN][K]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int r = 0; r < kMap; ++r) {
        rows[r][lane * kN + c] = r < K * K ? A[c][r / K % K][r % K] : b[c][r % K];
      }
    }
  }
  static DEVICE void get(const float (*rows)[kChannels], int c, float (&A)[K][K], float (&b)[K]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kMap; ++r) {
      (r < K * K ? A[r / K % K][r % K] : b[r % K]) = rows[r][lane * kN + c];
    }
  }
};

template <typename Element, int kWarps, int kSteps, int kResident>
__global__ void __launch_bounds__(32 * kWarps, kResident) scan_kernel(const __grid_constant__
                                                                      typename Element::Params p,
                                                                      const Scan scan) {
  using T = Tile<Element, kWarps, kSteps>;
  constexpr int K = T::K, kN = T::kN, kMap = T::kMap, P = Element::kSums;
  static_assert(sizeof(typename T::Shared) <= (kIsTuring ? kTuringSharedBytes : 99 << 10),
                "a block may have 99 KB on every arch from 8.0 on");
  if (scan.wanted != nullptr && *scan.wanted == 0) return;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t tickets = uint32_t(scan.columns * scan.tiles);
  constexpr int kGroup = T::kGroup;
  const int groups = (scan.tiles + kGroup - 1) / kGroup;
  auto draw = [&] {
    // The counter starts at kUnwritten, so that the first ticket is 0.
    if (threadIdx.x == 0) shared.ticket = atomicAdd(scan.ticket, 1u) + 1;
  };
  draw();
  __syncthreads();
  typename T::Place place(scan, shared.ticket);
  uint32_t ticket = shared.ticket;
  Element e(p, place.s, place.channel + lane * kN);
  const auto first_of = [&](const typename T::Place& of) {
    return of.tile * T::kLength + warp * kSteps;
  };
  if (T::kAhead > 0 && ticket < tickets) T::request(e, first_of(place), shared.rows[0]);
  copy_commit();
  __syncthreads();
  draw();

  for (int stage = 0; ticket < tickets; stage ^= 1) {
    __syncthreads();
    const uint32_t next_ticket = shared.ticket;
    const typename T::Place next_place(scan, next_ticket < tickets ? next_ticket : ticket);
    Element next(p, next_place.s, next_place.channel + lane * kN);
    if constexpr (T::kAhead == 0) {
      T::request(e, first_of(place), shared.rows[0]);
    } else if (next_ticket < tickets) {
      T::request(next, first_of(next_place), shared.rows[stage ^ 1]);
    }
    copy_commit();
    copy_wait<1>();

    const int tile = place.tile, begin = tile * T::kLength, first = begin + warp * kSteps;
    const int group = tile / kGroup, in_group = tile % kGroup;
    float A[kN][K][K], b[kN][K];
#pragma unroll
    for (int c = 0; c < kN; ++c) identity(A[c], b[c]);
    T::for_steps(e, first, shared.rows[stage * T::kAhead],
                 [&](int k, const typename Element::Raw& raw) {
                   float step_A[kN][K][K], step_b[kN][K];
                   e.map(raw, first + k, e.mark(first + k), step_A, step_b);
#pragma unroll
                   for (int c = 0; c < kN; ++c) compose(step_A[c], step_b[c], A[c], b[c]);
                 });
    T::put(shared.warp_map[warp], A, b);
    __syncthreads();

    const bool runs = begin < e.steps || tile == 0, is_last = begin + T::kLength >= e.steps;
    if (runs && warp == 0 && !is_last) {  // publish the map of the tile for the tiles after it
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          float next_A[K][K], next_b[K];
          T::get(shared.warp_map[w], c, next_A, next_b);
          compose(next_A, next_b, A[c], b[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < kN; ++c) {
#pragma unroll
        for (int r = 0; r < kMap; ++r) {
          const int64_t at = ((place.s * scan.tiles + tile) * kMap + r) * p.D + e.d + c;
          publish(scan.maps + at, r < K * K ? A[c][r / K % K][r % K] : b[c][r % K]);
        }
      }
    }
    // Fetch the maps of the group's earlier tiles, each by one warp; one warp fetches the carry
    // into the group.
    for (int t = kWarps - 1 - warp; runs && t < in_group; t += kWarps) {
      const float* from =
          scan.maps + ((place.s * scan.tiles + group * kGroup + t) * kMap) * p.D + e.d;
      float words[kMap][kN];
      bool missing = true;
      while (missing) {
        missing = false;
#pragma unroll
        for (int r = 0; r < kMap; ++r) {
#pragma unroll
          for (int c = 0; c < kN; ++c) {
            words[r][c] = peek(from + r * p.D + c);
            missing |= __float_as_uint(words[r][c]) == kUnwritten;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kMap; ++r) {
#pragma unroll
        for (int c = 0; c < kN; ++c) shared.tile_map[t][r][lane * kN + c] = words[r][c];
      }
    }
    float carry[kN][K];
    if (runs && warp == kWarps / 2) {
      if (group == 0) {
        e.begin(carry);
      } else {
#pragma unroll
        for (int c = 0; c < kN * K; ++c) {
          const float* from =
              scan.carries + ((place.s * groups + group) * K + c % K) * p.D + e.d + c / K;
          do carry[c / K][c % K] = peek(from);
          while (__float_as_uint(carry[c / K][c % K]) == kUnwritten);
        }
      }
#pragma unroll
      for (int c = 0; c < kN * K; ++c) shared.carry[c % K][lane * kN + c / K] = carry[c / K][c % K];
    }
    __syncthreads();
    draw();

    if (runs) {
#pragma unroll
      for (int c = 0; c < kN * K; ++c) carry[c / K][c % K] = shared.carry[c % K][lane * kN + c / K];
#pragma unroll 1
      for (int t = 0; t < in_group; ++t) {
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          T::get(shared.tile_map[t], c, A[c], b[c]);
          apply(A[c], b[c], carry[c]);
        }
      }
#pragma unroll 1
      for (int w = 0; w < warp; ++w) {
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          T::get(shared.warp_map[w], c, A[c], b[c]);
          apply(A[c], b[c], carry[c]);
        }
      }
      if (warp == kWarps - 1 && (is_last || in_group == kGroup - 1)) {
        float after[kN][K];
#pragma unroll
        for (int c = 0; c < kN; ++c) {
#pragma unroll
          for (int i = 0; i < K; ++i) after[c][i] = carry[c][i];
          T::get(shared.warp_map[warp], c, A[c], b[c]);
          apply(A[c], b[c], after[c]);
        }
        if (is_last) {
          e.end(after);
        } else {
#pragma unroll
          for (int c = 0; c < kN * K; ++c) {
            publish(scan.carries + ((place.s * groups + group + 1) * K + c % K) * p.D + e.d + c / K,
                    after[c / K][c % K]);
          }
        }
      }
      T::for_steps(e, first, shared.rows[stage * T::kAhead],
                   [&](int k, const typename Element::Raw& raw) {
                     e.advance(raw, first + k, e.mark(first + k), carry);
                   });
    }
    e.pad(max(first, e.steps), min(first + kSteps, e.steps + e.padding));

    if constexpr (P > 0) {
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kN * P; ++c)
        shared.sums[warp][c % P][lane * kN + c / P] = e.sums[c / P][c % P];
      __syncthreads();
      for (int i = threadIdx.x; i < P * T::kChannels; i += T::kThreads) {
        const int q = i / T::kChannels, channel = i % T::kChannels;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += shared.sums[w][q][channel];
        if (place.channel + channel < p.D) {
          scan.partial[((place.s * scan.tiles + tile) * P + q) * p.D + place.channel + channel] =
              sum;
        }
      }
    }
    e = next, place = next_place, ticket = next_ticket;
  }
}

}  // namespace flashcell::cuda
