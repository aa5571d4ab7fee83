// Launches the backward pass: the row terms of the gates, the states again, the divisor's gradient,
// the gradients of the states in reverse time, and then every chunk on its own.
#include <cmath>

#include "../launch.h"
#include "../narrow/run.h"
#include "../states/run.h"
#include "block.cuh"
#include "chunk.cuh"
#include "exact.cuh"
#include "gates.cuh"
#include "rows.cuh"
#include "run.h"

namespace flashcell::cuda {

namespace {

constexpr int kWidestKey = 2 * kBlockColumns, kWidestValue = kMostPanels * 64;

// Whether the chunks' gradients are computed by wgmma (block.cuh).
template <typename IO>
bool has_blocks(const BackwardParams& p, const Device& device) {
  return has_wgmma(device, sizeof(IO)) && has_h(p) && p.K <= kWidestKey && p.V <= kWidestValue;
}

template <typename IO>
struct Plan {
  BackwardTerms terms{};
  void *rows, *segments;
  IO* C;  // states; recomputed if the forward kept none
  float* n;
  int64_t bytes;
  Segments narrow{};  // none, if narrow heads do not go by a kernel of their own
  bool in_blocks;     // whether rows go in blocks of 128, on Hopper
  bool exact;         // whether rows with a nearly cancelling divisor are recomputed

  Plan(const BackwardParams& p, const Device& device, void* memory) {
    Arrays arrays(memory);
    const Chunks chunks = chunks_of(p);
    const int64_t values = p.H * chunks.rows, slots = p.H * chunks.slots();
    const int64_t divided = p.normalized ? values : 0, of_n = p.normalized ? slots * p.K : 0;
    check_kept(p, chunks);
    StateParams states{};
    states.rows.chunks = chunks, states.H = p.H, states.K = p.K, states.V = p.V;
    states.normalized = p.normalized;
    exact = sizeof(IO) == 2 && p.normalized && p.normalizer_grad && has_h(p);
    rows = arrays.take<char>(rows_scratch(p));
    segments = arrays.take<char>(states_scratch<IO>(states, device));
    C = arrays.take<IO>(p.kept ? 0 : slots * p.K * p.V), terms.C = p.kept ? p.kept_C : C;
    const NarrowPlan narrow_plan(p, chunks, device, sizeof(IO));
    if (narrow_plan.used && has_h(p)) narrow = narrow_plan.take(p, arrays);
    const bool has_dC = narrow.count == 0;  // the kernel of narrow heads has them in registers
    terms.dC = arrays.take<IO>(has_dC ? slots * p.K * p.V : 0);
    terms.weight = arrays.take<float>(values), terms.n_weight = arrays.take<float>(divided);
    terms.inverse = arrays.take<float>(values), terms.delta = arrays.take<float>(divided);
    terms.spread = arrays.take<float>(exact ? values : 0);
    terms.spreads = arrays.take<float>(exact ? slots : 0);
    n = arrays.take<float>(p.kept ? 0 : of_n), terms.dn = arrays.take<float>(has_dC ? of_n : 0);
    terms.n = p.kept ? static_cast<const float*>(p.kept_n) : n;
    in_blocks = narrow.count == 0 && has_blocks<IO>(p, device);
    if (in_blocks) {
      terms.in = arrays.take<float>(values), terms.out = arrays.take<float>(values);
      terms.taken = arrays.take<int>(2 * kGradients);
      terms.shut = arrays.take<int>(slots), terms.shut_count = arrays.take<int>(1);
    }
    const bool lists = in_blocks && exact && std::is_same_v<IO, bf16>;  // fp16 rounds far less
    terms.listed = arrays.take<int>(lists ? slots : 0);
    terms.count = arrays.take<int>(lists ? 1 : 0);
    if (!lists) terms.listed = terms.count = nullptr;
    bytes = arrays.bytes();
    if (!exact) terms.spread = terms.spreads = nullptr;
    if (!p.normalized) terms.n_weight = terms.delta = terms.dn = nullptr, terms.n = nullptr;
    terms.scale = 1 / std::sqrt(float(p.K));
  }
};

template <typename IO, int kTiles>
void run_chunks(const BackwardParams& p, const BackwardTerms& terms, const Device& device,
                cudaStream_t stream) {
  using Gradients = ChunkGradients<IO, kTiles>;
  using Shared = typename Gradients::Shared;
  const int bytes = Gradients::template bytes<Shared>(device.code);
  static_assert(sizeof(Shared) <= chunk_bytes(kTiles, sizeof(IO), Gradients::kStages));
  const int64_t blocks = terms.rows.chunks.slots() * p.H * 2;
  launch(chunk_gradients<IO, kTiles>, {blocks, Gradients::kThreads, bytes, stream}, p, terms);
}

template <typename IO, int kTiles>
void run_shut(const BackwardParams& p, const BackwardTerms& terms, const Device& device,
              cudaStream_t stream) {
  using Gradients = ChunkGradients<IO, kTiles>;
  const int64_t all = terms.rows.chunks.slots() * p.H;
  const int64_t blocks = std::min<int64_t>(all, device.sms);
  launch(shut_gates<IO, kTiles>,
         {blocks, Gradients::kThreads, int(sizeof(typename Gradients::Shared)), stream}, p, terms);
}

template <typename IO, int kKeyBlocks, int kValueBlocks>
void run_blocks(const BackwardParams& p, const BackwardTerms& terms, const Device& device,
                cudaStream_t stream) {
  using Gradients = BlockGradients<IO, kKeyBlocks, kValueBlocks, false>;
  const Chunks& chunks = terms.rows.chunks;
  if (chunks.slots() * p.H == 0) return;
  const int slots = Gradients::slots(p, device.shared_bytes);
  const int panels = Gradients::panels(std::max(p.K, p.V));
  const int bytes = Gradients::bytes(p, device.shared_bytes);
  const GradientBlocks blocks = Gradients::share(p, chunks.tiles(), device.sms);
  const Grid grid{blocks.total(), kRingThreads, bytes, stream};
  launch(block_gradients<IO, kKeyBlocks, kValueBlocks, false>, grid, p, terms, blocks, slots,
         panels);
  if constexpr (std::is_same_v<IO, bf16>) {
    if (terms.listed != nullptr) {
      launch(block_gradients<IO, kKeyBlocks, kValueBlocks, true>, grid, p, terms, blocks, slots,
             panels);
    }
  }
  launch(gate_gradients<IO>, {chunks.slots() * p.H, kGateThreads, 0, stream}, p, terms);
  if (chunks.tiles() == 1) return run_shut<IO, 1>(p, terms, device, stream);
  if (chunks.tiles() == 2) return run_shut<IO, 2>(p, terms, device, stream);
  run_shut<IO, 4>(p, terms, device, stream);
}
template <typename IO>
void run_blocks(const BackwardParams& p, const BackwardTerms& terms, const Device& device,
                cudaStream_t stream) {
  if (p.K > kBlockColumns) return run_blocks<IO, 2, 2>(p, terms, device, stream);
  if (p.V > kBlockColumns) return run_blocks<IO, 1, 2>(p, terms, device, stream);
  run_blocks<IO, 1, 1>(p, terms, device, stream);
}

// Computes the states before chunks, which the forward has not kept.
template <typename IO>
void run_states_again(const BackwardParams& p, const StateParams& states, const Plan<IO>& plan,
                      const Device& device, cudaStream_t stream) {
  if constexpr (sizeof(IO) == 2) {
    if (plan.narrow.count > 0) {
      ForwardParams forward{};
      static_cast<MlstmParams&>(forward) = p;
      forward.q.data = nullptr;
      return run_narrow_outputs<IO>(forward, states, plan.narrow, stream);
    }
  }
  run_states<IO, false>(states, device, plan.segments, stream);
}

// Computes the terms of rows besides the gates.
template <typename IO>
void find_row_terms(const BackwardParams& p, const Plan<IO>& plan, cudaStream_t stream) {
  const BackwardTerms& terms = plan.terms;
  const Chunks& chunks = terms.rows.chunks;
  if constexpr (sizeof(IO) == 2) {
    if (plan.narrow.count > 0) {
      run_narrow_rows<IO>(p, terms, stream);
    } else {
      launch(row_gradients<IO>, {chunks.slots() * p.H, kRowThreads, 0, stream}, p, terms);
    }
    if (!plan.exact) return;
    const int at_once = exact_chunks(chunks), bytes = int(p.K + p.V) * int(sizeof(float));
    const int64_t blocks = (chunks.slots() + at_once - 1) / at_once * p.H;
    launch(exact_rows<IO>, {blocks, kRowThreads, bytes, stream}, p, terms);
  } else {
    launch(row_gradients<IO>, {chunks.slots() * p.H, kRowThreads, 0, stream}, p, terms);
  }
}

}  // namespace

template <typename IO>
int64_t backward_scratch(const BackwardParams& p, const Device& device) {
  return Plan<IO>(p, device, nullptr).bytes;
}

template <typename IO>
void run_backward(const BackwardParams& p, const Device& device, void* memory,
                  cudaStream_t stream) {
  Plan<IO> plan(p, device, memory);
  BackwardTerms& terms = plan.terms;
  terms.rows = prepare_rows(p, plan.rows, nullptr, stream);

  StateParams states{};
  states.rows = terms.rows, states.H = p.H, states.K = p.K, states.V = p.V;
  states.normalized = p.normalized;
  if (!p.kept) {
    states.left = p.k, states.right = p.v;
    states.weight = terms.rows.outflow;
    states.n_weight = terms.rows.outflow;
    states.first = static_cast<const float*>(p.C), states.first_n = static_cast<const float*>(p.n);
    states.states = plan.C, states.n = p.normalized ? plan.n : nullptr;
    run_states_again<IO>(p, states, plan, device, stream);
  }

  if (has_h(p)) {
    find_row_terms<IO>(p, plan, stream);
    states.left = p.q, states.right = {p.dh, p.T * p.H * p.V, p.H * p.V, p.V};
    // Nothing is added to dC: run with k and v and weights of 0.
  } else if (terms.rows.chunks.rows > 0) {
    const int64_t bytes = p.H * terms.rows.chunks.rows * sizeof(float);
    check(cudaMemsetAsync(terms.weight, 0, bytes, stream));
    if (p.normalized) check(cudaMemsetAsync(terms.n_weight, 0, bytes, stream));
  }
  states.weight = terms.weight, states.n_weight = terms.n_weight;
  states.first = static_cast<const float*>(p.dlast_C);
  states.first_n = static_cast<const float*>(p.dlast_n);
  states.last = static_cast<float*>(p.dC), states.last_n = static_cast<float*>(p.dn);
  states.states = terms.dC, states.n = terms.dn;
  if constexpr (sizeof(IO) == 2) {
    if (plan.narrow.count > 0) {
      return run_narrow_gradients<IO>(p, terms, states, plan.narrow, stream);
    }
  }
  run_states<IO, true>(states, device, plan.segments, stream);

  if constexpr (sizeof(IO) == 2) {
    if (plan.in_blocks) return run_blocks<IO>(p, terms, device, stream);
  }
  switch (terms.rows.chunks.tiles()) {
    case 1:
      return run_chunks<IO, 1>(p, terms, device, stream);
    case 2:
      return run_chunks<IO, 2>(p, terms, device, stream);
    default:
      if constexpr (sizeof(IO) == 2) return run_chunks<IO, 4>(p, terms, device, stream);
      throw std::invalid_argument("tfla: chunks of fp32 have at most 128 steps");
  }
}

template int64_t backward_scratch<bf16>(const BackwardParams&, const Device&);
template int64_t backward_scratch<fp16>(const BackwardParams&, const Device&);
template int64_t backward_scratch<float>(const BackwardParams&, const Device&);
template void run_backward<bf16>(const BackwardParams&, const Device&, void*, cudaStream_t);
template void run_backward<fp16>(const BackwardParams&, const Device&, void*, cudaStream_t);
template void run_backward<float>(const BackwardParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
