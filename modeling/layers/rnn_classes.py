"""The class that a torch.nn recurrent module gets when it becomes flashcell's."""

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
# What decides on a module's results besides the methods that flashcell's forward calls as torch.nn's does:
# it makes no zeros where no state is given, which torch.nn's checks.
CHECKS = ("check_forward_args", "check_hidden_size", "get_expected_hidden_size")
FORWARD = ("forward", "permute_hidden", "all_weights", *CHECKS)

_lock = threading.Lock()
_metaclasses: dict[type, type] = {}


class AdoptedType(type):
    """The class of `adopted` classes. pickle finds a class by its names, and these have the names of the
    user's: so they are pickled as what they are made from."""


def class_for(own: type[nn.Module]) -> type[nn.Module] | str:
    """flashcell's class for modules of the class `own`, or why there is none."""
    if own in REPLACEMENTS:
        return REPLACEMENTS[own]
    base = next((kind for kind in own.__mro__ if kind in REPLACEMENTS), None)
    if base is None:
        return f"its class {own.__name__} is no torch.nn.LSTM, GRU, RNN or cell"
    for name in FORWARD:
        if getattr(own, name, None) is not getattr(base, name, None):
            return f"its class {own.__name__} has a {name} of its own"
    try:
        return adopted(own, REPLACEMENTS[base])
    except Exception as error:  # a metaclass of the user's may refuse anything
        return f"its class {own.__name__} takes no other forward ({error})"


def adopted(own: type[nn.Module], ours: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `own`, with its names, whose forward is that of `ours`: it stands in the order of
    bases behind the user's classes and ahead of torch.nn's. One for each class, found among its
    subclasses, so that nothing keeps a class alive."""
    with _lock:
        for known in own.__subclasses__():
            if isinstance(known, AdoptedType) and vars(known).get("own") is own:
                return known
        members = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        members["own"] = own
        return metaclass_for(type(own))(own.__name__, (own, ours), members)


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
    return class_for, (own,)


def base_class(module: nn.Module) -> type[nn.Module]:
    """A parametrized module's class is made for it alone, over the one that it had."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Gives `module` the class `kind`, with the properties of its parametrizations, if it has some."""
    if is_parametrized(module):
        old = type(module)
        members = {k: v for k, v in vars(old).items() if k not in ("__dict__", "__weakref__")}
        kind = type(old.__name__, (kind,), members)
    object.__setattr__(module, "__class__", kind)


def adopt(module: Any, kind: type[nn.Module], backend: str) -> None:
    """Makes `module` one of the class `kind`, and remembers what it was."""
    vars(module)["_replaced"] = base_class(module)
    set_class(module, kind)
    module.stand_in(backend)


def release(module: Any) -> None:
    """The way back from `adopt`. Whoever interrupts it can do it again."""
    set_class(module, vars(module)["_replaced"])
    for attribute in ("kernel_backend", "__module__", "_replaced"):
        vars(module).pop(attribute, None)
