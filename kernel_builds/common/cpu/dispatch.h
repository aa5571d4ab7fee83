// Selects the function compiled for a dtype and a cell that are known only at run time.
#pragma once
#include "common/cells/list.h"
#include "common/cpu/host.h"
#include "common/cpu/load_store.h"
#include "common/sequence.h"

namespace flashcell::FLASHCELL_ISA {

#define FLASHCELL_STRING_(name) #name
#define FLASHCELL_STRING(name) FLASHCELL_STRING_(name)

constexpr const char* kIsaName = FLASHCELL_STRING(FLASHCELL_ISA);

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

}  // namespace flashcell::FLASHCELL_ISA
