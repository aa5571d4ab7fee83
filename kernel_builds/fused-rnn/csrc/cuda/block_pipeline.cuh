// Inputs of the steps to come, on their way from global to shared memory: a ring of stages, each the
// kRows rows of one step of eight columns. A step every 0.2 us against a memory latency of up to
// 1 us make eight stages, where they fit.
#pragma once
#include "sequence.cuh"

namespace flashcell::cuda {

// Inputs of the steps to come, on their way from global memory: a ring of stages, each the kRows rows
// of one step. A step every 0.2 us and a memory latency of up to 1 us make eight stages, if they fit.
template <typename IO, int kWidth, int kRows, int kThreads>
struct Pipeline {
  static constexpr int kVectors = kWidth / Lane<IO>::kVector;  // of a row
  static constexpr int kRow = kWidth + Lane<IO>::kVector;      // padded: columns in other banks
  static constexpr int kRowsAtOnce = kThreads / (kColumns * kVectors);
  static constexpr int kStageBytes = kRows * kColumns * kRow * sizeof(IO);
  static constexpr int kStages = kStageBytes * 8 <= 60 * 1024 ? 8 : 4;

  struct Shared {
    IO rows[kStages][kRows][kColumns][kRow];
  };

  // A thread always copies the same vector of the same column.
  static DEVICE int column() { return threadIdx.x / kVectors % kColumns; }
  static DEVICE int vector() { return threadIdx.x % kVectors; }

  Shared& shared;
  const IO* source;  // row `first` of the next step of the thread's column
  const IO* last_source;  // row kRows - 1 lies elsewhere, or null
  int64_t row_stride, step_stride, last_step_stride;
  int length;  // steps that exist; none for vectors past the head
  int first;   // the thread copies rows first, first + kRowsAtOnce, ...

  // Steps go upwards (direction 1, from 0) or downwards (-1, from `from`).
  DEVICE Pipeline(Shared& shared, int length, int D, int from, int direction, const IO* source,
                  int64_t row_stride, int64_t time_stride, const IO* last_source = nullptr,
                  int64_t last_time_stride = 0)
      : shared(shared),
        row_stride(row_stride * kRowsAtOnce),
        step_stride(direction * time_stride),
        last_step_stride(direction * last_time_stride),
        length(vector() * Lane<IO>::kVector < D ? length : 0),
        first(threadIdx.x / (kColumns * kVectors)) {
    this->source = source + from * time_stride + first * row_stride + vector() * Lane<IO>::kVector;
    this->last_source = nullptr;
    if (last_source != nullptr) {
      this->last_source = last_source + from * last_time_stride + vector() * Lane<IO>::kVector;
    }
    for (int i = 0; i < kStages - 1; ++i) start(from + i * direction);
  }

  // Sends for step t, the one after the last call's. Every call is one group, whether it copies or not.
  DEVICE void start(int t) {
    if (unsigned(t) < unsigned(length)) {
      IO* to = &shared.rows[unsigned(t) % kStages][first][column()][vector() * Lane<IO>::kVector];
      const IO* from = source;
#pragma unroll
      for (int row = 0; row < kRows; row += kRowsAtOnce) {
        const bool is_last = row + kRowsAtOnce >= kRows && first + row == kRows - 1;
        if (row + kRowsAtOnce <= kRows || first + row < kRows) {
          copy_async(to + row * kColumns * kRow,
                     is_last && last_source != nullptr ? last_source : from);
        }
        from += row_stride;
      }
    }
    source += step_stride, last_source += last_source != nullptr ? last_step_stride : 0;
    copy_commit();
  }

  // Until the copies of the next step are there, of this thread: a barrier makes it all threads.
  DEVICE void wait() { copy_wait<kStages - 2>(); }

  DEVICE const IO* at(int t, int row, int unit) const {  // column 0
    return &shared.rows[unsigned(t) % kStages][row][0][unit];
  }
};

// Outputs of the last two steps, by parity, on their way to global memory.
template <typename IO, int kWidth, int kRows, int kThreads>
struct Outbox {
  static constexpr int kVectors = kWidth / Lane<IO>::kVector, kRow = kWidth + Lane<IO>::kVector;
  static constexpr int kRowsAtOnce = kThreads / (kColumns * kVectors);
  static constexpr int kPasses = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;

  struct Shared {
    IO rows[2][kRows][kColumns][kRow];
  };

  // A thread always sends the same vector of the same column (the one it copies for the Pipeline), of
  // rows first, first + kRowsAtOnce, ...
  static DEVICE int column() { return threadIdx.x / kVectors % kColumns; }
  static DEVICE int vector() { return threadIdx.x % kVectors; }
  static DEVICE int first() { return threadIdx.x / (kColumns * kVectors); }

  Shared& shared;
  IO* to[kPasses];          // of the next step, or null
  int64_t stride[kPasses];  // from a step to the next
  int length;

  // `target(row)` is where a row of the first step to send starts, `step(row)` its stride.
  template <typename Target, typename Step>
  DEVICE Outbox(Shared& shared, int length, int D, Target target, Step step)
      : shared(shared), length(vector() * Lane<IO>::kVector < D ? length : 0) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first() + i * kRowsAtOnce;
      IO* start = row < kRows ? target(row) : nullptr;
      to[i] = start == nullptr ? nullptr : start + vector() * Lane<IO>::kVector;
      stride[i] = start == nullptr ? 0 : step(row);
    }
  }

  DEVICE IO* at(int t, int row, int unit) { return &shared.rows[t & 1][row][0][unit]; }

  // Sends step t, of which a barrier has made all values visible.
  DEVICE void send(int t) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (unsigned(t) < unsigned(length) && to[i] != nullptr) {
        const int row = first() + i * kRowsAtOnce;
        *reinterpret_cast<uint4*>(to[i]) = *reinterpret_cast<const uint4*>(
            &shared.rows[t & 1][row][column()][vector() * Lane<IO>::kVector]);
      }
      to[i] += stride[i];
    }
  }

  // Zeros for `count` steps from `step` on, counted from where the next one would go.
  DEVICE void clear(int64_t step, int count, int D) {
    if (vector() * Lane<IO>::kVector >= D) return;
    for (int i = 0; i < kPasses; ++i) {
      for (int64_t n = step; to[i] != nullptr && n < step + count; ++n) {
        *reinterpret_cast<uint4*>(to[i] + n * stride[i]) = uint4{};
      }
    }
  }
};

}  // namespace flashcell::cuda
