// Copies pieces of W to shared memory, for linear.cuh.
#pragma once
#include "common/cuda/ptx/copy_async.cuh"
#include "linear_shape.cuh"

namespace flashcell::cuda {

namespace {

// Copies a warp's pieces, once for each pass over the rows of x, into its ring.
template <typename Own>
struct Copier {
  static constexpr Format kFormat = Own::kFormat;
  const LinearStepParams& p;
  const Order& order;
  const Place first;  // the warp's first piece
  const int count;    // its pieces in a pass
  int passes;
  Place place = first;
  int left = passes > 0 ? count : 0, stage = 0;
  // The lane's first row of the tile's first 8 rows and of its last 8, if the tile has 16, and the
  // row of factors of int4's groups that the lane copies, or null.
  const char *low_row = nullptr, *high_row = nullptr, *scale_row = nullptr;
  bool whole = false;  // whether there are 16 rows
  bool scales_of_16_bytes = false;
  int bytes = 0;  // of a row

  // Returns row `own` of the tile, of so many bytes in `low` or `high`; rows past the end repeat
  // the last.
  DEVICE const char* row_of(int own, const void* low, const void* high, int64_t row_bytes) const {
    const bool is_low = own < kRows / 2;
    const int row = place.row + (is_low || p.gated ? own % (kRows / 2) : own);
    const int last = int(p.linears[place.which].rows) - 1;
    return static_cast<const char*>(is_low ? low : high) + smaller(row, last) * row_bytes;
  }
  DEVICE void find_rows() {
    if (left == 0) return;
    const int lane = threadIdx.x % 32, lane_row = lane / Own::kLanes;
    const Linear& linear = p.linears[place.which];
    const Linear& other = p.gated ? p.linears[1] : linear;
    bytes = bytes_of<kFormat>(linear, int(p.K));
    whole = place.row + order.rows_of_tile <= int(linear.rows);
    low_row = row_of(lane_row, linear.weight, other.weight, bytes);
    high_row = row_of(lane_row + kRows / 2, linear.weight, other.weight, bytes);
    if (!Own::kPlain && !Own::kInt4 && linear.scale != nullptr && lane < 2) {
      fetch(static_cast<const float*>((lane == 0 ? linear : other).scale) + place.row);
    }
    if constexpr (Own::kInt4) {
      static_assert(Own::kScaleBytes == 16);
      scale_row = nullptr;
      if (linear.scale == nullptr) return;
      scale_row = row_of(lane % kRows, linear.scale, other.scale, bytes / 8);
      const uintptr_t both = uintptr_t(linear.scale) | uintptr_t(other.scale);
      scales_of_16_bytes = bytes % 128 == 0 && both % 16 == 0;
    }
  }
  DEVICE void copy(uint32_t ring) {
    if (left > 0) {
      const int lane = threadIdx.x % 32, lane_row = lane / Own::kLanes;
      const int vector = lane % Own::kLanes * 16, at = place.piece * Own::kRowBytes + vector;
      const bool exists = at < bytes;
      const int offset = exists ? at : 0;
      const uint32_t to = ring + stage * Own::kBytes;
      const auto copy_row = [&](int own, const char* source) {
        const int swap = own % 2 * Own::kSwap;
        copy_async_or_zero(to + own * Own::kStride + (vector ^ swap), source, exists);
      };
      if (whole) {
        const int64_t step = int64_t(Own::kRowsAtOnce) * bytes;
#pragma unroll
        for (int half = 0; half < kRows; half += kRows / 2) {
          const char* source = (half ? high_row : low_row) + offset;
#pragma unroll
          for (int r = 0; r < kRows / 2; r += Own::kRowsAtOnce, source += step) {
            copy_row(half + r + lane_row, source);
          }
        }
      } else {
        const Linear& linear = p.linears[place.which];
        const void* other = p.gated ? p.linears[1].weight : linear.weight;
        for (int own = lane_row; own < kRows; own += Own::kRowsAtOnce) {
          copy_row(own, row_of(own, linear.weight, other, bytes) + offset);
        }
      }
      if constexpr (Own::kInt4) {
        if (scale_row != nullptr && lane < kRows)
          copy_scales(to + lane * Own::kStride + Own::kRowBytes);
      }
      stage = stage + 1 == Own::kStages ? 0 : stage + 1;
      step_on();
    }
    copy_commit();
  }
  // Copies the factors of a row of the piece.
  DEVICE void copy_scales(uint32_t to) {
    const int at = place.piece * Own::kScaleBytes;
    if (scales_of_16_bytes) {
      copy_async(to, scale_row + at);
      return;
    }
    for (int word = at; word < at + Own::kScaleBytes; word += 4) {
      const bool exists = word < bytes / 8;
      copy_word_or_zero(to + word - at, scale_row + (exists ? word : 0), exists);
    }
  }
  DEVICE void step_on() {
    ++place.piece;
    if (--left == 0) {
      if (--passes == 0) return;
      place = first, left = count;
    } else if (place.piece == place.pieces) {
      order.next_tile(place);
    } else {
      return;
    }
    find_rows();
  }
};

}  // namespace
}  // namespace flashcell::cuda
