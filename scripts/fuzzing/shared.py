"""Faults that place several arguments of a call in the same memory."""

from __future__ import annotations

from typing import Any

import torch

from fuzzing.draw import Draw
from fuzzing.oracle import is_readable


def is_plain(t: torch.Tensor) -> bool:
    if t.layout != torch.strided or t.is_nested or t.is_inference() or t.device.type != "cpu":
        return False
    return t.is_floating_point() and is_readable(t) and 0 < t.numel() < 2**20


def places(call: dict[str, Any]) -> list[tuple[str, int | None, torch.Tensor]]:
    """Returns a call's floating tensors in plain memory: (argument, index in it, tensor)."""
    found = []
    for name, value in call.items():
        several = isinstance(value, (tuple, list))
        for k, t in enumerate(value) if several else [(None, value)]:
            if isinstance(t, torch.Tensor) and is_plain(t):
                found.append((name, k, t))
    return found


def put(call: dict[str, Any], name: str, k: int | None, t: torch.Tensor) -> None:
    if k is not None:
        value = call[name]
        t = getattr(type(value), "_make", type(value))(
            [t if j == k else v for j, v in enumerate(value)]
        )
    call[name] = t


def shared(draw: Draw, call: dict[str, Any]) -> str:
    """Moves one tensor into the memory of another."""
    every = places(call)
    draw.rng.shuffle(every)
    for name, k, t in every:
        for other, j, source in every:
            if (name, k) == (other, j) or source.dtype != t.dtype or source.numel() < t.numel():
                continue
            if not source.is_contiguous():
                continue
            first = draw.pick((0, draw.rng.randint(0, source.numel() - t.numel())))
            part = source.detach().view(-1)[first : first + t.numel()].view(t.shape)
            if bool((t > 0).all()) and not bool((part > 0).all()):
                continue  # such as sLSTM's n, a divisor
            if not float(part.abs().max()) <= 2 * float(t.detach().abs().max()):
                continue  # such as a recurrent weight, scaled so that errors do not grow
            put(call, name, k, part.requires_grad_(t.requires_grad))
            return f"{name} in {other}'s memory"
    return ""


def neighbours(draw: Draw, call: dict[str, Any]) -> str:
    """Puts all tensors of one dtype into one buffer, so that a write past an end is noticed."""
    every = places(call)
    if len(every) < 2:
        return ""
    dtype = draw.pick([t.dtype for _, _, t in every])
    every = [(name, k, t) for name, k, t in every if t.dtype == dtype]
    buffer, at = torch.empty(sum(t.numel() for _, _, t in every), dtype=dtype), 0
    for name, k, t in every:
        part = buffer[at : at + t.numel()].view(t.shape).copy_(t.detach())
        put(call, name, k, part.requires_grad_(t.requires_grad))
        at += t.numel()
    return "neighbours"
