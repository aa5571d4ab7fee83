// The planner of the CUDA engines as an op without tensors, in the CPU library too: it describes
// how a call would run on the GPU given by the arguments (cuda/explain.h defines the text).
#pragma once
#include "cells/all.h"
#include "common/torch/op.h"
#include "cuda/explain.h"
#include "cuda/stack/plan.h"
#if defined(CUDA_KERNEL)
#include "cuda/run.h"
#endif

namespace flashcell {

inline constexpr char kExplainPlanSchema[] =
    "explain_plan(str cell, int sequences, int steps, int heads, int width, int element_bytes, "
    "bool tf32, int arch, int code_arch, bool code_is_sm_90a, int sms, int shared_bytes, "
    "int input_width=0) -> str";

template <typename... Cells>
cuda::CellSizes sizes_of(CellList<Cells...>, const std::string& name) {
  cuda::CellSizes sizes{};
  const bool found = ((name == Cells::kName && (sizes = cuda::kSizesOf<Cells>, true)) || ...);
  STD_TORCH_CHECK(found, "cell is ", name, ", but must be a cell of this kernel");
  return sizes;
}

inline int whole(const char* name, int64_t value) {
  STD_TORCH_CHECK(value >= 1 && value < int64_t(1) << 31, name, " is ", value,
                  ", but must be from 1 to 2147483647");
  return int(value);
}

inline cuda::Problem problem_of(const cuda::CellSizes& sizes, int64_t sequences, int64_t steps,
                                int64_t heads, int64_t width, int64_t element_bytes, bool tf32) {
  STD_TORCH_CHECK(element_bytes == 2 || element_bytes == 4, "element_bytes is ", element_bytes,
                  ", but must be 2 or 4");
  return {.S = whole("sequences", sequences),
          .T = whole("steps", steps),
          .N = whole("heads", heads),
          .D = whole("width", width),
          .gates = sizes.gates,
          .io_bytes = int(element_bytes),
          .tf32 = tf32,
          .aligned = true,
          .keeps_state = cuda::batch::keeps_state(sizes),
          .clips = false};
}

inline cuda::Device device_of(int64_t arch, int64_t code_arch, bool code_is_sm_90a, int64_t sms,
                              int64_t shared_bytes) {
  return {whole("arch", arch),
          {whole("code_arch", code_arch), code_is_sm_90a},
          whole("sms", sms),
          whole("shared_bytes", shared_bytes)};
}

inline std::string explain_plan(std::string cell, int64_t sequences, int64_t steps, int64_t heads,
                                int64_t width, int64_t element_bytes, bool tf32, int64_t arch,
                                int64_t code_arch, bool code_is_sm_90a, int64_t sms,
                                int64_t shared_bytes, int64_t input_width) {
  STD_TORCH_CHECK(0 <= input_width && input_width < int64_t(1) << 31, "input_width is ",
                  input_width, ", but must be from 0 to 2147483647");
  const cuda::CellSizes sizes = sizes_of(AllCells(), cell);
  const cuda::Problem problem =
      problem_of(sizes, sequences, steps, heads, width, element_bytes, tf32);
  return cuda::explain(sizes, problem, input_width,
                       device_of(arch, code_arch, code_is_sm_90a, sms, shared_bytes));
}

// The steps of a chunk of layers that run side by side; 0 for one layer after the other. With arch
// 0 of the CUDA library, the GPU is the current one.
inline constexpr char kPlanLayersSchema[] =
    "plan_layers(str cell, int layers, bool saves, int sequences, int steps, int width, "
    "int element_bytes, bool tf32, int arch=0, int code_arch=0, bool code_is_sm_90a=False, "
    "int sms=0, int shared_bytes=0) -> int";

inline int64_t plan_layers(std::string cell, int64_t layers, bool saves, int64_t sequences,
                           int64_t steps, int64_t width, int64_t element_bytes, bool tf32,
                           int64_t arch, int64_t code_arch, bool code_is_sm_90a, int64_t sms,
                           int64_t shared_bytes) {
  const cuda::Problem problem =
      problem_of(sizes_of(AllCells(), cell), sequences, steps, 1, width, element_bytes, tf32);
  if (whole("layers", layers) == 1) return 0;
#if defined(CUDA_KERNEL)
  if (arch == 0) {
    return cuda::wavefront::chunk_of(problem, layers, saves, cuda::current_device());
  }
#endif
  return cuda::wavefront::chunk_of(problem, layers, saves,
                                   device_of(arch, code_arch, code_is_sm_90a, sms, shared_bytes));
}

}  // namespace flashcell
