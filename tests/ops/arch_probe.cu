// Prints what common/cuda/code.cuh says about the code that runs here, and what that code was
// compiled for.
#include <cstdio>

namespace flashcell::cuda {
inline constexpr char kKernelName[] = "probe";
}

#include "common/cuda/code.cuh"

namespace flashcell::cuda {

static __global__ void ask_preprocessor(int* answer) {
#if defined(__CUDA_ARCH__)
  answer[0] = __CUDA_ARCH__ / 10;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  answer[1] = 1;
#else
  answer[1] = 0;
#endif
#endif
}

}  // namespace flashcell::cuda

int main() {
  using namespace flashcell::cuda;
  int* answer;
  try {
    const Code code = of_current_gpu<Code>([](int) { return find_code(); });
    check(cudaMallocManaged(&answer, 2 * sizeof(int)));
    ask_preprocessor<<<1, 1>>>(answer);
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
    std::printf("%d %d %d %d\n", code.arch, code.sm_90a, answer[0], answer[1]);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
}
