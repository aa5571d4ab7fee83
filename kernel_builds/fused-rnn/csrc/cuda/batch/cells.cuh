// The cells of a tile: sums of the product in, states and h out.
#pragma once
#include "common/cuda/ptx/named_barrier.cuh"
#include "product.cuh"
#include "words.cuh"

namespace flashcell::cuda::batch {

template <typename S, int U>
DEVICE void load_bias(float (&bias)[U], const Work& work, const Position<S>& at, int row,
                      int unit) {
  const int units = work.unit_tiles * S::kUnits;
  const int64_t place = (int64_t(at.head) * S::R + row) * units + at.unit0 + unit;
  const float* from = work.bias + place;
  if constexpr (U == 4) {
    const float4 b = __ldg(reinterpret_cast<const float4*>(from));
    bias[0] = b.x, bias[1] = b.y, bias[2] = b.z, bias[3] = b.w;
  } else if constexpr (U == 2) {
    const float2 b = __ldg(reinterpret_cast<const float2*>(from));
    bias[0] = b.x, bias[1] = b.y;
  } else {
    bias[0] = __ldg(from);
  }
}

// A group is 16 units of 8 rows, which a warp runs at a time, a lane 4 units of a row. In a last
// group of 8 or 4 units a lane has 2 or 1. During a group it loads the inputs of the next ones.
template <typename S>
struct Cells {
  using Cell = typename S::Cell;
  using IO = typename S::IO;
  using V = typename S::V;
  static constexpr int G = S::G, K = S::K, R = S::R, kSaved = S::kSaved;
  static constexpr int kIo = S::kIo;
  static constexpr int kCount = S::kBlocks * 2 * S::kGroups;  // groups of a lane
  // Whether x is a part of the sums: then dr equals dx, as the cell reads only x + r. Otherwise it
  // is loaded with the states.
  static constexpr bool kSumsX = !Cell::kSplitGrad;

  // A sequence of the tile as a lane sees it: offsets are those of the tile's first unit, in bytes.
  struct Row {
    const char* x;
    int64_t h;       // offset in h
    uint32_t step;   // the number of the row in h_prev and the saved values
    uint32_t state;  // offset in a state
    uint32_t kept;   // where the state is kept, in shared memory
    bool carries;    // the step is one of the sequence's
    bool runs, zeros, ends;
    bool clears;  // the next step resets: the states after this one are 0
  };
  // The words of four units in the I/O type, of kIo bytes each, or of the first ones.
  using Quad = uint32_t[kIo];
  template <int U>
  static constexpr int kWords = (U * kIo + 3) / 4;
  DEVICE static float unit_value(const Quad& words, int unit) {
    Pair<IO> both;
#pragma unroll
    for (int i = 0; i < kIo / 2; ++i) both.word[i] = words[unit / 2 * (kIo / 2) + i];
    return unit % 2 ? both.floats().y : both.floats().x;
  }
  struct Inputs {  // of four units, or of the first ones
    Quad x[G];
    float states[K][4];
  };
  // The lane's first unit of a group, in the tile.
  template <int group>
  DEVICE static int unit_of() {
    return group * 16 + threadIdx.x % 4 * S::template kOfLane<group>;
  }

  // Where the sum of a gate and of a unit of the lane is: sums[m][column][2 half + element].
  struct SumPlace {
    int column, element;
  };
  template <int group>
  DEVICE static SumPlace sum_place(int gate, int unit) {
    constexpr int U = S::template kOfLane<group>;
    if constexpr (U == 1) return {2 * G * group + gate / 2, gate % 2};
    return {2 * G * group + gate * (U / 2) + unit / 2, unit % 2};
  }

  // Sets the sums to the bias (of an extra bias row, which belongs to the last gate's product, if
  // there is one) plus x, unless the engine computes x, while h is not there yet.
  DEVICE void start(typename S::Sums& sums) const {
#pragma unroll
    for (int m = 0; m < S::kBlocks; ++m) {
      const Row rows[2] = {row(m, 0), row(m, 1)};
      [&]<int... group>(std::integer_sequence<int, group...>) {
        (start_group<group>(sums[m], rows), ...);
      }(std::make_integer_sequence<int, S::kGroups>());
    }
  }
  template <int group>
  DEVICE void start_group(float (&sums)[S::kColumns / 8][4], const Row (&rows)[2]) const {
    constexpr int U = S::template kOfLane<group>;
    Quad x[2][G];
    if constexpr (kSumsX) {
      load_x<group>(x[0], rows[0]);
      load_x<group>(x[1], rows[1]);
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float bias[U];
      load_bias<S>(bias, work, at, g == G - 1 ? R - 1 : g, unit_of<group>());
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const SumPlace to = sum_place<group>(g, u);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float given = 0;
          if constexpr (kSumsX) given = unit_value(x[half][g], u);
          sums[to.column][2 * half + to.element] = bias[u] + given;
        }
      }
    }
  }

  const ForwardParams& p;
  const Work& work;
  const Position<S>& at;
  // Whether the tile's state stays in shared memory: not with `hold`, after whose steps a sequence
  // may end that has no step of its own to write the last state in.
  bool keeps;
  uint32_t states;  // of the tile, in shared memory
  Row now, after;
  // Groups whose inputs are loaded ahead: one where they are a kept state alone.
  static constexpr bool kShared = S::kKeeps && kSumsX;
  static constexpr int kAhead =
      !kShared && S::kGroups > 1 && S::kBlocks* S::kColumns <= 256 ? 2 : 1;
  Inputs in[kAhead + 1];  // of this group and the next

  DEVICE Cells(const ForwardParams& p, const Work& work, const Position<S>& at, uint32_t states)
      : p(p),
        work(work),
        at(at),
        keeps(S::kKeeps && p.hold == nullptr && at.own < S::kKeptTiles),
        states(states + at.own * S::kStateBytes) {}

  // Returns row 8 `half` of block m of the warp's rows, plus the lane's.
  DEVICE Row row(int m, int half) const {
    const int own = at.own_row() + m * 64 + half * 8;
    const Column column(p, at.row0 + own, p.x_batch);
    const int64_t ND = int64_t(work.N) * work.D;
    const int first = at.unit0, unit = at.head * work.D + first, t = at.t;
    const bool held = column.holds(p, t);
    Row row;
    row.carries = column.runs(t), row.runs = row.carries && !held;
    row.zeros = held || (t >= column.length && t < column.length + column.padding);
    row.clears = column.resets(p, t + 1), row.ends = t + 1 == column.length;
    const int64_t x = (row.runs ? column.x_offset + t * p.x_time : 0) + at.head * p.x_head + first;
    row.x = static_cast<const char*>(p.x) + kIo * x;
    const int64_t begin = p.sequences == nullptr ? column.index * work.h_batch : column.row * ND;
    row.h = kIo * (begin + t * work.h_time + unit);
    row.step = uint32_t(column.row) + uint32_t(t);
    row.state = 4 * uint32_t(int(column.index) * int(ND) + unit);
    row.kept = states + own * S::kKeptUnits * 4;
    return row;
  }
  DEVICE bool reads_x() const { return work.input_panels == 0; }
  template <int group>
  DEVICE bool inside() const {  // whether the lane's units of this group exist
    return at.unit0 + unit_of<group>() < work.D;
  }
  // Where the lane's state of a group is kept. So that two rows that are read at once share no
  // bank, the groups lie otherwise in every other row: of 32 and 64 units they change places, of 36
  // and 40 the last comes first. (In a last group of 4 units every fourth row shares one.)
  template <int group>
  DEVICE uint32_t kept(const Row& row) const {
    constexpr int U = S::template kOfLane<group>;
    const uint32_t odd = threadIdx.x / 4 % 2, own = threadIdx.x % 4 * U * 4;
    if constexpr (S::kUnits % 32 == 0) return row.kept + ((group ^ odd) * 64 + own);
    if constexpr (S::kKeptUnits == 40)
      return row.kept + (group * 64 + odd * uint32_t(U == 4 ? 32 : -128) + own);
    return row.kept + (group * 64 + own);
  }
  DEVICE int64_t state_bytes() const { return 4 * p.S * work.N * work.D; }

  // Where the lane's part of a group of row(m, half) lies in h after step t, as an operand. Its
  // 16-byte piece is swizzled by the row, which is r modulo 8.
  template <int group>
  DEVICE char* operand(int t, int m, int half) const {
    const unsigned lane = threadIdx.x % 32, unit = unsigned(at.unit0) + unit_of<group>();
    char* panel = at.operand(work, t) + unit / S::kDepth * at.panel_bytes(work);
    const unsigned swizzled = (unit / S::kPiece % 8 ^ lane / 4) * 16;
    return panel + (swizzled + at.own_row() * kRowBytes + unit % S::kPiece * kIo) +
           (m * 64 + half * 8) * kRowBytes;
  }
  // The place in a tensor [B, T, values, N, D] of the row and of a group.
  template <int group>
  DEVICE char* output(void* tensor, const Row& row, int values) const {
    const int64_t begin = int64_t(row.step) * (values * int64_t(work.N) * work.D);
    const int unit = at.head * work.D + at.unit0 + unit_of<group>();
    return static_cast<char*>(tensor) + kIo * (begin + unit);
  }
  // Writes the lane's units of a group to h, which may have fewer units than the tile.
  template <int group, int kCount>
  DEVICE void store_h(const Row& row, const uint32_t (&words)[kCount]) const {
    constexpr int U = S::template kOfLane<group>, kPart = U < 2 ? U : 2;  // units of a store
    char* to = static_cast<char*>(p.h) + row.h + unit_of<group>() * kIo;
    if (work.h_units == work.D) return store_bytes<U * kIo>(to, words);
#pragma unroll
    for (int u = 0; u < U; u += kPart) {
      uint32_t part[kWords<kPart>];
      memcpy(part, words + kWords<kPart> * (u / kPart), sizeof part);
      const bool exists = at.unit0 + unit_of<group>() + u < work.h_units;
      if (exists) store_bytes<kPart * kIo>(to + u * kIo, part);
    }
  }

  // Starts to load x of a group, if its units exist, or sets it to zeros; in rows that do not run,
  // values that nobody uses.
  template <int group>
  DEVICE void load_x(Quad (&x)[G], const Row& row) const {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const char* from = row.x + kIo * g * p.x_gate + unit_of<group>() * kIo;
      if constexpr (constexpr int kBytes = S::template kOfLane<group> * kIo; kBytes == 2) {
        load_half_constant_if(x[g][0], from, inside<group>() && reads_x());
      } else {
        load_constant_if<kBytes / 4>(x[g], from, inside<group>() && reads_x());
      }
    }
  }
  template <int group>
  DEVICE void load(Inputs& in, Row& row) const {
    if constexpr (!kSumsX) {
      // Keeps the compiler from holding a pointer for every gate, for which there are no registers.
      keep_pointer(row.x);
      load_x<group>(in.x, row);
    }
#pragma unroll
    for (int k = S::kFirst; k < K; ++k) {
      const char* last =
          static_cast<const char*>(p.last) + k * state_bytes() + row.state + unit_of<group>() * 4;
      if (keeps && at.t > 0) {
        load_first<S::template kOfLane<group>>(in.states[k], kept<group>(row));
      } else {
        load_first_if<S::template kOfLane<group>>(in.states[k], last, inside<group>());
      }
    }
  }

  template <int i>
  DEVICE void load_inputs() {
    if constexpr (i < kCount) {
      constexpr int group = i % S::kGroups;
      if constexpr (group == 0) after = row(i / S::kGroups / 2, i / S::kGroups % 2);
      load<group>(in[i % (kAhead + 1)], after);
    }
  }
  DEVICE void begin() {
    [&]<int... i>(std::integer_sequence<int, i...>) {
      (load_inputs<i>(), ...);
    }(std::make_integer_sequence<int, kAhead>());
  }
  template <int i>
  DEVICE void run(const typename S::Sums& sums) {
    constexpr int m = i / S::kGroups / 2, half = i / S::kGroups % 2, group = i % S::kGroups;
    constexpr int U = S::template kOfLane<group>;
    if constexpr (group == 0) now = after;
    load_inputs<i + kAhead>();
    if (!now.runs || !inside<group>()) return;
    float products[G][U];
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const SumPlace from = sum_place<group>(g, u);
        products[g][u] = sums[m][from.column][2 * half + from.element];
      }
    }
    run_units<group>(m, half, in[i % (kAhead + 1)], products);
  }

  // Runs U units of a sequence.
  template <int group, int U>
  DEVICE void run_units(int m, int half, const Inputs& in, const float (&products)[G][U]) const {
    const int64_t ND = int64_t(work.N) * work.D;
    float own[U] = {};  // the last gate's own bias
    if constexpr (R > G) load_bias<S>(own, work, at, G - 1, unit_of<group>());
    float values[kSaved][U], state[K][U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      V xs[G], rs[G], from[K], to[K], kept[kSaved];
#pragma unroll
      for (int g = 0; g < G; ++g) {
        rs[g] = V(products[g][u]);
        if constexpr (kSumsX) {
          xs[g] = V(0.f);
        } else {
          xs[g] = V(unit_value(in.x[g], u));
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
    struct Rounded {
      uint32_t of[kWords<U>];
      DEVICE explicit Rounded(const float (&v)[U]) {
#pragma unroll
        for (int u = 0; u < U; u += 2) {
          const Pair<IO> pair = Pair<IO>::of(v[u], u + 1 < U ? v[u + 1] : 0.f);
#pragma unroll
          for (int i = 0; i < kIo / 2; ++i) of[u / 2 * (kIo / 2) + i] = pair.word[i];
        }
      }
    };
    if constexpr (S::kSaves) {
      char* saved = output<group>(p.saved, now, kSaved);
#pragma unroll
      for (int v = 0; v < kSaved; ++v) {
        store_bytes<U * kIo>(saved + kIo * v * ND, Rounded(values[v]).of);
      }
    }
    const Rounded h(state[0]);
    Rounded shown = h, multiplied = h;  // what the next step sees, and what it multiplies
#pragma unroll
    for (int i = 0; i < kWords<U>; ++i) {
      shown.of[i] = now.clears ? 0 : h.of[i];
      multiplied.of[i] = cuda::operand<IO>(shown.of[i]);
    }
    store_bytes<U * kIo>(operand<group>(at.t, m, half), multiplied.of);
    store_h<group>(now, h.of);
    if constexpr (S::kSaves) {
      // h_prev of the next step is written here: loading h there would wait for L2. Held steps may
      // lie between, so with `hold` it is loaded from `last`, before that is overwritten below.
      char* before = output<group>(p.h_prev, now, 1);
      if (at.t == 0 || p.hold != nullptr) {
        float from[U];
        load_global(from, static_cast<const char*>(p.last) + now.state + unit_of<group>() * 4);
        store_bytes<U * kIo>(before, Rounded(from).of);
      }
      if (p.hold == nullptr && !now.ends) store_bytes<U * kIo>(before + kIo * ND, shown.of);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float next[U];
#pragma unroll
      for (int u = 0; u < U; ++u) next[u] = now.clears ? 0.f : state[k][u];
      if (k >= S::kFirst && keeps) store_shared(kept<group>(now), next);
      const bool is_read = k >= S::kFirst && !keeps;  // by the next step
      if (!is_read && !now.ends && p.hold == nullptr) continue;
      char* last = static_cast<char*>(p.last) + k * state_bytes() + now.state;
      store_global(last + unit_of<group>() * 4, next);
    }
  }

  // Writes the zeros of padding and of held steps, which only pass the states on.
  DEVICE void pass_states_on() const {
#pragma unroll 1
    for (int i = 0; i < S::kBlocks * 2; ++i) {
      const Row row = this->row(i / 2, i % 2);
      if (!row.zeros) continue;
      [&]<int... group>(std::integer_sequence<int, group...>) {
        (pass_group_on<group>(row, i / 2, i % 2), ...);
      }(std::make_integer_sequence<int, S::kGroups>());
    }
  }
  template <int group>
  DEVICE void pass_group_on(const Row& row, int m, int half) const {
    constexpr int U = S::template kOfLane<group>;
    using Words = typename WordsOf<kIo * U>::type;
    if (!inside<group>()) return;
    const int64_t ND = int64_t(work.N) * work.D;
    const auto put = [](void* to, Words words) { *static_cast<Words*>(to) = words; };
    const uint32_t none[kWords<U>] = {};
    store_h<group>(row, none);
    if constexpr (S::kSaves) {
      put(output<group>(p.h_prev, row, 1), Words{});
      char* saved = output<group>(p.saved, row, kSaved);
      for (int v = 0; v < kSaved; ++v) put(saved + kIo * v * ND, Words{});
    }
    if (!row.carries) return;
    const void* before = operand<group>(at.t + 1, m, half);
    put(operand<group>(at.t, m, half),
        row.clears ? Words{} : __ldcg(static_cast<const Words*>(before)));
    const float zeros[U] = {};
    for (int k = 0; row.clears && k < K; ++k) {
      char* last = static_cast<char*>(p.last) + k * state_bytes() + row.state;
      store_global(last + unit_of<group>() * 4, zeros);
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
