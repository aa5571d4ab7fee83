"""Finds gradients that share memory; the suite checks every backward that it runs.

Whoever changes a gradient in place (clipping, unscaling, zero_grad(set_to_none=False), accumulation)
changes every gradient that shares its memory. autograd makes that easy to get wrong: a formula that
returns one buffer twice, as two views of it, becomes two `.grad`s in one place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Named = tuple[str, Tensor]


def overlapping(grads: Iterable[Named], leaves: Iterable[Named] = ()) -> str | None:
    """Returns the names of two of `grads`, or of one and a leaf, that have a byte in common, or
    None."""
    reach = []
    for is_grad, named in ((True, grads), (False, leaves)):
        for name, tensor in named:
            if is_plain(tensor):
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                last, start = sum((n - 1) * step for n, step in steps), tensor.data_ptr()
                end = start + (last + 1) * tensor.element_size()
                reach.append((start, end, name, tensor, is_grad))
    reach.sort(key=lambda entry: entry[:2])
    for at, (_, end, name, tensor, is_grad) in enumerate(reach):
        for start, _, other_name, other, is_other in reach[at + 1 :]:
            if start >= end:
                break
            if (is_grad or is_other) and (tensor is other or share_bytes(tensor, other)):
                return f"{name} and {other_name}"
    return None


def is_plain(tensor: Any) -> bool:
    """Whether it has memory of its own to look at; torch.func's, batched and traced tensors do not."""
    plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if not plain or wrapped(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor):
        return False
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.numel() > 0


def share_bytes(a: Tensor, b: Tensor) -> bool:
    """Compares exactly views whose spans meet: [0::2] and [1::2] have no byte in common."""
    storage = a.untyped_storage()
    if storage.data_ptr() != b.untyped_storage().data_ptr():
        return False
    marks = [bytes_of(tensor, storage.nbytes()) for tensor in (a, b)]
    return bool((marks[0] & marks[1]).any())


def bytes_of(tensor: Tensor, nbytes: int) -> Tensor:
    """Returns [nbytes] bool: which bytes of its storage belong to a tensor."""
    marks, size = torch.zeros(nbytes, dtype=torch.bool, device="cpu"), tensor.element_size()
    steps = (*(step * size for step in tensor.stride()), 1)
    marks.as_strided((*tensor.shape, size), steps, tensor.storage_offset() * size).fill_(True)
    return marks


def leaves_of(roots: Iterable[Any]) -> list[Tensor]:
    """Returns the leaves in which a backward from `roots` accumulates gradients."""
    stack = [root.grad_fn for root in roots if isinstance(root, Tensor)]
    seen, leaves = set(stack), []
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = {following for following, _ in node.next_functions} - seen
        seen |= following
        stack += following
    return leaves


def as_list(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else list(given or ())


@contextmanager
def checked() -> Iterator[None]:
    """Inside this context, a backward whose gradients share memory raises AssertionError.

    It looks at the `.grad` of every leaf that the graph reaches, beside the leaves themselves,
    and at what torch.autograd.grad returns.
    """
    backward, grad = torch.autograd.backward, torch.autograd.grad

    @functools.wraps(backward)
    def checked_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        leaves = leaves_of(as_list(tensors))  # before the graph is freed
        backward(tensors, *args, **kwargs)
        named = [(f"leaf {k} {list(leaf.shape)}", leaf) for k, leaf in enumerate(leaves)]
        check([(f"the gradient of {name}", leaf.grad) for name, leaf in named], named)

    @functools.wraps(grad)
    def checked_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        found, given = grad(outputs, inputs, *args, **kwargs), as_list(inputs)
        named = [(f"leaf {k} {list(leaf.shape)}", leaf) for k, leaf in enumerate(given)]
        check([(f"the gradient of {n[0]}", g) for n, g in zip(named, found, strict=True)], named)
        return found

    torch.autograd.backward, torch.autograd.grad = checked_backward, checked_grad
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = backward, grad


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside this context nothing is looked at: on CUDA torch.nn's own biases share a gradient."""
    names = "backward", "grad"
    checking = {name: getattr(torch.autograd, name) for name in names}
    for name, function in checking.items():
        setattr(torch.autograd, name, getattr(function, "__wrapped__", function))
    try:
        yield
    finally:
        for name, function in checking.items():
            setattr(torch.autograd, name, function)


def check(grads: list[Named], leaves: list[Named]) -> None:
    found = overlapping(grads, leaves)
    assert found is None, f"{found} share memory"
