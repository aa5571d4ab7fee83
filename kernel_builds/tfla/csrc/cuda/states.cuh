// A thread block has 128 rows by 128 columns of one head's state in registers, and walks through
// the chunks of a segment of its sequence. Left rows are scaled as operands; sums are fp32.
#pragma once
#include "states.h"
#include "tile.cuh"

namespace flashcell::cuda {

// Segments of every sequence run side by side, from states that a first pass works out.
struct Segments {
  int count;        // of a sequence
  float *C, *n;     // [count, S, H, K, V], [count, S, H, K]: where segments start; 0 is not used
  bool first_pass;  // from zero, and only to the start of the next segment

  DEVICE static int64_t begin(int64_t chunks, int segment, int count) {
    return chunks * segment / count;
  }
};

template <typename IO, bool kReverse>
struct StateWalk {
  static constexpr int kThreads = 128, kSize = 128, kStages = 3;
  static constexpr int kSteps = 128 / sizeof(IO);  // of a stage
  using Rows = Tile<IO, kSteps>;
  struct Stage {
    alignas(1024) char left[Rows::bytes(kSize)];
    char right[Rows::bytes(kSize)];
  };
  struct Shared {
    Stage stages[kStages];
    float weight[kStages][kSteps], n_weight[kStages][kSteps];
  };

  const StateParams& p;
  const Segments& segments;
  Shared& shared;
  int segment, row, column;  // of C: the thread block's first
  int64_t head, state;       // of x; in [S, H]
  Sequence sequence;
  int64_t chunk, begin, end;  // in the order of the walk
  int64_t ahead, ahead_step;  // the next stage to load: its chunk, and its first step there
  int loads = 0;
  bool has_n;  // the thread block's warps at column 0
  Sums<4, 8> sums;
  Sums<4, 1> n;

  DEVICE StateWalk(const StateParams& params, const Segments& all, Shared& memory)
      : p(params), segments(all), shared(memory) {
    int64_t block = blockIdx.x;
    const auto take = [&](int64_t count) {
      const int64_t index = block % count;
      block /= count;
      return index;
    };
    column = int(take((p.V + kSize - 1) / kSize)) * kSize;
    row = int(take((p.K + kSize - 1) / kSize)) * kSize;
    head = take(p.H);
    segment = int(take(segments.count - segments.first_pass));
    sequence = p.rows.chunks.sequence(block);
    state = sequence.index * p.H + head;
    const int64_t chunks = p.rows.chunks.count(sequence);
    begin = chunk = ahead = Segments::begin(chunks, segment, segments.count);
    end = Segments::begin(chunks, segment + 1, segments.count);
    ahead_step = 0;
    has_n = p.normalized && column + n0() == 0;
  }

  // The warp's part.
  DEVICE static int m0() { return threadIdx.x / 64 * 64; }
  DEVICE static int n0() { return threadIdx.x / 32 % 2 * 64; }

  DEVICE int64_t number(int64_t walked) const {
    return kReverse ? p.rows.chunks.count(sequence) - 1 - walked : walked;
  }
  DEVICE int64_t first_step(int64_t walked) const { return number(walked) * p.rows.chunks.length; }
  DEVICE int64_t steps(int64_t walked) const {
    const int64_t left = sequence.length - first_step(walked);
    return left < p.rows.chunks.length ? left : p.rows.chunks.length;
  }

  // ---- Loads ----

  DEVICE const IO* rows_of(const Strided& x, int64_t step) const {
    const int64_t T = p.rows.chunks.T, t = sequence.row % T + step;
    return static_cast<const IO*>(x.data) + sequence.row / T * x.batch + t * x.time + head * x.head;
  }

  DEVICE void load() {
    if (ahead < end) {
      const int slot = loads % kStages;
      const int64_t step = first_step(ahead) + ahead_step;
      const int rows = int(steps(ahead) - ahead_step);  // more than a stage has, maybe
      copy_tile<kThreads, kSize>(Rows{shared_address(shared.stages[slot].left)},
                                 rows_of(p.left, step) + row, p.left.time, rows, int(p.K) - row);
      copy_tile<kThreads, kSize>(Rows{shared_address(shared.stages[slot].right)},
                                 rows_of(p.right, step) + column, p.right.time, rows,
                                 int(p.V) - column);
      const int i = threadIdx.x % kSteps;
      const bool of_n = threadIdx.x >= kSteps;
      const float* from = of_n ? p.n_weight : p.weight;
      if (threadIdx.x < 2 * kSteps && (p.normalized || !of_n)) {
        const bool exists = i < rows;
        from += head * p.rows.chunks.rows + sequence.row + step;
        copy_word_or_zero(of_n ? &shared.n_weight[slot][i] : &shared.weight[slot][i],
                          from + (exists ? i : 0), exists);
      }
      ahead_step += kSteps;
      if (ahead_step >= steps(ahead)) ++ahead, ahead_step = 0;
    }
    ++loads;
    copy_commit();
  }

  // ---- Sums ----

  // The state's own rows and columns of the lane's sums: body(i, half, k), for its columns
  // v + 8 j + (0, 1) body does what it likes.
  template <typename Body>
  DEVICE void for_rows(const Body& body) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        body(i, half, row + m0() + i * 16 + half * 8 + int(threadIdx.x) % 32 / 4);
      }
    }
  }
  DEVICE int first_column() const { return column + n0(); }

  // From, and to, fp32 [K, V] and [K].
  DEVICE void read(const float* C, const float* from_n) {
    clear(sums), clear(n);
    const int q = threadIdx.x % 4;
    for_rows([&](int i, int half, int k) {
      if (k >= p.K) return;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int v = first_column() + 8 * j + 2 * q;
        if (C != nullptr && v < p.V) {
          const float2 pair = reinterpret_cast<const float2&>(C[k * p.V + v]);
          sums[i][j][2 * half] = pair.x, sums[i][j][2 * half + 1] = pair.y;
        }
      }
      if (from_n != nullptr && q == 0) n[i][0][2 * half] = from_n[k];
    });
  }
  DEVICE void write(float* C, float* to_n) const {
    const int q = threadIdx.x % 4;
    for_rows([&](int i, int half, int k) {
      if (k >= p.K) return;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int v = first_column() + 8 * j + 2 * q;
        if (C != nullptr && v < p.V) {
          reinterpret_cast<float2&>(C[k * p.V + v]) =
              make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
        }
      }
      write_n(to_n, i, half, k);
    });
  }
  DEVICE void write_n(float* to, int i, int half, int k) const {
    if (to != nullptr && has_n && k < p.K && threadIdx.x % 4 == 0) {
      to[k] = n[i][0][2 * half] + n[i][0][2 * half + 1];
    }
  }
  // To the states between chunks.
  DEVICE void write_chunk(int64_t slot) const {
    const int64_t at = p.rows.slot(int(head), slot);
    IO* C = static_cast<IO*>(p.states) + at * p.K * p.V;
    const int first = first_column();
    for_rows([&](int i, int half, int k) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        float low[4], high[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          low[c] = sums[i][j + c][2 * half], high[c] = sums[i][j + c][2 * half + 1];
        }
        store_row<IO>(C + k * p.V + first + 8 * j, low, high, k < p.K, int(p.V) - first - 8 * j);
      }
      write_n(p.n + at * p.K, i, half, k);
    });
  }

  DEVICE void scale(float keep) {
    const auto by = [keep](float& x) { x = keep == 0 ? 0.0f : x * keep; };  // NaN ends there
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int j = 0; j < 8; ++j) by(sums[i][j][e]);
        by(n[i][0][e]);
      }
    }
  }

  DEVICE void add(int slot, int rows) {
    const Left<Lies::kAcross, IO, kSteps> left(Rows{shared_address(shared.stages[slot].left)}, 0,
                                               m0());
    const Right<Lies::kAcross, IO, kSteps> right(Rows{shared_address(shared.stages[slot].right)}, 0,
                                                 n0());
#pragma unroll
    for (int d = 0; d < kSteps / kDepth<IO>; ++d) {
      if (d * kDepth<IO> >= rows) break;
      const DepthScale<IO> weight(shared.weight[slot] + d * kDepth<IO>);
      const DepthScale<IO> n_weight(shared.n_weight[slot] + d * kDepth<IO>);
      multiply<IO>(sums, left, right, d, [&](uint32_t (&words)[4], int i, int) {
        if (has_n) n_weight.multiply(n[i][0], words);
        weight(words);
      });
    }
  }

  DEVICE void run() {
    const bool starts = segment == 0, ends = segment == segments.count - 1;
    const int64_t size = p.rows.chunks.S * p.H, C_size = p.K * p.V;
    const auto start = [&](int s) { return s * size + state; };
    if (segments.first_pass) {
      read(nullptr, nullptr);
    } else if (starts) {
      read(p.first ? p.first + state * C_size : nullptr,
           p.first_n ? p.first_n + state * p.K : nullptr);
    } else {
      read(segments.C + start(segment) * C_size,
           has_n ? segments.n + start(segment) * p.K : nullptr);
    }
    for (int i = 0; i < kStages - 1; ++i) load();
    int stage = 0;
    for (; chunk < end; ++chunk) {
      const int64_t slot = p.rows.chunks.first_slot(sequence) + number(chunk);
      const bool given = p.first != nullptr || p.first_n != nullptr;
      const bool empty = starts && chunk == 0 && !given;  // nobody reads it
      if (!segments.first_pass && p.states != nullptr && !empty) write_chunk(slot);
      scale(p.rows.keep[p.rows.slot(int(head), slot)]);
      const int count = int(steps(chunk));
      for (int step = 0; step < count; step += kSteps, ++stage) {
        copy_wait<kStages - 2>();
        __syncthreads();
        load();
        add(stage % kStages, count - step);
      }
    }
    if (segments.first_pass) {
      write(segments.C + start(segment + 1) * C_size, segments.n + start(segment + 1) * p.K);
    } else if (ends) {
      write(p.last ? p.last + state * C_size : nullptr,
            p.last_n ? p.last_n + state * p.K : nullptr);
    }
  }
};

template <typename IO, bool kReverse>
__global__ void __launch_bounds__(128, sizeof(IO) == 2 ? 2 : 1) states_kernel(
    const StateParams p, const Segments segments) {
  using Walk = StateWalk<IO, kReverse>;
  extern __shared__ __align__(1024) char memory[];
  Walk(p, segments, *reinterpret_cast<typename Walk::Shared*>(memory)).run();
}

constexpr int kMostSegments = 64, kJoinThreads = 256, kJoinElements = 4;

// Turns what the segments before add into where segments start: C_g <- C_g + decay_{g-1} C_{g-1}.
template <bool kReverse>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(const StateParams p,
                                                            const Segments segments) {
  __shared__ float decay[kMostSegments];
  const int64_t size = p.K * p.V, parts = (size + p.K + kJoinThreads * kJoinElements - 1) /
                                          (kJoinThreads * kJoinElements);
  const int64_t head = blockIdx.x / parts % p.H;
  const Sequence s = p.rows.chunks.sequence(blockIdx.x / parts / p.H);
  const int64_t chunks = p.rows.chunks.count(s), state = s.index * p.H + head;
  if (threadIdx.x < segments.count - 1) {
    const int64_t end = Segments::begin(chunks, threadIdx.x + 1, segments.count);
    float product = 1;
    for (int64_t c = Segments::begin(chunks, threadIdx.x, segments.count); c < end; ++c) {
      const int64_t number = kReverse ? chunks - 1 - c : c;
      const int64_t slot = p.rows.chunks.first_slot(s) + number;
      const float keep = p.rows.keep[p.rows.slot(int(head), slot)];
      product = keep == 0 ? 0.0f : product * keep;  // NaN ends there
    }
    decay[threadIdx.x] = product;
  }
  __syncthreads();
  const int64_t between = p.rows.chunks.S * p.H;
  for (int e = 0; e < kJoinElements; ++e) {
    const int64_t i = (blockIdx.x % parts * kJoinElements + e) * kJoinThreads + threadIdx.x;
    const bool of_n = i >= size;
    if (of_n && (!p.normalized || i >= size + p.K)) continue;
    const int64_t width = of_n ? p.K : size, at = of_n ? i - size : i;
    const float* first = of_n ? p.first_n : p.first;
    float* starts = of_n ? segments.n : segments.C;
    float value = first ? first[state * width + at] : 0.0f;
    for (int g = 1; g < segments.count; ++g) {
      float& start = starts[(g * between + state) * width + at];
      start = value = start + (decay[g - 1] == 0 ? 0.0f : decay[g - 1] * value);
    }
  }
}

// As many segments as fill the GPU twice, none shorter than eight chunks of the longest sequence.
inline int segments_of(const StateParams& p, int processors) {
  const auto tiles = [](int64_t width) { return (width + 127) / 128; };
  const int64_t blocks = p.rows.chunks.S * p.H * tiles(p.K) * tiles(p.V);
  const int64_t chunks = p.rows.chunks.per_row() / 8;
  int64_t count = blocks ? 2 * processors / blocks : 1;
  if (count > chunks) count = chunks;
  return count < 2 ? 1 : count < kMostSegments ? int(count) : kMostSegments;
}

inline Segments take_segments(const StateParams& p, int processors, Arrays& arrays) {
  const int count = segments_of(p, processors);
  const int64_t states = count > 1 ? count * p.rows.chunks.S * p.H : 0;
  return {count, arrays.take<float>(states * p.K * p.V), arrays.take<float>(states * p.K), false};
}

template <typename IO, bool kReverse>
void run_states(const StateParams& p, int processors, void* scratch, cudaStream_t stream) {
  using Walk = StateWalk<IO, kReverse>;
  Arrays arrays(scratch);
  Segments segments = take_segments(p, processors, arrays);
  const int64_t tiles = (p.K + 127) / 128 * ((p.V + 127) / 128), heads = p.rows.chunks.S * p.H;
  const int bytes = sizeof(typename Walk::Shared);
  const auto walk = [&](int64_t count) {
    launch(states_kernel<IO, kReverse>, {heads * tiles * count, Walk::kThreads, bytes, stream}, p,
           segments);
  };
  if (segments.count > 1) {
    segments.first_pass = true;
    walk(segments.count - 1);
    segments.first_pass = false;
    const int64_t each = kJoinThreads * kJoinElements;
    launch(join_kernel<kReverse>,
           {heads * ((p.K * p.V + p.K + each - 1) / each), kJoinThreads, 0, stream}, p, segments);
  }
  walk(segments.count);
}

}  // namespace flashcell::cuda
