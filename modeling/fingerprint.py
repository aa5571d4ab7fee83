"""What a decoded step reads from Python, and whether it is still as it was.

A recorded step is the model's as long as two things hold. All code inside the step is this package's,
torch's or transformers' (`refusal` says whose is not), so that it depends on nothing but what the
model's modules, their classes, their configuration and global names (global_names.py) hold. And every one of these values is the one
that the recording was made with: all of them are compared, not a list of those that may matter. Values
of tensors are not among them, because a recording reads tensors where they lie.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationMixin, PreTrainedModel

from .global_names import GlobalNames

try:  # all of torch's flags at once, as torch.compile compares them
    from torch._C._dynamo.guards import GlobalStateGuard

    has_guard = True
except ImportError:
    has_guard = False

PACKAGE = __name__.rpartition(".")[0]
# Remote code lies in transformers_modules.<repository>.<revision>, the configuration's maybe in another
# revision than the model's.
REPOSITORY = PACKAGE.rpartition(".")[0] if PACKAGE.count(".") > 1 else PACKAGE
KNOWN = {"torch", "transformers", "builtins", "abc", "typing", "collections", "contextlib"}
# Whose functions the code around a step imports, for loading and saving.
LIBRARIES = {*sys.stdlib_module_names, "huggingface_hub", "kernels", "safetensors"}
# What a subclass or an instance of a language model may have of its own: it runs around the step.
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
HOOKS = "_forward_hooks", "_forward_pre_hooks"
MOST_CONTAINERS = 1000  # all of which are compared with every token
GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
TABLES = "_modules", "_parameters", "_buffers"
data_ptr: Any = torch.Tensor.data_ptr
stride: Any = torch.Tensor.stride
size: Any = torch.Tensor.size


class Whatever:
    """Equal to anything."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class Fingerprint:
    """Of one model, which it does not keep alive; what it saw inside the model, it does.

    refusal   why the model's step cannot be recorded, None if it can
    alone     nobody's code is around the step either: forward is the step
    """

    def __init__(self, model: nn.Module, device: torch.device):
        modules = list(model.modules())
        dicts = [vars(m) for m in modules]
        self._inside = dicts[1:]
        self._attributes = [dict(d) for d in dicts]
        self._modules, self._types = modules[1:], list(map(type, modules))
        self._attributes[0]["decoder"] = Whatever()  # it has this fingerprint
        self._tensors = [*model.parameters(), *model.buffers()]
        self._names = GlobalNames(_classes(modules))
        self.refusal = _why_not(model, modules, self._tensors, device) or _of_names(self._names)
        # Attributes that are tables themselves are compared as they are now. If one was replaced, the
        # attributes are equal only while both are.
        tables = [*GLOBAL_HOOKS, *(d[name] for d in dicts for name in TABLES + HOOKS)]
        # what others' code holds may lead anywhere, FSDP's to all of Python
        containers = _containers(modules if self.refusal is None else modules[:1])
        if len(containers) > MOST_CONTAINERS:
            self.refusal = f"its modules hold more than {MOST_CONTAINERS} lists, dicts and objects"
            containers = _containers(modules[:1])
        tables += [*containers, *(vars(kind) for kind in _classes(modules))]
        self._empty = [t for t in tables if not t]
        self._filled = [t for t in tables if t]
        self._copies = [_copy(t) for t in self._filled]
        # two of one value are equal, the others neither equal nor unequal
        single = {id(w) for w in self._tensors if w.numel() == 1}
        self._single = [
            (d[t], n) for d in dicts for t in TABLES for n in d[t] if id(d[t][n]) in single
        ]
        self._single_ids = [id(table[name]) for table, name in self._single]
        self._places = self._look_at_tensors()
        self._flags = GlobalStateGuard().check if has_guard else _flags_are(_flags())
        self.alone = runs_alone(model)

    def holds(self, model: nn.Module) -> bool:
        try:
            return (
                [vars(model), *self._inside] == self._attributes
                and [type(model), *map(type, self._modules)] == self._types
                and not any(self._empty)
                and self._filled == self._copies
                and self._look_at_tensors() == self._places
                and self._flags()
                and self._names.hold()
                and [id(table[name]) for table, name in self._single] == self._single_ids
            )
        except Exception:  # such as of tensors that are asked whether they are equal
            return False

    def _look_at_tensors(self) -> tuple[Any, ...]:
        tensors = self._tensors
        return list(map(data_ptr, tensors)), list(map(stride, tensors)), list(map(size, tensors))


def runs_alone(model: Any) -> bool:
    """Whether a call of the model runs its family's forward and no other code, and `generate` what it
    inherits."""
    if any(GLOBAL_HOOKS) or any(vars(model)[name] for name in HOOKS) or model._compiled_call_impl:
        return False
    around = ("__call__", "forward", "prepare_inputs_for_generation")
    return (
        AROUND.isdisjoint(vars(model))
        and all(_is_known(kind.__module__) for kind in type(model).__mro__)
        and all(is_ours(getattr(type(model), name)) for name in around)
    )


def _why_not(
    model: Any, modules: list[nn.Module], tensors: list[torch.Tensor], device: torch.device
) -> str | None:
    """What makes the step more than a recording can have."""
    if model.training or model.config.output_hidden_states:
        return "the model is training" if model.training else "output_hidden_states is asked for"
    if device.type == "cpu" and model.config.backend == "reference":
        return "the torch reference is called as it is"
    return next(chain(_of_code(model, modules), _of_tensors(tensors, device)), None)


def _of_code(model: nn.Module, modules: list[nn.Module]) -> Iterator[str]:
    if any(GLOBAL_HOOKS):
        yield "hooks of all modules are registered"
    for m in modules[1:]:
        name = type(m).__name__
        for kind in type(m).__mro__:
            home = kind.__module__
            elsewhere = home.startswith("torch.") and not home.startswith("torch.nn.modules.")
            if elsewhere or not _is_known(home):  # of torch's, FSDP's, quantised, parametrised ones
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
    for kind in _classes(modules):
        for key, value in vars(kind).items():
            if _is_known(kind.__module__):
                if not is_ours(value) and (kind in inside or key not in AROUND):
                    yield f"{kind.__name__}.{key} is replaced"
            elif key not in AROUND and _differs(type(model), key, value):
                yield f"{kind.__name__} has its own {key}"


def _of_tensors(tensors: list[torch.Tensor], device: torch.device) -> Iterator[str]:
    for w in tensors:
        if w.device != device:
            yield f"not every weight is on {device}, where the tokens are"
        elif type(w.data) is not torch.Tensor:
            yield f"a weight is a {type(w.data).__name__}, which has no one place"


def _of_names(names: GlobalNames) -> str | None:
    for value in names:
        if isinstance(value, FunctionType) and not is_ours(value):
            home = str(value.__globals__.get("__name__"))
            if home.partition(".")[0] not in LIBRARIES:
                return f"{value.__qualname__}, which the step may call, is code of {home}"
    return None


def _differs(kind: type, key: str, value: Any) -> bool:
    """Whether a subclass's `value` replaces something that a step may read."""
    known = (vars(k) for k in kind.__mro__ if _is_known(k.__module__))
    inherited = next((attributes[key] for attributes in known if key in attributes), value)
    return inherited is not value and key not in DESCRIPTIONS


def _is_idle(hook: Any) -> bool:
    """transformers', left behind by output_hidden_states; it listens while outputs are asked for."""
    return getattr(hook, "__name__", "") == "output_capturing_hook" and is_ours(hook)


def _is_known(name: Any) -> bool:
    """A module's name, of code that does nothing but what the values it reads say."""
    name = str(name)
    own = name == PACKAGE or name.startswith(f"{REPOSITORY}.")
    return own or name.partition(".")[0] in KNOWN


def is_ours(value: Any) -> bool:
    """Code of known authors, or data."""
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


def _classes(modules: list[nn.Module]) -> list[type]:
    """Whose attributes a step may read: all but what transformers' models share and build on it."""
    kinds = {kind for m in modules for kind in type(m).__mro__}
    return [kind for kind in kinds if kind not in SHARED]


def _copy(table: Any) -> Any:
    return type(table)(table) if isinstance(table, (list, set)) else dict(table)


def _containers(modules: list[nn.Module]) -> list[Any]:
    """Lists, dicts, sets and what objects such as the configuration hold, inside the modules; of more
    than MOST_CONTAINERS one more."""
    usual, found = vars(nn.Module()).keys(), dict[int, Any]()
    values: list[Any] = [modules[0].config]
    values += (v for m in modules[1:] for k, v in vars(m).items() if k not in usual)
    while values and len(found) <= MOST_CONTAINERS:
        value = values.pop()
        if not isinstance(value, (dict, list, set)):
            if isinstance(value, (nn.Module, torch.Tensor, type)) or callable(value):
                continue
            value = getattr(value, "__dict__", None)
        if isinstance(value, (dict, list, set)) and id(value) not in found:
            found[id(value)] = value
            values += list(value.values() if isinstance(value, dict) else value)
    return list(found.values())


def _flags() -> tuple[Any, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def _flags_are(before: tuple[Any, ...]) -> Callable[[], bool]:
    return lambda: _flags() == before
