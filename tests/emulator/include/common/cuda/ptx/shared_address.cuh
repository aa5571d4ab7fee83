// Emulated function of common/cuda/ptx/shared_address.cuh: addresses are offsets in dynamic shared
// memory.
#pragma once
#include <cuda_runtime.h>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

inline uint32_t shared_address(const void* pointer) {
  const intptr_t offset = static_cast<const char*>(pointer) - emulator::machine.shared;
  if (offset < 0 || offset > intptr_t(emulator::machine.shared_bytes)) {
    emulator::fail("an address that is not in dynamic shared memory");
  }
  return uint32_t(offset);
}

}  // namespace flashcell::cuda
