// The kernels of narrow heads: which calls they take, and their launches.
#pragma once
#include "../backward/terms.cuh"
#include "../forward/terms.cuh"
#include "../states/chunk_loop.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

// Bytes of shared memory that a thread block needs for heads of up to 32, or of up to 64.
constexpr int narrow_bytes(bool wide) { return (wide ? 113 : 57) << 10; }

// A thread block takes a head of a sequence, or a segment of it, instead of a chunk: states stay in
// registers.
struct NarrowPlan {
  bool used;     // whether the call's heads are narrow
  int segments;  // of a sequence

  NarrowPlan(const MlstmParams& p, const Chunks& chunks, const Device& device, int io_bytes)
      : segments(1) {
    const bool wide = p.K > 32 || p.V > 32;
    used = io_bytes == 2 && p.K <= kWidestNarrow && p.V <= kWidestNarrow &&
           chunks.length == kTile && narrow_bytes(wide) <= device.shared_bytes;
    // As many segments as fill the GPU, each with at least eight chunks of the longest sequence: to
    // know where they start, rows are read once more.
    const int64_t heads = p.S * p.H, at_once = device.sms * (wide ? 2 : 4);
    const int64_t chunks_each = chunks.per_row() / 8;
    int64_t count = heads ? at_once / heads : 1;
    if (count > chunks_each) count = chunks_each;
    segments = count < 2 ? 1 : count < kMostSegments ? int(count) : kMostSegments;
  }

  Segments take(const MlstmParams& p, Arrays& arrays) const {
    const int64_t states = segments > 1 ? segments * p.S * p.H : 0;
    return {segments, arrays.take<float>(states * p.K * p.V), arrays.take<float>(states * p.K),
            false};
  }
};

// Computes h, unless p.q is null, and the states before chunks, unless states.states is null.
template <typename IO>
void run_narrow_outputs(const ForwardParams& p, const StateParams& states, const Segments& segments,
                        cudaStream_t stream);
// Computes the terms of rows besides the gates, as row_gradients.
template <typename IO>
void run_narrow_rows(const BackwardParams& p, const BackwardTerms& terms, cudaStream_t stream);
// Computes all gradients: states.left is q, and states.right dh.
template <typename IO>
void run_narrow_gradients(const BackwardParams& p, const BackwardTerms& terms,
                          const StateParams& states, const Segments& segments, cudaStream_t stream);

}  // namespace flashcell::cuda
