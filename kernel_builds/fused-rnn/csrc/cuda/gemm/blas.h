// Declares the cuBLAS functions that are called here, without NVIDIA's headers, so that one binary
// serves every CUDA version of torch. This library is linked to torch's CUDA library, which loads
// cuBLAS.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>

using cudaStream_t = struct CUstream_st*;  // as in CUDA's headers, which ops.cpp lacks

extern "C" __attribute__((weak)) int cublasGemmStridedBatchedEx(
    void* handle, int, int, int m, int n, int k, const void* alpha, const void* a, int, int lda,
    long long stride_a, const void* b, int, int ldb, long long stride_b, const void* beta, void* c,
    int, int ldc, long long stride_c, int count, int compute, int algorithm);
extern "C" __attribute__((weak)) int cublasSetStream_v2(void* handle, cudaStream_t stream);
extern "C" __attribute__((weak)) int cublasSetWorkspace_v2(void* handle, void* memory,
                                                           size_t bytes);

namespace flashcell::cuda::gemm {

// Arguments of cuBLAS, with the values that they have in NVIDIA's headers.
enum Operation { kNone = 0, kTransposed = 1 };
enum DataType { kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14 };
enum Compute { kFp32 = 68, kExactFp32 = 69, kTf32 = 77 };
constexpr int kDefaultAlgorithm = -1;

// Throws if torch's CUDA library does not bring the functions declared above.
inline void check_has_blas() {
  if (cublasGemmStridedBatchedEx == nullptr || cublasSetStream_v2 == nullptr ||
      cublasSetWorkspace_v2 == nullptr) {
    throw std::runtime_error(
        "fused_rnn: the gemm engine needs the cuBLAS that torch is linked to, and this torch has "
        "none: set FLASHCELL_CUDA_ENGINE=step");
  }
}

inline void check_blas(const char* function, int status) {
  if (status != 0) {
    throw std::runtime_error(std::string("fused_rnn: ") + function + " failed with status " +
                             std::to_string(status));
  }
}

}  // namespace flashcell::cuda::gemm
