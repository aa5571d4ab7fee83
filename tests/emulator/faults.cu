// One correct kernel, and the same kernel with one fault each, which the emulator must detect.
// Prints "<fault>: <the emulator's message, or whether the result is right>" for every fault.
#include <cstdio>
#include <exception>
#include <vector>

#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

constexpr int kThreads = 64;
enum Fault {
  kNone,
  kNoBarrier,       // reads what another warp may not have written yet
  kNoWait,          // reads a copy that was not waited for
  kNoCopy,          // reads shared memory that was never written
  kOutOfRange,      // copies beyond the shared memory of the launch
  kMisaligned,      // copies from an address that is no multiple of 16
  kDivergentLane,   // a lane stays away from a shuffle
  kDivergentKinds,  // a lane is in another collective than the others
  kTooMuchShared    // more shared memory than the device has
};
const char* const kNames[] = {"none",           "no barrier",      "no wait",
                              "no copy",        "range",           "alignment",
                              "divergent lane", "divergent kinds", "too much shared"};

// out[t] = 4 x[t ^ 32], through a copy to shared memory, a barrier, and a shuffle that doubles
// twice.
__global__ void kernel(const float* x, float* out, Fault fault) {
  extern __shared__ __align__(16) char memory[];
  float* rows = reinterpret_cast<float*>(memory);
  __shared__ float doubled[kThreads];
  const int t = threadIdx.x;
  if (t % 4 == 0 && fault != kNoCopy) {
    const int to = fault == kOutOfRange ? t + 4 : t, from = fault == kMisaligned ? t + 1 : t;
    copy_async(rows + to, x + from);
    copy_commit();
    if (fault != kNoWait) copy_wait<0>();
  }
  __syncthreads();
  doubled[t] = 2 * rows[t];
  if (fault == kNoBarrier) {
    __syncwarp();  // this does not replace __syncthreads
  } else {
    __syncthreads();
  }
  const uint32_t a[4] = {};
  float d[4] = {};
  float sum = doubled[t ^ 32];
  if (fault == kDivergentLane && t == 5) return;
  if (fault == kDivergentKinds && t == 5) mma<float>(d, a, 0, 0);
  sum += __shfl_xor_sync(~0u, __shfl_xor_sync(~0u, sum, 1), 1);
  out[t] = sum;
}

bool is_right(Fault fault) {
  alignas(16) float x[kThreads + 4], out[kThreads];
  for (int i = 0; i < kThreads + 4; ++i) x[i] = float(i + 1);
  cudaLaunchConfig_t config{};
  config.gridDim = 2, config.blockDim = kThreads,
  config.dynamicSmemBytes = kThreads * sizeof(float);
  if (fault == kTooMuchShared) config.dynamicSmemBytes = 64 << 10;
  cudaLaunchKernelEx(&config, kernel, x, out, fault);
  bool right = true;
  for (int i = 0; i < kThreads; ++i) right &= out[i] == 4 * x[i ^ 32];
  return right;
}

}  // namespace flashcell::cuda

int main() {
  using namespace flashcell::cuda;
  for (int fault = kNone; fault <= kTooMuchShared; ++fault) {
    try {
      std::printf("%s: %s\n", kNames[fault], is_right(Fault(fault)) ? "right" : "wrong");
    } catch (const std::exception& error) {
      std::printf("%s: %s\n", kNames[fault], error.what());
    }
  }
}
