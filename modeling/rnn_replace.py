"""replace(model): torch.nn's recurrent modules become flashcell's where they stand."""

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell, check_backend

REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}


def replace(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Makes every torch.nn.LSTM, GRU, RNN and cell of `model` the flashcell module of that name.

    A module changes its class and nothing else, as torch.nn.utils.parametrize does it: it stays
    the same object with the same Parameters, buffers, hooks, training flag and attributes, and so
    do all references to it: tied modules, optimizers, `model` itself where it is an nn.LSTM.

    Modules of exactly those types are replaced, parametrized ones included. A subclass of nn.LSTM
    stays as it is, since its own forward may be all it is for; so do quantised modules,
    TorchScript, and flashcell's own.

    Returns `model`. Raises TypeError for what is no module, and ValueError, before anything is
    changed, for an unknown `backend` and for a module with a forward of its own on the instance (accelerate's hooks, kernels.kernelize),
    which would go on calling torch.nn's: replace first, hook later.
    """
    check_backend(backend)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but must be a torch.nn.Module")
    found: list[tuple[str, Any, type[nn.Module]]] = []
    for name, module in model.named_modules():
        kind = _class_for(module)
        if kind is not None:
            found.append((name, module, kind))
    for name, module, _ in found:
        if "forward" in vars(module):
            raise ValueError(
                f"{name or 'model'} is a torch.nn.{type(module).__name__} whose forward was set on "
                "the instance, but must be the class's: replace before hooks are added"
            )
    for _, module, kind in found:
        module.__class__ = kind
        module.backend = backend
    return model


def _class_for(module: nn.Module) -> type[nn.Module] | None:
    """What the module's class becomes, None to leave it alone."""
    kind = type(module)
    if kind in REPLACEMENTS:
        return REPLACEMENTS[kind]
    if is_parametrized(module) and kind.__bases__[0] in REPLACEMENTS:
        # A class made for this module alone, with a property for each tensor: the same over ours.
        members = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        return type(kind.__name__, (REPLACEMENTS[kind.__bases__[0]],), members)
    return None
