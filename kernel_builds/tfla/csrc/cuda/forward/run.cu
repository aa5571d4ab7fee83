// Launches the forward pass: gates, states between chunks, then h of every chunk.
#include "../narrow/run.h"
#include "../states/run.h"
#include "mma.cuh"
#include "run.h"
#include "wgmma.cuh"

namespace flashcell::cuda {

namespace {

template <typename IO>
struct Plan {
  StateParams states{};
  ForwardTerms terms{};
  void *rows, *segments;
  Segments narrow{};  // none, if narrow heads do not go by a kernel of their own
  int64_t bytes;

  Plan(const ForwardParams& p, const Device& device, void* scratch) {
    Arrays arrays(scratch);
    rows = arrays.take<char>(rows_scratch(p));
    states.rows.chunks = chunks_of(p);
    check_kept(p, states.rows.chunks);
    states.H = p.H, states.K = p.K, states.V = p.V, states.normalized = p.normalized;
    states.left = p.k, states.right = p.v;
    states.first = static_cast<const float*>(p.C), states.first_n = static_cast<const float*>(p.n);
    states.last = static_cast<float*>(p.last_C), states.last_n = static_cast<float*>(p.last_n);
    const NarrowPlan narrow_plan(p, states.rows.chunks, device, sizeof(IO));
    if (narrow_plan.used) {
      narrow = narrow_plan.take(p, arrays);
      states.states = p.kept_C, states.n = static_cast<float*>(p.kept_n);
      bytes = arrays.bytes();
      return;
    }
    if (p.q.data != nullptr) {
      const int64_t slots = states.rows.chunks.slots() * p.H;
      IO* C = p.kept ? static_cast<IO*>(p.kept_C) : arrays.take<IO>(slots * p.K * p.V);
      float* n = !p.normalized ? nullptr
                 : p.kept      ? static_cast<float*>(p.kept_n)
                               : arrays.take<float>(slots * p.K);
      states.states = C, states.n = n;
      terms = {{}, 1 / sqrtf(float(p.K)), C, n};
    }
    segments = arrays.take<char>(states_scratch<IO>(states, device));
    bytes = arrays.bytes();
  }
};

template <typename IO, int kTiles>
void launch_outputs(const ForwardParams& p, const ForwardTerms& terms, const Device& device,
                    cudaStream_t stream) {
  using Outputs = ChunkOutputs<IO, kTiles>;
  using Shared = typename Outputs::Shared;
  static_assert(sizeof(Shared) <= chunk_bytes(kTiles, sizeof(IO), Outputs::kStages));
  const int bytes = Outputs::template bytes<Shared>(device.code);
  launch(chunk_outputs<IO, kTiles>,
         {terms.rows.chunks.slots() * p.H, Outputs::kThreads, bytes, stream}, p, terms);
}

template <typename IO, int kColumns>
void launch_wgmma(const ForwardParams& p, const ForwardTerms& terms, const Device& device,
                  cudaStream_t stream) {
  using Outputs = OutputWgmma<IO, kColumns>;
  const typename Outputs::Layout layout(p.K, device.shared_bytes);
  const OutputParts<kColumns> parts(p.H, p.V, terms.rows.chunks.length);
  const int64_t count = parts.count(terms.rows.chunks);
  if (count > INT32_MAX) throw std::invalid_argument("tfla: too many rows");
  // Thread blocks that run at the same time work on parts of the same chunks.
  const int64_t at_once = device.sms / parts.in_chunk * parts.in_chunk;
  launch(outputs_wgmma<IO, kColumns>,
         {at_once > 0 && at_once < count ? at_once : count, kRingThreads, layout.bytes, stream}, p,
         terms, device.shared_bytes);
}

}  // namespace

template <typename IO>
int64_t forward_scratch(const ForwardParams& p, const Device& device) {
  return Plan<IO>(p, device, nullptr).bytes;
}

template <typename IO>
void run_forward(const ForwardParams& p, const Device& device, void* scratch, cudaStream_t stream) {
  Plan<IO> plan(p, device, scratch);
  const Rows rows = prepare_rows(p, plan.rows, static_cast<float*>(p.last_m), stream);
  plan.states.rows = plan.terms.rows = rows;
  plan.states.weight = rows.outflow;
  plan.states.n_weight = rows.outflow;
  if constexpr (sizeof(IO) == 2) {
    if (plan.narrow.count > 0) return run_narrow_outputs<IO>(p, plan.states, plan.narrow, stream);
  }
  run_states<IO, false>(plan.states, device, plan.segments, stream);
  if (p.q.data == nullptr) return;
  if constexpr (sizeof(IO) == 2) {
    if (has_wgmma(device, sizeof(IO)) && p.K <= kWidestKey) {
      return p.V > 128 ? launch_wgmma<IO, 256>(p, plan.terms, device, stream)
                       : launch_wgmma<IO, 128>(p, plan.terms, device, stream);
    }
  }
  switch (rows.chunks.tiles()) {
    case 1:
      return launch_outputs<IO, 1>(p, plan.terms, device, stream);
    case 2:
      return launch_outputs<IO, 2>(p, plan.terms, device, stream);
    default:
      if constexpr (sizeof(IO) == 2) return launch_outputs<IO, 4>(p, plan.terms, device, stream);
  }
}

template int64_t forward_scratch<bf16>(const ForwardParams&, const Device&);
template int64_t forward_scratch<fp16>(const ForwardParams&, const Device&);
template int64_t forward_scratch<float>(const ForwardParams&, const Device&);
template void run_forward<bf16>(const ForwardParams&, const Device&, void*, cudaStream_t);
template void run_forward<fp16>(const ForwardParams&, const Device&, void*, cudaStream_t);
template void run_forward<float>(const ForwardParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
