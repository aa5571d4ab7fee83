// One forward step of each cell, arranged for the shortest chain of dependent instructions from
// state to state, because that chain sets the time of a sequential pass over few channels. It is
// three multiply-adds and two evaluations of core (curve.cuh) for the GRU, six operations and two
// evaluations for the LSTM.
#pragma once
#include "../curve.cuh"

namespace flashcell::cuda {

template <typename Cell, bool kCoarse>
struct Chain;

template <bool kCoarse>
struct Chain<FlashGru, kCoarse> {
  using Cell = FlashGru;
  using F = Curve<kCoarse>;
  float z, r, c;  // the weights, with the input scales of core folded in

  Chain() = default;
  DEVICE Chain(const float (&w)[Cell::kWeights])
      : z(F::kSigmoidIn * w[Cell::Z]), r(F::kSigmoidIn * w[Cell::R]), c(F::kTanhIn * w[Cell::C]) {}

  // With kTangent it also computes tangent = J tangent, where J is the Jacobian of the step.
  template <bool kTangent>
  DEVICE void step(const float (&x)[3], float (&s)[1], float (&tangent)[1][1]) const {
    const float h = s[0];
    const float core_r = F::core(fmaf(r, h, F::kSigmoidIn * x[Cell::R]));
    const float core_z = F::core(fmaf(z, h, F::kSigmoidIn * x[Cell::Z]));
    // Computed while core_r is: the factor that core_r is multiplied by, and the rest of the sum.
    const float q = c * h, x_c = F::kTanhIn * x[Cell::C];
    const float rest = F::kSigmoid0 == 0 ? x_c : fmaf(F::kSigmoid0, q, x_c);
    const float core_c = F::core(fmaf(F::kSigmoid1 * q, core_r, rest));
    const float open = affine(F::kSigmoid1, core_z, F::kSigmoid0);
    const float kept = fmaf(-open, h, h);
    s[0] = fmaf(F::kTanh1 * open, core_c, F::kTanh0 == 0 ? kept : fmaf(F::kTanh0, open, kept));
    if constexpr (kTangent) {
      const float a_z = z / F::kSigmoidIn, a_r = r / F::kSigmoidIn, a_c = c / F::kTanhIn;
      const float reset = affine(F::kSigmoid1, core_r, F::kSigmoid0);
      const float candidate = affine(F::kTanh1, core_c, F::kTanh0);
      const float d_z = (candidate - h) * (open * (1 - open));
      const float d_c = open * (1 - candidate * candidate);
      const float d_r = d_c * (a_c * h) * (reset * (1 - reset));
      const float slope = (1 - open) + a_z * d_z + a_r * d_r + a_c * reset * d_c;
      tangent[0][0] *= slope;
    }
  }
};

template <bool kCoarse>
struct Chain<FlashLstm, kCoarse> {
  using Cell = FlashLstm;
  using F = Curve<kCoarse>;
  float f, o, z, p_f, p_o;

  Chain() = default;
  DEVICE Chain(const float (&w)[Cell::kWeights])
      : f(F::kSigmoidIn * w[Cell::AF]),
        o(F::kSigmoidIn * w[Cell::AO]),
        z(F::kTanhIn * w[Cell::AZ]),
        p_f(F::kSigmoidIn * w[Cell::PF]),
        p_o(F::kSigmoidIn * w[Cell::PO]) {}

  template <bool kTangent>
  DEVICE void step(const float (&x)[3], float (&s)[2], float (&tangent)[2][2]) const {
    const float h = s[0], c = s[1];
    const float core_f = F::core(fmaf(f, h, fmaf(p_f, c, F::kSigmoidIn * x[Cell::F])));
    const float core_z = F::core(fmaf(z, h, F::kTanhIn * x[Cell::Z]));
    const float in = affine(F::kTanh1, core_z, F::kTanh0);
    const float keep = affine(F::kSigmoid1, core_f, F::kSigmoid0);
    const float next = fmaf(keep, c - in, in);
    const float core_o = F::core(fmaf(p_o, next, fmaf(o, h, F::kSigmoidIn * x[Cell::O])));
    const float out = affine(F::kSigmoid1, core_o, F::kSigmoid0);
    const float shown = affine(F::kTanh1, F::core(F::kTanhIn * next), F::kTanh0);
    s[0] = out * shown, s[1] = next;
    if constexpr (kTangent) {
      const float a_f = f / F::kSigmoidIn, a_o = o / F::kSigmoidIn, a_z = z / F::kTanhIn;
      const float d_f = (c - in) * (keep * (1 - keep)), d_z = (1 - keep) * (1 - in * in);
      const float d_o = shown * (out * (1 - out));
      const float along = out * (1 - shown * shown) + d_o * (p_o / F::kSigmoidIn);
      const float c_h = d_f * a_f + d_z * a_z, c_c = keep + d_f * (p_f / F::kSigmoidIn);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float m_h = tangent[0][j], m_c = tangent[1][j];
        tangent[1][j] = c_h * m_h + c_c * m_c;
        tangent[0][j] = d_o * a_o * m_h + along * tangent[1][j];
      }
    }
  }
};

}  // namespace flashcell::cuda
