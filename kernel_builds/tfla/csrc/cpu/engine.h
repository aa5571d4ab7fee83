// The functions that the CPU engine offers to ops.cpp. It takes the parameters of ../params.h, as
// the CUDA engine does.
#pragma once
#include "../params.h"
#include "common/cpu/host.h"

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

namespace baseline {
extern const Backend kBackend;
}
namespace avx2 {
extern const Backend kBackend;
}
namespace avx512 {
extern const Backend kBackend;
}

}  // namespace flashcell
