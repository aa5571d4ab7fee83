#pragma once
#include "cuda_runtime.h"
struct __half { _Float16 v; };
struct __half2 { __half x,y; };
inline float __half2float(__half h){return float(h.v);} inline __half __float2half_rn(float f){return {(_Float16)f};}
inline __half2 __floats2half2_rn(float a,float b){return {__float2half_rn(a),__float2half_rn(b)};}
