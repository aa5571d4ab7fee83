// What every function of a kernel is.
#pragma once

#define DEVICE __device__ __forceinline__
