// States between chunks: the part of a head's state that a thread block keeps in registers, and the
// loop over the chunks of a segment of its sequence.
#pragma once
#include "../chunk/tile.cuh"
#include "run.h"

namespace flashcell::cuda {

constexpr int kMostSegments = 64;

// The segments of every sequence, which run in parallel from states that a first pass computes.
struct Segments {
  int count;  // segments of a sequence
  // [count, S, H, K, V], [count, S, H, K]: the states where segments start; segment 0 has none.
  float *C, *n;
  // The first pass starts from zero and only computes the start of the next segment.
  bool first_pass;

  DEVICE static int64_t begin(int64_t chunks, int segment, int count) {
    return chunks * segment / count;
  }
};

// Turns what each segment adds, which the first pass has written, into the states where segments
// start.
template <bool kReverse>
void join_segments(const StateParams& p, const Segments& segments, cudaStream_t stream);

// A thread block's part of the work: kRows by kColumns of the state of one head, over one segment.
template <bool kReverse, int kRows, int kColumns>
struct StatePlace {
  const StateParams& p;
  int segment, row, column;  // first row and column of C
  int64_t head, state;       // head of x, and index in [S, H]
  Sequence sequence;
  int64_t begin, end;  // chunks, in the order of the loop

  DEVICE StatePlace(const StateParams& params, const Segments& segments) : p(params) {
    int64_t block = blockIdx.x;
    const auto take = [&](int64_t count) {
      const int64_t index = block % count;
      block /= count;
      return index;
    };
    column = int(take((p.V + kColumns - 1) / kColumns)) * kColumns;
    row = int(take((p.K + kRows - 1) / kRows)) * kRows;
    head = take(p.H);
    segment = int(take(segments.count - segments.first_pass));
    sequence = p.rows.chunks.sequence(block);
    state = sequence.index * p.H + head;
    const int64_t chunks = p.rows.chunks.count(sequence);
    begin = Segments::begin(chunks, segment, segments.count);
    end = Segments::begin(chunks, segment + 1, segments.count);
  }

  DEVICE int64_t number(int64_t walked) const {
    return kReverse ? p.rows.chunks.count(sequence) - 1 - walked : walked;
  }
  DEVICE int64_t slot(int64_t walked) const {
    return p.rows.chunks.first_slot(sequence) + number(walked);
  }
  DEVICE int64_t first_step(int64_t walked) const { return number(walked) * p.rows.chunks.length; }
  DEVICE int64_t steps(int64_t walked) const {
    const int64_t left = sequence.length - first_step(walked);
    return left < p.rows.chunks.length ? left : p.rows.chunks.length;
  }

  // Copies one stage: `rows` steps (which may exceed the stage) from `step` of the sequence on, to
  // left [kSteps, kRows] and right [kSteps, kColumns], with their weights.
  template <int kThreads, typename IO, int kSteps>
  DEVICE void copy(Tile<IO, kSteps> left, Tile<IO, kSteps> right, float* weight, float* n_weight,
                   int64_t step, int rows) const {
    copy_tile<kThreads, kRows>(left, rows_of<IO>(p.left, step) + row, p.left.time, rows,
                               int(p.K) - row);
    copy_tile<kThreads, kColumns>(right, rows_of<IO>(p.right, step) + column, p.right.time, rows,
                                  int(p.V) - column);
    static_assert(kThreads >= 2 * kSteps);
    const int i = threadIdx.x % kSteps;
    const bool of_n = threadIdx.x >= kSteps;
    const float* from = of_n ? p.n_weight : p.weight;
    if (threadIdx.x < 2 * kSteps && (p.normalized || !of_n)) {
      const bool exists = i < rows;
      from += head * p.rows.chunks.rows + sequence.row + step;
      copy_word_or_zero(of_n ? &n_weight[i] : &weight[i], from + (exists ? i : 0), exists);
    }
  }

 private:
  template <typename IO>
  DEVICE const IO* rows_of(const Strided& x, int64_t step) const {
    const int64_t T = p.rows.chunks.T, t = sequence.row % T + step;
    return static_cast<const IO*>(x.data) + sequence.row / T * x.batch + t * x.time + head * x.head;
  }
};

// A warp's part of the state: kStrips of 16 rows from `row` on, kBlocks of 8 columns from `column`
// on.
template <typename IO, int kStrips, int kBlocks>
struct StateSums {
  const StateParams& p;
  const int row, column;
  const bool has_n;
  Sums<kStrips, kBlocks> C;
  Sums<kStrips, 1> n;  // the sum of columns 0 and 1

  DEVICE StateSums(const StateParams& params, int first_row, int first_column)
      : p(params),
        row(first_row),
        column(first_column),
        has_n(params.normalized && first_column == 0) {}

  // Loops over chunks: writes the state before each of them, and calls add(chunk), which adds its
  // terms.
  template <typename Place, typename Add>
  DEVICE void walk(const Place& place, const Segments& segments, const Add& add) {
    begin(place, segments);
    for (int64_t chunk = place.begin; chunk < place.end; ++chunk) {
      const int64_t at = p.rows.slot(int(place.head), place.slot(chunk));
      const bool given = p.first != nullptr || p.first_n != nullptr;
      const bool empty = place.segment == 0 && chunk == 0 && !given;  // never read
      if (!segments.first_pass && p.states != nullptr && !empty) write_chunk(at);
      scale(p.rows.keep[at]);
      add(chunk);
    }
    end(place, segments);
  }

  // Reads the state with which the segment starts.
  template <typename Place>
  DEVICE void begin(const Place& place, const Segments& segments) {
    const int64_t state = place.state, at = start_of(place, segments, place.segment);
    if (segments.first_pass) {
      read(nullptr, nullptr);
    } else if (place.segment == 0) {
      read(p.first ? p.first + state * p.K * p.V : nullptr,
           p.first_n ? p.first_n + state * p.K : nullptr);
    } else {
      read(segments.C + at * p.K * p.V, has_n ? segments.n + at * p.K : nullptr);
    }
  }
  // Writes the state with which the segment ends, for the next segment or the caller.
  template <typename Place>
  DEVICE void end(const Place& place, const Segments& segments) const {
    const int64_t state = place.state, next = start_of(place, segments, place.segment + 1);
    if (segments.first_pass) {
      write(segments.C + next * p.K * p.V, segments.n + next * p.K);
    } else if (place.segment == segments.count - 1) {
      write(p.last ? p.last + state * p.K * p.V : nullptr,
            p.last_n ? p.last_n + state * p.K : nullptr);
    }
  }
  template <typename Place>
  DEVICE int64_t start_of(const Place& place, const Segments& segments, int segment) const {
    return segment * p.rows.chunks.S * p.H + place.state;
  }

  // Calls body(i, half, k) for the rows of the lane, whose columns are column + 8 j + 2 q + (0, 1).
  template <typename Body>
  DEVICE void for_rows(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        body(i, half, row + i * 16 + half * 8 + int(threadIdx.x) % 32 / 4);
      }
    }
  }

  // Reads from, and writes to, fp32 [K, V] and [K].
  DEVICE void read(const float* from, const float* from_n) {
    clear(C), clear(n);
    const int q = threadIdx.x % 4;
    for_rows([&](int i, int half, int k) {
      if (k >= p.K) return;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int v = column + 8 * j + 2 * q;
        if (from != nullptr && v < p.V) {
          const float2 pair = reinterpret_cast<const float2&>(from[k * p.V + v]);
          C[i][j][2 * half] = pair.x, C[i][j][2 * half + 1] = pair.y;
        }
      }
      if (from_n != nullptr && q == 0) n[i][0][2 * half] = from_n[k];
    });
  }
  DEVICE void write(float* to, float* to_n) const {
    const int q = threadIdx.x % 4;
    for_rows([&](int i, int half, int k) {
      if (k >= p.K) return;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int v = column + 8 * j + 2 * q;
        if (to != nullptr && v < p.V) {
          reinterpret_cast<float2&>(to[k * p.V + v]) =
              make_float2(C[i][j][2 * half], C[i][j][2 * half + 1]);
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
  // Writes to the states between chunks.
  DEVICE void write_chunk(int64_t at) const {
    IO* to = static_cast<IO*>(p.states) + at * p.K * p.V;
    for_rows([&](int i, int half, int k) {
#pragma unroll
      for (int j = 0; j < kBlocks; j += 4) {
        float low[4], high[4];
#pragma unroll
        for (int c = 0; c < 4; ++c)
          low[c] = C[i][j + c][2 * half], high[c] = C[i][j + c][2 * half + 1];
        const int v = column + 8 * j;
        store_row<IO>(to + k * p.V + v, low, high, k < p.K, int(p.V) - v);
      }
      write_n(p.n + at * p.K, i, half, k);
    });
  }

  DEVICE void scale(float keep) {
    // A factor of 0 clears even NaN.
    const auto by = [keep](float& x) { x = keep == 0 ? 0.0f : x * keep; };
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) by(C[i][j][e]);
        by(n[i][0][e]);
      }
    }
  }
};

}  // namespace flashcell::cuda
