"""Single rows of a cache: the state of one sequence of a batch, taken out as a cache of its own.

Such a cache is a DynamicCache of one row. It holds the state after `get_seq_length()` tokens.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from ..utils.private_names import copy_all
from .cache import is_recurrent

Shapes = dict[str, tuple[torch.Size, torch.dtype]]  # name -> shape without the batch, and dtype


def named_states(cache: Any) -> dict[str, torch.Tensor]:
    """Returns the states of a cache by names such as layers.3.cell.0."""
    return {
        f"layers.{i}.{name}.{k}": s
        for i, layer in enumerate(cache.layers)
        for name, group in layer.states.items()
        for k, s in enumerate(group)
    }


@torch.no_grad()
def state_shapes(model: Any) -> Shapes:
    """Returns the shapes and dtypes of the states that the model makes, by reading two tokens."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    cache = DynamicCache(config=model.config)
    model(tokens, past_key_values=cache, logits_to_keep=1)
    return {name: (s.shape[1:], s.dtype) for name, s in named_states(cache).items()}


def check_row(name: str, cache: Any, shapes: Shapes) -> None:
    """Raises unless `cache` is the state of one sequence, of the model that has these `shapes`."""
    if not isinstance(cache, Cache) or not all(map(is_recurrent, cache.layers)):
        raise TypeError(f"{name} is a {type(cache).__name__}, but must be a cache of states")
    check_shapes(name, named_states(cache), shapes, 1)


def check_shapes(
    origin: str, states: dict[str, torch.Tensor], shapes: Shapes, rows: int | None = None
) -> None:
    """Raises ValueError unless the states have the names, shapes and dtypes of `shapes`, and all have
    `rows` rows; with None, as many as the first."""
    if states.keys() != shapes.keys():
        missing, extra = sorted(shapes.keys() - states), sorted(states.keys() - shapes)
        raise ValueError(
            f"{origin} has states of another model: without {missing[:3]}, but with {extra[:3]}"
        )
    batch = states[next(iter(shapes))].shape[:1] if rows is None else (rows,)
    for name, (shape, dtype) in shapes.items():  # in the layers' order, which a file does not keep
        s, wanted = states[name], [*batch, *shape]
        if list(s.shape) != wanted or s.dtype != dtype:
            raise ValueError(
                f"{origin}: {name} is {list(s.shape)} {s.dtype}, but must be {wanted} {dtype}"
            )


def take_row(cache: Any, row: int, length: int, config: Any) -> DynamicCache:
    """Copies a row of a cache, the state after `length` tokens, into a cache of its own."""
    taken = DynamicCache(config=config)
    targets, sources = list[torch.Tensor](), list[torch.Tensor]()
    for layer, own in zip(cache.layers, taken.layers, strict=True):
        with layer.borrow_states([row]) as states:
            groups = {
                name: tuple(torch.empty_like(s[row : row + 1]) for s in group)
                for name, group in states.items()
            }
            for name, group in groups.items():
                targets += group
                sources += [s[row : row + 1] for s in states[name]]
        own.update_states(length, **groups)
    copy_all(targets, sources)
    return taken


def move_row(cache: Any, device: torch.device | str, config: Any) -> DynamicCache:
    """Returns a copy of a cache on another device."""
    moved = DynamicCache(config=config)
    for layer, own in zip(cache.layers, moved.layers, strict=True):
        groups = {n: tuple(s.to(device, copy=True) for s in g) for n, g in layer.states.items()}
        own.update_states(int(layer.get_seq_length()), **groups)
    return moved


def bytes_of(cache: Any) -> int:
    return sum(s.nbytes for s in named_states(cache).values())
