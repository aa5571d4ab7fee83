// The cells of a tile: sums of the product in, states and h out.
#pragma once
#include "../../cells/reads_h.h"
#include "common/cuda/ptx/named_barrier.cuh"
#include "product.cuh"

namespace flashcell::cuda::batch {

template <typename S>
DEVICE float4 load_bias(const Work& work, const Position<S>& at, int row, int unit) {
  const int units = work.unit_tiles * S::kUnits;
  const int64_t place = (int64_t(at.head) * S::R + row) * units + at.unit0 + unit;
  return __ldg(reinterpret_cast<const float4*>(work.bias + place));
}

// A warp runs 16 units of 8 rows at a time, a lane 4 units of a row: a group. While it runs one, it
// loads the inputs of the next ones.
template <typename S>
struct Cells {
  using Cell = typename S::Cell;
  using IO = typename S::IO;
  using V = typename S::V;
  static constexpr int G = S::G, K = S::K, R = S::R, kSaved = S::kSaved;
  static constexpr int kCount = S::kBlocks * 2 * S::kGroups;  // groups of a lane
  // Whether x is a part of the sums: then dr equals dx, as the cell reads only x + r. Otherwise it
  // is loaded with the states.
  static constexpr bool kSumsX = !Cell::kSplitGrad;

  // A sequence of the tile as a lane sees it: offsets are those of the lane's first unit, in bytes.
  struct Row {
    const char* x;
    int64_t h;       // offset in h
    uint32_t state;  // offset in a state
    bool carries;    // the step is one of the sequence's
    bool runs, zeros, ends;
    bool clears;  // the next step resets: the states after this one are 0
  };
  struct Inputs {  // of four units
    uint32_t x[G][2];
    float states[K][4];
  };

  // Sets the sums to the bias (of an extra bias row, which belongs to the last gate's product, if
  // there is one) plus x, while h is not there yet.
  DEVICE void start(typename S::Sums& sums) const {
    const int unit = threadIdx.x % 4 * 4;
#pragma unroll
    for (int m = 0; m < S::kBlocks; ++m) {
      uint32_t x[2][S::kGroups][G][2];
#pragma unroll
      for (int half = 0; half < 2 * kSumsX; ++half) {
        const Row row = this->row(m, half);
#pragma unroll
        for (int group = 0; group < S::kGroups; ++group) load_x(x[half][group], row, group);
      }
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const int j = 2 * (G * group + g);
          const float4 b = load_bias(work, at, g == G - 1 ? R - 1 : g, group * 16 + unit);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float2 low{}, high{};
            if constexpr (kSumsX) {
              low = Pair<IO>{{x[half][group][g][0]}}.floats();
              high = Pair<IO>{{x[half][group][g][1]}}.floats();
            }
            sums[m][j][2 * half] = b.x + low.x, sums[m][j][2 * half + 1] = b.y + low.y;
            sums[m][j + 1][2 * half] = b.z + high.x, sums[m][j + 1][2 * half + 1] = b.w + high.y;
          }
        }
      }
    }
  }

  const ForwardParams& p;
  const Work& work;
  const Position<S>& at;
  Row now, after;
  static constexpr int kAhead = S::kGroups > 1 && S::kBlocks* S::kColumns <= 256 ? 2 : 1;
  Inputs in[kAhead + 1];  // of this group and the next

  DEVICE Cells(const ForwardParams& p, const Work& work, const Position<S>& at)
      : p(p), work(work), at(at) {}

  // Returns row 8 `half` of block m of the warp's rows, plus the lane's.
  DEVICE Row row(int m, int half) const {
    const Column column(p, at.row0 + at.own_row() + m * 64 + half * 8, p.x_batch);
    const int64_t ND = int64_t(work.N) * work.D;
    const int first = at.unit0 + threadIdx.x % 4 * 4, unit = at.head * work.D + first, t = at.t;
    const bool held = column.holds(p, t);
    Row row;
    row.carries = column.runs(t), row.runs = row.carries && !held;
    row.zeros = held || (t >= column.length && t < column.length + column.padding);
    row.clears = column.resets(p, t + 1), row.ends = t + 1 == column.length;
    const int64_t x = (row.runs ? column.x_offset + t * p.x_time : 0) + at.head * p.x_head + first;
    row.x = static_cast<const char*>(p.x) + 2 * x;
    row.h = 2 * ((column.row + t) * ND + unit);
    row.state = 4 * uint32_t(int(column.index) * int(ND) + unit);
    return row;
  }
  DEVICE bool inside(int group) const {  // whether the lane's units of this group exist
    return at.unit0 + group * 16 + int(threadIdx.x % 4) * 4 < work.D;
  }
  DEVICE int64_t state_bytes() const { return 4 * p.S * work.N * work.D; }

  // Where the lane's part of a group of row(m, half) lies in h after step t, as an operand. Its
  // 16-byte piece is 2 (unit / 16) + q / 2, swizzled by the row, which is r modulo 8.
  DEVICE char* operand(int t, int m, int half, int group) const {
    const unsigned lane = threadIdx.x % 32, q = lane % 4, place = unsigned(at.unit0) / 16 + group;
    char* panel = at.operand(work, t) + place / 4 * at.panel_bytes(work);
    const unsigned swizzled = (q / 2 ^ lane / 4) * 16 ^ place % 4 * 32;
    return panel + (swizzled + at.own_row() * kRowBytes + q % 2 * 8) +
           (m * 64 + half * 8) * kRowBytes;
  }
  // The place in a tensor [B, T, values, N, D] of the row and of a group.
  DEVICE char* output(void* tensor, const Row& row, int values, int group) const {
    const int unit = at.head * work.D + at.unit0 + threadIdx.x % 4 * 4;
    return static_cast<char*>(tensor) + (row.h * values - 2 * (values - 1) * unit) + group * 32;
  }
  DEVICE static void put(void* to, uint2 words) { *static_cast<uint2*>(to) = words; }

  // Starts to load x of a group, if its units exist; in rows that do not run, values that nobody
  // uses.
  DEVICE void load_x(uint32_t (&x)[G][2], const Row& row, int group) const {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      load_constant_if(x[g], row.x + 2 * g * p.x_gate + group * 32, inside(group));
    }
  }
  DEVICE void load(Inputs& in, Row& row, int group) const {
    if constexpr (!kSumsX) {
      // Keeps the compiler from holding a pointer for every gate, for which there are no registers.
      keep_pointer(row.x);
      load_x(in.x, row, group);
    }
#pragma unroll
    for (int k = kReadsH<Cell> ? 0 : 1; k < K; ++k) {
      const char* last = static_cast<const char*>(p.last) + k * state_bytes() + row.state;
      load_if(in.states[k], last + group * 64, inside(group));
    }
  }

  DEVICE void begin() {
    after = row(0, 0);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(in[i], after, i);
  }
  template <int i>
  DEVICE void run(const typename S::Sums& sums) {
    constexpr int m = i / S::kGroups / 2, half = i / S::kGroups % 2, group = i % S::kGroups;
    if constexpr (group == 0) now = after;
    if constexpr (constexpr int next = i + kAhead; next < kCount) {
      if constexpr (next % S::kGroups == 0) {
        after = row(next / S::kGroups / 2, next / S::kGroups % 2);
      }
      load(in[next % (kAhead + 1)], after, next % S::kGroups);
    }
    if (!now.runs || !inside(group)) return;
    float products[G][4];
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        products[g][u] = sums[m][2 * (G * group + g) + u / 2][2 * half + u % 2];
      }
    }
    run_units(m, half, group, in[i % (kAhead + 1)], products);
  }

  // Runs four units of a sequence.
  DEVICE void run_units(int m, int half, int group, const Inputs& in,
                        const float (&products)[G][4]) const {
    const int64_t ND = int64_t(work.N) * work.D;
    float own[4] = {};  // the last gate's own bias
    if constexpr (R > G) {
      const float4 b = load_bias(work, at, G - 1, group * 16 + threadIdx.x % 4 * 4);
      own[0] = b.x, own[1] = b.y, own[2] = b.z, own[3] = b.w;
    }
    float values[kSaved][4], state[K][4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      V xs[G], rs[G], from[K], to[K], kept[kSaved];
#pragma unroll
      for (int g = 0; g < G; ++g) {
        rs[g] = V(products[g][u]);
        if constexpr (kSumsX) {
          xs[g] = V(0.f);
        } else {
          const float2 x = Pair<IO>{{in.x[g][u / 2]}}.floats();
          xs[g] = V(u % 2 ? x.y : x.x);
        }
      }
      if constexpr (R > G) xs[G - 1] += V(own[u]);
#pragma unroll
      for (int k = 0; k < K; ++k) from[k] = V(in.states[k][u]);
      Cell::forward(xs, rs, from, to, kept);
#pragma unroll
      for (int k = 0; k < K; ++k) state[k][u] = to_float(to[k]);
#pragma unroll
      for (int v = 0; v < kSaved; ++v) values[v][u] = to_float(kept[v]);
    }
    const auto rounded = [](const float (&v)[4]) {
      return make_uint2(Pair<IO>::of(v[0], v[1]).word[0], Pair<IO>::of(v[2], v[3]).word[0]);
    };
    const uint2 h = rounded(state[0]);
    put(operand(at.t, m, half, group), now.clears ? make_uint2(0, 0) : h);
    put(output(p.h, now, 1, group), h);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k == 0 && !kReadsH<Cell> && !now.ends && p.hold == nullptr) continue;
      char* last = static_cast<char*>(p.last) + k * state_bytes() + now.state + group * 64;
      *reinterpret_cast<float4*>(last) =
          now.clears ? float4{} : make_float4(state[k][0], state[k][1], state[k][2], state[k][3]);
    }
    if constexpr (S::kSaves) {
      const void* before = operand(at.t + 1, m, half, group);  // of step t - 1
      put(output(p.h_prev, now, 1, group), __ldcg(static_cast<const uint2*>(before)));
      char* saved = output(p.saved, now, kSaved, group);
#pragma unroll
      for (int v = 0; v < kSaved; ++v) put(saved + 2 * v * ND, rounded(values[v]));
    }
  }

  // Writes the zeros of padding and of held steps, which only pass the states on.
  DEVICE void pass_states_on() const {
    const int64_t ND = int64_t(work.N) * work.D;
    const uint2 zeros = make_uint2(0, 0);
#pragma unroll 1
    for (int i = 0; i < S::kBlocks * 2; ++i) {
      const Row row = this->row(i / 2, i % 2);
      if (!row.zeros) continue;
#pragma unroll 1
      for (int group = 0; group < S::kGroups && inside(group); ++group) {
        put(output(p.h, row, 1, group), zeros);
        if constexpr (S::kSaves) {
          put(output(p.h_prev, row, 1, group), zeros);
          char* saved = output(p.saved, row, kSaved, group);
          for (int v = 0; v < kSaved; ++v) put(saved + 2 * v * ND, zeros);
        }
        if (!row.carries) continue;
        const void* before = operand(at.t + 1, i / 2, i % 2, group);
        put(operand(at.t, i / 2, i % 2, group),
            row.clears ? zeros : __ldcg(static_cast<const uint2*>(before)));
        for (int k = 0; row.clears && k < K; ++k) {
          char* last = static_cast<char*>(p.last) + k * state_bytes() + row.state + group * 64;
          *reinterpret_cast<float4*>(last) = float4{};
        }
      }
    }
  }

  // Ends the tile's step: lets the blocks read h that compute the next.
  DEVICE void finish() const {
    if (!at.runs() || p.hold != nullptr || p.sequences != nullptr) pass_states_on();
    if (!at.runs()) return;
    fence_proxy_async_global();
    named_barrier_sync<kWarpgroup>(int(threadIdx.x) / kWarpgroup);  // 1 or 2
    if (threadIdx.x % kWarpgroup == 0) add_released(at.published, 1);
  }
};

}  // namespace flashcell::cuda::batch
