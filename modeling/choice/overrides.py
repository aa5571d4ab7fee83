"""Finds the inputs, states and weights with a __torch_function__ of their own.

Such a method may know torch's functions only, so torch.nn's own forward runs. For a subclass
without the method our kernels run, and return that subclass."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..kernels.fused_rnn.private_names import weight_of
from .cost_model import CELLS


def overrides_torch(module: Any, data: Any) -> bool:
    """Whether the input or the weights have a __torch_function__ of their own.

    torch.overrides.has_torch_function would not do: while a mode such as `with torch.device(...)` is on,
    it is true of every tensor."""
    weight = weight_of(module, "weight_ih" if module.call_kind >= CELLS else "weight_ih_l0")
    return _has_own_functions(type(data)) or _has_own_functions(type(weight))


def states_override_torch(hx: Any) -> bool:
    """Whether a state has a __torch_function__ of its own."""
    for state in hx if type(hx) in (tuple, list) else (hx,):
        if type(state) is not Tensor and _has_own_functions(type(state)):
            return True
    return False


def _has_own_functions(kind: type) -> bool:
    if kind in (Tensor, Parameter) or not hasattr(kind, "__torch_function__"):
        return False
    handler = lambda kind: getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return handler(kind) not in (handler(Tensor), handler(Parameter))
