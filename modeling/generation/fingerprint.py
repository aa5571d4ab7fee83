"""Records all Python values that a decoding step reads, and detects whether any of them has
changed.

A recorded step equals the model's forward as long as two conditions hold. All code inside the step
is this package's, torch's or transformers' (known_code.py), so it depends only on the values held
by the model's modules, their classes, their configuration and global names (global_names.py). And
each of these values is the one that the recording was made with. All of them are compared, not a
selection. The contents of tensors are not compared, because a recording reads tensors in place.

Nearly all of these values are in dicts. CPython keeps a version of each dict, so its contents are
compared only after a change; all other values are compared before every token. From Python 3.12 on,
one number tells whether any dict has changed (`counts_changes`), so that not even the versions are
read: what the comparison costs is mostly memory that has left the CPU's caches since the last token.
"""

import gc
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..utils.private_names import (
    GLOBAL_HOOKS,
    GUARDS,
    HOOKS,
    TABLES,
    GlobalStateGuard,
    TensorGuards,
    dict_version,
)
from .decode_path import why_not_recorded
from .global_names import GlobalNames
from .known_code import classes_of, runs_alone

has_guard = GUARDS.reason is None


def counts_changes(version: Callable[[Any], int]) -> bool:
    """Whether `version` numbers the changes of only those dicts that it was asked about before.

    torch's dict_version does so from Python 3.12 on: it watches these dicts and draws the numbers
    from one counter. A dict that is new to it gets the next number, so if that is one more than the
    last new dict's, no watched dict has changed in between."""
    watched, other = {0: 0}, {0: 0}
    version(watched)
    first = version({})
    other[0] = 1
    second = version({})
    watched[0] = 1
    return (second, version({})) == (first + 1, first + 3)


COUNTS = has_guard and counts_changes(dict_version)
MOST_CONTAINERS = 1000  # every one costs time at every token
data_ptr: Any = torch.Tensor.data_ptr
stride: Any = torch.Tensor.stride
size: Any = torch.Tensor.size


class Whatever:
    """Compares equal to any object; stands for a value that may change."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class Fingerprint:
    """The Python values that a step of one model reads, for comparison before each replay.

    It keeps these values alive, but not the model itself.

    refusal   why the model's step cannot be recorded, None if it can
    alone     whether no hook or wrapper runs around forward, so that a step may replace the whole call
    """

    def __init__(self, model: nn.Module, device: torch.device):
        modules = list(model.modules())
        dicts = [vars(m) for m in modules]
        kinds = classes_of(modules)
        self._names, self._tensors = GlobalNames(kinds), (*model.parameters(), *model.buffers())
        self.refusal = why_not_recorded(model, modules, self._tensors, self._names, device)
        # Unknown code may hold references to anything: FSDP's lead to all of Python.
        containers, holders = _containers(modules if self.refusal is None else modules[:1])
        if len(containers) > MOST_CONTAINERS:
            self.refusal = f"its modules hold more than {MOST_CONTAINERS} lists, dicts and objects"
            containers, holders = _containers(modules[:1])
        # Attributes that are dicts are compared by their contents, and also as values of their owner,
        # so a replaced dict is noticed.
        tables = [*GLOBAL_HOOKS, *(d[name] for d in dicts for name in TABLES + HOOKS)]
        tables += [*containers, *map(vars, kinds)]
        # An object refers to its dict, class and slots; a class to its dict and bases.
        self._type, self._objects = type(model), (*modules[1:], *holders, *kinds)
        self._referents = gc.get_referents(*self._objects)
        self._inside, self._empty = dicts[1:], [t for t in tables if not t]
        self._filled = [t for t in tables if t]
        self._lists = [t for t in self._filled if isinstance(t, (list, set))]
        filled = [t for t in self._filled if not isinstance(t, (list, set))]
        versioned = map(_dict_of, chain(dicts[1:], filled, self._names.tables))
        self._dicts = list({id(d): d for d in versioned}.values())
        # Before the copies, so that the next check sees what changes meanwhile.
        self._count, self._own = _count_and_own(model)
        self._version = self._add_versions(model)
        self._attributes = [dict(d) for d in dicts]
        self._attributes[0]["decoder"] = Whatever()  # the decoder holds this fingerprint
        self._copies = [_copy(t) for t in self._filled]
        self._listed = [_copy(t) for t in self._lists]
        # A replaced tensor of one element may equal the old one; comparing larger ones raises.
        single = {id(w) for w in self._tensors if w.numel() == 1}
        self._single = [
            (d[t], n) for d in dicts for t in TABLES for n in d[t] if id(d[t][n]) in single
        ]
        self._single_ids = [id(table[name]) for table, name in self._single]
        self._places, self._layouts = list(map(data_ptr, self._tensors)), Layouts(self._tensors)
        self._flags = GlobalStateGuard().check if has_guard else _flags_are(_flags())
        # Asked again: another thread may have changed the model before the versions were read.
        about = model, modules, self._tensors, self._names, device
        self.refusal = self.refusal or why_not_recorded(*about)
        self.alone = runs_alone(model)

    def holds(self, model: nn.Module) -> bool:
        try:
            return (
                self._dicts_hold(model)
                and type(model) is self._type
                and gc.get_referents(*self._objects) == self._referents
                and not any(self._empty)
                and self._lists == self._listed
                and self._layouts.hold()
                and list(map(data_ptr, self._tensors)) == self._places
                and self._flags()
            )
        except Exception:  # such as of tensors that are asked whether they are equal
            return False

    def _dicts_hold(self, model: nn.Module) -> bool:
        count, own = _count_and_own(model)  # first, so that later changes are seen by the next call
        none = COUNTS and (count, own) == (self._count + 1, self._own)
        if none or self._add_versions(model) == self._version or self._compare(model):
            self._count, self._own = count, own
            return True
        return False

    def _add_versions(self, model: nn.Module) -> float:
        """Returns the sum of all dicts' versions, which is the same only while no dict has
        changed."""
        if not has_guard:
            return math.nan
        return dict_version(vars(model)) + sum(map(dict_version, self._dicts))

    def _compare(self, model: nn.Module) -> bool:
        """Compares the contents of the dicts, which may be equal although a version has changed."""
        version = self._add_versions(model)  # first, as above
        same = (
            [vars(model), *self._inside] == self._attributes
            and self._filled == self._copies
            and self._names.hold()
            and [id(table[name]) for table, name in self._single] == self._single_ids
        )
        if same:
            self._version = version
        return same


def _count_and_own(model: nn.Module) -> tuple[int, int]:
    """Returns the number of changes of all watched dicts, and the version of the model's own dict,
    which may be another dict than before."""
    return (dict_version({}), dict_version(vars(model))) if COUNTS else (0, 0)


class Layouts:
    """Remembers the sizes and strides of tensors, to notice when one of them changes."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]):
        self._tensors = tensors
        self._guard: Any = None
        self._seen = self._look()

    def hold(self) -> bool:
        if self._guard is not None and self._guard.check(*self._tensors):
            return True
        if self._look() != self._seen:
            return False
        if has_guard:  # a guard holds in one autograd mode, and the mode may have changed
            strides, sizes = (list(map(list, of_all)) for of_all in self._seen)
            self._guard = TensorGuards(
                *self._tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
            )
        return True

    def _look(self) -> tuple[Any, ...]:
        return list(map(stride, self._tensors)), list(map(size, self._tensors))


def _copy(table: Any) -> Any:
    return type(table)(table) if isinstance(table, (list, set)) else dict(table)


def _dict_of(table: Any) -> dict[Any, Any]:
    """Returns `table` as a dict; unwraps the mapping proxy of a class's attributes."""
    return table if isinstance(table, dict) else gc.get_referents(table)[0]


def _containers(modules: list[nn.Module]) -> tuple[list[Any], list[Any]]:
    """Returns the containers and the plain objects, such as the configuration, held by the modules.

    Containers are lists, dicts and sets. The search stops at MOST_CONTAINERS + 1 of them."""
    usual, found, holders = vars(nn.Module()).keys(), dict[int, Any](), list[Any]()
    values: list[Any] = [modules[0].config]
    values += (v for m in modules[1:] for k, v in vars(m).items() if k not in usual)
    while values and len(found) <= MOST_CONTAINERS:
        value = values.pop()
        if not isinstance(value, (dict, list, set)):
            if isinstance(value, (nn.Module, torch.Tensor, type)) or callable(value):
                continue
            holder, value = value, getattr(value, "__dict__", None)
            if value is not None:
                holders.append(holder)
        if isinstance(value, (dict, list, set)) and id(value) not in found:
            found[id(value)] = value
            values += list(value.values() if isinstance(value, dict) else value)
    return list(found.values()), holders


def _flags() -> tuple[Any, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def _flags_are(before: tuple[Any, ...]) -> Callable[[], bool]:
    return lambda: _flags() == before
