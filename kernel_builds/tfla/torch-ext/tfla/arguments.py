"""Validates arguments: how q, k, v, the gates, the state and the epilogue must fit together."""

from typing import List, Tuple

import torch

from .cells import INPUT_GATES, Cell
from .checks import (
    check_choice,
    check_count,
    check_input,
    check_masks,
    check_number,
    check_operand,
    check_tensor,
    check_whole,
)
from .memory import check_memory

WIDEST = 1024
NORMS = ("layer", "rms")


def check_tensors(named, like: torch.Tensor, shape, letters: str) -> None:
    for name, value in named:
        check_operand(name, value, shape, letters, like.device)


def check_width(name: str, letter: str, width: int) -> None:
    if width % 8 or not 0 < width <= WIDEST:
        raise ValueError(
            f"{name} has {letter} = {width}, but it must be a multiple of 8 up to {WIDEST}"
        )


def check_key(name: str, value, letters: str, dims: int) -> None:
    check_input(name, value)
    if value.dim() != dims:
        raise ValueError(f"{name} has shape {list(value.shape)}, but must be {letters}")
    check_width(name, "K", value.shape[-1])


def check_inputs(k, v, i, f, letters: str, dims: int) -> None:
    """Checks k [..., H, K], v [..., H, V], i and f [..., H]; `letters` are those of "..."."""
    check_key("k", k, f"[{letters}, H, K]", dims)
    check_input("v", v)
    if v.dim() != dims:
        raise ValueError(f"v has shape {list(v.shape)}, but must be [{letters}, H, V]")
    rows = tuple(k.shape[:-1])
    check_tensors([("v", v)], k, (*rows, v.shape[-1]), f"[{letters}, H, V]")
    check_width("v", "V", v.shape[-1])
    check_tensors([("i", i), ("f", f)], k, rows, f"[{letters}, H]")


def check_query(q, k: torch.Tensor, letters: str) -> None:
    check_tensors([("q", q)], k, tuple(k.shape), f"[{letters}, H, K]")


def check_gate(input_gate, normalize, eps) -> None:
    check_choice("input_gate", input_gate, INPUT_GATES)
    if normalize is not None:
        check_choice("normalize", normalize, ("floor",))
    check_number("eps", eps)


def check_chunk_size(chunk_size) -> None:
    if chunk_size is not None:
        check_whole("chunk_size", chunk_size, 1, "None or an int >= 1")


def check_state(cell: Cell, state, sequences: int, letter: str, k, v) -> None:
    if state is None:
        return
    check_count("state", state, cell.states, cell.name)
    H, K, V = k.shape[-2], k.shape[-1], v.shape[-1]
    sizes: List[Tuple[Tuple[int, ...], str]] = [((K, V), ", K, V")]
    sizes += [((K,), ", K")] * cell.normalized + [((), "")] * cell.exponential
    for s, (value, (size, letters)) in enumerate(zip(state, sizes)):
        shape = (sequences, H, *size)
        check_tensors([(f"state[{s}]", value)], k, shape, f"[{letter}, H{letters}]")


STORED = ("q", "k", "v", "i", "f", "out_gate", "norm_weight", "state")


def check_transfer(name: str, transfer) -> None:
    """Checks C, n, m and log_decay of one shard; n and m may be None."""
    check_count(name, transfer, 4, "a transfer")
    C, n, m, log_decay = transfer
    check_tensor(f"{name}[0]", C)
    if C.dim() != 4:
        raise ValueError(f"{name}[0] has shape {list(C.shape)}, but must be [S, H, K, V]")
    sizes = [
        (C, 4, "[S, H, K, V]"),
        (n, 3, "[S, H, K]"),
        (m, 2, "[S, H]"),
        (log_decay, 2, "[S, H]"),
    ]
    for at, (value, dims, letters) in enumerate(sizes):
        if value is None and at in (1, 2):
            continue
        check_operand(f"{name}[{at}]", value, tuple(C.shape[:dims]), letters, C.device)
        if value.dtype != C.dtype:
            raise TypeError(f"{name}[{at}] has dtype {value.dtype}, but must be {C.dtype}, C's")
    if m is not None and n is None:
        raise ValueError(f"{name}[1] is None, but must be a tensor where {name}[2] is one")
    check_memory((name,), *transfer)


def check_carried(name: str, state, transfer, who: str) -> None:
    """Checks a state, or the state in a transfer, that precedes the checked transfer called `who`."""
    wanted = [t for t in transfer[:3] if t is not None]
    check_count(name, state, len(wanted), who)
    for s, (value, like) in enumerate(zip(state, wanted)):
        check_operand(f"{name}[{s}]", value, tuple(like.shape), f"{who}[{s}]'s", like.device)
        if value.dtype != like.dtype:
            raise TypeError(
                f"{name}[{s}] has dtype {value.dtype}, but must be {like.dtype}, {who}[{s}]'s"
            )
    check_memory((name,), *state)


def check_epilogue(v, out_gate, norm, norm_weight, norm_eps) -> None:
    if norm is not None:
        check_choice("norm", norm, NORMS)
    if out_gate is not None:
        check_tensors([("out_gate", out_gate)], v, tuple(v.shape), "v's shape")
    if norm_weight is not None:
        if norm is None:
            raise ValueError("norm_weight is given, but norm is None: it must be layer or rms")
        check_tensors([("norm_weight", norm_weight)], v, tuple(v.shape[-2:]), "[H, V]")
    check_number("norm_eps", norm_eps)


def check_sequences(k, reset, hold, lengths, cu_seqlens):
    """Returns the number of sequences, and its letter in messages."""
    count = check_masks(k, reset, hold, lengths, cu_seqlens)
    return count, "B" if cu_seqlens is None else "S"
