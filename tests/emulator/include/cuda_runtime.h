// The parts of CUDA that the kernels use, emulated: keywords, types, device functions, and the
// runtime.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
// What a library says it was compiled for; the option `code` says what runs.
#define __CUDA_ARCH_LIST__ 900
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // machine.cpp, Storage, explains it

using std::isinf;
using std::isnan;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct double2 {
  double x, y;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
// Selects four of the eight bytes of x (0 to 3) and y (4 to 7), by the low three bits of each
// digit.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned digits) {
  const uint64_t bytes = x | uint64_t(y) << 32;
  unsigned word = 0;
  for (int i = 0; i < 4; ++i) {
    word |= unsigned(bytes >> 8 * (digits >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return word;
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- Device functions ----

inline const emulator::Index &threadIdx = emulator::machine.thread,
                             &blockIdx = emulator::machine.block,
                             &blockDim = emulator::machine.block_size,
                             &gridDim = emulator::machine.grid_size;

inline uint32_t __float_as_uint(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof x);
  return word;
}
inline float __uint_as_float(uint32_t word) {
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int max(int a, int b) { return a < b ? b : a; }
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, const T& value) {
  *to = value;
}

// Threads switch only where they wait, so they see at once what others have written.
inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}
inline void __threadfence() {}

inline void __syncthreads() { emulator::barrier(); }

namespace emulator {

// Returns each lane's x of lane `from`, or its own if there is no such lane.
template <typename T>
T shuffle(unsigned mask, T x, int from) {
  static_assert(sizeof(T) <= 8);
  if (mask != ~0u) fail("a shuffle of some lanes only, which is not emulated");
  uint32_t given[3] = {}, answer[2];
  std::memcpy(given, &x, sizeof x);
  given[2] = uint32_t(from >= 0 && from < kWarpSize ? from : machine.lane());
  collective(given, answer, [](Warp& warp) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      std::memcpy(warp.answer[lane], warp.given[warp.given[lane][2]], 8);
    }
  });
  std::memcpy(&x, answer, sizeof x);
  return x;
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T x, int lane) {
  return emulator::shuffle(mask, x, lane % emulator::kWarpSize);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int by) {
  return emulator::shuffle(mask, x, emulator::machine.lane() ^ by);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, int by) {
  return emulator::shuffle(mask, x, emulator::machine.lane() - by);
}
[[noreturn]] inline void __trap() { emulator::fail("__trap: a kernel without code"); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::shuffle(mask, 0, 0); }
inline unsigned __ballot_sync(unsigned mask, bool x) {
  unsigned ballot = 0;
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
    ballot |= unsigned(emulator::shuffle(mask, int(x), lane)) << lane;
  }
  return ballot;
}

// ---- The runtime ----

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorJitCompilerNotFound = 221,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorJitCompilationDisabled = 223
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error"
         : status == cudaErrorNoKernelImageForDevice
             ? "no kernel image is available for execution on the device"
             : "invalid argument";
}

using cudaStream_t = struct CUstream_st*;
struct dim3 {  // one-dimensional
  unsigned x = 1;
  dim3() = default;
  dim3(unsigned count) : x(count) {}
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
// Grids run one after the other, whatever their attributes allow.
template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  const int code = emulator::read_options().code;
  if (code == 0) return cudaErrorNoKernelImageForDevice;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& given = config->attrs[i];
    if (given.id == cudaLaunchAttributeProgrammaticStreamSerialization && code < 90 &&
        given.val.programmaticStreamSerializationAllowed) {
      throw std::runtime_error(
          "emulator: code for less than 9.0 does not wait for earlier kernels");
    }
  }
  std::tuple<std::decay_t<Params>...> params(std::forward<Args>(args)...);
  emulator::launch(reinterpret_cast<const void*>(kernel), config->gridDim.x, config->blockDim.x,
                   config->dynamicSmemBytes, [&] { std::apply(kernel, params); });
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Function>
cudaError_t cudaFuncSetAttribute(Function* kernel, cudaFuncAttribute, int bytes) {
  const bool fits = emulator::allow_shared(reinterpret_cast<const void*>(kernel), bytes);
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}

struct cudaFuncAttributes {
  int ptxVersion, maxThreadsPerBlock;
};
// The launch bounds are those of code_kernel (code.cuh): 64 threads if the code is for 9.0a.
template <typename Function>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Function*) {
  const emulator::Options options = emulator::read_options();
  *attributes = {options.code, options.sm_90a ? 64 : 32};
  return options.code == 0 ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrClusterLaunch
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const emulator::Options options = emulator::read_options();
  const int values[] = {options.arch / 10, options.arch % 10, options.processors,
                        options.shared_bytes, 0};
  *value = values[attribute];
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* index) {
  *index = emulator::current_gpu();
  return cudaSuccess;
}
struct cudaDeviceProp {
  char name[256];
  int major, minor;
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int) {
  const int arch = emulator::read_options().arch;
  *of = {"Emulator", arch / 10, arch % 10};
  return cudaSuccess;
}
