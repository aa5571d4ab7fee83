"""Trains small models that differ in one respect and returns their loss curves, for convergence.

A curve is the loss of every step of AdamW on the same batches, from the same weights: bytes of this
repository's own Python sources, rows of one piece of text each. On a GPU the step is one CUDA graph,
so that the reference, a loop over time in torch, takes seconds.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.loss import add_loss

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 256
LEARNING_RATE, CLIP = 2e-3, 1.0


@dataclass(frozen=True)
class Provider:
    """One curve: a model, the precision of its products, and perturbations of its initial
    weights."""

    name: str
    make: Callable[[], nn.Module]
    bf16: bool = False
    nudge: int = 0  # seed of one unit in the last place of every weight, up or down; 0: none
    reorder: int = 0  # seed of another order of a batch's rows, so of every sum over them; 0: none
    tf32: bool = False  # for torch.nn's recurrent modules, whose default it is
    rate: float = LEARNING_RATE


def draw_batches(steps: int, batch: int, length: int, device: str) -> Tensor:
    """Draws batches of source text, [steps, B, T + 1]; the same on every machine."""
    files = sorted([*ROOT.glob("modeling/**/*.py"), *ROOT.glob("kernel_builds/*/torch-ext/*/*.py")])
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - length - 1, (steps, batch, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long().to(device)


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        up = torch.randint(2, weight.shape, generator=generator).bool()
        towards = torch.where(up, torch.inf, -torch.inf).to(weight.dtype)
        weight.copy_(torch.nextafter(weight, towards))


class Run:
    """One provider in training: `take` a step on rows [B, T + 1], and there are the losses so far.

    On a GPU the steps of several runs go side by side, each on a stream of its own.
    """

    def __init__(self, provider: Provider, rows: Tensor):
        self.provider, self.rows, device = provider, rows.clone(), rows.device.type
        generator = torch.Generator().manual_seed(provider.reorder)
        order = torch.randperm(len(rows), generator=generator).to(rows.device)
        self.order = order if provider.reorder else torch.arange(len(rows), device=rows.device)
        torch.backends.cudnn.rnn.fp32_precision = "tf32" if provider.tf32 else "ieee"
        torch.manual_seed(0)
        self.model = provider.make().train()
        if provider.nudge:
            nudge(self.model, provider.nudge)
        add_loss(self.model)
        self.model.to(device)
        cuda = device == "cuda"
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=provider.rate, fused=cuda, capturable=cuda)
        self._losses: list[Tensor] = []
        self.stream: Any = torch.cuda.Stream() if cuda else None
        self.replay = self._record() if cuda else self._step

    def take(self, rows: Tensor) -> None:
        with torch.cuda.stream(self.stream):  # None: does nothing
            self.rows.copy_(rows[self.order])
            self._losses.append(self.replay().clone())

    def losses(self) -> Tensor:
        if self.stream is not None:
            self.stream.synchronize()
        return torch.stack(self._losses).double().cpu()

    def _step(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.rows.device.type, torch.bfloat16, enabled=self.provider.bf16):
            loss, _ = self.model(
                input_ids=self.rows[:, :-1], targets=self.rows[:, 1:], use_cache=False
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.detach()

    def _record(self) -> Callable[[], Tensor]:
        """Records the step as a CUDA graph; leaves model and optimizer unchanged."""
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):  # a first step, for lazy initialisation
            self._step()
        torch.cuda.synchronize()
        self.model.load_state_dict(before)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            loss = self._step()
        torch.cuda.synchronize()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay


def train(providers: Iterable[Provider], batches: Tensor) -> Iterator[Tensor]:
    """Trains every model; yields its losses [steps]."""
    runs = [Run(provider, batches[0]) for provider in providers]
    for rows in batches:
        for run in runs:
            run.take(rows)
    return (run.losses() for run in runs)


def distance(a: Tensor, b: Tensor) -> float:
    """Returns the root mean square, over the steps, of the difference of two curves."""
    return (a - b).square().mean().sqrt().item()
