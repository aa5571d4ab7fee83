// The functions that the CPU engine offers to ops.cpp. It takes the parameters of ../params.h, as
// the CUDA engine does.
#pragma once
#include "../params.h"
#include "common/cpu/host.h"
#include "common/cpu/levels.h"

namespace flashcell {

// One instruction set's build of the engine; `cell` is the index in AllCells.
struct Backend {
  const char* name;
  void (*forward)(int cell, Dtype, const ForwardParams&, const Host&);
  void (*backward)(int cell, Dtype, const BackwardParams&, const Host&);
  void (*scan_forward)(Dtype, const ScanForwardParams&, const Host&);
  void (*scan_backward)(Dtype, const ScanBackwardParams&, const Host&);
  void (*conv_step)(Dtype, const ConvStepParams&, const Host&);
  void (*mix_step)(int cell, Dtype, const MixStepParams&, const Host&);
};

#define FLASHCELL_DECLARE(level) \
  namespace level {              \
  extern const Backend kBackend; \
  }
FLASHCELL_LEVELS(FLASHCELL_DECLARE)
#undef FLASHCELL_DECLARE

}  // namespace flashcell
