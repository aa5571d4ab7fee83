"""Draws random module calls of ordinary sizes; the same seed gives the same calls."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch

NETS = {
    "lstm": ("LSTM", {}),
    "lstm-2": ("LSTM", {"num_layers": 2}),
    "lstm-2-bi": ("LSTM", {"num_layers": 2, "bidirectional": True}),
    "lstm-4": ("LSTM", {"num_layers": 4}),
    "gru": ("GRU", {}),
    "gru-3": ("GRU", {"num_layers": 3}),
    "rnn-tanh": ("RNN", {}),
    "lstm-proj": ("LSTM", {}),  # proj_size is half of the width
    "lstm-packed": ("LSTM", {}),  # a PackedSequence of lengths between T / 2 and T
    "lstm-cell": ("LSTMCell", {}),
    "gru-cell": ("GRUCell", {}),
    "rnn-cell": ("RNNCell", {}),
}
CELLS = ("lstm-cell", "gru-cell", "rnn-cell")
BATCHES = (1, 2, 4, 8, 16, 32, 50, 64, 100, 128, 256, 512, 1000, 1024, 2048)
STEPS = (1, 2, 5, 10, 20, 35, 50, 100, 128, 200, 333, 512, 1000, 1024, 2000)
WIDTHS = (
    16, 32, 50, 64, 96, 100, 128, 200, 256, 300, 333, 384, 400, 500, 512, 600, 640, 650, 700, 768, 800,
    1000, 1024, 1150, 1280, 1500, 1536, 1800, 2000, 2048,
)  # fmt: skip
# "fp32" is torch's default: cuDNN rounds the operands of products to TF32, cells do not. "exact" never rounds.
PRECISIONS = {"cuda": ("bf16", "fp16", "fp32", "exact"), "cpu": ("fp32", "fp32", "fp32", "bf16")}
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "exact": torch.float32,
}
MODES = ("inference", "training")
# Limits of a call: values of the gates at all steps and layers, and multiply-adds. In training each
# counts three times.
MOST_VALUES = {"cuda": 3 * 10**9, "cpu": 10**8}
MOST_PRODUCTS = {"cuda": 3 * 10**13, "cpu": 2 * 10**10}


class Call(NamedTuple):
    """One module call: a key of NETS, sizes, a precision of PRECISIONS and a mode of MODES."""

    net: str
    batch: int
    steps: int
    width: int
    precision: str
    mode: str

    def __str__(self) -> str:
        return f"{self.net} B{self.batch} T{self.steps} H{self.width} {self.precision} {self.mode}"

    @classmethod
    def parse(cls, name: str) -> "Call":
        """Returns the call that str() names; raises ValueError if there is none."""
        words = name.split()
        try:
            net, *letters, precision, mode = words
            batch, steps, width = (
                int(word.removeprefix(letter)) for letter, word in zip("BTH", letters, strict=True)
            )
            call = cls(net, batch, steps, width, precision, mode)
        except ValueError:
            call = None
        known = call is not None and call.net in NETS and call.precision in DTYPES
        if not known or call.mode not in MODES or str(call) != name or min(call[1:4]) < 1:
            call = None
        if call is None or (call.net in CELLS and call.steps > 1):
            raise ValueError(
                f"{name!r} must be a net, B, T (of a cell 1), H, a precision and a mode, such as "
                f'"lstm B16 T100 H256 bf16 training". Nets are {", ".join(NETS)}; precisions '
                f"{', '.join(DTYPES)}; modes {', '.join(MODES)}"
            )
        return call

    def gates(self) -> int:
        """Returns the number of gates, summed over layers and directions."""
        kind, options = NETS[self.net]
        layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        return layers * {"LSTM": 4, "GRU": 3, "RNN": 1}[kind.removesuffix("Cell")]

    def fits(self, device: str) -> bool:
        """Returns whether the call is within MOST_VALUES and MOST_PRODUCTS."""
        values = self.batch * self.steps * self.width * self.gates()
        training = 3 if self.mode == "training" else 1
        products = values * self.width * 2 * training
        return values * training <= MOST_VALUES[device] and products <= MOST_PRODUCTS[device]


def lengths(call: Call) -> torch.Tensor:
    """Returns the lengths of a packed call's sequences, between T / 2 and T."""
    return torch.linspace(call.steps, (call.steps + 1) // 2, call.batch).long()


def draw(seed: int, count: int, device: str) -> Iterator[Call]:
    """Yields `count` random calls that are within the device's limits."""
    random_ = random.Random(seed)
    while count > 0:
        net = random_.choice(tuple(NETS))
        batch, steps, width = map(random_.choice, (BATCHES, STEPS, WIDTHS))
        precision, mode = random_.choice(PRECISIONS[device]), random_.choice(MODES)
        call = Call(net, batch, 1 if net in CELLS else steps, width, precision, mode)
        if call.fits(device):
            count -= 1
            yield call
