// Defines DEVICE, the qualifiers of every function that kernels call.
#pragma once

#define DEVICE __device__ __forceinline__
