// Launches the gemm engine: for every time step a matrix product, of cuBLAS or split, then a kernel
// that computes the cells.
#pragma once
#include "backward.cuh"
#include "forward.cuh"
#include "graph.cuh"

namespace flashcell::cuda {

namespace gemm {

template <typename Pointer>
void move(Pointer*& pointer, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  if (pointer != nullptr) pointer = static_cast<Byte*>(pointer) + bytes;
}

// `overlaps`: the kernel may start while the product before it ends.
template <typename Params>
void launch_cells(void (*kernel)(Params, Step), const Params& p, const Step& step,
                  const Launch& launch, bool overlaps) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((step.ND / kQuad + kQuads - 1) / kQuads),
                        unsigned((p.S + kSequences - 1) / kSequences));
  config.blockDim = kSequences * kQuads, config.stream = launch.stream;
  config.attrs = &early, config.numAttrs = overlaps && launch.device.code.arch >= 90;
  check(cudaLaunchKernelEx(&config, kernel, p, step));
}

// Moves the pointer to an element of each tensor to the first head that runs.
inline void skip_heads(SequenceParams& p, int io_bytes) {
  move(p.weight, p.first_head * p.D * p.D * io_bytes);
}
inline void skip_heads(ForwardParams& p, int io_bytes) {
  const int64_t units = p.first_head * p.D;
  skip_heads(static_cast<SequenceParams&>(p), io_bytes);
  move(p.x, p.first_head * p.x_head * io_bytes);
  move(p.bias, units * (p.bias_is_io ? io_bytes : 4));
  for (auto* values : {&p.h, &p.saved, &p.h_prev}) move(*values, units * io_bytes);
  move(p.initial, units * 4), move(p.last, units * 4);
}
inline void skip_heads(BackwardParams& p, int io_bytes) {
  const int64_t units = p.first_head * p.D;
  skip_heads(static_cast<SequenceParams&>(p), io_bytes);
  for (auto* values : {&p.dh, &p.saved}) move(*values, units * io_bytes);
  for (auto* values : {&p.dx, &p.dr}) move(*values, units * io_bytes);
  move(p.dlast, units * 4);
  for (auto* values : {&p.dstate, &p.dbias_partial}) move(*values, units * 4);
}

// Brings the weight and the operand's memory into the layout of the product; returns the weight.
inline const void* prepare(const SequenceParams& p, int gates, int io_bytes, bool backward,
                           const Scratch& places, const Launch& launch) {
  char* scratch = static_cast<char*>(launch.scratch);
  if (!places.split.used) return pack_weight(p, gates, io_bytes, scratch + places.weight, launch);
  pack_weight(p, gates, backward, scratch + places.weight, places.split, launch);
  if (p.D % kPanel != 0) {  // what pads the depth must be numbers
    const auto bytes = size_t(2 * places.split.operand.bytes);
    check(cudaMemsetAsync(scratch + places.operand, 0, bytes, launch.stream));
  }
  return scratch + places.weight;
}

inline Step first_step(const SequenceParams& p, const Scratch& places, void* scratch) {
  char* base = static_cast<char*>(scratch);
  Step step{};
  step.D = int(p.D), step.ND = int(p.heads * p.D), step.row = int(p.N * p.D);
  step.states = p.S * p.N * p.D;
  step.product = reinterpret_cast<float*>(base + places.product);
  step.operand = base + places.operand;
  step.parts = places.parts;
  step.is_split = places.split.used, step.halves = places.split.operand;
  return step;
}

template <typename Cell, typename IO, typename V>
void run_forward(const ForwardParams& all, const Launch& launch) {
  constexpr int G = Cell::kGates;
  ForwardParams p = all;
  skip_heads(p, sizeof(IO));
  const Scratch places(p, G, sizeof(IO), false, launch);
  use_stream(launch);
  const bool multiplies = p.initial != nullptr || p.T > 1;
  const void* weight = multiplies ? prepare(p, G, sizeof(IO), false, places, launch) : nullptr;
  Step step = first_step(p, places, launch.scratch);
  step.has_product = p.initial != nullptr;
  const auto run = [&](const Launch& on, int t, const int* clock) {
    float* sums = const_cast<float*>(step.product);
    if (step.has_product && places.split.used) {
      multiply_split(weight, step.operand, sums, p.S, G * p.D, places.split, on);
    } else if (step.has_product) {
      multiply<IO>(weight, step.operand, sums, true, p.S, p.heads, p.D, G * p.D, on);
    }
    step.t = t, step.clock = clock;
    launch_cells(&forward_cells_kernel<Cell, IO, V>, p, step, on, step.has_product);
  };
  if (step.has_product) launch_cells(&first_operand_kernel<IO>, p, step, launch, false);
  run(launch, 0, nullptr);  // also copies the states of sequences that have no steps
  step.has_product = true;
  int* clock = reinterpret_cast<int*>(static_cast<char*>(launch.scratch) + places.clock);
  run_steps(1, p.T - 1, 1, clock, launch, run);
}

template <typename Cell, typename IO, typename V>
void run_backward(const BackwardParams& all, const Launch& launch) {
  constexpr int G = Cell::kGates;
  BackwardParams p = all;
  skip_heads(p, sizeof(IO));
  const Scratch places(p, G, sizeof(IO), true, launch);
  use_stream(launch);
  // Step -1 adds the product of step 0 to the gradients of the initial states.
  const bool has_initial = p.T == 0 || !p.skips_initial, multiplies = has_initial || p.T > 1;
  const void* weight = multiplies ? prepare(p, G, sizeof(IO), true, places, launch) : nullptr;
  Step step = first_step(p, places, launch.scratch);
  const int64_t heads = p.heads * step.parts, depth = G * p.D / step.parts;
  const auto run = [&](const Launch& on, int t, const int* clock) {
    float* sums = const_cast<float*>(step.product);
    if (step.has_product && places.split.used) {
      multiply_split(weight, step.operand, sums, p.S, p.D, places.split, on);
    } else if (step.has_product) {
      multiply<IO>(weight, step.operand, sums, false, p.S, heads, depth, p.D, on);
    }
    step.t = t, step.clock = clock;
    launch_cells(&backward_cells_kernel<Cell, IO, V>, p, step, on, step.has_product);
  };
  run(launch, int(p.T) - 1, nullptr);
  step.has_product = true;
  int* clock = reinterpret_cast<int*>(static_cast<char*>(launch.scratch) + places.clock);
  run_steps(int(p.T) - 2, p.T - 1 + has_initial, -1, clock, launch, run);
}

}  // namespace gemm

template <typename Cell, typename IO>
void forward_gemm(const ForwardParams& p, const Launch& launch) {
  if (p.S == 0) return;
  if constexpr (sizeof(IO) == 4) {
    if (!launch.tf32) return gemm::run_forward<Cell, IO, float>(p, launch);
  }
  gemm::run_forward<Cell, IO, typename IoTraits<IO>::Value>(p, launch);
}

template <typename Cell, typename IO>
void backward_gemm(const BackwardParams& p, const Launch& launch) {
  if (p.S == 0) return;
  if constexpr (sizeof(IO) == 4) {
    if (!launch.tf32) return gemm::run_backward<Cell, IO, float>(p, launch);
  }
  gemm::run_backward<Cell, IO, typename IoTraits<IO>::Value>(p, launch);
}

}  // namespace flashcell::cuda
