"""Finds or makes the class that a torch.nn recurrent module gets when `replace` changes it."""

import copyreg
import threading
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}
# A module that overrides one of these stays torch.nn's. torch.nn passes zeros to CHECKS where no state is
# given, and flashcell's forward makes no zeros.
CHECKS = ("check_forward_args", "check_hidden_size", "get_expected_hidden_size")
FORWARD = ("forward", "permute_hidden", "all_weights", *CHECKS)

# What torch.nn's classes had when this module was imported, by which a later change of them is noticed.
SHIPPED = {(kind, name): getattr(kind, name, None) for kind in REPLACEMENTS for name in FORWARD}

KEPT = "_accelerated"  # what `change_module` has replaced: names and values, "__class__" among them

_lock = threading.Lock()
_metaclasses: dict[type, type] = {}


class AdoptedType(type):
    """Metaclass of the classes that `adopted` and `mixed` make, which lets pickle handle them.

    pickle finds a class by its name, but these have the name of the user's class. So they are
    pickled as a call of `class_for`, or of `mixed`, with the user's class."""


def class_for(own: type[nn.Module]) -> type[nn.Module] | str:
    """Returns flashcell's class for modules of the class `own`, or the reason why there is none."""
    base = next((kind for kind in own.__mro__ if kind in REPLACEMENTS), None)
    if base is None:
        return f"its class {own.__name__} is no torch.nn.LSTM, GRU, RNN or cell"
    for name in FORWARD:
        if getattr(base, name, None) is not SHIPPED[base, name]:
            return f"torch.nn.{base.__name__} has another {name} than torch's"
        if getattr(own, name, None) is not SHIPPED[base, name]:
            return f"its class {own.__name__} has a {name} of its own"
    if own is base:
        return REPLACEMENTS[own]
    try:
        return adopted(own, REPLACEMENTS[base])
    except Exception as error:  # a metaclass of the user's may refuse anything
        return f"its class {own.__name__} takes no other forward ({error})"


def adopted(own: type[nn.Module], ours: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of `own`, with its name, whose forward is that of `ours`.

    In the method resolution order `ours` comes after the user's classes and before torch.nn's.
    There is one such class for each `own`. It is found among its subclasses, so no table keeps a
    class alive."""
    with _lock:
        for known in own.__subclasses__():
            kind = vars(known)
            if isinstance(known, AdoptedType) and kind.get("own") is own and "mixin" not in kind:
                return known
        members = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        members["own"] = own
        return metaclass_for(type(own))(own.__name__, (own, ours), members)


def mixed(own: type[nn.Module], mixin: type) -> type[nn.Module]:
    """Returns a subclass of `own`, with its name, in which the methods of `mixin` come first."""
    with _lock:
        for known in own.__subclasses__():
            if isinstance(known, AdoptedType) and vars(known).get("mixin") is mixin:
                return known
        members = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        members |= {"own": own, "mixin": mixin}
        return metaclass_for(type(own))(own.__name__, (mixin, own), members)


def metaclass_for(meta: type) -> type:
    if meta not in _metaclasses:
        made: type = AdoptedType
        if not issubclass(AdoptedType, meta):
            made = type(f"Adopted{meta.__name__}", (AdoptedType, meta), {})
        copyreg.pickle(made, _reduce_class)  # type: ignore[arg-type]
        _metaclasses[meta] = made
    return _metaclasses[meta]


def _reduce_class(kind: type) -> Any:
    own = vars(kind).get("own")
    if own is None:  # somebody's subclass of such a class, which is found by its name
        return kind.__qualname__
    if "mixin" in vars(kind):
        return mixed, (own, vars(kind)["mixin"])
    return class_for, (own,)


def base_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class of `module` without the one that torch.nn.utils.parametrize derived from
    it."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Sets the class of `module` to `kind`, and keeps the properties of its parametrizations."""
    if is_parametrized(module):
        old = type(module)
        members = {k: v for k, v in vars(old).items() if k not in ("__dict__", "__weakref__")}
        kind = type(old.__name__, (kind,), members)
    object.__setattr__(module, "__class__", kind)


def adopt(module: Any, kind: type[nn.Module], backend: str) -> None:
    """Sets the class of `module` to `kind`, and stores its old class for `release`."""
    vars(module)["_replaced"] = base_class(module)
    set_class(module, kind)
    module.stand_in(backend)


def is_adopted(module: nn.Module) -> bool:
    """Whether a module has the class that `adopt` gave it."""
    old, kind = vars(module)["_replaced"], base_class(module)
    return kind is REPLACEMENTS.get(old) or vars(kind).get("own") is old


def release(module: Any) -> None:
    """Undoes `adopt`; after an interrupt it can be called again."""
    set_class(module, vars(module)["_replaced"])
    for attribute in ("kernel_backend", "__module__", "_replaced"):
        vars(module).pop(attribute, None)


def change_module(module: nn.Module, change: dict[str, Any]) -> None:
    """Sets attributes of `module`, its class if "__class__" is one, and keeps the old for `undo`."""
    kept = vars(module).setdefault(KEPT, {})
    for name, value in change.items():
        kept.setdefault(name, getattr(module, name, None))
        if name == "__class__":
            set_class(module, value)
        else:
            setattr(module, name, value)


def undo(module: nn.Module) -> None:
    """Undoes `change_module`."""
    for name, value in vars(module)[KEPT].items():
        if name == "__class__":
            set_class(module, value)
        elif value is None:
            delattr(module, name)
        else:
            setattr(module, name, value)
    del vars(module)[KEPT]
