// Builds the whole engine for one instruction set: includes all of it in a namespace named by
// FLASHCELL_ISA, and fills its Backend. Nothing here may use torch or the C++ library: the linker
// could merge the code they emit, with this unit's flags, into units that run on older machines.
#pragma once
#include "../backward.h"
#include "../engine.h"
#include "../forward.h"
#include "../linear_step.h"
#include "../step.h"
#include "common/cpu/dispatch.h"

namespace flashcell::FLASHCELL_ISA {

template <typename IO>
struct RunForward {
  static void run(const ForwardParams& params, const Host& host) {
    Forward<IO>(params, host).run();
  }
};
template <typename IO>
struct RunBackward {
  static void run(const BackwardParams& params, const Host& host) {
    Backward<IO>(params, host).run();
  }
};
template <typename IO>
struct RunStep {
  static void run(const StepParams& params, const Host& host) { Step<IO>{params, host}.run(); }
};
template <typename IO>
struct RunLinearStep {
  static void run(const LinearStepParams& params, const Host& host) {
    LinearStep<IO>{params, host}.run();
  }
};
template <typename IO>
struct RunEpilogue {
  static void run(const EpilogueParams& params, const Host& host) {
    EpilogueForward<IO>{{params, host}}.run();
  }
  static void run(const EpilogueBackwardParams& params, const Host& host) {
    EpilogueBackward<IO>{{params, host}}.run();
  }
};

const Backend kBackend = {
    kIsaName,
    [](Dtype dtype, const ForwardParams& params, const Host& host) {
      for_dtype<RunForward>(dtype, params, host);
    },
    [](Dtype dtype, const BackwardParams& params, const Host& host) {
      for_dtype<RunBackward>(dtype, params, host);
    },
    [](Dtype dtype, const StepParams& params, const Host& host) {
      for_dtype<RunStep>(dtype, params, host);
    },
    [](Dtype dtype, const LinearStepParams& params, const Host& host) {
      for_dtype<RunLinearStep>(dtype, params, host);
    },
    [](Dtype dtype, const EpilogueParams& params, const Host& host) {
      for_dtype<RunEpilogue>(dtype, params, host);
    },
    [](Dtype dtype, const EpilogueBackwardParams& params, const Host& host) {
      for_dtype<RunEpilogue>(dtype, params, host);
    },
};

}  // namespace flashcell::FLASHCELL_ISA
