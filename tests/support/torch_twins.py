"""A torch.nn module and flashcell's of the same name with the same parameters, all they compute, and
tables of costs by which backend="auto" chooses between the two."""

import abc
import json
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import flashcell
from cases import DEVICE
from numerics import EPS, assert_close

# float64 shows mistakes best; the CUDA kernels do not take it.
EXACT = torch.float64 if DEVICE == "cpu" else torch.float32
# The same sums in another order, relative to the size of each tensor. Observed in float64 over 8
# seeds of all options: median 2.7 units, 99.9 % 18, worst 61, where a gradient's terms cancel.
SAME = 128 * EPS[EXACT]
SEQUENCES = ["LSTM", "GRU", "RNN"]
CELLS = ["LSTMCell", "GRUCell", "RNNCell"]


def make_twins(kind: str, *args: Any, backend: str = "auto", gain: float = 2.0, **kwargs: Any):
    """Returns (torch's, ours). The weights are larger than torch draws them, so every gate moves."""
    theirs = getattr(nn, kind)(*args, **kwargs)
    ours = getattr(flashcell, kind)(*args, backend=backend, **kwargs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(gain)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def make_inputs(module: nn.Module, batch: int | None, T: int = 5, states: bool = True):
    """Returns x in the module's layout, unbatched for None, and hx or None."""
    lead = (T,) if batch is None else (batch, T) if module.batch_first else (T, batch)
    dtype = module.weight_ih_l0.dtype
    x = torch.randn(*lead, module.input_size, dtype=dtype)
    if not states:
        return x, None
    rows = module.num_layers * (2 if module.bidirectional else 1)
    widths = [getattr(module, "proj_size", 0) or module.hidden_size, module.hidden_size]
    shape = (rows,) if batch is None else (rows, batch)
    hx = tuple(torch.randn(*shape, width, dtype=dtype) for width in widths)
    return x, hx if module.mode == "LSTM" else hx[0]


def flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in flatten(v)]


def compute(module, x, hx=None, lengths=None, enforce_sorted=False) -> dict[str, torch.Tensor]:
    """Returns outputs, states, and the gradients of a random weighting of them; packed for
    `lengths`."""
    copy = lambda t: t.detach().clone().requires_grad_()
    x = copy(x)
    hx = None if hx is None else copy(hx) if torch.is_tensor(hx) else tuple(map(copy, hx))
    leaves = {"x": x, **{f"hx[{k}]": s for k, s in enumerate(() if hx is None else flatten(hx))}}
    leaves |= dict(module.named_parameters())
    given = x
    if lengths is not None:
        given = pack_padded_sequence(
            x, lengths, batch_first=module.batch_first, enforce_sorted=enforce_sorted
        )
    outputs = flatten(module(given, hx))
    g = torch.Generator("cpu").manual_seed(1)
    draw = lambda o: torch.randn(o.shape, generator=g, dtype=torch.float64, device="cpu")
    loss = sum((o.double() * draw(o).to(o.device)).sum() for o in outputs)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {f"output[{k}]": o.detach() for k, o in enumerate(outputs)}
    return found | {f"d {name}": g for name, g in zip(leaves, grads, strict=True)}


def assert_same(ours: dict, theirs: dict, tolerance: float, what: object = "") -> None:
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        assert ours[name].dtype == want.dtype, f"{what} {name}: {ours[name].dtype}, {want.dtype}"
        assert_close(f"{what} {name}", ours[name], want, tolerance)


def outputs(module: nn.Module, *args: Any) -> dict:
    return {k: t.detach() for k, t in enumerate(flatten(module(*args)))}


# modules of a user


class Mixin(abc.ABC):
    @abc.abstractmethod
    def describe(self): ...


class Own(Mixin, nn.LSTM):
    """A class with a metaclass, methods and attributes, and torch's forward."""

    def __init__(self, width):
        super().__init__(width, 2 * width, batch_first=True)
        self.backend = "gloo"

    def describe(self):
        return f"{type(self).__name__} of {self.input_size}"


class OwnCell(nn.GRUCell):
    pass


class OtherForward(nn.GRU):
    def forward(self, input, hx=None):
        return super().forward(input, hx)


class OtherOrder(nn.RNN):
    def permute_hidden(self, hx, permutation):
        return hx


FORMS = ("inference", "training")
GROUPS = (*CELLS, "onednn", "loop", "sequence", "packed", "projected")


def table(torch_us: float, kernel_us: float, **changes) -> dict:
    """A CPU's entry in which every call takes the same time."""
    sides = {
        name: {
            f"{g} {f} {p}": {"call": us} for g in GROUPS for f in FORMS for p in ("fp32", "bf16")
        }
        for name, us in (("torch", torch_us), ("kernel", kernel_us))
    }
    entry = {"device": "cpu", "name": "CPU", "capability": 512, "units": 1, "margin": 1.0}
    return {**entry, "source": "a test", **sides, **changes}


def as_file(*entries: dict) -> bytes:
    return json.dumps({"format": 1, "devices": list(entries)}).encode()
