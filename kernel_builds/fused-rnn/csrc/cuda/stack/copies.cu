// Runs the copies of ../../stack/params.h on CUDA: up to kMost of them in one launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../launch.h"
#include "../run.h"

namespace flashcell::cuda {

namespace {

constexpr int kThreads = 256, kPerThread = 4;
constexpr int64_t kSmall = int64_t(1) << 30;  // counts below it do not overflow 32 bits
constexpr int kMost = 15;                     // parameters of a kernel have 4 KB
constexpr int64_t kMostBlocks = 8448;         // of a launch: 64 for each of an H200's SMs

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
  Copy copy;          // sizes and strides in units
  int64_t last;       // units of a row, padded, or its segments
  int64_t count;      // of all rows
  int unit_bytes;     // of what one load reads; 0 if elements are converted or added
  bool has_segments;  // whether warps move segments of rows
  Divisor d1, d2, d3;

  int64_t blocks() const {  // thread blocks, if every thread has one turn
    const int64_t of_block = has_segments ? kThreads / 32 : kThreads * kPerThread;
    return (count + of_block - 1) / of_block;
  }
};

// A warp moves so many units of a row at a time: all loads go out before the first store waits.
// Shorter rows are moved unit by unit.
constexpr int kLoads = 8, kSegment = 32 * kLoads;
constexpr int64_t kShortestRow = 24;

struct Jobs {
  Job jobs[kMost];
};
static_assert(sizeof(Jobs) <= 4096);

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

// The indices of a unit or segment.
struct Index {
  int64_t at[4];

  __device__ Index(const Job& job, uint32_t i) {
    const uint32_t rest = job.d3.divide(i), rest2 = job.d2.divide(rest), i0 = job.d1.divide(rest2);
    at[0] = i0, at[1] = rest2 - i0 * job.d1.value;
    at[2] = rest - rest2 * job.d2.value, at[3] = i - rest * job.d3.value;
  }
  __device__ Index(const Job& job, int64_t i) {
    const int64_t size = job.copy.size[1], rows = job.copy.padded_rows;
    const int64_t rest = i / job.last, rest2 = rest / rows;
    at[0] = rest2 / size, at[1] = rest2 % size, at[2] = rest % rows, at[3] = i % job.last;
  }
};

// Where unit `unit` of a row is read, written and added, and whether it is.
struct Address {
  int64_t from = 0, to = 0, plus = 0;
  bool reads, writes = true;

  __device__ Address(const Copy& c, const Index& i, int64_t unit) {
    from = i.at[0] * c.in_stride[0] + unit * c.in_stride[3];
    to = i.at[0] * c.out_stride[0] + unit * c.out_stride[3];
    if (c.packed.begins != nullptr) {
      const int64_t b = i.at[1], t = i.at[2], length = c.packed.lengths[b];
      reads = t < length, writes = reads || c.out_is_engine;
      const int64_t packed = c.packed.begins[t] + b;
      const int64_t engine = c.packed.firsts[b] + (c.turns && reads ? length - 1 - t : t);
      to += (c.out_is_engine ? engine : packed) * c.out_stride[2];
      from += (c.out_is_engine ? packed : engine) * c.in_stride[2];
    } else {
      reads = i.at[2] < c.size[2];
      to += i.at[1] * c.out_stride[1] + i.at[2] * c.out_stride[2];
      from += i.at[1] * c.in_stride[1] + i.at[2] * c.in_stride[2];
    }
    if (c.plus == nullptr) return;
    const int64_t* strides = c.plus_stride;
    for (int k = 0; k < 3; ++k) plus += i.at[k] * strides[k];
    plus += unit * strides[3];
  }
};

template <typename Unit, typename Count>
__device__ void move_units(const Job& job) {
  const Count count = Count(job.count), step = Count(gridDim.x) * kThreads;
  for (Count i = Count(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step * kPerThread) {
    Unit units[kPerThread];
    Unit* to[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {  // all loads go out before the first store waits
      to[k] = nullptr, units[k] = {};
      if (i + k * step >= count) continue;
      const Index index(job, Count(i + k * step));
      const Address address(job.copy, index, index.at[3]);
      if (!address.writes) continue;
      if (address.reads && index.at[3] < job.copy.size[3]) {
        units[k] = static_cast<const Unit*>(job.copy.in)[address.from];
      }
      to[k] = static_cast<Unit*>(job.copy.out) + address.to;
    }
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (to[k] != nullptr) *to[k] = units[k];
    }
  }
}

template <typename Unit, typename Count>
__device__ void move_segments(const Job& job) {
  constexpr int kWarps = kThreads / 32;
  const Count count = Count(job.count), step = Count(gridDim.x) * kWarps;
  for (Count i = Count(blockIdx.x) * kWarps + threadIdx.x / 32; i < count; i += step) {
    const Index index(job, i);
    const Address address(job.copy, index, 0);
    if (!address.writes) continue;
    const int64_t begin = index.at[3] * kSegment + threadIdx.x % 32;
    const Unit* from = static_cast<const Unit*>(job.copy.in) + address.from + begin;
    Unit* to = static_cast<Unit*>(job.copy.out) + address.to + begin;
    const int64_t read = address.reads ? job.copy.size[3] - begin : 0;
    const int64_t written = job.copy.padded - begin;
    Unit units[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) units[k] = 32 * k < read ? from[32 * k] : Unit{};
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (32 * k < written) to[32 * k] = units[k];
    }
  }
}

template <typename Unit>
__device__ void move(const Job& job, bool is_small) {
  if (job.has_segments && is_small) return move_segments<Unit, uint32_t>(job);
  if (job.has_segments) return move_segments<Unit, int64_t>(job);
  if (is_small) return move_units<Unit, uint32_t>(job);
  move_units<Unit, int64_t>(job);
}

__device__ void compute(const Job& job) {
  const Copy& c = job.copy;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < job.count; i += step) {
    const bool is_small = job.count < kSmall;
    const Index index = is_small ? Index(job, uint32_t(i)) : Index(job, i);
    const Address address(c, index, index.at[3]);
    if (!address.writes) continue;
    float value = 0;
    if (address.reads && index.at[3] < c.size[3]) {
      value = read(c.in, c.in_type, address.from);
      if (c.plus != nullptr) value += read(c.plus, c.in_type, address.plus);
    }
    write(c.out, c.out_type, address.to, value);
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Jobs jobs) {
  const Job& job = jobs.jobs[blockIdx.y];
  const bool is_small = job.count < kSmall;
  if (job.unit_bytes == 16) return move<uint4>(job, is_small);
  if (job.unit_bytes == 8) return move<uint2>(job, is_small);
  if (job.unit_bytes == 4) return move<uint32_t>(job, is_small);
  if (job.unit_bytes == 2) return move<uint16_t>(job, is_small);
  compute(job);
}

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat ? 4 : 2; }

// Whether every row of a copy without a conversion consists of whole units of so many bytes.
bool has_units(const Copy& c, int64_t bytes) {
  const int64_t elements = bytes / bytes_of(c.in_type);
  bool fits = elements > 0 && c.size[3] % elements == 0;
  fits &= c.padded % elements == 0 && c.in_stride[3] == 1 && c.out_stride[3] == 1;
  fits &= (reinterpret_cast<uintptr_t>(c.in) | reinterpret_cast<uintptr_t>(c.out)) % bytes == 0;
  for (int i = 0; i < 3; ++i) {
    const int64_t size = i == 2 ? c.padded_rows : c.size[i];
    fits &= size == 1 || (c.in_stride[i] % elements == 0 && c.out_stride[i] % elements == 0);
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
  const bool may_swap =
      c.packed.begins == nullptr && c.padded == c.size[3] && c.padded_rows == c.size[2];
  for (int i = 0; i < 3 && may_swap; ++i) {
    const bool is_apart = c.in_stride[3] != 1 || c.out_stride[3] != 1;
    if (is_apart && c.size[i] > 1 && c.in_stride[i] == 1 && c.out_stride[i] == 1) {
      swap_dimensions(c, i, 3), c.padded = c.size[3], c.padded_rows = c.size[2];
    }
  }
  if (c.in_type == c.out_type && c.plus == nullptr) {
    job.unit_bytes = 16;
    while (job.unit_bytes > bytes_of(c.in_type) && !has_units(c, job.unit_bytes)) {
      job.unit_bytes /= 2;
    }
    const int64_t elements = job.unit_bytes / bytes_of(c.in_type);
    c.size[3] /= elements, c.padded /= elements;
    for (int i = 0; i < 3; ++i) c.in_stride[i] /= elements, c.out_stride[i] /= elements;
  }
  job.has_segments = job.unit_bytes > 0 && c.size[3] >= kShortestRow && c.in_stride[3] == 1 &&
                     c.out_stride[3] == 1;
  job.last = job.has_segments ? (c.padded + kSegment - 1) / kSegment : c.padded;
  job.copy = c, job.count = c.size[0] * c.size[1] * c.padded_rows * job.last;
  if (job.count < kSmall) {
    job.d1 = Divisor(c.size[1]), job.d2 = Divisor(c.padded_rows), job.d3 = Divisor(job.last);
  }
  return job;
}

}  // namespace

void copy_all(const Copy* copies, int64_t count, cudaStream_t stream) {
  Jobs jobs;
  int used = 0;
  int64_t most = 0;
  const auto flush = [&] {
    if (used == 0) return;
    const int64_t limit = kMostBlocks / used;
    const dim3 grid(unsigned(most < limit ? most : limit), unsigned(used));
    copy_kernel<<<grid, kThreads, 0, stream>>>(jobs);
    check(cudaGetLastError());
    used = 0, most = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (copies[i].count() == 0) continue;
    jobs.jobs[used] = make_job(copies[i]);
    const int64_t blocks = jobs.jobs[used++].blocks();
    most = blocks > most ? blocks : most;
    if (used == kMost) flush();
  }
  flush();
}

}  // namespace flashcell::cuda
