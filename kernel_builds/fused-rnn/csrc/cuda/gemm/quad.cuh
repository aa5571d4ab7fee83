// Loads and stores four neighbouring units of a row (a quad) at once.
#pragma once
#include "../tensor_core.cuh"

namespace flashcell::cuda::gemm {

constexpr int kQuad = 4;

DEVICE void unpack(float (&v)[kQuad], const float4& q) {
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}
template <typename IO>
DEVICE void unpack(float (&v)[kQuad], const uint2& words) {
  const float2 low = Pair<IO>{{words.x}}.floats(), high = Pair<IO>{{words.y}}.floats();
  v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
}

template <typename IO>
DEVICE void load_quad(float (&v)[kQuad], const IO* from) {
  if constexpr (sizeof(IO) == 4) {
    unpack(v, *reinterpret_cast<const float4*>(from));
  } else {
    unpack<IO>(v, *reinterpret_cast<const uint2*>(from));
  }
}
// Does the same with values that are not read again: they are the first to leave the L2 cache.
template <typename IO>
DEVICE void load_quad_once(float (&v)[kQuad], const IO* from) {
  if constexpr (sizeof(IO) == 4) {
    unpack(v, __ldcs(reinterpret_cast<const float4*>(from)));
  } else {
    unpack<IO>(v, __ldcs(reinterpret_cast<const uint2*>(from)));
  }
}

DEVICE void store_quad(float* to, const float (&v)[kQuad]) {
  *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}
template <typename IO>
DEVICE void store_quad(IO* to, const float (&v)[kQuad]) {
  if constexpr (sizeof(IO) == 4) {
    store_quad(reinterpret_cast<float*>(to), v);
  } else {
    const uint32_t low = Pair<IO>::of(v[0], v[1]).word[0];
    const uint32_t high = Pair<IO>::of(v[2], v[3]).word[0];
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
  }
}

template <typename IO>
DEVICE void store_zeros(IO* to) {
  const float zeros[kQuad] = {};
  store_quad(to, zeros);
}

// Loads a quad element by element, from a tensor of the caller's, which need not be aligned.
template <typename IO>
DEVICE void load_each(float (&v)[kQuad], const IO* from) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) v[i] = to_float(from[i]);
}

// Loads a quad at once if it is aligned.
template <typename IO>
DEVICE void load_any(float (&v)[kQuad], const IO* from) {
  if (reinterpret_cast<uintptr_t>(from) % (kQuad * sizeof(IO)) == 0) {
    load_quad(v, from);
  } else {
    load_each(v, from);
  }
}

}  // namespace flashcell::cuda::gemm
