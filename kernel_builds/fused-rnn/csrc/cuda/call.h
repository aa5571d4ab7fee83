// Runs the sequence ops on CUDA for ops.cpp. cpu/call.h has functions of the same names.
#pragma once
#include <cstdlib>
#include <string_view>

#include "../cells/all.h"
#include "common/torch/cuda.h"
#include "plan.h"
#include "run.h"

namespace flashcell {

// Whether the bias is read in io: in a decoding step of a 16-bit model a launch that widens it
// would cost too much.
inline bool takes_bias_in(ScalarType io, int64_t T) { return T == 1 && io != ScalarType::Float; }

inline ScalarType saved_dtype(const Tensor& x) { return x.scalar_type(); }

struct Axis {
  int64_t size, stride;  // in elements
};

// Whether every row of D elements starts at a multiple of 16 bytes, so that x can be read 16 bytes
// at a time. The bytes from a step and from a gate to the next one must fit in 32 bits.
inline bool is_aligned(const void* x, int64_t element_size, Axis batch, Axis time, Axis gate,
                       Axis head) {
  const int64_t vector = 16 / element_size, far = int64_t(1) << 28;
  bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  for (const Axis& a : {batch, time, gate, head}) aligned &= a.size <= 1 || a.stride % vector == 0;
  for (const Axis& a : {time, gate}) aligned &= a.size <= 1 || a.stride < far;
  return aligned;
}
inline bool is_aligned(const Tensor& x) {
  const auto axis = [&](int i) { return Axis{x.size(i), x.stride(i)}; };
  return x.stride(4) == 1 &&
         is_aligned(x.const_data_ptr(), x.element_size(), axis(0), axis(1), axis(2), axis(3));
}

// Returns x in the layout that the engine reads. Copying an x whose strides prevent wide loads pays
// off, except for a single step.
inline Tensor input(const Tensor& x) {
  const bool could_align = x.size(1) > 1 && x.size(4) % (16 / x.element_size()) == 0;
  const bool last_is_dense = x.stride(4) == 1 || x.size(4) <= 1;
  return last_is_dense && (is_aligned(x) || !could_align) ? x : torch::stable::contiguous(x);
}

// An environment variable, or nothing.
inline std::string_view of_environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// FLASHCELL_CUDA_ENGINE=block|cluster|grid|step|gemm|fma|batch|wide overrides the planner's choice.
// The batch engine has no backward pass.
inline cuda::Engine engine_for(const cuda::Problem& problem, const cuda::Device& device,
                               bool backward) {
  using cuda::Engine;
  const std::string_view name = of_environment("FLASHCELL_CUDA_ENGINE");
  if (name.empty()) {
    return backward ? cuda::select_backward(problem, device) : cuda::select_engine(problem, device);
  }
  int index = 0;
  while (index < cuda::kEngineCount && name != cuda::kEngineNames[index]) ++index;
  STD_TORCH_CHECK(index < cuda::kEngineCount, "FLASHCELL_CUDA_ENGINE is ", name,
                  ", but must be block, cluster, grid, step, gemm, fma, batch or wide");
  const Engine asked = Engine(index);
  STD_TORCH_CHECK(!problem.clips || asked == Engine::kStep, "FLASHCELL_CUDA_ENGINE is ", name,
                  ", but must be step where states are clipped");
  if (asked == Engine::kCluster && device.arch >= 90 && !cuda::cluster::has_code(device)) {
    cuda::refuse_cluster();
  }
  STD_TORCH_CHECK(cuda::can_run(asked, problem, device), "FLASHCELL_CUDA_ENGINE=", name,
                  " does not run a head of width ", problem.D, " here");
  return backward && asked == Engine::kBatch ? cuda::select_backward(problem, device) : asked;
}

// Sets `heads` to the number of heads that run.
inline void choose_heads(SequenceParams& p) {
  if (p.heads == 0) p.heads = p.N;
}

template <typename Cell>
cuda::Problem problem_of(const SequenceParams& p, Dtype dtype, bool tf32, bool aligned) {
  // The engines that run a part of the heads run one step like any other.
  const int64_t steps = p.heads < p.N ? std::max<int64_t>(p.T, 2) : p.T;
  const int io_bytes = dtype == Dtype::kFloat ? 4 : 2;
  const bool keeps_state = cuda::batch::keeps_state(cuda::kSizesOf<Cell>);
  return {p.S,      steps, p.heads, p.D,         Cell::kGates,
          io_bytes, tf32,  aligned, keeps_state, p.bound > 0};
}

template <typename Cell>
cuda::Problem problem_of(const ForwardParams& p, Dtype dtype, bool tf32) {
  const bool aligned = is_aligned(p.x, dtype == Dtype::kFloat ? 4 : 2, {p.S, p.x_batch},
                                  {p.T, p.x_time}, {Cell::kGates, p.x_gate}, {p.N, p.x_head});
  cuda::Problem problem = problem_of<Cell>(p, dtype, tf32, aligned);
  problem.I = p.input.I;
  return problem;
}

inline cuda::Launch prepare(const SequenceParams& p, const cuda::Problem& problem, Dtype dtype,
                            bool backward, const Tensor& like) {
  STD_TORCH_CHECK(dtype != Dtype::kDouble, "x must be float32, float16 or bfloat16 on CUDA, got ",
                  torch::headeronly::toString(like.scalar_type()));
  cuda::Launch launch{};
  launch.device = cuda::current_device();
  launch.stream = current_stream(like);
  launch.tf32 = problem.tf32 && cuda::has_tf32(launch.device);
  const bool is_part = p.heads < p.N;
  launch.engine = is_part ? cuda::select_part(problem, launch.device)
                          : engine_for(problem, launch.device, backward);
  STD_TORCH_CHECK(!is_part || launch.engine != cuda::Engine::kStep,
                  "the step engine runs all heads, got ", p.heads, " of ", p.N);
  launch.tile = cuda::tile_of(launch.engine, problem, launch.device);
  if (launch.engine == cuda::Engine::kGemm) launch.blas = current_blas_handle();
  return launch;
}

template <typename Cell>
cuda::Launch prepare(const ForwardParams& p, Dtype dtype, bool tf32, const Tensor& x) {
  return prepare(p, problem_of<Cell>(p, dtype, tf32), dtype, false, x);
}
template <typename Cell>
cuda::Launch prepare(const BackwardParams& p, Dtype dtype, bool tf32, const Tensor& like) {
  return prepare(p, problem_of<Cell>(p, dtype, tf32, true), dtype, true, like);
}

// Whether the batch engine will run the call and compute x from the layer's input of I units.
// FLASHCELL_CUDA_INPUT=engine|product overrides the planner's choice where that engine runs.
template <typename Cell>
bool multiplies_input(ForwardParams p, int64_t I, Dtype dtype, bool tf32) {
  const std::string_view wanted = of_environment("FLASHCELL_CUDA_INPUT");
  STD_TORCH_CHECK(wanted.empty() || wanted == "engine" || wanted == "product",
                  "FLASHCELL_CUDA_INPUT is ", wanted, ", but must be engine or product");
  if (Cell::kSplitGrad || dtype == Dtype::kDouble || wanted == "product") return false;
  choose_heads(p);
  const cuda::Problem problem = problem_of<Cell>(p, dtype, tf32);
  const cuda::Device device = cuda::current_device();
  const bool is_asked = !of_environment("FLASHCELL_CUDA_ENGINE").empty();
  if (wanted.empty() && !is_asked) {
    return cuda::multiplies_input(problem, I, Cell::kSplitGrad, device);
  }
  if (engine_for(problem, device, false) != cuda::Engine::kBatch) return false;
  const cuda::batch::Sizes sizes = cuda::batch_sizes(problem);
  return !wanted.empty() ||
         cuda::batch::multiplies_input(sizes, I, p.T, cuda::Engine::kBatch, device);
}

// Whether the engine that will run the call can write h with strides and fewer units.
template <typename Cell>
bool writes_strided_h(ForwardParams p, Dtype dtype, bool tf32, const Tensor& x) {
  choose_heads(p);
  return p.N == 1 && p.sequences == nullptr &&
         prepare<Cell>(p, dtype, tf32, x).engine == cuda::Engine::kBatch;
}

template <typename Cell>
void run(ForwardParams p, Dtype dtype, bool tf32, const Tensor& x) {
  choose_heads(p);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  cuda::Launch launch = prepare<Cell>(p, dtype, tf32, x);
  if (p.h_begins_as_zero) launch.engine = cuda::Engine::kStep;
  const bool fits = launch.engine == cuda::Engine::kBatch && p.N == 1 && p.sequences == nullptr;
  STD_TORCH_CHECK(
      p.h_units == 0 || (fits && p.h_units % 2 == 0),
      "h may have strides only in the batch engine, of one head, of whole sequences and "
      "an even number of units, got ",
      p.h_units, " units");
  const int cell = AllCells::index_of<Cell>();
  Tensor scratch;
  if (const int64_t bytes = cuda::forward_scratch(cell, p, dtype, launch)) {
    scratch = new_tensor(x, {bytes}, ScalarType::Byte);
    launch.scratch = scratch.mutable_data_ptr();
  }
  cuda::forward(cell, p, dtype, launch);
}

// Returns the tiles of sequences of a backward pass, each of which has a row of dbias_partial.
template <typename Cell>
int64_t bias_tiles(BackwardParams p, Dtype dtype, bool tf32, const Tensor& like) {
  choose_heads(p);
  const cuda::Launch launch = prepare<Cell>(p, dtype, tf32, like);
  return (p.S + launch.tile - 1) / launch.tile;
}

// If `dbias_partial` is given, adds nothing up: the caller does, and has zeros in rows that no
// launch writes.
template <typename Cell>
void run(BackwardParams p, Dtype dtype, bool tf32, const Tensor& dh) {
  choose_heads(p);
  const torch::stable::accelerator::DeviceGuard guard(dh.get_device_index());
  cuda::Launch launch = prepare<Cell>(p, dtype, tf32, dh);
  if (cuda::is_cut(p)) launch.tile = cuda::kCutTile;
  const int64_t tiles = (p.S + launch.tile - 1) / launch.tile;
  const bool adds_up = p.dbias_partial == nullptr;
  Tensor partial;
  if (adds_up) {
    partial = new_tensor(dh, {tiles, Cell::kBias, p.N, p.D}, ScalarType::Float);
    p.dbias_partial = partial.mutable_data_ptr();
  }
  const int cell = AllCells::index_of<Cell>();
  Tensor scratch;
  if (const int64_t bytes = cuda::backward_scratch(cell, p, dtype, launch)) {
    scratch = new_tensor(dh, {bytes}, ScalarType::Byte);
    launch.scratch = scratch.mutable_data_ptr();
  }
  cuda::backward(cell, p, dtype, launch);
  if (!adds_up) return;
  cuda::reduce_bias(static_cast<const float*>(p.dbias_partial), tiles, Cell::kBias * p.N * p.D,
                    static_cast<float*>(p.dbias), launch.stream);
}

inline void add_up_bias(const Tensor& partial, int64_t tiles, Tensor& dbias) {
  cuda::reduce_bias(static_cast<const float*>(partial.const_data_ptr()), tiles, dbias.numel(),
                    static_cast<float*>(dbias.mutable_data_ptr()), current_stream(partial));
}

// Writes the gradients that `p` describes, but for its scratch, in the dtype of `like`.
inline void write_dweight(cuda::DweightParams p, bool tf32, const Tensor& like) {
  const Dtype dtype = io_dtype(like, "dr");
  STD_TORCH_CHECK(dtype != Dtype::kDouble, "dr must be float32, float16 or bfloat16 on CUDA");
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  const cuda::Device device = cuda::current_device();
  const cuda::Launch launch{
      device, current_stream(like), tf32 && cuda::has_tf32(device), cuda::Engine::kStep, 8, nullptr,
      nullptr};
  const Tensor scratch =
      new_tensor(like, {cuda::dweight_scratch(p, dtype, launch)}, ScalarType::Byte);
  p.scratch = scratch.mutable_data_ptr();
  cuda::recurrent_dweight(p, dtype, launch);
}

// Writes dweight[g, n, j, k] = sum over `rows` rows of dr[row, g, n, j] h_prev[row, n, k].
inline void write_recurrent_dweight(const Tensor& dr, const Tensor& h_prev, int64_t rows, int64_t G,
                                    int64_t N, int64_t D, bool tf32, Tensor& dweight) {
  write_dweight({rows, G, N, D, dr.const_data_ptr(), h_prev.const_data_ptr(),
                 dweight.mutable_data_ptr(), nullptr, N, 0},
                tf32, dr);
}

inline Tensor recurrent_dweight(Tensor dr, Tensor h_prev, bool tf32) {
  check_rank(dr, "dr", 5, "[B, T, G, N, D]");
  const int64_t B = dr.size(0), T = dr.size(1), G = dr.size(2), N = dr.size(3), D = dr.size(4);
  dr = dense(dr);
  h_prev = operand(h_prev, "h_prev", {B, T, N, D}, dr.scalar_type());
  Tensor dweight = new_tensor(dr, {G, N, D, D}, dr.scalar_type());
  write_recurrent_dweight(dr, h_prev, B * T, G, N, D, tf32, dweight);
  return dweight;
}

}  // namespace flashcell
