"""Runs the stand-ins for torch.nn's modules as ONNX's own LSTM, GRU and RNN operators.

While torch.onnx.export captures a model, the modules of rnn.py call this instead of a kernel, so the
export takes them as they are and the ONNX model holds no operator of ours. ONNX has, with N directions
and G gates in an order of its own,

    X [T, B, I], W [N, G D, I], R [N, G D, D], B [N, 2 G D], initial_h, initial_c [N, B, D]
    -> Y [T, N, B, D], Y_h, Y_c [N, B, D]

T and B may be dynamic axes. The program that torch captures holds placeholders of these operators, which
return zeros. So the exporter's option `verify` reports differences: compare with the model instead.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.fused_rnn.plain import as_tuple, compute_dtype
from ..kernels.fused_rnn.private_names import is_tracing

# For each gate of ONNX its place in torch.nn: LSTM i, o, f, c of i, f, g, o; GRU z, r, h of r, z, n.
GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
_Head = list[Tensor]  # the parameters of one layer and direction, in torch.nn's order


def is_onnx_export(compiles: bool) -> bool:
    """Whether the call is captured by one of the two exporters of torch.onnx.export. `compiles` is
    torch.compiler.is_compiling().

    With dynamo=False torch.nn's forward is what gives ONNX's operators, otherwise
    `export_sequence`."""
    return (compiles or is_tracing()) and torch.onnx.is_in_onnx_export()


def export_sequence(module: Any, input: Any, hx: Any) -> Any:
    """Does what the forward of flashcell's LSTM, GRU or RNN does, by ONNX's operators."""
    if not isinstance(input, Tensor):
        raise NotImplementedError(
            f"input is a {type(input).__name__}, but must be a tensor for torch.onnx.export with "
            "dynamo=True: pass the padded tensor, or use dynamo=False for a PackedSequence"
        )
    batched, states = input.dim() != 2, as_tuple(hx)
    if len(states) not in (0, 2 if module.mode == "LSTM" else 1):
        wanted = "a tuple of two tensors, (h, c)" if module.mode == "LSTM" else "one tensor"
        raise ValueError(f"hx has {len(states)} tensors, but must be {wanted}")
    if not batched:
        input = input.unsqueeze(0 if module.batch_first else 1)
        states = tuple(s.unsqueeze(1) for s in states)
    if states:
        module.check_forward_args(input, states if module.mode == "LSTM" else states[0], None)
    else:
        module.check_input(input, None)
    y, last = _run_layers(module, input.transpose(0, 1) if module.batch_first else input, states)
    y = y.transpose(0, 1) if module.batch_first else y
    if not batched:
        y, last = y.squeeze(0 if module.batch_first else 1), [s.squeeze(1) for s in last]
    return y, tuple(last) if len(last) > 1 else last[0]


def _run_layers(module: Any, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """Runs x [T, B, I] and states [layers * N, B, ...] -> y [T, B, N * P] and the last states."""
    dtype, N, lasts = compute_dtype(x), 2 if module.bidirectional else 1, []
    x, states = x.to(dtype), tuple(s.to(dtype) for s in states)
    heads = [[w.to(dtype) for w in head] for head in module.all_weights]
    for at in range(0, len(heads), N):
        if at > 0:
            x = nn.functional.dropout(x, module.dropout, module.training)
        run = _run_projected if module.proj_size > 0 else _run_layer
        x, last = run(module.mode, x, heads[at : at + N], [s[at : at + N] for s in states])
        lasts.append(last)
    return x, [torch.cat(parts) for parts in zip(*lasts, strict=True)]


def _run_layer(
    mode: str, x: Tensor, heads: list[_Head], states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Runs one layer: x [T, B, I], states [N, B, D] -> y [T, B, N * D] and the last states."""
    kind, _, activation = mode.partition("_")
    (T, B), N, D = x.shape[:2], len(heads), heads[0][1].shape[1]
    size = len(GATES[kind]) * D
    order = [g * D + row for g in GATES[kind] for row in range(D)]  # torch's row for each of ONNX's
    rows = torch.tensor(order + [size + row for row in order], device=x.device)
    stack = lambda place: torch.stack([head[place] for head in heads])
    inputs: list[Tensor | None] = [stack(k).index_select(1, rows[:size]) for k in (0, 1)]
    biased = len(heads[0]) > 2
    inputs.append(torch.cat([stack(2), stack(3)], 1).index_select(1, rows) if biased else None)
    attributes: dict[str, Any] = {"hidden_size": D}
    attributes["direction"] = "bidirectional" if N == 2 else "forward"
    if kind == "GRU":
        attributes["linear_before_reset"] = 1
    if activation:
        attributes["activations"] = [activation.capitalize()] * N
    shapes = [(T, N, B, D)] + [(N, B, D)] * (2 if kind == "LSTM" else 1)
    y, *last = torch.onnx.ops.symbolic_multi_out(
        kind,
        [x, *inputs, None, *states],  # None: all sequences are T steps long
        attributes,
        dtypes=[x.dtype] * len(shapes),
        shapes=shapes,
    )
    y, *last = (value.to(x.device) for value in (y, *last))  # placeholders lie on the CPU
    y = y.squeeze(1) if N == 1 else y.transpose(1, 2).flatten(2)
    return y, last


def _run_projected(
    mode: str, x: Tensor, heads: list[_Head], states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Runs a layer of an LSTM with a projection, which ONNX's LSTM does not have, as one without.

    h = P m, m = o tanh(c): a recurrence of m with the matrix R P, and h is found afterwards. h_0 adds
    R h_0 to the gates of the first step alone, as an input that is zero at all other steps."""
    (T, B), N, plain = x.shape[:2], len(heads), []
    width = heads[0][1].shape[1]
    for n, (w_ih, w_hh, *biases, w_hr) in enumerate(heads):
        if states:
            columns = [w_hh if k == n else torch.zeros_like(w_hh) for k in range(N)]
            w_ih = torch.cat([w_ih, *columns], dim=1)
        plain.append([w_ih, w_hh @ w_hr, *biases])
    if states:
        rest = x.new_zeros(T - 1, B, width)
        first = [states[0][n : n + 1] for n in range(N)]
        ends = [torch.cat([h, rest] if n == 0 else [rest, h]) for n, h in enumerate(first)]
        x = torch.cat([x, *ends], dim=2)
        D = states[1].shape[2]
        states = [x.new_zeros(N, B, D), states[1]]
    y, (m, c) = _run_layer(mode, x, plain, states)
    y = y.unflatten(2, (N, -1))
    y = torch.cat([y[:, :, n] @ head[-1].t() for n, head in enumerate(heads)], dim=2)
    return y, [torch.stack([m[n] @ head[-1].t() for n, head in enumerate(heads)]), c]
