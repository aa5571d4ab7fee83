// Launches the kernels of narrow heads.
#include "run.h"

#include "gradients.cuh"
#include "outputs.cuh"
#include "rows.cuh"

namespace flashcell::cuda {

namespace {

// Calls walk(segments) for the first pass over segments, if there are several, and for all.
template <bool kReverse, typename Walk>
void for_segments(const StateParams& states, Segments segments, cudaStream_t stream,
                  const Walk& walk) {
  if (segments.count > 1) {
    segments.first_pass = true;
    walk(segments);
    segments.first_pass = false;
    join_segments<kReverse>(states, segments, stream);
  }
  walk(segments);
}

Grid grid_of(const StateParams& states, const Segments& segments, size_t bytes,
             cudaStream_t stream) {
  const int64_t blocks = states.rows.chunks.S * states.H * (segments.count - segments.first_pass);
  return {blocks, kNarrowThreads, int(bytes), stream};
}

template <typename IO, int kWidth>
void run_outputs(const ForwardParams& p, const StateParams& states, const Segments& segments,
                 cudaStream_t stream) {
  using Shared = typename NarrowOutputs<IO, kWidth>::Shared;
  static_assert(sizeof(Shared) <= narrow_bytes(kWidth > 32));
  for_segments<false>(states, segments, stream, [&](const Segments& s) {
    launch(narrow_outputs<IO, kWidth>, grid_of(states, s, sizeof(Shared), stream), p, states, s);
  });
}
template <typename IO, int kWidth>
void run_gradients(const BackwardParams& p, const BackwardTerms& terms, const StateParams& states,
                   const Segments& segments, cudaStream_t stream) {
  using Shared = typename NarrowGradients<IO, kWidth>::Shared;
  static_assert(sizeof(Shared) <= narrow_bytes(kWidth > 32));
  for_segments<true>(states, segments, stream, [&](const Segments& s) {
    launch(narrow_gradients<IO, kWidth>, grid_of(states, s, sizeof(Shared), stream), p, terms,
           states, s);
  });
}

bool fits_32(const StateParams& states) { return states.K <= 32 && states.V <= 32; }

}  // namespace

template <typename IO>
void run_narrow_outputs(const ForwardParams& p, const StateParams& states, const Segments& segments,
                        cudaStream_t stream) {
  fits_32(states) ? run_outputs<IO, 32>(p, states, segments, stream)
                  : run_outputs<IO, 64>(p, states, segments, stream);
}
template <typename IO>
void run_narrow_rows(const BackwardParams& p, const BackwardTerms& terms, cudaStream_t stream) {
  const int64_t groups = (p.H + kHeadsAtOnce - 1) / kHeadsAtOnce;
  const Grid grid{terms.rows.chunks.slots() * groups, kRowThreads, 0, stream};
  launch(p.V > 32 ? narrow_rows<IO, 8> : narrow_rows<IO, 4>, grid, p, terms);
}
template <typename IO>
void run_narrow_gradients(const BackwardParams& p, const BackwardTerms& terms,
                          const StateParams& states, const Segments& segments,
                          cudaStream_t stream) {
  fits_32(states) ? run_gradients<IO, 32>(p, terms, states, segments, stream)
                  : run_gradients<IO, 64>(p, terms, states, segments, stream);
}

#define FLASHCELL_INSTANTIATE(IO)                                                                 \
  template void run_narrow_outputs<IO>(const ForwardParams&, const StateParams&, const Segments&, \
                                       cudaStream_t);                                             \
  template void run_narrow_rows<IO>(const BackwardParams&, const BackwardTerms&, cudaStream_t);   \
  template void run_narrow_gradients<IO>(const BackwardParams&, const BackwardTerms&,             \
                                         const StateParams&, const Segments&, cudaStream_t);
FLASHCELL_INSTANTIATE(bf16)
FLASHCELL_INSTANTIATE(fp16)
#undef FLASHCELL_INSTANTIATE

}  // namespace flashcell::cuda
