"""Turns torch.nn's recurrent modules into flashcell's in place: `replace`, `restore`, `drop_in`.

Only the class of a module changes, as in torch.nn.utils.parametrize: it stays the same object with
the same Parameters, buffers, hooks, training flag and attributes, and so do all references to it:
tied modules, optimizers, the model itself where it is an nn.LSTM.
"""

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from ..hub.kernel_loader import check_backend, kernel_info
from .rnn_classes import (
    FORWARD,
    KEPT,
    REPLACEMENTS,
    adopt,
    base_class,
    class_for,
    is_adopted,
    release,
    undo,
)

logger = logging.getLogger(__name__)

ALREADY = "it is flashcell's already"


@dataclass
class ReplaceReport:
    """Lists the recurrent modules of a model by name: which were replaced, and which were skipped
    and why."""

    replaced: dict[str, str] = field(default_factory=dict)  # name -> class
    skipped: dict[str, str] = field(default_factory=dict)  # name -> why it stays as it is

    def __str__(self) -> str:
        count = len(self.replaced) + len(self.skipped)
        text = f"{len(self.replaced)} of {count} recurrent modules became flashcell's"
        kept = [f"{name or 'the model'} ({why})" for name, why in self.skipped.items()]
        return f"{text}; left as they are: {', '.join(kept)}" if kept else text

    def log(self) -> None:
        """Logs the report in one line, as a warning if a recurrent module was skipped."""
        left = [why for why in self.skipped.values() if why != ALREADY]
        nothing = not self.replaced and not self.skipped
        logger.log(logging.WARNING if left or nothing else logging.INFO, "%s", self)


def replace(model: nn.Module, *, backend: str = "auto") -> ReplaceReport:
    """Turns every torch.nn.LSTM, GRU, RNN and cell of `model` into the flashcell module of that
    name.

    Subclasses that do not override forward are taken, too: they keep their class's name and methods,
    isinstance, pickles and copies. So are parametrized modules. Code that compares classes, such as
    `type(module) is nn.LSTM` in an initialisation or torch.ao.quantization.quantize_dynamic, finds none
    of them: run it before.

    Returns a report and logs it in one line. `report.skipped` says which modules stay as they are,
    and why: a class with a forward of its own (which may or may not call torch.nn's; with
    flashcell.LSTM as its base, super().forward is flashcell's), a forward set on the object
    (accelerate's hooks, kernels.kernelize: replace first, hook later), TorchScript, quantised
    modules, flashcell's own, and modules on a device that has no kernel here, where torch.nn's
    forward is the faster one. A model that is moved to such a device afterwards runs torch.nn's
    forward there.

    Raises TypeError if `model` is no module, ValueError for an unknown `backend`, and what
    `kernel_loader.load_kernel` raises if the backend asked for by name cannot be had: then nothing
    is changed.
    """
    check_module(model)
    check_kernel(backend)
    report, found = find_replacements(model, backend)
    for module, kind in found:
        adopt(module, kind, backend)
    report.log()
    return report


def find_replacements(
    model: nn.Module, backend: str
) -> tuple[ReplaceReport, list[tuple[nn.Module, type[nn.Module]]]]:
    """Returns the report that `replace` will give, and the modules with the classes that they get."""
    report, found = ReplaceReport(), []
    for name, module in model.named_modules():
        if not _is_recurrent(module):
            continue
        target = _target(module, backend)
        if isinstance(target, str):
            report.skipped[name] = target
        else:
            report.replaced[name] = base_class(module).__name__
            found.append((module, target))
    return report, found


def restore(model: nn.Module) -> list[str]:
    """Undoes `replace`, `drop_in` and `accelerate` in `model`, and returns the names of the modules it
    changed.

    They get their old class back, and keep their Parameters with their present values. Modules made
    as flashcell.LSTM(...) stay. Raises ValueError, before anything is changed, for a module that got
    a forward of its own, or another class (by torch's fully_shard or replicate), after it was
    replaced: those go on calling flashcell's.
    """
    check_module(model)
    found = {name: m for name, m in model.named_modules() if vars(m).keys() & {"_replaced", KEPT}}
    for name, module in found.items():
        if "forward" in vars(module):
            raise ValueError(
                f"{name or 'model'} has a forward that was set on the object after it was replaced, "
                "but must have its class's: remove the hook first"
            )
        if KEPT not in vars(module) and not is_adopted(module):
            raise ValueError(
                f"{name or 'model'} has the class {type(module).__name__}, which it got after it was "
                "replaced, but must have the class that it got then: restore it before it is sharded"
            )
    for module in found.values():
        if KEPT in vars(module):
            undo(module)
        else:
            release(module)
    return list(found)


class drop_in:
    """Context manager and decorator in which torch.nn's recurrent constructors make flashcell's
    modules.

        with flashcell.drop_in() as report:
            trainer.fit(model, data)  # also what is built in there

        @flashcell.drop_in()
        def build(): ...

    That holds for torch.nn.LSTM by whatever name it was imported, for subclasses as `replace` takes
    them, and for what a called library makes; isinstance(module, torch.nn.LSTM) stays true. It
    holds in this thread or asyncio task alone: a thread or process that is started inside makes
    torch.nn's. The innermost of several counts. `report` (a `ReplaceReport` with numbers for names)
    grows as modules are made and is logged in one line at the end. `restore` undoes it. `backend` and
    errors: see `replace`.

    A generator that yields inside the block leaves it entered for whoever holds the generator. As a
    decorator it takes functions and coroutine functions; TypeError for generators and classes.
    """

    def __init__(self, *, backend: str = "auto"):
        check_kernel(backend)
        self._backend, self._report = backend, None  # type: tuple[str, ReplaceReport | None]

    def __enter__(self) -> ReplaceReport:
        if self._report is not None:
            raise RuntimeError("this drop_in() is entered already: make another one")
        self._report = ReplaceReport()
        _install()
        _entered.set((*_entered.get(), (self._backend, self._report)))
        return self._report

    def __exit__(self, *_: object) -> None:
        report, self._report = self._report, None
        _entered.set(tuple(entry for entry in _entered.get() if entry[1] is not report))
        _uninstall()
        if report is not None:
            report.log()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if generator or inspect.isclass(function) or not callable(function):
            kind = "a generator" if generator else f"a {type(function).__name__}"
            raise TypeError(f"function is {kind}, but must be a function: use `with` inside")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def called_later(*args: Any, **kwargs: Any) -> Any:
                with drop_in(backend=self._backend):
                    return await function(*args, **kwargs)

            return called_later

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with drop_in(backend=self._backend):
                return function(*args, **kwargs)

        return called


# In each context the blocks it is in, outermost first. Blocks need not end in the order they began
# in, nor in the context they began in (generators), so each takes itself out.
_entered: ContextVar[tuple[tuple[str, ReplaceReport], ...]] = ContextVar("drop_in", default=())
_lock, _blocks = threading.Lock(), 0
_hooks: list[tuple[Any, Callable[..., None], Callable[..., None]]] = []  # class, its __init__, ours


def _install() -> None:
    """Hooks torch.nn's constructors while any `drop_in` block is entered.

    The hook replaces __init__ of their base classes, so it works however the classes were
    imported."""
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            for base in (RNNBase, RNNCellBase):
                own, hook = base.__init__, _hooked(base.__init__)
                base.__init__ = hook  # type: ignore[method-assign]
                _hooks.append((base, own, hook))


def _uninstall() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        if _blocks == 0:
            for base, own, hook in _hooks:
                if base.__init__ is hook:  # else other code has wrapped our hook since
                    base.__init__ = own
            _hooks.clear()


def _hooked(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not _entered.get():
            return
        backend, report = _entered.get()[-1]
        number, target = str(len(report.replaced) + len(report.skipped)), _target(self, backend)
        if not isinstance(target, str):
            report.replaced[number] = type(self).__name__
            adopt(self, target, backend)
        elif target != ALREADY:
            report.skipped[number] = target

    return __init__


def check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but must be a torch.nn.Module")


def check_kernel(backend: str) -> None:
    """Raises if a backend that was named, other than "auto", is not available."""
    if check_backend(backend) in ("cpu", "cuda"):
        kernel_info("fused-rnn", backend, backend)


def _is_recurrent(module: nn.Module) -> bool:
    """Whether `module` is a recurrent module that the report should mention."""
    if isinstance(module, (RNNBase, RNNCellBase)):
        return True
    script = isinstance(module, torch.jit.ScriptModule)
    name = getattr(module, "original_name", "") if script else type(module).__name__
    known = any(name == kind.__name__ for kind in REPLACEMENTS)
    return known and (script or type(module).__module__.startswith("torch."))


def _target(module: nn.Module, backend: str) -> type[nn.Module] | str:
    """Returns the class that `module` gets, or the reason why it is skipped."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript, compiled as it is"
    if not isinstance(module, (RNNBase, RNNCellBase)):
        return f"it is of {type(module).__module__}: quantised"
    if isinstance(module, tuple(REPLACEMENTS.values())):
        return ALREADY
    for name in FORWARD:
        if name in vars(module):
            return f"its {name} was set on the object: replace before hooks are added"
    target = class_for(base_class(module))
    device = next((p.device.type for p in module.parameters()), "cpu")
    # A module on the meta device may go to any device later.
    if isinstance(target, str) or backend != "auto" or device == "meta":
        return target
    info = kernel_info("fused-rnn", device, backend)
    return f"no kernel here: {info.reason}" if info.source == "reference" else target
