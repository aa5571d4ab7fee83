// Copies pieces of W to shared memory, for linear.cuh.
#pragma once
#include "common/cuda/ptx/copy_async.cuh"
#include "linear_shape.cuh"

namespace flashcell::cuda {

namespace {

// Copies a warp's pieces, tile after tile, into its ring.
template <Format kFormat, typename Own>
struct Copier {
  const LinearStepParams& p;
  const Tiles& tiles;
  int first, piece = first, stage = 0, tile = tiles.first;
  int pass =
      tiles.first < tiles.count ? tiles.first_pass : tiles.passes;  // a team may have no tiles
  // The matrices of the tile's first 8 rows and of its last 8, and in both the lane's first row of
  // a whole tile. The same of the factors of int4's groups, or null.
  const char *low = nullptr, *high = nullptr, *low_row = nullptr, *high_row = nullptr;
  const char *low_scale = nullptr, *high_scale = nullptr;
  const char *low_scale_row = nullptr, *high_scale_row = nullptr;
  int row = 0, rows = 0, next = 0;  // first row, number of rows, and ninth row
  bool whole = false;               // whether there are 16 rows
  int pieces = 0;
  int64_t bytes = 0;  // of a row

  // Finds the rows of the tile, or of the next that has pieces for this warp.
  DEVICE void find_rows() {
    const int lane = threadIdx.x % 32, lane_row = lane / Own::kLanes;
    for (;; tile += tiles.stride) {
      if (tile >= tiles.count) tile = tiles.first, pass += tiles.pass_stride;
      if (pass >= tiles.passes) return;
      const Place place = find(p, tile);
      const Linear& linear = p.linears[place.which];
      low = static_cast<const char*>(linear.weight);
      high = p.gated ? static_cast<const char*>(p.linears[1].weight) : low;
      row = place.row, rows = int(linear.rows), next = p.gated ? row : row + kRows / 2;
      whole = next + kRows / 2 <= rows;
      bytes = bytes_of<kFormat>(linear, int(p.K));
      low_row = low + (row + lane_row) * bytes, high_row = high + (next + lane_row) * bytes;
      if constexpr (Own::kInt4) {
        low_scale = static_cast<const char*>(linear.scale);
        high_scale = p.gated ? static_cast<const char*>(p.linears[1].scale) : low_scale;
        const int own = lane / kWords;
        low_scale_row = low_scale + (row + own) * (bytes / 8);
        high_scale_row = high_scale + (next + own) * (bytes / 8);
      }
      pieces = pieces_of<kFormat, Own::kRowBytes>(linear, int(p.K));
      if (first < pieces) return;
    }
  }
  DEVICE void copy(uint32_t ring) {
    if (pass < tiles.passes) {
      const int lane = threadIdx.x % 32, lane_row = lane / Own::kLanes;
      const int vector = lane % Own::kLanes * 16, at = piece * Own::kRowBytes + vector;
      const bool exists = at < bytes;
      const uint32_t to = ring + stage * Own::kBytes;
      const auto copy_row = [&](int own, const char* source) {
        const int swap = own % 2 * Own::kSwap;
        copy_async_or_zero(to + own * Own::kStride + (vector ^ swap), source, exists);
      };
      if (whole) {
        const int64_t step = Own::kRowsAtOnce * bytes;
#pragma unroll
        for (int half = 0; half < kRows; half += kRows / 2) {
          const char* source = (half ? high_row : low_row) + (exists ? at : 0);
#pragma unroll
          for (int r = 0; r < kRows / 2; r += Own::kRowsAtOnce, source += step) {
            copy_row(half + r + lane_row, source);
          }
        }
      } else {
#pragma unroll
        for (int r = 0; r < kRows; r += Own::kRowsAtOnce) {
          const int own = r + lane_row;
          const char* source = (own < kRows / 2 ? low : high) + row_of(own) * bytes;
          copy_row(own, exists ? source + at : source);
        }
      }
      if constexpr (Own::kInt4) {
        if (low_scale != nullptr) copy_scales(to + Own::kRowBytes);
      }
      stage = stage + 1 == Own::kStages ? 0 : stage + 1;
      if ((piece += Own::kWarps) >= pieces) {
        piece = first, tile += tiles.stride;
        find_rows();
      }
    }
    copy_commit();
  }
  // Returns the row of its matrix that is row `own` of the tile; rows past the end repeat the last.
  DEVICE int row_of(int own) const {
    return smaller(own < kRows / 2 ? row + own : next + own - kRows / 2, rows - 1);
  }
  // Copies the factors of the piece's groups, two at a time.
  DEVICE void copy_scales(uint32_t to) {
    static_assert(!Own::kInt4 || kWords == 4);  // so that a half takes all lanes once
    const int lane = threadIdx.x % 32, word = lane % kWords * 4;
    const int64_t all_bytes = bytes / 8;
    const int at = piece * Own::kScaleBytes + word;
    const bool exists = at < all_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = half * kRows / 2 + lane / kWords;
      const char* source = half ? high_scale_row : low_scale_row;
      if (!whole) source = (half ? high_scale : low_scale) + row_of(own) * all_bytes;
      copy_word_or_zero(to + own * Own::kStride + word, exists ? source + at : source, exists);
    }
  }
  static constexpr int kWords = Own::kScaleBytes > 0 ? Own::kScaleBytes / 4 : 1;  // of a row
};

}  // namespace
}  // namespace flashcell::cuda
