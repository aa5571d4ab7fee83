"""The public functions. Shapes: B batch, T time, G gates, N heads, D head width, K states.

Every sequence function takes, besides what its docstring says,

    x           [B, T, G, N, D]  pre-activations from the input, bf16, fp16, fp32 or fp64; any strides
    weight      [G, N, D, D]     recurrent weight, weight[g, n, j, k] from unit k to gate g of unit j:
                                 torch's weight_hh viewed as (G, 1, D, D) fits with one head
    bias        [R, N, D]        R rows, None for zero
    state       K tensors [B, N, D], None for the empty state (zeros); differentiable
    reset       [B, T] bool      the state is emptied *before* a marked step (document boundaries)
    reset_state K tensors [R, N, D]  the states that take the place of the emptied ones, one for each
                                 of the R marks of reset, row by row; differentiable
    hold        [B, T] bool      at a marked step the state passes through and h is 0 (padding)
    lengths     [B] int          row b ends after lengths[b] steps: later marks of reset count no more
    cu_seqlens  [S + 1] int      documents packed into one row: x is [1, total, G, N, D], states are
                                 [S, N, D], document s is x[0, cu_seqlens[s]:cu_seqlens[s + 1]]:
                                 offsets from 0 to total that never decrease
    grad_clip   float            clips, element by element, the gradient that reaches h through the
                                 recurrent product to [-grad_clip, grad_clip]; 0 cuts it, and then the
                                 backward has no recurrent product
    clip_state  float            clips what every step adds up, c of lstm and h of gru and rnn, to
                                 [-clip_state, clip_state] before anything reads it, as TensorFlow's
                                 cell_clip does; gradients pass where it lies inside. Not for slstm.
                                 On CUDA it takes a launch a step; in 16 bits the reference runs calls
                                 that record gradients there
    precision   "highest"|"tf32" fp32 products on tensor cores; the CPU always computes "highest"
    save        "gates"|"recompute"  keep the gates for the backward, or run the forward again there
    return_states  bool          return a third value, the K states of every step [B, T, N, D], h first;
                                 the others are in fp32 (fp64), 0 at held steps, and differentiable
                                 but for m of slstm. The gates are kept, whatever `save` says
    backend     "auto"|"cuda"|"cpu"|"reference"  one asked for by name is used or refused

and returns ``(h, state)``, or ``(h, state, states)``: h [B, T, N, D] in x's dtype and the K last
states in fp32 (fp64 for fp64), unrounded. Sums are in fp32 (fp64); h is rounded to x's dtype only
as an operand of the recurrent product. Weights in another dtype than x are cast inside, and their
gradients have the weights' dtype. Gradients can be differentiated once more (create_graph=True)
unless grad_clip, clip_state or return_states is given. Derivatives in forward mode (torch.func.jvp,
jacfwd, hessian) are the reference's, with a warning, where backend is "auto".
Wrong arguments raise TypeError or ValueError naming the argument, what it was and what it must be;
a backend that is not here raises RuntimeError. What only the values of lengths and cu_seqlens tell
(their range and order), and the number of reset's marks, is checked on the CPU. On CUDA, where
reading them would wait for the GPU, it is checked if FLASHCELL_CHECK=1 is set, and not in a
compiled graph: without the check, lengths are clamped to 0..T, and what cu_seqlens gives is
undefined, though nothing is read or written outside the tensors.
"""

from typing import Any, Tuple

import torch

from .arguments import STORED, check_clips, check_parameters, check_sequence, check_x
from .checks import (
    check_choice,
    check_flag,
    check_input,
    check_operand,
    check_state,
    check_tensor,
    check_values,
    find_cell,
)
from .dispatch import BACKEND, select_backend, without_autocast
from .formulas import CALLS, is_nested, may_have_tangents
from .memory import check_memory
from .projection import project
from .reset_states import check_reset_state, split
from .run import Options, as_dtype, run

Result = Tuple[Any, ...]  # (h, state) or (h, state, states)


def lstm(
    x, weight, bias=None, state=None, *, reset=None, reset_state=None, hold=None, lengths=None,
    cu_seqlens=None, grad_clip=None, clip_state=None, precision="highest", save="gates",
    return_states=False, backend="auto",
) -> Result:  # fmt: skip
    """Long short-term memory (Hochreiter & Schmidhuber 1997 with forget gate), as torch.nn.LSTM.

        i, f, o = sigmoid(x + R h + b)    g = tanh(x_g + R_g h + b_g)
        c' = f c + i g                    h' = o tanh(c')

    Gates i, f, g, o; states (h, c); bias 4 rows. Arguments and errors: see the module.
    """
    return recurrent(
        "lstm", x, weight, bias, state, reset=reset, reset_state=reset_state, hold=hold,
        lengths=lengths, cu_seqlens=cu_seqlens, grad_clip=grad_clip, clip_state=clip_state,
        precision=precision, save=save, return_states=return_states, backend=backend,
    )  # fmt: skip


def gru(
    x, weight, bias=None, state=None, *, reset=None, reset_state=None, hold=None, lengths=None,
    cu_seqlens=None, grad_clip=None, clip_state=None, precision="highest", save="gates",
    return_states=False, backend="auto",
) -> Result:  # fmt: skip
    """Gated recurrent unit (arXiv 1406.1078v1, reset after the product), as torch.nn.GRU.

        r, z = sigmoid(x + R h + b)       n = tanh(x_n + b_nx + r (R_n h + b_nh))
        h' = (1 - z) n + z h

    Gates r, z, n; states (h,); bias 4 rows r, z, n_x, n_h. Arguments and errors: see the module.
    """
    return recurrent(
        "gru", x, weight, bias, state, reset=reset, reset_state=reset_state, hold=hold,
        lengths=lengths, cu_seqlens=cu_seqlens, grad_clip=grad_clip, clip_state=clip_state,
        precision=precision, save=save, return_states=return_states, backend=backend,
    )  # fmt: skip


def rnn(
    x, weight, bias=None, state=None, *, nonlinearity="tanh", reset=None, reset_state=None,
    hold=None, lengths=None, cu_seqlens=None, grad_clip=None, clip_state=None, precision="highest",
    save="gates", return_states=False, backend="auto",
) -> Result:  # fmt: skip
    """Elman's network (1990), as torch.nn.RNN:  h' = act(x + R h + b), act tanh or relu.

    One gate; states (h,); bias 1 row. Arguments and errors: see the module.
    """
    check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
    return recurrent(
        f"rnn_{nonlinearity}", x, weight, bias, state, reset=reset, reset_state=reset_state, hold=hold,
        lengths=lengths, cu_seqlens=cu_seqlens, grad_clip=grad_clip, clip_state=clip_state,
        precision=precision, save=save, return_states=return_states, backend=backend,
    )  # fmt: skip


def slstm(
    x, weight, bias=None, state=None, *, reset=None, reset_state=None, hold=None, lengths=None,
    cu_seqlens=None, grad_clip=None, clip_state=None, precision="highest", save="gates",
    return_states=False, backend="auto",
) -> Result:  # fmt: skip
    """sLSTM (xLSTM, arXiv 2405.04517; FlashRNN, arXiv 2412.07752, eq. 12-15), exponential input gate.

        lf = logsigmoid(f) + m            m' = i where n = 0, else max(i, lf)
        c' = e^(lf-m') c + e^(i-m') tanh(z)
        n' = e^(lf-m') n + e^(i-m')       h' = sigmoid(o) c' / n'

    Gates i, f, z, o (pre-activations x + R h + b); states (h, c, n, m); bias 4 rows. A unit with n
    = 0 is empty: the terms of its old state are 0. m carries no gradient, and the gradients of c
    and n are taken at fixed m. clip_state must be None: c and n are relative to e^m, so the same
    bound would mean another one at every step; h is bounded by |c| <= n. Arguments and errors: see
    the module.
    """
    return recurrent(
        "slstm", x, weight, bias, state, reset=reset, reset_state=reset_state, hold=hold,
        lengths=lengths, cu_seqlens=cu_seqlens, grad_clip=grad_clip, clip_state=clip_state,
        precision=precision, save=save, return_states=return_states, backend=backend,
    )  # fmt: skip


def lstm_step(x, weight, bias=None, state=None, *, clip_state=None, backend="auto") -> Result:
    """One step of `lstm`: x [B, 4, N, D] -> h [B, N, D], (h, c)."""
    return recurrent_step("lstm", x, weight, bias, state, clip_state=clip_state, backend=backend)


def gru_step(x, weight, bias=None, state=None, *, clip_state=None, backend="auto") -> Result:
    """One step of `gru`: x [B, 3, N, D] -> h [B, N, D], (h,)."""
    return recurrent_step("gru", x, weight, bias, state, clip_state=clip_state, backend=backend)


def rnn_step(
    x, weight, bias=None, state=None, *, nonlinearity="tanh", clip_state=None, backend="auto"
) -> Result:
    """One step of `rnn`: x [B, 1, N, D] -> h [B, N, D], (h,)."""
    check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
    cell, given = f"rnn_{nonlinearity}", (x, weight, bias, state)
    return recurrent_step(cell, *given, clip_state=clip_state, backend=backend)


def slstm_step(x, weight, bias=None, state=None, *, backend="auto") -> Result:
    """One step of `slstm`: x [B, 4, N, D] -> h [B, N, D], (h, c, n, m)."""
    return recurrent_step("slstm", x, weight, bias, state, backend=backend)


def recurrent(
    cell: str, x, weight, bias=None, state=None, *, reset=None, reset_state=None, hold=None,
    lengths=None, cu_seqlens=None, grad_clip=None, clip_state=None, precision="highest",
    save="gates", return_states=False, backend="auto",
) -> Result:  # fmt: skip
    """Runs the cell named `cell`, one of `CELLS`: what lstm, gru, rnn and slstm call."""
    spec = find_cell(cell)
    check_sequence(spec, x, weight, bias, state, reset, hold, lengths, cu_seqlens)
    check_clips(spec, grad_clip, clip_state)
    check_values(x, lengths, cu_seqlens)
    check_choice("precision", precision, ("highest", "tf32"))
    check_choice("save", save, ("gates", "recompute"))
    check_flag("return_states", return_states)
    masks = (reset, hold, lengths, cu_seqlens)
    options = Options(grad_clip, clip_state, precision == "tf32", save, return_states)
    if reset_state is None:
        h, last, states = run(spec, x, weight, bias, state, masks, options, backend)
    else:
        check_reset_state(spec, x, reset, reset_state)
        parts = split(x, state, masks, reset_state)
        masks = (None, parts.hold, None, parts.cu_seqlens)
        h, last, states = run(spec, parts.x, weight, bias, parts.state, masks, options, backend)
        h, *states = (parts.join(s) for s in (h, *states))
        last = tuple(s[parts.ends] for s in last)
    return (h, last, (h, *states)) if return_states else (h, last)


def recurrent_step(
    cell: str, x, weight, bias=None, state=None, *, clip_state=None, backend="auto"
) -> Result:
    """One step of the cell named `cell`: x [B, G, N, D], states [B, N, D] -> h [B, N, D], states."""
    spec = find_cell(cell)
    check_x(spec, x, "[B, G, N, D]", 4)
    check_parameters(spec, x, weight, bias)
    check_state(spec, state, (x.shape[0], *x.shape[-2:]), "[B, N, D]", x)
    check_clips(spec, None, clip_state)
    check_memory(STORED, x, weight, bias, *(state or ()))
    no_masks = (None, None, None, None)
    x = x.unsqueeze(1)
    options = Options(clip_state=clip_state)
    h, state, _ = run(spec, x, weight, bias, state, no_masks, options, backend)
    return h.squeeze(1), state


def linear(x, weight, bias=None, *, precision="highest", backend="auto") -> torch.Tensor:
    """y = x weight^T + bias:  x [..., I], weight [O, I], bias [O] -> y [..., O], as F.linear.

    The input projection of a cell through our own GEMM on the CPU, where torch's fp32 and fp16
    products can be several times slower; torch's own elsewhere. With ``precision="tf32"``, large
    products in fp32 on CUDA round their operands to TF32, as those of cuDNN's recurrent networks do.
    """
    check_input("x", x)
    check_input("weight", weight)
    check_tensor("weight", weight, x.device)
    if weight.dim() != 2 or x.dim() < 1 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, but must be [O, I] with I = x.shape[-1]; "
            f"x has shape {list(x.shape)}"
        )
    check_choice("precision", precision, ("highest", "tf32"))
    if bias is not None:
        check_operand("bias", bias, (weight.shape[0],), "[O]", x.device)
    check_memory(("x", "weight", "bias", "bias"), x, weight, bias)
    weight = as_dtype(weight, x.dtype)
    bias = None if bias is None else as_dtype(bias, x.dtype)
    chosen = select_backend(backend, x.device.type, BACKEND, x.dtype)
    if backend == "auto" and (may_have_tangents(x, weight, bias) or is_nested()):
        chosen = "reference"  # torch's own, which is not slow
    if chosen == "cpu":
        return CALLS["linear_fwd"](x, weight, bias)
    if chosen == "cuda" and bias is None:
        return project(x, weight, precision == "tf32")
    with without_autocast(x.device.type):
        return torch.nn.functional.linear(x, weight, bias)
