// Builds the whole engine for one instruction set: includes all of it in a namespace named by
// FLASHCELL_ISA, and fills its Backend. Nothing here may use torch or the C++ library: the linker
// could merge the code they emit, with this unit's flags, into units that run on older machines.
#pragma once
#include "../../cells/all.h"
#include "../backward.h"
#include "../block_step.h"
#include "../column_sum.h"
#include "../forward.h"
#include "../gemm.h"
#include "common/cpu/dispatch.h"
#include "common/cpu/vec_math.h"

namespace flashcell::FLASHCELL_ISA {

template <typename IO>
struct RunGemm {
  static void run(const GemmParams& params, const Host& host) { Gemm<IO>{params, host}.run(); }
};
template <typename IO>
struct RunColumnSum {
  static void run(const ColumnSumParams& params, const Host& host) { column_sum<IO>(params, host); }
};
template <typename Cell, typename IO>
struct RunBlockStep {
  const BlockStepParams& params;
  const Host& host;
  RunBlockStep(const BlockStepParams& p, const Host& h) : params(p), host(h) {}
  void run() const {
    if (params.format == Format::kInt8) return BlockStep<Cell, IO, int8<IO>>(params, host).run();
    if (params.format == Format::kInt4) return BlockStep<Cell, IO, int4<IO>>(params, host).run();
    BlockStep<Cell, IO, IO>(params, host).run();
  }
};

const Backend kBackend = {
    kIsaName,
    [](int cell, Dtype dtype, const ForwardParams& params, const Host& host) {
      for_cell<Forward>(AllCells(), cell, dtype, params, host);
    },
    [](int cell, Dtype dtype, const BackwardParams& params, const Host& host) {
      for_cell<Backward>(AllCells(), cell, dtype, params, host);
    },
    [](Dtype dtype, const GemmParams& params, const Host& host) {
      for_dtype<RunGemm>(dtype, params, host);
    },
    [](Dtype dtype, const ColumnSumParams& params, const Host& host) {
      for_dtype<RunColumnSum>(dtype, params, host);
    },
    [](int cell, Dtype dtype, const BlockStepParams& params, const Host& host) {
      for_cell<RunBlockStep>(AllCells(), cell, dtype, params, host);
    },
};

}  // namespace flashcell::FLASHCELL_ISA
