"""Saves and loads a run's checkpoints, checkpoints/step-00000040/: one file per process, and a
manifest.

process-N.pt holds plain values and tensors only, so it is read by torch.load(weights_only=True), which
runs no code of the file's. Process 0 has weights and optimizer for all; under FSDP2 each has its shards.
"""

import hashlib
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from training.manifest import find_damage, sync, write_manifest

LOAD_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoint folders, newest first, complete or not."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


class Checkpoints:
    """The checkpoints of a run, of which the newest two are kept.

    A checkpoint is written under another name and then renamed, so it is complete or absent. The
    older one is for the case that the newer one is damaged."""

    def __init__(self, folder: Path, accelerator, model, optimizer, scheduler):
        self.folder, self.accelerator = folder, accelerator
        self.model = accelerator.unwrap_model(model)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.before: Path | None = None  # the last one that was saved or loaded

    def save(self, progress: dict) -> None:
        """Saves a checkpoint; every process calls it and writes its own part."""
        target = self.folder / f"step-{progress['step']:08d}"
        staging = self.folder / "unfinished"
        main = self.accelerator.is_main_process
        try:
            if main:
                remove(staging)
                staging.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            own = f"process-{self.accelerator.process_index}.pt"
            written = {own: write_state(staging / own, self._state(progress))}
            files = dict(gather_object(list(written.items())))
            if main:
                write_manifest(staging, files)
                remove(target)  # exists only if it is damaged
                os.rename(staging, target)
                sync(self.folder)
        except BaseException:
            if main:
                remove(staging)
            raise
        if main:
            for old in checkpoints_in(self.folder):
                if old not in (target, self.before):
                    remove(old)
        self.before = target
        self.accelerator.wait_for_everyone()

    def load(self) -> tuple[dict, list[str]]:
        """Loads the newest undamaged checkpoint; returns its progress and the faults of newer
        ones."""
        path, damaged = self._choose()
        if path is None:
            lines = "\n  ".join(damaged)
            raise ValueError(
                f"no checkpoint is whole: --restart begins the run again, without them\n  {lines}"
            )
        first, own = (path / f"process-{i}.pt" for i in (0, self.accelerator.process_index))
        try:
            state = read_state(own)
            shared = state if self._sharded or own == first else read_state(first)
            self._take(state, shared)
        except LOAD_ERRORS as error:
            raise ValueError(f"{own} is no checkpoint of this run: {error!r}") from error
        self.before = path
        return state["progress"], damaged

    def _choose(self) -> tuple[Path | None, list[str]]:
        """Chooses the checkpoint to load, the same in all processes.

        Each process checks its own file only: one process would need minutes to hash a large
        model."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        names = [f"process-{i}.pt" for i in range(world)]
        found, damaged = broadcast_object_list([checkpoints_in(self.folder)])[0], []
        for path in found:
            problems = gather_object([find_damage(path, names, [names[rank]])])
            if not any(problems):
                return path, damaged
            damaged.append(f"{path} is damaged: {next(filter(None, problems))}")
        return None, damaged

    @property
    def _sharded(self) -> bool:
        return bool(self.accelerator.is_fsdp2)

    def _state(self, progress: dict) -> dict:
        state = {"progress": progress, "random": random_state(self.accelerator.device)}
        state["sharded"] = self._sharded
        if self._sharded or self.accelerator.is_main_process:
            state["model"] = self.model.state_dict()
            state["optimizer"] = self.optimizer.state_dict()
            state["scheduler"] = self.scheduler.state_dict()
        return plain(state)

    @torch.no_grad()
    def _take(self, state: dict, shared: dict) -> None:
        if state["sharded"] != self._sharded:
            words = {True: "--strategy fsdp2", False: "--strategy ddp"}
            raise ValueError(f"it was written with {words[state['sharded']]}, and must be read so")
        own = self.model.state_dict()
        if own.keys() != shared["model"].keys():
            raise ValueError(f"it has weights {sorted(own.keys() ^ shared['model'].keys())[:3]}")
        for name, weight in own.items():
            local(weight).copy_(like(name, shared["model"][name], local(weight)))
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, values in shared["optimizer"]["state"].items():
            parameter = parameters[index]
            for name, value in values.items():
                if name != "step":
                    value = like(name, value, local(parameter))
                    values[name] = shard(value, parameter)
        self.optimizer.load_state_dict(shared["optimizer"])
        self.scheduler.load_state_dict(shared["scheduler"])
        progress = state["progress"]
        progress["texts"] = as_numpy(progress["texts"])
        if progress["carried"] is not None:
            config, device = self.model.config, self.accelerator.device
            progress["carried"] = [restored(c, config, device) for c in progress["carried"]]
        set_random_state(state["random"])


def remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


class Hashed:
    """A file opened for sequential writing that hashes what is written."""

    def __init__(self, file):
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, part) -> int:
        try:
            self.file.write(part)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(part)
        self.bytes += len(part)
        return len(part)

    def flush(self) -> None:
        self.file.flush()


def write_state(path: Path, state: dict) -> dict:
    """Writes `state` to a file; returns the file's entry in the manifest."""
    with open(path, "xb") as file:
        hashed = Hashed(file)
        try:
            torch.save(state, hashed)
        except (OSError, RuntimeError):  # torch raises RuntimeError if a write falls short
            if hashed.error is None:
                raise
            raise OSError(hashed.error.errno, hashed.error.strerror, str(path)) from None
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": hashed.bytes, "sha256": hashed.digest.hexdigest()}


def read_state(path: Path) -> dict:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError:  # torch's message suggests an unsafe load
        raise ValueError("it holds more than plain values and tensors: it is not read") from None
    except Exception as error:  # the bytes may be anything
        raise ValueError(f"it cannot be read: {error!r:.200}") from None
    if not isinstance(state, dict):
        raise ValueError(f"it is a {type(state).__name__}, but must be a dict")
    return state


def plain(value: Any) -> Any:
    """Converts a value to dicts, lists, numbers, strings and tensors, as checkpoints hold them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, DynamicCache):
        return [{"length": layer.length, "states": plain(layer.states)} for layer in value.layers]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return local(value).detach()
    if isinstance(value, int | float | str | None):
        return value
    raise TypeError(f"a checkpoint cannot hold {value!r:.60}, a {type(value).__name__}")


def as_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_numpy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(as_numpy, value))
    return value.numpy() if isinstance(value, torch.Tensor) else value


def restored(saved: list[dict] | None, config, device) -> DynamicCache | None:
    if saved is None:
        return None
    cache = DynamicCache(config=config)
    for layer, values in zip(cache.layers, saved, strict=True):
        states = {n: tuple(s.to(device) for s in group) for n, group in values["states"].items()}
        layer.update_states(values["length"], **states)
    return cache


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's shard of a distributed tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(name: str, value: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
        had = f"{name} is {list(value.shape)} {value.dtype}"
        raise ValueError(f"{had}, but must be {list(wanted.shape)} {wanted.dtype}")
    return value


def shard(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Shards an optimizer state of `parameter` as the optimizer keeps it in this process."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    size = {"shape": parameter.shape, "stride": parameter.stride()}
    value = value.to(local(parameter).device)
    return DTensor.from_local(value, mesh, placements, run_check=False, **size)


def random_state(device: torch.device) -> dict:
    """Returns the states of all random generators that a library may draw from."""
    state = {"python": random.getstate()}
    state["numpy"] = np.random.get_state(legacy=False)  # noqa: NPY002
    state["torch"] = torch.get_rng_state()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(as_numpy(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
