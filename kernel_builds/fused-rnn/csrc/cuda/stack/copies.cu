// Runs the copies of ../../stack/params.h on CUDA: up to kMost of them in one launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../launch.h"
#include "../run.h"

namespace flashcell::cuda {

namespace {

constexpr int kThreads = 256, kPerThread = 4;
constexpr int kMost = 16;  // parameters of a kernel have 4 KB

// Divides numbers below 2^31 without a division: n / divisor = (n multiplier) >> (32 + shift).
struct Divisor {
  uint32_t value, multiplier, shift;

  Divisor() = default;
  explicit Divisor(int64_t divisor) : value(uint32_t(divisor)), shift(0) {
    while ((int64_t(1) << shift) < divisor) ++shift;
    multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - value)) / value + 1);
  }
  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

struct Job {
  Copy copy;       // sizes and strides in units
  int64_t count;   // units
  int unit_bytes;  // of what one load reads; 0 if elements are converted or added
  Divisor d1, d2, d3;
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

// Where unit i is read, written and added; `runs` is false past the end of a sequence.
struct Address {
  int64_t from = 0, to = 0, plus = 0;
  bool runs = true;

  __device__ Address(const Copy& c, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
    from = i0 * c.in_stride[0] + i3 * c.in_stride[3];
    to = i0 * c.out_stride[0] + i3 * c.out_stride[3];
    if (c.packed.begins != nullptr) {
      const int64_t length = c.packed.lengths[i1];
      runs = i2 < length;
      if (!runs) return;
      const int64_t packed = c.packed.begins[i2] + i1;
      const int64_t engine = c.packed.firsts[i1] + (c.turns ? length - 1 - i2 : i2);
      to += (c.out_is_engine ? engine : packed) * c.out_stride[2];
      from += (c.out_is_engine ? packed : engine) * c.in_stride[2];
    } else {
      to += i1 * c.out_stride[1] + i2 * c.out_stride[2];
      from += i1 * c.in_stride[1] + i2 * c.in_stride[2];
    }
    if (c.plus == nullptr) return;
    const int64_t* strides = c.plus_stride;
    plus = i0 * strides[0] + i1 * strides[1] + i2 * strides[2] + i3 * strides[3];
  }
};

__device__ Address address_of(const Job& job, uint32_t i) {
  const uint32_t rest = job.d3.divide(i), rest2 = job.d2.divide(rest), i0 = job.d1.divide(rest2);
  return {job.copy, i0, rest2 - i0 * job.d1.value, rest - rest2 * job.d2.value,
          i - rest * job.d3.value};
}
__device__ Address address_of(const Job& job, int64_t i) {
  const int64_t* size = job.copy.size;
  const int64_t rest = i / size[3], rest2 = rest / size[2];
  return {job.copy, rest2 / size[1], rest2 % size[1], rest % size[2], i % size[3]};
}

template <typename Unit, typename Index>
__device__ void move(const Job& job) {
  const Index count = Index(job.count), step = Index(gridDim.x) * kThreads;
  for (Index i = Index(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step * kPerThread) {
    Unit units[kPerThread];
    Unit* to[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {  // all loads go out before the first store waits
      to[k] = nullptr;
      if (i + k * step >= count) continue;
      const Address address = address_of(job, Index(i + k * step));
      if (!address.runs) continue;
      units[k] = static_cast<const Unit*>(job.copy.in)[address.from];
      to[k] = static_cast<Unit*>(job.copy.out) + address.to;
    }
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (to[k] != nullptr) *to[k] = units[k];
    }
  }
}

template <typename Index>
__device__ void compute(const Job& job) {
  const Copy& c = job.copy;
  const Index count = Index(job.count), step = Index(gridDim.x) * kThreads;
  for (Index i = Index(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const Address address = address_of(job, i);
    if (!address.runs) continue;
    float value = read(c.in, c.in_type, address.from);
    if (c.plus != nullptr) value += read(c.plus, c.in_type, address.plus);
    write(c.out, c.out_type, address.to, value);
  }
}

template <typename Index>
__device__ void run(const Job& job) {
  if (job.unit_bytes == 16) return move<uint4, Index>(job);
  if (job.unit_bytes == 8) return move<uint2, Index>(job);
  if (job.unit_bytes == 4) return move<uint32_t, Index>(job);
  if (job.unit_bytes == 2) return move<uint16_t, Index>(job);
  compute<Index>(job);
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Jobs jobs) {
  const Job& job = jobs.jobs[blockIdx.y];
  if (job.count < int64_t(1) << 30) {  // so that no index overflows
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

__global__ void __launch_bounds__(kThreads) table_kernel(Sequence* table, const int64_t* lengths,
                                                         int64_t B, int64_t T, int64_t stride) {
  const int64_t b = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (b < B) table[b] = {b, b * T, b * T * stride, lengths[b], T - lengths[b]};
}

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat ? 4 : 2; }

// Whether every row of a copy without a conversion consists of whole units of so many bytes.
bool has_units(const Copy& c, int64_t bytes) {
  const int64_t elements = bytes / bytes_of(c.in_type);
  bool fits = elements > 0 && c.size[3] % elements == 0;
  fits &= c.in_stride[3] == 1 && c.out_stride[3] == 1;
  fits &= (reinterpret_cast<uintptr_t>(c.in) | reinterpret_cast<uintptr_t>(c.out)) % bytes == 0;
  for (int i = 0; i < 3; ++i) {
    fits &= c.size[i] == 1 || (c.in_stride[i] % elements == 0 && c.out_stride[i] % elements == 0);
  }
  return fits;
}

// Exchanges two dimensions of a copy.
void swap_dimensions(Copy& c, int i, int j) {
  const auto swap = [](int64_t& a, int64_t& b) {
    const int64_t first = a;
    a = b, b = first;
  };
  swap(c.size[i], c.size[j]), swap(c.plus_stride[i], c.plus_stride[j]);
  swap(c.in_stride[i], c.in_stride[j]), swap(c.out_stride[i], c.out_stride[j]);
}

Job make_job(Copy c) {
  Job job{};
  // Neighbouring threads get neighbouring elements.
  for (int i = 0; i < 3 && c.packed.begins == nullptr; ++i) {
    const bool is_apart = c.in_stride[3] != 1 || c.out_stride[3] != 1;
    if (is_apart && c.size[i] > 1 && c.in_stride[i] == 1 && c.out_stride[i] == 1) {
      swap_dimensions(c, i, 3);
    }
  }
  if (c.in_type == c.out_type && c.plus == nullptr) {
    job.unit_bytes = 16;
    while (job.unit_bytes > bytes_of(c.in_type) && !has_units(c, job.unit_bytes)) {
      job.unit_bytes /= 2;
    }
    const int64_t elements = job.unit_bytes / bytes_of(c.in_type);
    c.size[3] /= elements;
    for (int i = 0; i < 3; ++i) c.in_stride[i] /= elements, c.out_stride[i] /= elements;
  }
  job.copy = c, job.count = c.count();
  if (job.count < int64_t(1) << 30) {
    job.d1 = Divisor(c.size[1]), job.d2 = Divisor(c.size[2]), job.d3 = Divisor(c.size[3]);
  }
  return job;
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

void write_packed_table(Sequence* table, const int64_t* lengths, int64_t B, int64_t T,
                        int64_t stride, cudaStream_t stream) {
  const int64_t blocks = (B + kThreads - 1) / kThreads;
  table_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(table, lengths, B, T, stride);
  check(cudaGetLastError());
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
