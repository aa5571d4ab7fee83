// The functions that the CPU engine offers to ops.cpp. It takes the parameters of ../params.h, as
// the CUDA engine does.
#pragma once
#include "../params.h"
#include "common/cpu/host.h"
#include "common/cpu/levels.h"

namespace flashcell {

// One instruction set's build of the engine.
struct Backend {
  const char* name;
  void (*forward)(Dtype, const ForwardParams&, const Host&);
  void (*backward)(Dtype, const BackwardParams&, const Host&);
  void (*step)(Dtype, const StepParams&, const Host&);
  void (*linear_step)(Dtype, const LinearStepParams&, const Host&);
  void (*epilogue)(Dtype, const EpilogueParams&, const Host&);
  void (*epilogue_backward)(Dtype, const EpilogueBackwardParams&, const Host&);
};

#define FLASHCELL_DECLARE(level) \
  namespace level {              \
  extern const Backend kBackend; \
  }
FLASHCELL_LEVELS(FLASHCELL_DECLARE)
#undef FLASHCELL_DECLARE

}  // namespace flashcell
