// The kernels that run before those of the grid and the wide engine: they fill the tensor that
// thread blocks exchange, and round the initial states.
#include <algorithm>

#include "../launch.h"
#include "exchange.cuh"

namespace flashcell::cuda {
namespace {

constexpr int kThreads = 256;

// `vector` is the number of values in 16 bytes.
__global__ void __launch_bounds__(kThreads) fill_kernel(const SequenceParams p, uint4* tensor,
                                                        int gates, int vector) {
  const Column column(p, blockIdx.x);
  const bool all = p.heads == p.N;  // then the rows of all gates follow each other without gaps
  const int64_t whole = p.N * p.D / vector;  // vectors of a part
  const int64_t vectors = p.heads * p.D / vector * (all ? gates : 1);
  uint4* to = tensor + column.row * gates * whole + p.first_head * p.D / vector;
  const int64_t count = column.length * (all ? 1 : gates) * vectors;
  for (int64_t i = blockIdx.y * kThreads + threadIdx.x; i < count; i += gridDim.y * kThreads) {
    to[all ? i : i / vectors * whole + i % vectors] =
        make_uint4(kUnwritten, kUnwritten, kUnwritten, kUnwritten);
  }
}

template <typename IO>
__global__ void __launch_bounds__(kThreads) round_kernel(const float* from, IO* to, int64_t pairs) {
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i >= pairs) return;
  auto pair = Pair<IO>::of(from[2 * i], from[2 * i + 1]);
  for (uint32_t& word : pair.word) word = min(word, kUnwritten - 1);
  reinterpret_cast<Pair<IO>*>(to)[i] = pair;
}

}  // namespace

template <typename IO>
void fill_exchanged(const SequenceParams& p, void* tensor, int gates, const Launch& launch) {
  const int parts = int(std::clamp<int64_t>(8 * launch.device.sms / p.S, 1, 4096));
  fill_kernel<<<dim3(unsigned(p.S), unsigned(parts)), kThreads, 0, launch.stream>>>(
      p, static_cast<uint4*>(tensor), gates, IoTraits<IO>::kVector);
  check(cudaGetLastError());
}

template <typename IO>
void round_states(const float* from, void* to, int64_t count, cudaStream_t stream) {
  const int64_t pairs = count / 2, blocks = (pairs + kThreads - 1) / kThreads;
  round_kernel<IO><<<unsigned(blocks), kThreads, 0, stream>>>(from, static_cast<IO*>(to), pairs);
  check(cudaGetLastError());
}

#define FLASHCELL_INSTANTIATE_PREPARE(IO)                                             \
  template void fill_exchanged<IO>(const SequenceParams&, void*, int, const Launch&); \
  template void round_states<IO>(const float*, void*, int64_t, cudaStream_t);
FLASHCELL_INSTANTIATE_PREPARE(bf16)
FLASHCELL_INSTANTIATE_PREPARE(fp16)
FLASHCELL_INSTANTIATE_PREPARE(float)

}  // namespace flashcell::cuda
