// One instruction set's build of the whole engine: includes everything into its namespace, named
// by FLASHCELL_ISA, and fills its Backend. Nothing here may use torch or the C++ library: code they
// would emit with this unit's flags could be merged into units that run on older machines.
#pragma once
#include "../cells/all.h"
#include "backward.h"
#include "forward.h"
#include "gemm.h"
#include "vec_math.h"

namespace flashcell::FLASHCELL_ISA {

template <template <typename> class Run, typename... Args>
void for_dtype(Dtype dtype, const Args&... args) {
  switch (dtype) {
    case Dtype::kFloat:
      return Run<float>::run(args...);
    case Dtype::kDouble:
      return Run<double>::run(args...);
    case Dtype::kHalf:
      return Run<fp16>::run(args...);
    case Dtype::kBFloat16:
      return Run<bf16>::run(args...);
  }
}

template <template <typename, typename> class Pass, typename Params, typename... Cells>
void for_cell(CellList<Cells...>, int cell, Dtype dtype, const Params& params, const Host& host) {
  int index = 0;
  auto run = [&]<typename Cell>(Cell*) {
    if (index++ != cell) return;
    switch (dtype) {
      case Dtype::kFloat:
        return Pass<Cell, float>(params, host).run();
      case Dtype::kDouble:
        return Pass<Cell, double>(params, host).run();
      case Dtype::kHalf:
        return Pass<Cell, fp16>(params, host).run();
      case Dtype::kBFloat16:
        return Pass<Cell, bf16>(params, host).run();
    }
  };
  (run((Cells*)nullptr), ...);
}

template <typename IO>
struct RunGemm {
  static void run(const GemmParams& params, const Host& host) { Gemm<IO>{params, host}.run(); }
};
template <typename IO>
struct RunColumnSum {
  static void run(const ColumnSumParams& params, const Host& host) { column_sum<IO>(params, host); }
};

#define FLASHCELL_STRING_(name) #name
#define FLASHCELL_STRING(name) FLASHCELL_STRING_(name)

const Backend kBackend = {
    FLASHCELL_STRING(FLASHCELL_ISA),
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
};

}  // namespace flashcell::FLASHCELL_ISA
