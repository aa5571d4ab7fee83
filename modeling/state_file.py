"""A conversation on disk: the states of a cache as one safetensors file.

    model.save_state(cache, "talk.safetensors")
    cache = model.load_state("talk.safetensors")    # in another process, on another device
    model.generate(text, past_key_values=cache)     # text: all of it, what the cache holds included

Such a file is as long as the states, however many tokens they have seen. Its tensors are named
`layers.<number>.<group>.<number>`, such as layers.3.cell.0; its metadata hold the format's name and
version, the model family and the number of tokens. Nothing in it says whose weights made it: that
a state goes on with the model it came from is the caller's business.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import Cache, DynamicCache

from .cache import is_recurrent

FORMAT = {"format": "flashcell.state", "version": "1"}


def save_state(model: Any, cache: Cache, path: str | os.PathLike) -> None:
    """Writes the states of `cache`, a DynamicCache or StaticCache of `model`, all rows of its batch.

    The file is complete or not there: it is written beside `path` and renamed. TypeError or
    ValueError for a cache that is not a recurrent model's, is empty or is another model's.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__}, but must be a Cache")
    for layer in cache.layers:
        if not is_recurrent(layer):
            raise TypeError(
                f"cache has a {type(layer).__name__}, but every layer must be a RecurrentStateLayer"
            )
    tensors = _named(cache)
    if not tensors or not int(cache.get_seq_length()):
        raise ValueError("cache is empty, but must hold the states after at least one token")
    _check_shapes("cache", tensors, model)
    metadata = {
        **FORMAT, "model_type": model.config.model_type, "tokens": str(int(cache.get_seq_length()))
    }  # fmt: skip
    own = {name: s.detach().to("cpu", copy=True).contiguous() for name, s in tensors.items()}
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        save_file(own, unfinished, metadata)
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


def load_state(model: Any, path: str | os.PathLike) -> DynamicCache:
    """The cache to go on with, on the model's device. ValueError for a file that is not whole or is
    no state of such a model: its family, or the names, shapes or dtypes of its states."""
    try:
        with safe_open(path, framework="pt", device=str(model.device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"path is {str(path)!r}, but must be a saved state: {error}") from None
    wanted = {**FORMAT, "model_type": model.config.model_type}
    for name, value in wanted.items():
        if metadata.get(name) != value:
            raise ValueError(
                f"{path}: {name} is {metadata.get(name)!r}, but must be {value!r} for this model"
            )
    tokens = metadata.get("tokens", "")
    if not tokens.isdecimal() or int(tokens) < 1:
        raise ValueError(f"{path}: tokens is {tokens!r}, but must be a number of at least 1")
    _check_shapes(str(path), tensors, model)
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        groups: dict[str, list[torch.Tensor]] = {}
        for name in (n for n in _order(tensors) if n.startswith(f"layers.{i}.")):
            groups.setdefault(name.split(".")[2], []).append(tensors[name])
        layer.update_states(int(tokens), **{name: tuple(group) for name, group in groups.items()})
    return cache


def _named(cache: Cache) -> dict[str, torch.Tensor]:
    return {
        f"layers.{i}.{name}.{k}": s
        for i, layer in enumerate(cache.layers)
        for name, group in layer.states.items()
        for k, s in enumerate(group)
    }


def _order(names: Any) -> list[str]:
    return sorted(names, key=lambda name: int(name.rsplit(".", 1)[1]))


@torch.no_grad()
def _check_shapes(origin: str, tensors: dict[str, torch.Tensor], model: Any) -> None:
    """Against the states that one token leaves in the model."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache = DynamicCache(config=model.config)
    model(token, past_key_values=cache)
    wanted = _named(cache)
    if wanted.keys() != tensors.keys():
        missing, extra = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted)
        raise ValueError(
            f"{origin} has states of another model: without {missing[:3]}, but with {extra[:3]}"
        )
    batch = next(iter(tensors.values())).shape[:1]
    for name, s in tensors.items():
        shape, dtype = (*batch, *wanted[name].shape[1:]), wanted[name].dtype
        if s.shape != shape or s.dtype != dtype:
            raise ValueError(
                f"{origin}: {name} is {list(s.shape)} {s.dtype}, but must be {list(shape)} {dtype}"
            )
