// The schemas of the torch operators: what they take and return.
#pragma once

namespace flashcell {

// q, k [B,T,H,K], v [B,T,H,V] strided · i, f [B,T,H], C [S,H,K,V], n [S,H,K], m [S,H] in the state
// dtype · reset, hold [B,T] bool · lengths [B] · cu_seqlens [S+1]. With q None only the state is
// computed. n and m are [0] if the cell has none. total [B,T,H] is n q of every step, whose
// absolute value is the divisor; [0] without n. The backward needs h if the gradient goes through
// the divisor. kept [.., kept, ..], on CUDA, has the states before all chunks; with 0 none is kept,
// and the backward recomputes them.
#define FLASHCELL_INPUTS                                                                          \
  "Tensor? q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor? C, Tensor? n, Tensor? m, Tensor? "  \
  "reset, Tensor? hold, Tensor? lengths, Tensor? cu_seqlens, bool exponential, bool normalized, " \
  "float eps, bool normalizer_grad, int chunk_size"
inline constexpr char kForwardSchema[] =
    "mlstm_fwd(" FLASHCELL_INPUTS
    ", int kept=0) -> (Tensor h, Tensor C, Tensor n, Tensor m, Tensor total, Tensor kept_C, "
    "Tensor kept_n)";
inline constexpr char kBackwardSchema[] =
    "mlstm_bwd(Tensor? dh, Tensor? dC, Tensor? dn, Tensor last_C, Tensor last_n, Tensor? h, Tensor "
    "total, Tensor? kept_C, Tensor? kept_n, " FLASHCELL_INPUTS
    ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor di, Tensor df, Tensor dC, Tensor dn)";
#undef FLASHCELL_INPUTS
// h, dy [B,T,H,V] · out_gate as h, strided · norm_weight [H,V] in the state dtype, on CUDA also in
// h's. Gradients of absent arguments are [0].
#define FLASHCELL_EPILOGUE "bool norm, bool centered, float norm_eps"
inline constexpr char kEpilogueSchema[] =
    "mlstm_epilogue(Tensor h, Tensor? out_gate, Tensor? norm_weight, " FLASHCELL_EPILOGUE
    ") -> Tensor";
inline constexpr char kEpilogueBackwardSchema[] =
    "mlstm_epilogue_bwd(Tensor dy, Tensor h, Tensor? out_gate, Tensor? "
    "norm_weight, " FLASHCELL_EPILOGUE ") -> (Tensor dh, Tensor dout_gate, Tensor dnorm_weight)";
// The same arguments without T.
#define FLASHCELL_STEP_OPTIONS                                                       \
  "Tensor? out_gate, Tensor? norm_weight, bool exponential, bool normalized, float " \
  "eps, " FLASHCELL_EPILOGUE
inline constexpr char kStepSchema[] =
    "mlstm_step(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor? C, Tensor? n, Tensor? "
    "m, " FLASHCELL_STEP_OPTIONS ") -> (Tensor h, Tensor C, Tensor n, Tensor m)";
inline constexpr char kStepInPlaceSchema[] =
    "mlstm_step_(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, Tensor(a!) C, Tensor(b!)? n, "
    "Tensor(c!)? m, " FLASHCELL_STEP_OPTIONS ") -> Tensor";
// On CUDA: a step that is written into a ring (replay.py) of R steps. Without q, k, v, i and f the
// ring is folded into the state, and h is [0].
inline constexpr char kReplaySchema[] =
    "mlstm_replay_(Tensor? q, Tensor? k, Tensor? v, Tensor? i, Tensor? f, Tensor(a!) C, "
    "Tensor(b!)? n, Tensor(c!)? m, Tensor(d!) ring_k, Tensor(e!) ring_v, Tensor(f!) ring_i, "
    "Tensor(g!) ring_f, Tensor(h!) used, " FLASHCELL_STEP_OPTIONS ") -> Tensor";
#undef FLASHCELL_STEP_OPTIONS
#undef FLASHCELL_EPILOGUE

}  // namespace flashcell
