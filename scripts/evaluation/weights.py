"""Checks that the weights of a checkpoint are whole, by their headers and sizes."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open


def check_weights(folder: Path) -> None:
    """Raises for a *.safetensors that is damaged or cut off, and for a shard that is missing."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):  # reads the header, and compares its sizes with the file's
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    for path in sorted(folder.glob("*.safetensors.index.json")):
        for shard in shards_in(path):
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise ValueError(f"{path} names {shard}, but there is no such file beside it")


def shards_in(index: Path) -> list[str]:
    try:
        shards = json.loads(index.read_text())["weight_map"].values()
        return sorted({str(shard) for shard in shards})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of shards: {error!r:.100}") from None
