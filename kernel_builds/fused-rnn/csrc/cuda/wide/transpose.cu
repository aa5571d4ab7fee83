// Transposes the weight for the wide engine's backward pass.
#include "transpose.h"

#include "../launch.h"
#include "plan.h"

namespace flashcell::cuda::wide {

constexpr int kSide = 32, kRows = 8;  // a tile's side, and its rows that threads take at once

static __global__ void __launch_bounds__(kSide* kRows) transpose_weight_kernel(
    const BackwardParams p, int gates, float* to) {
  __shared__ float tile[kSide][kSide + 1];
  const int64_t head = blockIdx.z / gates, gate = blockIdx.z % gates;
  const int64_t j = blockIdx.y * kSide, unit = blockIdx.x * kSide;
  const float* from =
      static_cast<const float*>(p.weight) + (gate * p.N + p.first_head + head) * p.D * p.D;
  for (int i = threadIdx.y; i < kSide; i += kRows) {
    const bool inside = j + i < p.D && unit + threadIdx.x < p.D;
    if (inside) tile[i][threadIdx.x] = from[(j + i) * p.D + unit + threadIdx.x];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kSide; i += kRows) {
    const bool inside = unit + i < p.D && j + threadIdx.x < p.D;
    const int64_t row = (head * p.D + unit + i) * gates + gate;
    if (inside) to[row * p.D + j + threadIdx.x] = tile[threadIdx.x][i];
  }
}

void transpose_weight(const BackwardParams& p, int gates, float* to, cudaStream_t stream) {
  const unsigned tiles = unsigned(divide_up(p.D, kSide));
  const dim3 grid(tiles, tiles, unsigned(p.heads * gates));
  transpose_weight_kernel<<<grid, dim3(kSide, kRows), 0, stream>>>(p, gates, to);
  check(cudaGetLastError());
}

}  // namespace flashcell::cuda::wide
