// Builds the whole engine for one instruction set: includes all of it in a namespace named by
// FLASHCELL_ISA, and fills its Backend. Nothing here may use torch or the C++ library: the linker
// could merge the code they emit, with this unit's flags, into units that run on older machines.
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
