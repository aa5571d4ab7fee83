"""Finds the layer that made a training step's values NaN or infinite."""

import warnings
from collections.abc import Callable

import torch
from torch import nn


def _is_finite(values) -> bool:
    values = values if isinstance(values, (tuple, list)) else (values,)
    return all(v.isfinite().all() for v in values if isinstance(v, torch.Tensor))


def first_non_finite(
    model: nn.Module, loss: Callable[[], torch.Tensor], backward: bool = True
) -> str:
    """Reruns a failed step; returns the first layer with a non-finite value, forward or backward.

    loss() is the step's. backward=False leaves the second half out and looks at the gradients as
    they are: a sharded model can only go backward in all processes together.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the parameter {name} is not finite before the step"
    found: list[str] = []
    handles = [
        handle
        for name, module in model.named_modules()
        if name
        for handle in _watch(name, module, found, backward)
    ]
    if backward:
        model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules return no tensor, and have no such gradient
        value = loss()
        if backward and not found:
            value.backward()
    for handle in handles:
        handle.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            found.append(f"the gradient of {name} is not finite")
    model.zero_grad(set_to_none=True)
    return found[0] if found else "the step is finite when it runs again"


def _watch(name: str, module: nn.Module, found: list[str], backward: bool):
    kind = type(module).__name__

    def forward(module, inputs, output):
        if not _is_finite(output):
            found.append(f"the output of {name} ({kind}) is not finite")

    def back(module, grad_input, grad_output):
        if _is_finite(grad_output) and not _is_finite(grad_input):
            found.append(f"the gradient through {name} ({kind}) is not finite")

    yield module.register_forward_hook(forward)
    if backward:
        yield module.register_full_backward_hook(back)
