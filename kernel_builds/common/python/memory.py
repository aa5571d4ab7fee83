"""Checks the memory of tensors: that it is there, and that tensors to be written share it with no
other.

The kernels share this file. Compiled graphs skip these checks: their tensors have no addresses
yet.
"""

from typing import Any, Optional, Sequence

import torch

NOWHERE = 2**64  # above all addresses


def check_memory(names: Sequence[str], *values: Optional[torch.Tensor]) -> None:
    """Raises if a tensor's memory was freed by storage().resize_(0), because a read would end the
    process.

    The last of `names` may stand for several values, such as the states.
    """
    if torch.compiler.is_compiling():
        return
    try:
        for value in values:
            if value is not None and not value.data_ptr():
                break
        else:
            return
    except RuntimeError:  # a fake tensor, or one inside torch.func, has no memory of its own
        return
    _find_freed(names, values)


def _find_freed(names: Sequence[str], values) -> None:
    for at, value in enumerate(values):
        if value is None or value.data_ptr() or not value.numel() or value.is_meta:
            continue
        if value.untyped_storage().nbytes():  # a fake tensor, or a subclass around other tensors
            continue
        raise ValueError(
            f"{_name(names, at)} has shape {list(value.shape)}, but must have the memory for it: its storage "
            "was freed"
        )


def check_written(name: str, value: torch.Tensor) -> bool:
    """Checks a tensor that a step changes in place; returns whether its layout lets a binary write
    it."""
    dense = value.is_contiguous()
    if torch.compiler.is_compiling():
        return dense
    if value.is_neg():
        raise ValueError(f"{name} is a view that negates another tensor, but is written: clone it")
    if value.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} is an inference tensor, but is written outside inference mode: clone it"
        )
    if not dense and _overlaps(value):
        raise ValueError(
            f"{name} has strides {value.stride()}, but is written: no two elements may share memory"
        )
    return dense and value.storage_offset() * value.element_size() % 8 == 0


def _overlaps(value: torch.Tensor) -> bool:
    reach = 0  # span of the dimensions so far, innermost first
    for stride, size in sorted(zip(value.stride(), value.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def check_apart(names: Sequence[str], count: int, *values: Any) -> None:
    """Runs check_memory, and checks that none of the last `count` values, which are written, shares
    memory with another value: that one would be read or written when only part of the new
    numbers is in it."""
    if torch.compiler.is_compiling():
        return
    try:
        begins = [NOWHERE if value is None else value.data_ptr() for value in values]
    except RuntimeError:  # a fake tensor, or one inside torch.func, has no memory of its own
        return
    if 0 in begins:
        _find_freed(names, values)
    for at in range(len(values) - count, len(values)):
        begin = begins[at]
        end = begin + _reach(values[at]) if begin else 0
        for k, other in enumerate(begins[:at]):
            # most begin after its end, or end before it
            if other >= end:
                continue
            value, before = values[k], begin - other
            if value.nbytes <= before and value.is_contiguous():
                continue
            if other and _reach(value) > before and _share(values[at], value):
                raise ValueError(
                    f"{_name(names, at)} shares memory with {_name(names, k)}, but is written: clone it"
                )


def _reach(value: torch.Tensor) -> int:
    """Returns the number of bytes from its first element to the end of its last."""
    if value.is_contiguous():
        return value.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return (reach + 1) * value.element_size()


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors with overlapping spans have a byte in common; views with gaps may not."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    return bool(torch.isin(_addresses(first), _addresses(second)).any())


def _addresses(value: torch.Tensor) -> torch.Tensor:
    """Returns the address of every byte of the tensor."""
    width, found = value.element_size(), torch.tensor([value.data_ptr()], device="cpu")
    for size, stride in (
        (width, 1),
        *((n, s * width) for n, s in zip(value.shape, value.stride())),
    ):
        found = (found[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    return found


def _name(names: Sequence[str], at: int) -> str:
    last = len(names) - 1
    return names[at] if at < last else f"{names[last]}[{at - last}]"
