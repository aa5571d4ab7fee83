// One instruction set's build of the whole engine: includes everything into its namespace, named
// by FLASHCELL_ISA, and fills its Backend. Nothing here may use torch or the C++ library: code they
// would emit with this unit's flags could be merged into units that run on older machines.
#pragma once
#include "../../cells/all.h"
#include "../backward.h"
#include "../engine.h"
#include "../forward.h"
#include "../mixer_step.h"
#include "../scan.h"
#include "common/cpu/dispatch.h"
#include "common/cpu/vec_math.h"

namespace flashcell::FLASHCELL_ISA {

const Backend kBackend = {
    kIsaName,
    [](int cell, Dtype dtype, const ForwardParams& params, const Host& host) {
      for_cell<Forward>(AllCells(), cell, dtype, params, host);
    },
    [](int cell, Dtype dtype, const BackwardParams& params, const Host& host) {
      for_cell<Backward>(AllCells(), cell, dtype, params, host);
    },
    [](Dtype dtype, const ScanForwardParams& params, const Host& host) {
      for_dtype<ScanForward>(dtype, params, host);
    },
    [](Dtype dtype, const ScanBackwardParams& params, const Host& host) {
      for_dtype<ScanBackward>(dtype, params, host);
    },
    [](Dtype dtype, const ConvStepParams& params, const Host& host) {
      for_dtype<ConvStep>(dtype, params, host);
    },
    [](int cell, Dtype dtype, const MixStepParams& params, const Host& host) {
      for_cell<MixStep>(AllCells(), cell, dtype, params, host);
    },
};

}  // namespace flashcell::FLASHCELL_ISA
