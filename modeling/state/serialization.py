"""Saves and loads the states of a cache, such as a conversation, as one safetensors file.

    model.save_state(cache, "talk.safetensors")
    cache = model.load_state("talk.safetensors")    # in another process, on another device
    model.generate(text, past_key_values=cache)     # text: all of it, what the cache holds included

The size of the file does not depend on the number of tokens. Its tensors are named
`layers.<number>.<group>.<number>`, such as layers.3.cell.0; its metadata hold the format's name and
version, the model family, the number of tokens, these tokens if they were given, and a SHA-256 of
all that is in the file. The file does not identify the weights: the caller must load a state into
the model that it came from.
"""

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers.cache_utils import Cache, DynamicCache

from ..utils.whole_file import write_file
from .cache import is_recurrent
from .rollback import refuse_owed
from .rows import Shapes, check_shapes, named_states, state_shapes

FORMAT = {"format": "flashcell.state", "version": "1"}


def save_state(model: Any, cache: Cache, path: str | os.PathLike, input_ids: Any = None) -> None:
    """Writes the states of `cache`, a DynamicCache or StaticCache of `model`, all rows of its batch.

    `input_ids` are the tokens that the one row of the cache has read: `flashcell serve` finds a
    state by them. The file is written whole or not at all, also after a kill or on a full disk.
    TypeError or ValueError for a cache that is not a recurrent model's, is empty or is another
    model's; OSError that names `path` if it cannot be written.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__}, but must be a Cache")
    for layer in cache.layers:
        if not is_recurrent(layer):
            raise TypeError(
                f"cache has a {type(layer).__name__}, but every layer must be a RecurrentStateLayer"
            )
    refuse_owed(cache)
    tensors = named_states(cache)
    if not tensors or not int(cache.get_seq_length()):
        raise ValueError("cache is empty, but must hold the states after at least one token")
    check_shapes("cache", tensors, state_shapes(model))
    ids = None if input_ids is None else _ids_of(input_ids, cache)
    place = _place(path)
    if not place.name or place.is_dir():
        raise ValueError(f"path is {str(path)!r}, but must be a file's, not a folder's")
    write_file(place, state_bytes(model.config.model_type, cache, ids))


def state_bytes(model_type: str, cache: Cache, ids: list[int] | None = None) -> bytes:
    """Returns the content of the file of a state."""
    tokens = str(int(cache.get_seq_length()))
    metadata = {**FORMAT, "model_type": model_type, "tokens": tokens}
    if ids is not None:
        metadata["input_ids"] = json.dumps(ids, separators=(",", ":"))
    states = named_states(cache)
    own = {name: s.detach().to("cpu", copy=True).contiguous() for name, s in states.items()}
    metadata["sha256"] = _digest(metadata, own)
    return save(own, metadata)


def _ids_of(input_ids: Any, cache: Cache) -> list[int]:
    ids, tokens = torch.as_tensor(input_ids, device="cpu"), int(cache.get_seq_length())
    if ids.is_floating_point() or ids.is_complex() or ids.shape not in ((tokens,), (1, tokens)):
        raise ValueError(
            f"input_ids is {list(ids.shape)} {ids.dtype}, but must be the {tokens} token ids that "
            "the cache has read"
        )
    if cache.layers[0].batch_size != 1:
        raise ValueError(
            f"input_ids is given for a cache of {cache.layers[0].batch_size} rows, but it must "
            "have one"
        )
    return ids.view(-1).tolist()


def load_state(model: Any, path: str | os.PathLike) -> DynamicCache:
    """Loads a saved cache onto the model's device.

    Raises ValueError if the file was changed, or if its family or the names, shapes or dtypes of
    its states are not the model's."""
    return read_state(model.config, path, state_shapes(model), model.device)[0]


def read_state(
    config: Any, path: str | os.PathLike, shapes: Shapes, device: torch.device | str = "cpu"
) -> tuple[DynamicCache, list[int] | None]:
    """Loads a saved cache and the tokens that it has read, without a model to try it on.

    `shapes` are the model's state_shapes; the tokens are None if the file has none."""
    metadata, tensors = _read(_place(path))
    wanted = {**FORMAT, "model_type": config.model_type}
    for name, value in wanted.items():
        if metadata.get(name) != value:
            raise ValueError(
                f"{path}: {name} is {metadata.get(name)!r}, but must be {value!r} for this model"
            )
    digest = _digest(metadata, tensors)
    if metadata.get("sha256") != digest:
        raise ValueError(
            f"{path}: sha256 is {metadata.get('sha256')!r}, but must be {digest!r}: the file is damaged"
        )
    tokens = metadata.get("tokens", "")
    if not re.fullmatch("[0-9]{1,18}", tokens) or int(tokens) < 1:
        raise ValueError(f"{path}: tokens is {tokens!r}, but must be a number of at least 1")
    check_shapes(str(path), tensors, shapes)
    cache = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        groups: dict[str, list[torch.Tensor]] = {}
        for name in (n for n in _order(tensors) if n.startswith(f"layers.{i}.")):
            own = tensors[name].to(device, copy=True)
            groups.setdefault(name.split(".")[2], []).append(own)
        layer.update_states(int(tokens), **{name: tuple(group) for name, group in groups.items()})
    if "input_ids" not in metadata:
        return cache, None
    return cache, _ids_of(json.loads(metadata["input_ids"]), cache)


def _place(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        kind = type(path).__name__
        raise TypeError(f"path is a {kind}, but must be a str or an os.PathLike of one") from None


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Reads metadata and tensors into memory, without mapping the file."""
    problem = f"path is {str(path)!r}, but must be a saved state"
    # a pipe that nobody writes to would not open
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{problem}: it is a folder")
        if not stat.S_ISREG(mode):
            raise ValueError(f"{problem}: it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
    finally:
        os.close(descriptor)
    try:
        tensors = load(content)
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        return json.loads(header).get("__metadata__") or {}, tensors
    except (SafetensorError, KeyError) as error:  # KeyError: of a dtype that torch does not have
        raise ValueError(f"{problem}: {error}") from None


def _digest(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of metadata, names, dtypes, shapes and values."""
    described = {name: [str(s.dtype), list(s.shape)] for name, s in tensors.items()}
    said = {name: value for name, value in metadata.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps([said, described], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _order(names: Any) -> list[str]:
    return sorted(names, key=lambda name: int(name.rsplit(".", 1)[1]))
