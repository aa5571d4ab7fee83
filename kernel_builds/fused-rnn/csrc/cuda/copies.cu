// Runs the copies of ../stack/params.h on CUDA: up to kMost of them in one launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"
#include "run.h"

namespace flashcell::cuda {

namespace {

constexpr int kThreads = 256, kPerThread = 4;
constexpr int kMost = 24;  // parameters of a kernel have 4 KB

struct Job {
  Copy copy;
  int vector;  // elements that are moved at once: bytes if above 1
};

struct Jobs {
  Job jobs[kMost];
};

__device__ float read(const void* x, Dtype dtype, int64_t at) {
  if (dtype == Dtype::kFloat) return static_cast<const float*>(x)[at];
  if (dtype == Dtype::kHalf) return __half2float(static_cast<const __half*>(x)[at]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[at]);
}

__device__ void write(void* x, Dtype dtype, int64_t at, float value) {
  if (dtype == Dtype::kFloat) {
    static_cast<float*>(x)[at] = value;
  } else if (dtype == Dtype::kHalf) {
    static_cast<__half*>(x)[at] = __float2half(value);
  } else {
    static_cast<__nv_bfloat16*>(x)[at] = __float2bfloat16(value);
  }
}

template <typename Index>
__device__ void run(const Copy& c, bool by_vector) {
  const Index count = Index(c.count()), step = Index(gridDim.x) * kThreads;
  const Index d3 = Index(c.size[3]), d2 = Index(c.size[2]), d1 = Index(c.size[1]);
  for (Index i = Index(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const Index i3 = i % d3, rest = i / d3, i2 = rest % d2, rest2 = rest / d2;
    const Index i1 = rest2 % d1, i0 = rest2 / d1;
    const int64_t from = i0 * c.in_stride[0] + i1 * c.in_stride[1] + i2 * c.in_stride[2] +
                         i3 * c.in_stride[3];
    const int64_t to = i0 * c.out_stride[0] + i1 * c.out_stride[1] + i2 * c.out_stride[2] +
                       i3 * c.out_stride[3];
    if (by_vector) {
      static_cast<uint4*>(c.out)[to] = static_cast<const uint4*>(c.in)[from];
    } else {
      float value = read(c.in, c.in_type, from);
      if (c.plus != nullptr) value += read(c.plus, c.in_type, from);
      write(c.out, c.out_type, to, value);
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Jobs jobs) {
  const Job& job = jobs.jobs[blockIdx.y];
  if (job.copy.count() < (int64_t(1) << 31)) {
    run<uint32_t>(job.copy, job.vector > 1);
  } else {
    run<int64_t>(job.copy, job.vector > 1);
  }
}

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat ? 4 : 2; }

// Moves 16 bytes at a time if pointers, strides and the innermost size allow it.
Job make_job(Copy c) {
  const int64_t bytes = bytes_of(c.in_type), vector = 16 / bytes;
  bool fits = c.in_type == c.out_type && c.plus == nullptr && c.size[3] % vector == 0;
  fits &= c.in_stride[3] == 1 && c.out_stride[3] == 1;
  fits &= (reinterpret_cast<uintptr_t>(c.in) | reinterpret_cast<uintptr_t>(c.out)) % 16 == 0;
  for (int i = 0; i < 3; ++i) {
    fits &= c.size[i] == 1 || (c.in_stride[i] % vector == 0 && c.out_stride[i] % vector == 0);
  }
  if (!fits) return {c, 1};
  c.size[3] /= vector;
  for (int i = 0; i < 3; ++i) c.in_stride[i] /= vector, c.out_stride[i] /= vector;
  return {c, int(vector)};
}

}  // namespace

void copy_all(const Copy* copies, int64_t count, cudaStream_t stream) {
  Jobs jobs;
  int used = 0;
  int64_t most = 0;
  const auto flush = [&] {
    if (used == 0) return;
    const int64_t blocks = (most + kThreads * kPerThread - 1) / (kThreads * kPerThread);
    const dim3 grid(unsigned(blocks < 1056 ? blocks : 1056), unsigned(used));
    copy_kernel<<<grid, kThreads, 0, stream>>>(jobs);
    check(cudaGetLastError());
    used = 0, most = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (copies[i].count() == 0) continue;
    jobs.jobs[used] = make_job(copies[i]);
    const int64_t elements = jobs.jobs[used++].copy.count();
    most = elements > most ? elements : most;
    if (used == kMost) flush();
  }
  flush();
}

}  // namespace flashcell::cuda
