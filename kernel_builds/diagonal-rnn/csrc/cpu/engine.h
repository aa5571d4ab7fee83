// What the CPU engine offers ops.cpp. Its parameters are the ones of every engine: ../params.h.
#pragma once
#include "../params.h"
#include "common/cpu/host.h"

namespace flashcell {

// One instruction set's build of the engine; cell = position in AllCells.
struct Backend {
  const char* name;
  void (*forward)(int cell, Dtype, const ForwardParams&, const Host&);
  void (*backward)(int cell, Dtype, const BackwardParams&, const Host&);
  void (*scan_forward)(Dtype, const ScanForwardParams&, const Host&);
  void (*scan_backward)(Dtype, const ScanBackwardParams&, const Host&);
  void (*conv_step)(Dtype, const ConvStepParams&, const Host&);
  void (*mix_step)(int cell, Dtype, const MixStepParams&, const Host&);
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
