#pragma once
#include "cuda_runtime.h"
struct __nv_bfloat16 { uint16_t b; };
struct __nv_bfloat162 { __nv_bfloat16 x,y; };
inline float __bfloat162float(__nv_bfloat16 v){ return __uint_as_float(uint32_t(v.b)<<16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f){ uint32_t u=__float_as_uint(f); if(f!=f) return {0x7fff}; return {uint16_t((u+0x7fff+((u>>16)&1))>>16)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a,float b){ return {__float2bfloat16_rn(a),__float2bfloat16_rn(b)}; }
