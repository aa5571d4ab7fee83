// What the kernels of one decoding step share: the gates' factors, and a head's inputs and
// epilogue.
#pragma once
#include "../epilogue/row.cuh"
#include "../gates/rows.cuh"
#include "common/cuda/ptx/programmatic_launch.cuh"

namespace flashcell::cuda {
namespace {

constexpr int kFinishThreads = 256;
constexpr float kShut = -1000;

DEVICE float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }
DEVICE float at_least(float least, float x) { return x < least ? least : x; }  // NaN stays NaN
// 0 if keep is 0, even for NaN.
DEVICE float times(float keep, float x) { return keep == 0 ? 0.0f : keep * x; }

template <typename X>
DEVICE const X* at(const Strided& x, int b, int h) {
  return static_cast<const X*>(x.data) + b * x.batch + h * x.head;
}

// Prefetches to L2. This may run before pdl_wait(), while a preceding kernel still writes the data,
// because its writes reach L2 as well. Only loads into registers must come after the wait.
DEVICE void fetch([[maybe_unused]] const void* from, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
// Prefetches a row of up to 4 KB, by one warp.
DEVICE void fetch_row([[maybe_unused]] const void* row, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  const int at = int(threadIdx.x) % 32 * 128;
  if (at >= bytes) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(row) + at));
#endif
}

// Returns the thread's index; the modulo tells the compiler that there are kThreads.
template <int kThreads>
DEVICE int thread() {
  return int(threadIdx.x % kThreads);
}

struct Factors {
  float keep, add, m;  // factors of the state and of k v, and the new m
};
DEVICE Factors find_factors(const StepParams& p, float input, float forget, float before) {
  const float log_f = at_least(kShut, log_sigmoid(forget));
  if (!p.exponential) return {expf(log_f), expf(log_sigmoid(input)), 0};
  const float log_i = at_least(float(kNever), input);  // the factors use the rounded m
  const double carried = double(log_f) + double(before);
  const float m = float(carried < log_i || isnan(log_i) ? double(log_i) : carried);
  const float keep = before < float(kNever) ? 0.0f : expf(float(carried - double(m)));
  return {keep, expf(float(double(log_i) - double(m))), m};
}

struct KeyRow {  // one element of the key, the query and n
  float key, query, n;
};

// The inputs of a head's step, except C and v.
template <typename IO>
struct Head {
  int state, b, h, K;
  const IO *k, *q;
  const float *i, *f, *m, *n;  // m and n are null for 0

  DEVICE Head(const StepParams& p, int number, int K)
      : state(number), b(number / int(p.H)), h(number % int(p.H)), K(K) {
    k = at<IO>(p.k, b, h), q = at<IO>(p.q, b, h);
    i = at<float>(p.i, b, h), f = at<float>(p.f, b, h);
    m = p.m ? static_cast<const float*>(p.m) + state : nullptr;
    n = p.n ? static_cast<const float*>(p.n) + int64_t(state) * K : nullptr;
  }
  DEVICE void fetch() const {
    const int warp = threadIdx.x / 32, io = int(sizeof(IO)), own = int(sizeof(float));
    if (warp == 1) fetch_row(k, K * io);
    if (warp == 2) fetch_row(q, K * io);
    if (warp == 3 && n != nullptr) fetch_row(n, K * own);
    if (warp == 4) fetch_row(i, own), fetch_row(f, own);
    if (warp == 5 && m != nullptr) fetch_row(m, own);
  }
  DEVICE float m_before() const { return m != nullptr ? *m : 0.0f; }
  DEVICE KeyRow row(int r) const {
    if (r >= K) return {};
    return {to_float(k[r]), to_float(q[r]), n != nullptr ? n[r] : 0.0f};
  }
  // Writes n and m; call it when nothing reads the old ones any more. `own` is the thread's first
  // row.
  template <int kThreads>
  DEVICE void write_n_and_m(const StepParams& p, const Factors& factors, const KeyRow& own) const {
    float* next_n = static_cast<float*>(p.next_n) + int64_t(state) * K;
    const auto write = [&](int r, const KeyRow& old) {
      if (r < K) next_n[r] = times(factors.keep, old.n) + factors.add * old.key;
    };
    write(thread<kThreads>(), own);
#pragma unroll 1  // rarely runs: few heads are so wide
    for (int r = thread<kThreads>() + kThreads; r < K; r += kThreads) write(r, row(r));
    if (thread<kThreads>() == 0 && p.next_m != nullptr)
      static_cast<float*>(p.next_m)[state] = factors.m;
  }
  // Computes the epilogue of the head's h, which the step has written; kFinishThreads threads.
  DEVICE void finish(const StepParams& p, const float* unrounded) const {
    Row<kFinishThreads, 4, 1> row, weight, gate;
    static_assert(decltype(row)::kSize * kFinishThreads >= 1024);  // the widest row
    const int V = int(p.V);
    row.load(unrounded + int64_t(state) * V, V);
    weight.template load_weight<IO>(p.epilogue, h, V);
    if (p.epilogue.out_gate.data != nullptr) gate.load(gate_row<IO>(p.epilogue, b, 0, h), V);
    finish_row<IO>(p.epilogue, row, weight, gate, V);
    row.store(static_cast<IO*>(p.h) + int64_t(state) * V, V);
  }
};

}  // namespace
}  // namespace flashcell::cuda
