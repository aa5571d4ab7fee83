// Runs the copies of ../../stack/params.h on CUDA: up to kMost of them in one launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../launch.h"
#include "../run.h"

namespace flashcell::cuda {

namespace {

constexpr int kThreads = 256, kPerThread = 4;
constexpr int kMost = 18;  // parameters of a kernel have 4 KB

struct Job {
  Copy copy;
  int64_t count;
  bool by_vector;  // sizes and strides are in 16 bytes
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
__device__ void run(const Job& job) {
  const Copy& c = job.copy;
  const Index count = Index(job.count), step = Index(gridDim.x) * kThreads;
  const Index d3 = Index(c.size[3]), d2 = Index(c.size[2]), d1 = Index(c.size[1]);
  for (Index i = Index(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const Index i3 = i % d3, rest = i / d3, i2 = rest % d2, rest2 = rest / d2;
    const Index i1 = rest2 % d1, i0 = rest2 / d1;
    int64_t from = i0 * c.in_stride[0] + i3 * c.in_stride[3];
    int64_t to = i0 * c.out_stride[0] + i3 * c.out_stride[3];
    if (c.packed.begins != nullptr) {
      const int64_t length = c.packed.lengths[i1];
      if (int64_t(i2) >= length) continue;
      const int64_t packed = c.packed.begins[i2] + i1;
      const int64_t engine = c.packed.firsts[i1] + (c.turns ? length - 1 - i2 : i2);
      to += (c.out_is_engine ? engine : packed) * c.out_stride[2];
      from += (c.out_is_engine ? packed : engine) * c.in_stride[2];
    } else {
      to += i1 * c.out_stride[1] + i2 * c.out_stride[2];
      from += i1 * c.in_stride[1] + i2 * c.in_stride[2];
    }
    if (job.by_vector) {
      static_cast<uint4*>(c.out)[to] = static_cast<const uint4*>(c.in)[from];
    } else {
      float value = read(c.in, c.in_type, from);
      if (c.plus != nullptr) {
        const int64_t* strides = c.plus_stride;
        const int64_t plus = i0 * strides[0] + i1 * strides[1] + i2 * strides[2] + i3 * strides[3];
        value += read(c.plus, c.in_type, plus);
      }
      write(c.out, c.out_type, to, value);
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Jobs jobs) {
  const Job& job = jobs.jobs[blockIdx.y];
  if (job.count < (int64_t(1) << 31)) {
    run<uint32_t>(job);
  } else {
    run<int64_t>(job);
  }
}

constexpr int kSizes = 960;

// Some of a PackedSequence's steps: those from `step` on.
struct Steps {
  int step, count;
  int64_t begin;      // row of the first step
  int sizes[kSizes];  // sequences at each step, which never increase
};

__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Steps steps,
                                                        int64_t B, int64_t T, int64_t* begins,
                                                        int64_t* firsts, int64_t* lengths) {
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    int64_t row = steps.begin;
    for (int i = 0; i < steps.count; ++i) begins[steps.step + i] = row, row += steps.sizes[i];
  }
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  for (int64_t b = int64_t(blockIdx.x) * kThreads + threadIdx.x; b < B; b += stride) {
    int low = 0, high = steps.count;  // the steps that have more than b sequences end in between
    while (low < high) {
      const int middle = (low + high) / 2;
      if (steps.sizes[middle] > b) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    lengths[b] = (steps.step > 0 ? lengths[b] : 0) + low;
    firsts[b] = b * T;
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
  if (!fits) return {c, c.count(), false};
  c.size[3] /= vector;
  for (int i = 0; i < 3; ++i) c.in_stride[i] /= vector, c.out_stride[i] /= vector;
  return {c, c.count(), true};
}

}  // namespace

void write_packed_rows(const int64_t* batch_sizes, int64_t T, int64_t* begins, int64_t* firsts,
                       int64_t* lengths, cudaStream_t stream) {
  const int64_t B = batch_sizes[0], blocks = (B + kThreads - 1) / kThreads;
  Steps steps{};
  for (int64_t t = 0; t < T; t += kSizes) {
    steps.step = int(t), steps.count = int(T - t < kSizes ? T - t : kSizes);
    for (int i = 0; i < steps.count; ++i) steps.sizes[i] = int(batch_sizes[t + i]);
    rows_kernel<<<unsigned(blocks < 1024 ? blocks : 1024), kThreads, 0, stream>>>(
        steps, B, T, begins, firsts, lengths);
    check(cudaGetLastError());
    for (int i = 0; i < steps.count; ++i) steps.begin += steps.sizes[i];
  }
}

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
    const int64_t elements = jobs.jobs[used++].count;
    most = elements > most ? elements : most;
    if (used == kMost) flush();
  }
  flush();
}

}  // namespace flashcell::cuda
