// The matrix products of the gemm engine, computed by the cuBLAS that torch brings.
#pragma once
#include "../launch.h"
#include "blas.h"
#include "common/cuda/device.cuh"
#include "common/cuda/ptx/mma.cuh"
#include "plan.h"

namespace flashcell::cuda::gemm {

// Makes cuBLAS use the launch's stream, and the launch's scratch as its workspace: the workspace
// that torch gave it may be used on torch's stream alone.
inline void use_stream(const Launch& launch) {
  check_has_blas();
  check_blas("cublasSetStream", cublasSetStream_v2(launch.blas, launch.stream));
  check_blas("cublasSetWorkspace",
             cublasSetWorkspace_v2(launch.blas, launch.scratch, kWorkspaceBytes));
}

template <typename IO>
constexpr DataType kDataType = sizeof(IO) == 4            ? kFloat32
                               : std::is_same_v<IO, bf16> ? kBFloat16
                                                          : kFloat16;

// Computes c = b a^T if `transposed`, else c = b a, for every head. a is [heads, width, depth] if
// `transposed`, else [heads, depth, width]; b is [sequences, heads, depth], in a's dtype, and c
// [sequences, heads, width] in fp32.
template <typename IO>
void multiply(const void* a, const void* b, float* c, bool transposed, int64_t sequences,
              int64_t heads, int64_t depth, int64_t width, const Launch& launch) {
  const float one = 1, zero = 0;
  const int compute = sizeof(IO) == 2 ? kFp32 : launch.tf32 ? kTf32 : kExactFp32;
  const int status = cublasGemmStridedBatchedEx(
      launch.blas, transposed ? kTransposed : kNone, kNone, int(width), int(sequences), int(depth),
      &one, a, kDataType<IO>, int(transposed ? depth : width), depth * width, b, kDataType<IO>,
      int(heads * depth), depth, &zero, c, kFloat32, int(heads * width), width, int(heads), compute,
      kDefaultAlgorithm);
  check_blas("cublasGemmStridedBatchedEx", status);
}

// Copies the weights of the heads that run from [G, N, D, D] to [heads, G, D, D], where all gates
// of a head are one matrix. With one head in all the two are the same, and nothing is copied.
inline const void* pack_weight(const SequenceParams& p, int gates, int io_bytes, void* scratch,
                               const Launch& launch) {
  if (p.N == 1) return p.weight;
  const size_t bytes = size_t(p.D * p.D * io_bytes);
  for (int g = 0; g < gates; ++g) {
    check(cudaMemcpy2DAsync(static_cast<char*>(scratch) + g * bytes, gates * bytes,
                            static_cast<const char*>(p.weight) + g * p.N * bytes, bytes, bytes,
                            size_t(p.heads), cudaMemcpyDeviceToDevice, launch.stream));
  }
  return scratch;
}

}  // namespace flashcell::cuda::gemm
