// The epilogue (norm, weight and output gate of every head of every row) and its gradients: one
// kernel forward and one backward, with a warp for each row, bound by memory.
#include "../launch.h"
#include "row.cuh"
#include "run.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;  // in a thread block
constexpr int kBlockRows = 128;  // rows whose gradients of the weight a thread block adds up
constexpr int kVector = 8;       // all widths are multiples of it
template <int kCount>
using WarpRow = Row<32, kVector, kCount>;

// The rows of a thread block: kBlockRows steps of one head. A warp takes every kWarps-th row.
struct Rows {
  int head, begin, end;  // end: the first row after the block's

  template <typename Params>
  DEVICE explicit Rows(const Params& p) {
    const int rows = int(p.B * p.T), first = int(blockIdx.x / p.H) * kBlockRows;
    head = int(blockIdx.x % p.H), begin = first + int(threadIdx.x) / 32;
    end = first + kBlockRows < rows ? first + kBlockRows : rows;
  }
};

template <typename Params>
DEVICE int64_t place(const Params& p, int row, int head) {
  return (int64_t(row) * p.H + head) * p.V;
}
template <typename IO, typename Params>
DEVICE const IO* gate_at(const Params& p, int row, int head) {
  return gate_row<IO>(p, row / int(p.T), row % int(p.T), head);
}

// Both kernels load the next row while they work on one.
template <typename IO, int kCount>
__global__ void __launch_bounds__(kThreads) forward_kernel(const EpilogueParams p) {
  using Row = WarpRow<kCount>;
  const Rows rows(p);
  const int V = int(p.V);
  const bool gated = p.out_gate.data != nullptr;
  typename Row::template Raw<IO> raw_h{}, raw_gate{};
  const auto load = [&](int row) {
    if (row >= rows.end) return;
    raw_h.load(static_cast<const IO*>(p.h) + place(p, row, rows.head), V);
    if (gated) raw_gate.load(gate_at<IO>(p, row, rows.head), V);
  };
  load(rows.begin);
  Row weight;
  weight.template load_weight<IO>(p, rows.head, V);
  for (int row = rows.begin; row < rows.end; row += kWarps) {
    Row y, gate;
    y.unpack(raw_h), gate.unpack(raw_gate);
    load(row + kWarps);
    finish_row<IO>(p, y, weight, gate, V);
    y.store(static_cast<IO*>(p.y) + place(p, row, rows.head), V);
  }
}

// With z = norm(h) and s = sigmoid(out_gate): dgate = dy z weight s (1 - s), dweight = sum dy s z,
// d = dy s weight, dh = (d - mean(d) - z mean(d z)) / root; mean(d) is only subtracted if h is
// centered. A thread block writes its part of dweight to its row of parts[blocks][V].
template <typename IO, int kCount>
__global__ void __launch_bounds__(kThreads) backward_kernel(const EpilogueBackwardParams p,
                                                            float* parts) {
  using Row = WarpRow<kCount>;
  const Rows rows(p);
  const int V = int(p.V);
  const bool gated = p.out_gate.data != nullptr;
  typename Row::template Raw<IO> raw_h{}, raw_dy{}, raw_gate{};
  const auto load = [&](int row) {
    if (row >= rows.end) return;
    const int64_t at = place(p, row, rows.head);
    raw_h.load(static_cast<const IO*>(p.h) + at, V);
    raw_dy.load(static_cast<const IO*>(p.dy) + at, V);
    if (gated) raw_gate.load(gate_at<IO>(p, row, rows.head), V);
  };
  load(rows.begin);
  Row weight, dweight{};
  weight.template load_weight<IO>(p, rows.head, V);
  for (int row = rows.begin; row < rows.end; row += kWarps) {
    const int64_t at = place(p, row, rows.head);
    Row z, d, gate;
    z.unpack(raw_h), d.unpack(raw_dy), gate.unpack(raw_gate);
    load(row + kWarps);
    const float inverse = z.normalize(p, V);
    if (gated) {
#pragma unroll
      for (int i = 0; i < Row::kSize; ++i) {
        const float open = sigmoid<IO>(gate.x[i]), dz = d.x[i] * open;
        gate.x[i] = dz * (1 - open) * z.x[i] * weight.x[i];
        d.x[i] = dz;
      }
      gate.store(static_cast<IO*>(p.dout_gate) + at, V);
    }
#pragma unroll
    for (int i = 0; i < Row::kSize; ++i) {
      dweight.x[i] += d.x[i] * z.x[i];
      d.x[i] *= weight.x[i];
    }
    if (p.norm) {
      const float along = Row::total([&](int i) { return d.x[i] * z.x[i]; }) / float(V);
      const float mean = p.centered ? Row::total([&](int i) { return d.x[i]; }) / float(V) : 0.0f;
#pragma unroll
      for (int i = 0; i < Row::kSize; ++i) d.x[i] = (d.x[i] - mean - z.x[i] * along) * inverse;
    }
    d.store(static_cast<IO*>(p.dh) + at, V);
  }
  if (parts == nullptr) return;
  float* sums = reinterpret_cast<float*>(memory);  // [kWarps][V]
  dweight.store(sums + int(threadIdx.x) / 32 * V, V);
  __syncthreads();
  for (int column = threadIdx.x; column < V; column += kThreads) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += sums[w * V + column];
    parts[int64_t(blockIdx.x) * V + column] = sum;
  }
}

// to[columns] = sum over blocks of parts[blocks][columns], always in the same order.
__global__ void __launch_bounds__(kThreads) sum_blocks(const float* parts, float* to, int blocks,
                                                       int columns) {
  __shared__ float sums[kWarps][32];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int column = int(blockIdx.x) * 32 + lane;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int b = warp; b < blocks; b += kWarps) sum += parts[int64_t(b) * columns + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w][lane];
  to[column] = sum;
}

// Calls body with the number of vectors of a row for each lane, rounded up to a power of two.
template <typename Body>
void with_count(int64_t V, const Body& body) {
  const int64_t vectors = V / kVector;
  if (vectors <= 32) return body.template operator()<1>();
  if (vectors <= 64) return body.template operator()<2>();
  return body.template operator()<4>();
}

template <typename Params>
int64_t blocks_of(const Params& p) {  // number of blocks of rows
  if (p.B * p.T > INT32_MAX - kBlockRows) throw std::invalid_argument("tfla: too many rows");
  return (p.B * p.T + kBlockRows - 1) / kBlockRows;
}

}  // namespace

template <typename IO>
void run_epilogue(const EpilogueParams& p, cudaStream_t stream) {
  with_count(p.V, [&]<int kCount>() {
    launch(forward_kernel<IO, kCount>, {blocks_of(p) * p.H, kThreads, 0, stream}, p);
  });
}

int64_t epilogue_scratch(const EpilogueBackwardParams& p) {
  return p.dweight != nullptr ? blocks_of(p) * p.H * p.V * int64_t(sizeof(float)) : 0;
}

template <typename IO>
void run_epilogue(const EpilogueBackwardParams& p, void* scratch, cudaStream_t stream) {
  // Write it even if there are no rows, and so no scratch.
  const bool weighted = p.dweight != nullptr;
  float* parts = weighted ? static_cast<float*>(scratch) : nullptr;
  const int shared = weighted ? int(kWarps * p.V * int64_t(sizeof(float))) : 0;
  with_count(p.V, [&]<int kCount>() {
    launch(backward_kernel<IO, kCount>, {blocks_of(p) * p.H, kThreads, shared, stream}, p, parts);
  });
  if (!weighted) return;
  launch(sum_blocks, {(p.H * p.V + 31) / 32, kThreads, 0, stream}, parts,
         static_cast<float*>(p.dweight), int(blocks_of(p)), int(p.H * p.V));
}

template void run_epilogue<bf16>(const EpilogueParams&, cudaStream_t);
template void run_epilogue<fp16>(const EpilogueParams&, cudaStream_t);
template void run_epilogue<float>(const EpilogueParams&, cudaStream_t);
template void run_epilogue<bf16>(const EpilogueBackwardParams&, void*, cudaStream_t);
template void run_epilogue<fp16>(const EpilogueBackwardParams&, void*, cudaStream_t);
template void run_epilogue<float>(const EpilogueBackwardParams&, void*, cudaStream_t);

}  // namespace flashcell::cuda
