"""Checks that a model runs only known code. A step with code of unknown origin is not recorded, and
a kernel replaces a module only if the module is no more than its weights."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from ..quantization.linear import QuantizedLinear, why_not_readable
from ..utils.private_names import ENGINE, GLOBAL_HOOKS, HOOKS, is_compiled, parameters_of
from .global_names import PACKAGE, GlobalNames

# Remote code lies in transformers_modules.<repository>.<revision>, the configuration's maybe in another
# revision than the model's.
REPOSITORY = PACKAGE.rpartition(".")[0] if PACKAGE.count(".") > 1 else PACKAGE
KNOWN = {"torch", "transformers", "builtins", "abc", "typing", "collections", "contextlib"}
# Libraries whose functions the code around a step imports, to load and save models.
LIBRARIES = {*sys.stdlib_module_names, "huggingface_hub", "kernels", "safetensors"}
# Attributes that a subclass or an instance of a language model may define: they run around the step.
AROUND = {"forward", "generate", "__init__", *vars(GenerationMixin)}
SHARED = {*GenerationMixin.__mro__, *PreTrainedModel.__mro__} - {nn.Module}
DESCRIPTIONS = {
    "__module__",
    "__doc__",
    "__qualname__",
    "__annotations__",
    "__dict__",
    "__weakref__",
}
CAPTURING = sys.modules[capture_outputs.__module__]


def runs_alone(model: Any) -> bool:
    """Whether calling the model runs only its family's forward, without hooks, wrappers or
    overrides."""
    if ENGINE.reason is not None or is_compiled(model):
        return False
    if any(GLOBAL_HOOKS) or any(vars(model)[name] for name in HOOKS):
        return False
    around = ("__call__", "forward", "prepare_inputs_for_generation")
    return (
        AROUND.isdisjoint(vars(model))
        and all(_is_known(kind.__module__) for kind in type(model).__mro__)
        and all(is_ours(getattr(type(model), name)) for name in around)
    )


def why_not(
    model: Any,
    modules: list[nn.Module],
    tensors: Iterable[torch.Tensor],
    names: GlobalNames,
    device: torch.device,
) -> str | None:
    """Returns which code of unknown origin runs in the model's step, or which weight has no fixed
    place; None if nothing keeps the step from being recorded."""
    reasons = chain(_of_code(model, modules), _of_tensors(tensors, device), _of_names(names))
    return next(reasons, None)


def _of_code(model: nn.Module, modules: list[nn.Module]) -> Iterator[str]:
    if any(GLOBAL_HOOKS):
        yield "hooks of all modules are registered"
    for m in modules[1:]:
        name = type(m).__name__
        for kind in type(m).__mro__:
            home = kind.__module__
            elsewhere = home.startswith("torch.") and not home.startswith("torch.nn.modules.")
            if elsewhere or not _is_known(home):  # such as classes that FSDP or quantisation makes
                yield f"{name} is code of {home}"
        if any(not _is_idle(hook) for hooks in HOOKS for hook in vars(m)[hooks].values()):
            yield f"{name} has hooks"
        for key, value in vars(m).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key} is a tensor, but neither a parameter nor a buffer"
            elif not isinstance(value, nn.Module) and not is_ours(value):
                yield f"{name}.{key} is code of others"
            elif callable(value) and hasattr(type(m), key):
                yield f"{name}.{key} is replaced"
    for key, value in vars(model).items():
        if key not in AROUND and callable(value) and hasattr(type(model), key):
            yield f"{type(model).__name__}.{key} is replaced"
    inside = {kind for m in modules[1:] for kind in type(m).__mro__}
    for kind in classes_of(modules):
        for key, value in vars(kind).items():
            if _is_known(kind.__module__):
                if not is_ours(value) and (kind in inside or key not in AROUND):
                    yield f"{kind.__name__}.{key} is replaced"
            elif key not in AROUND and _differs(type(model), key, value):
                yield f"{kind.__name__} has its own {key}"


def _of_tensors(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[str]:
    for w in tensors:
        if w.device != device:
            yield f"not every weight is on {device}, where the tokens are"
        elif type(w.data) is not torch.Tensor:
            yield f"a weight is a {type(w.data).__name__}, which has no one place"


def _of_names(names: GlobalNames) -> Iterator[str]:
    for value in names:
        if isinstance(value, FunctionType) and not is_ours(value):
            home = str(value.__globals__.get("__name__"))
            if home.partition(".")[0] not in LIBRARIES:
                yield f"{value.__qualname__}, which the step may call, is code of {home}"


def _differs(kind: type, key: str, value: Any) -> bool:
    """Whether a subclass's `value` replaces something that a step may read."""
    known = (vars(k) for k in kind.__mro__ if _is_known(k.__module__))
    inherited = next((attributes[key] for attributes in known if key in attributes), value)
    return inherited is not value and key not in DESCRIPTIONS


def _is_idle(hook: Any) -> bool:
    """Whether a hook is one that transformers leaves behind after output_hidden_states."""
    return getattr(hook, "__globals__", None) is vars(CAPTURING)


def _is_known(name: Any) -> bool:
    """Whether a Python module's name is torch's, transformers' or this package's."""
    name = str(name)
    own = name == PACKAGE or name.startswith(f"{REPOSITORY}.")
    return own or name.partition(".")[0] in KNOWN


def is_ours(value: Any) -> bool:
    """Whether a value is code of torch, transformers or this package, or is not code at all."""
    while value is not None:
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, FunctionType):
            if not _is_known(value.__globals__.get("__name__")):
                return False
            value = getattr(value, "__wrapped__", None)
        else:
            kind = value if isinstance(value, type) else type(value)
            return isinstance(value, BuiltinFunctionType) or _is_known(kind.__module__)
    return True


def classes_of(modules: list[nn.Module]) -> list[type]:
    """Returns the classes whose attributes a step may read, without the base classes of all
    models."""
    kinds = {kind for m in modules for kind in type(m).__mro__}
    return [kind for kind in kinds if kind not in SHARED]


def why_called(module: nn.Module) -> str | None:
    """Returns what else than its class's original forward a call of the module would run."""
    if ENGINE.reason is not None:
        return ENGINE.reason
    if any(vars(module)[name] for name in HOOKS):
        return f"{type(module).__name__} has hooks"
    if "forward" in vars(module) or not is_ours(type(module).forward):
        return f"{type(module).__name__} has a forward of its own"
    return None


def why_not_weights(module: nn.Module, x: torch.Tensor, kinds: Sequence[type]) -> str | None:
    """Returns why the module is more than weights that the kernel can read beside x."""
    name = type(module).__name__
    if type(module) not in kinds:
        return f"{name} is another module than {', '.join(kind.__name__ for kind in kinds)}"
    if (called := why_called(module)) is not None:
        return called
    if not has_weights_like(module, x):
        return f"a weight of {name} is no contiguous {x.dtype} tensor on {x.device}"
    if isinstance(module, nn.RMSNorm) and (module.weight is None or module.eps is None):
        return f"{name} has no weight or no eps"
    # The kernel adds the biases of GateLinear, which always has one, and no others.
    if (getattr(module, "bias", None) is None) == getattr(module, "kernel_adds_bias", False):
        return f"{name} has {'no' if module.bias is None else 'a'} bias"
    weight: Any = module.weight
    reason = why_not_readable(weight) if weight.dim() > 1 else None
    return None if reason is None else f"the weight of {name} {reason}"


def has_weights_like(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether the module is untouched and its weights are plain tensors of its dtypes on x's device."""
    weights = parameters_of(module)
    if isinstance(module, QuantizedLinear):
        own = module.fits(x.dtype)
    else:
        own = all(w.dtype == x.dtype for w in weights)
    plain = (type(w.data) is torch.Tensor and w.is_contiguous() for w in weights)
    near = (w.device == x.device for w in weights)
    return why_called(module) is None and own and all(plain) and all(near)
