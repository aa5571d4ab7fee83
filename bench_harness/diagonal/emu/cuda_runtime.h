#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <cstdio>
#include <type_traits>
#include <functional>
#include <stdexcept>
#include <string>
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)
struct Dim { unsigned x; };
extern Dim threadIdx, blockIdx, gridDim, blockDim;
void __syncthreads(); int __syncthreads_or(int); void __syncwarp();
unsigned __ballot_sync(unsigned, int); int __any_sync(unsigned, int); float __shfl_xor_sync(unsigned, float, int);
inline int min(int a,int b){return a<b?a:b;} inline int max(int a,int b){return a>b?a:b;}
inline uint32_t min(uint32_t a,uint32_t b){return a<b?a:b;} inline int64_t min(int64_t a,int64_t b){return a<b?a:b;} inline int64_t max(int64_t a,int64_t b){return a>b?a:b;}
inline uint32_t __float_as_uint(float f){uint32_t u;memcpy(&u,&f,4);return u;} inline float __uint_as_float(uint32_t u){float f;memcpy(&f,&u,4);return f;}
inline int __float_as_int(float f){return (int)__float_as_uint(f);}
inline uint32_t atomicAdd(uint32_t*p,uint32_t v){uint32_t o=*p;*p+=v;return o;} inline float atomicAdd(float*p,float v){float o=*p;*p+=v;return o;}
inline int atomicMax(int*p,int v){int o=*p;if(v>o)*p=v;return o;}
using std::isnan;
using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError(){return cudaSuccess;} inline const char* cudaGetErrorString(cudaError_t){return "";}
inline cudaError_t cudaMemsetAsync(void*p,int v,size_t n,cudaStream_t){memset(p,v,n);return cudaSuccess;}
void emulate(int64_t blocks,int threads,const std::function<void()>& body);
