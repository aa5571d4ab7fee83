// Launches the states between chunks: chooses the kernel and the number of segments, and computes
// the states where segments start.
#include "mma.cuh"
#include "wgmma.cuh"

namespace flashcell::cuda {

namespace {

constexpr int kJoinThreads = 256, kJoinElements = 4;

// Turns what each segment adds into the states where segments start: C_g <- C_g + decay_{g-1}
// C_{g-1}.
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
      product = keep == 0 ? 0.0f : product * keep;  // a factor of 0 clears even NaN
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

// How the states are divided among thread blocks.
struct StatePlan {
  bool wgmma;
  int rows, columns;   // the part of the state of a thread block
  int blocks_at_once;  // thread blocks that the GPU runs at once

  StatePlan(const StateParams& p, const Device& device, int io_bytes)
      : wgmma(has_wgmma(device, io_bytes)),
        rows(128),
        columns(wgmma && p.V > 128 ? 256 : 128),
        blocks_at_once(device.sms * (wgmma ? 1 : 2)) {}

  int64_t blocks(const StateParams& p) const {
    const auto parts = [](int64_t width, int size) { return (width + size - 1) / size; };
    return p.rows.chunks.S * p.H * parts(p.K, rows) * parts(p.V, columns);
  }
  // As many segments as fill the GPU, each with at least eight chunks of the longest sequence.
  int segments(const StateParams& p) const {
    const int64_t all = blocks(p), chunks = p.rows.chunks.per_row() / 8;
    int64_t count = all ? blocks_at_once / all : 1;
    if (count > chunks) count = chunks;
    return count < 2 ? 1 : count < kMostSegments ? int(count) : kMostSegments;
  }
};

Segments take_segments(const StateParams& p, const StatePlan& plan, Arrays& arrays) {
  const int count = plan.segments(p);
  const int64_t states = count > 1 ? count * p.rows.chunks.S * p.H : 0;
  return {count, arrays.take<float>(states * p.K * p.V), arrays.take<float>(states * p.K), false};
}

template <typename IO, bool kReverse>
void launch_walk(const StateParams& p, const StatePlan& plan, const Code& code,
                 const Segments& segments, cudaStream_t stream) {
  const int64_t blocks = plan.blocks(p) * (segments.count - segments.first_pass);
  const auto walk = [&]<typename Walk>(auto kernel) {
    launch(kernel, {blocks, Walk::kThreads, Walk::bytes(code), stream}, p, segments);
  };
  if constexpr (sizeof(IO) == 2) {
    if (plan.wgmma) {
      if (plan.columns == 128) {
        return walk.template operator()<StateWgmma<IO, kReverse, 128>>(
            states_wgmma<IO, kReverse, 128>);
      }
      return walk.template operator()<StateWgmma<IO, kReverse, 256>>(
          states_wgmma<IO, kReverse, 256>);
    }
  }
  walk.template operator()<StateWalk<IO, kReverse>>(states_kernel<IO, kReverse>);
}

}  // namespace

template <bool kReverse>
void join_segments(const StateParams& p, const Segments& segments, cudaStream_t stream) {
  const int64_t each = kJoinThreads * kJoinElements, heads = p.rows.chunks.S * p.H;
  launch(join_kernel<kReverse>,
         {heads * ((p.K * p.V + p.K + each - 1) / each), kJoinThreads, 0, stream}, p, segments);
}
template void join_segments<false>(const StateParams&, const Segments&, cudaStream_t);
template void join_segments<true>(const StateParams&, const Segments&, cudaStream_t);

template <typename IO>
int64_t states_scratch(const StateParams& p, const Device& device) {
  Arrays arrays(nullptr);
  take_segments(p, StatePlan(p, device, sizeof(IO)), arrays);
  return arrays.bytes();
}

template <typename IO, bool kReverse>
void run_states(const StateParams& p, const Device& device, void* scratch, cudaStream_t stream) {
  const StatePlan plan(p, device, sizeof(IO));
  Arrays arrays(scratch);
  Segments segments = take_segments(p, plan, arrays);
  if (segments.count > 1) {
    segments.first_pass = true;
    launch_walk<IO, kReverse>(p, plan, device.code, segments, stream);
    segments.first_pass = false;
    join_segments<kReverse>(p, segments, stream);
  }
  launch_walk<IO, kReverse>(p, plan, device.code, segments, stream);
}

#define FLASHCELL_INSTANTIATE(IO)                                                              \
  template int64_t states_scratch<IO>(const StateParams&, const Device&);                      \
  template void run_states<IO, false>(const StateParams&, const Device&, void*, cudaStream_t); \
  template void run_states<IO, true>(const StateParams&, const Device&, void*, cudaStream_t);
FLASHCELL_INSTANTIATE(bf16)
FLASHCELL_INSTANTIATE(fp16)
FLASHCELL_INSTANTIATE(float)
#undef FLASHCELL_INSTANTIATE

}  // namespace flashcell::cuda
