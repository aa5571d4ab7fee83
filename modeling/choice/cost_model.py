"""Predicts what a call of a recurrent module takes in torch.nn's own forward and in our kernels.

A call's time is a sum of amounts (its steps, its products, ...), each times a cost in microseconds:

    time = sum over AMOUNTS of amount(call) * cost

A table holds the costs of each device that was measured, apart for every algorithm, mode and
precision; an algorithm of our kernels on a GPU is an engine of fused-rnn. `scripts/tune` fits them to
times that `scripts/bench_grid` measured. costs.json is the table of this package; a user's own table
has the same format:

    {"format": 1, "devices": [{"device": "cuda", "name": "H100", "capability": 90, "units": 132,
      "margin": 1.1, "torch": {"cudnn inference bf16": {"call": 60.0, "step": 9.1}},
      "kernel": {"grid inference bf16": {"call": 90.0, "step": 2.3}}, "source": "..."}]}

`name` is a part of a GPU's name, or the maker of a CPU. `units` are a GPU's multiprocessors or a
CPU's threads, `capability` a GPU's compute capability times 10 or the bits of a CPU's vectors. Our
kernels run where torch.nn's time is predicted to be at least `margin` times theirs; the fit chooses
the margin by calls that it has not seen.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

KINDS = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
CELLS = 3  # the kinds from here on are cells
GATES = (4, 3, 1)
PRECISIONS = ("bf16", "fp16", "fp32", "tf32")  # what has no number here is not predicted
AMOUNTS = {  # name -> how many of them a cost is for
    "call": 1,
    "layer": 1,  # layers times directions
    "step": 1,  # steps of all layers and directions
    "unit": 10**3,  # hidden units of all steps
    "value": 10**6,  # values of the gates
    "product": 10**9,  # multiplications of all matrix products
    "read": 10**6,  # weights that all steps read
    "weight": 10**6,
    "token": 10**6,  # values of inputs and outputs
}
LARGEST_FILE = 2**20
LARGEST_NUMBER = 1e12


class Call(NamedTuple):
    """The sizes that decide a call's time, as ints, so that it is a key of a cache."""

    kind: int  # a place in KINDS
    layers: int
    directions: int
    projection: int  # 0 without
    batch: int
    steps: int
    inputs: int
    width: int
    precision: int  # a place in PRECISIONS
    trains: int  # 1 if gradients are recorded
    packed: int  # 1 for a PackedSequence
    engine: str = ""  # of our kernels on a GPU


class Device(NamedTuple):
    """What was measured, or what a call runs on."""

    device: str  # "cuda" or "cpu"
    name: str
    capability: int
    units: int


class Prediction(NamedTuple):
    torch_us: float
    kernel_us: float
    margin: float
    source: str  # which entry of which table

    @property
    def torch_wins(self) -> bool:
        return self.torch_us < self.kernel_us * self.margin


class TableError(ValueError):
    """A table that cannot be used; the text names the file and what is wrong."""


def amounts(call: Call) -> tuple[float, ...]:
    """Returns the call's amounts in the order of AMOUNTS."""
    G, H, B, D = GATES[call.kind % CELLS], call.width, call.batch, call.directions
    out = call.projection or H
    runs = call.layers * D
    steps = runs * call.steps
    inputs = D * (call.inputs + (call.layers - 1) * D * out)  # of all layers and directions
    weights = G * H * (inputs + runs * out) + runs * call.projection * H
    found = (
        1,
        runs,
        steps,
        steps * H,
        B * steps * G * H,
        B * call.steps * weights,
        steps * H * (G * out + call.projection),
        weights,
        B * call.steps * (inputs + runs * out),
    )
    return tuple(n / per for n, per in zip(found, AMOUNTS.values(), strict=True))


def groups(call: Call, device: str) -> tuple[str, str]:
    """Returns the names of the costs that hold for torch.nn's forward and for our kernels."""
    form = f"{'training' if call.trains else 'inference'} {PRECISIONS[call.precision]}"
    if call.kind >= CELLS:
        return f"{KINDS[call.kind]} {form}", f"{KINDS[call.kind]} {form}"
    kinds = "packed" * call.packed, "projected" * (call.projection > 0)
    ours = " ".join(filter(None, (*kinds, call.engine))) or "sequence"
    if device == "cpu":
        # oneDNN has LSTMs alone; the rest is a loop of ops.
        whole = call.kind == 0 and not call.packed and not call.projection
        theirs = "onednn" if whole else "loop"
    else:
        # torch takes cuDNN's kernels for small widths up to these (RNN.cpp), which have no bf16.
        few = call.width <= (256 if call.trains else 384)
        theirs = "cudnn-small" if few and PRECISIONS[call.precision] != "bf16" else "cudnn"
        theirs = " ".join(filter(None, (*kinds, theirs)))
    return f"{theirs} {form}", f"{ours} {form}"


def predict(entry: dict[str, Any], call: Call) -> Prediction | None:
    """Returns the predicted times, or None if the entry has no costs for such calls."""
    if not 0 <= call.precision < len(PRECISIONS):
        return None
    sizes = dict(zip(AMOUNTS, amounts(call), strict=True))
    times = []
    for side, group in zip(("torch", "kernel"), groups(call, entry["device"]), strict=True):
        costs = entry[side].get(group)
        if not costs:
            return None
        times.append(sum(sizes[name] * cost for name, cost in costs.items()))
    return Prediction(times[0], times[1], entry["margin"], entry["source"])


def nearest(entries: Sequence[dict[str, Any]], device: Device) -> dict[str, Any] | None:
    """Returns the entry of the device, or else the one nearest in capability, then of the same name
    (of CPUs the maker's) and then in units."""
    alike = [e for e in entries if e["device"] == device.device]

    def distance(entry: dict[str, Any]) -> tuple[float, ...]:
        units = abs(math.log(max(1, device.units) / entry["units"]))
        named = entry["name"].lower() in device.name.lower()
        return abs(entry["capability"] - device.capability), not named, units

    return min(alike, key=distance, default=None)


def read_table(content: bytes, name: str) -> list[dict[str, Any]]:
    """Returns the entries of a table's file; raises TableError, which names the file, if it cannot
    be used."""
    if len(content) > LARGEST_FILE:
        raise TableError(f"{name} has more than {LARGEST_FILE} bytes")
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TableError(f"{name} is no JSON ({error})") from error
    if not isinstance(table, dict) or table.get("format") != 1:
        raise TableError(f'{name} must be an object with "format": 1')
    entries = table.get("devices")
    if not isinstance(entries, list) or not 0 < len(entries) <= 64:
        raise TableError(f"{name}: devices must be a list of 1 to 64 objects")
    for number, entry in enumerate(entries):
        problem = _problem(entry)
        if problem is not None:
            raise TableError(f"{name}: devices[{number}]{problem}")
    return entries


def _problem(entry: Any) -> str | None:
    """Returns what is wrong with an entry, or None."""
    texts, counts = ("name", "source"), ("capability", "units")
    keys = {"device", "margin", "torch", "kernel", *texts, *counts}
    if not isinstance(entry, dict) or set(entry) != keys:
        return f" must be an object with exactly the keys {', '.join(sorted(keys))}"
    if entry["device"] not in ("cuda", "cpu"):
        return '.device must be "cuda" or "cpu"'
    for key in texts:
        if not isinstance(entry[key], str) or not 0 < len(entry[key]) <= 200:
            return f".{key} must be a text of 1 to 200 characters"
    for key in counts:
        if type(entry[key]) is not int or not 1 <= entry[key] <= 10**6:
            return f".{key} must be an int from 1 to 1000000"
    if not _is_number(entry["margin"]) or not 0.1 <= entry["margin"] <= 10:
        return ".margin must be a number from 0.1 to 10"
    for side in ("torch", "kernel"):
        if not isinstance(entry[side], dict):
            return f".{side} must be an object"
        for group, costs in entry[side].items():
            fits = isinstance(costs, dict) and set(costs) <= set(AMOUNTS)
            if not fits or not all(map(_is_number, costs.values())):
                return (
                    f".{side}[{group[:50]!r}] must have numbers from 0 to {LARGEST_NUMBER:g} under "
                    f"some of the keys {', '.join(AMOUNTS)}"
                )
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST_NUMBER
