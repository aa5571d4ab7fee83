"""Trains a stack of models on a synthetic task until they have solved it, and measures them."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from synthetic_tasks.data import IGNORED, Kept, Rows, Task
from synthetic_tasks.models import TaskModel
from synthetic_tasks.stack import Stack

ROWS_AT_ONCE = 256  # rows in an evaluation: transformers' Mamba2 takes 1 GB for 40


@dataclass
class Run:
    """One seed at one learning rate, with its status and results."""

    seed: int
    learning_rate: float
    status: str = "running"  # then solved, limit, stopped (another rate has solved it) or diverged
    step: int = 0
    loss: float = float("nan")
    accuracy: float = float("nan")  # on the test rows, at the end
    good: int = 0  # consecutive checks at which it was solved


class RowAdamW:
    """AdamW (arXiv 1711.05101) on the rows of one matrix, each with a learning rate of its own.

    m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2
    x' = x - rate (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + decay x)

    Everything that changes is a tensor of the rows' device, so that a CUDA graph can hold a step.
    """

    betas, eps = (0.9, 0.999), 1e-8

    def __init__(self, rows: Tensor, rates: list[float], decay: float):  # rows [S, P]
        self.rows, self.decay = rows, decay
        self.t = torch.zeros((), device=rows.device, dtype=torch.float64)
        self.rates = torch.tensor(rates, device=rows.device, dtype=rows.dtype)[:, None]
        self.m, self.v = torch.zeros_like(rows), torch.zeros_like(rows)

    @torch.no_grad()
    def step(self, factor: Tensor | float) -> None:
        grad, (b1, b2) = self.rows.grad, self.betas
        self.t += 1
        self.m.lerp_(grad, 1 - b1)
        self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        divisor = (self.v / (1 - b2**self.t)).sqrt_().add_(self.eps)
        update = (self.m / (1 - b1**self.t)).div_(divisor).add_(self.rows, alpha=self.decay)
        self.rows.sub_(update.mul_(factor * self.rates))
        self.rows.grad = None

    def keep(self, chosen: list[int]) -> Tensor:
        """Drops all rows but `chosen`; returns the kept ones."""
        self.rows = self.rows.detach()[chosen].requires_grad_()
        self.rates, self.m, self.v = self.rates[chosen], self.m[chosen], self.v[chosen]
        return self.rows


def rate_factor(task: Task, step: int) -> float:
    """Returns the factor of the learning rate: linear warm-up, then half a cosine to
    `task.last_rate`."""
    warmup = task.warmup * task.steps
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, task.steps - warmup)
    return task.last_rate + (1 - task.last_rate) * 0.5 * (1 + np.cos(np.pi * done))


def answers(
    stack: Stack, tokens: Tensor, targets: Tensor, scored: int | None
) -> tuple[Tensor, Tensor]:
    """Returns logits [B, T, S, V] and targets [B, T, S] for tokens and targets [S, B, T].

    If every row has `scored` targets, only their positions are computed instead of all T."""
    at = None
    if scored:
        at = (targets != IGNORED).int().topk(scored).indices
        targets = targets.gather(2, at)
    return stack(tokens, at), targets.permute(1, 2, 0)


def losses(stack: Stack, tokens: Tensor, targets: Tensor, scored: int | None = None) -> Tensor:
    """Returns each model's mean cross-entropy over its targets: tokens, targets [S, B, T] ->
    [S]."""
    logits, targets = answers(stack, tokens, targets, scored)
    rows = logits.flatten(0, 2), targets.flatten()  # [*, V]: softmax is fast on its last dimension
    each = cross_entropy(*rows, ignore_index=IGNORED, reduction="none").view(targets.shape)
    return each.sum((0, 1)) / (targets != IGNORED).sum((0, 1))


@torch.no_grad()
def accuracies(stack: Stack, rows: Rows, scored: int | None = None) -> Tensor:
    """Returns each model's accuracy over the targets, [S]; all read the same rows."""
    device, total = stack.flat.device, 0
    right = torch.zeros(len(stack), dtype=torch.long, device=device)
    for at in range(0, len(rows[0]), ROWS_AT_ONCE):
        parts = (torch.from_numpy(part[at : at + ROWS_AT_ONCE]).to(device) for part in rows)
        logits, y = answers(stack, *(x.expand(len(stack), -1, -1) for x in parts), scored)
        right += ((logits.argmax(-1) == y) & (y != IGNORED)).sum((0, 1))
        total += int((rows[1][at : at + ROWS_AT_ONCE] != IGNORED).sum())
    return right / total


class Feed:
    """Buffers the batches and rates of the next steps on the device; `take` returns the next
    step's.

    A step that is recorded as a CUDA graph reads them from the same place every time. Training sets
    lie on the device too, and of a step's rows their numbers are sent.
    """

    def __init__(self, task: Task, runs: list[Run], count: int, device: str):
        self.task, self.count = task, count
        self.seeds = sorted({run.seed for run in runs})
        self.kept: Kept = {}
        shape = count, len(self.seeds), task.batch
        self.sets: Tensor | None = None
        if task.training_rows is None:
            self.rows = torch.zeros(2, *shape, task.lengths[1], dtype=torch.int16, device=device)
        else:  # tokens and targets of each seed's, [2, seeds, rows, T]
            both = [task.training_set(seed) for seed in self.seeds]
            self.sets = torch.stack(
                [
                    torch.stack([torch.from_numpy(x).to(device) for x in part])
                    for part in zip(*both, strict=True)
                ]
            )
            self.order = torch.zeros(shape, dtype=torch.int32, device=device)
            self.each = torch.arange(len(self.seeds), device=device)[:, None]
        self.factors = torch.zeros(count, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.choose(runs)

    def choose(self, runs: list[Run]) -> None:
        places = [self.seeds.index(run.seed) for run in runs]
        self.places = torch.tensor(places, device=self.at.device)

    def fill(self, first: int, count: int) -> None:
        """Fills the buffers with steps first to first + count."""
        steps = range(first, first + count)
        read = self.task.training_order if self.sets is not None else self.task.training_batch
        rows = [[read(seed, step, self.kept) for seed in self.seeds] for step in steps]
        if self.sets is not None:
            self.order[:count] = torch.from_numpy(np.array(rows, np.int32))
        else:
            self.rows[:, :count] = torch.from_numpy(np.array(rows, np.int16)).permute(2, 0, 1, 3, 4)
        factors = [rate_factor(self.task, step) for step in steps]
        self.factors[:count] = torch.tensor(factors)
        self.at.zero_()

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the next tokens and targets [S, B, T], and the factor of the learning rates,
        [1]."""
        if self.sets is not None:
            rows = self.sets[:, self.each, self.order.index_select(0, self.at)[0]]
        else:
            rows = self.rows.index_select(1, self.at)[:, 0]
        tokens, targets = rows[:, self.places].long()
        factor = self.factors[self.at]
        self.at += 1
        return tokens, targets, factor


class Trainer:
    """Trains all runs of one model on one task at once; each leaves the stack when it ends.

    On a GPU a step is a CUDA graph on a stream of its own: a model of this size would wait for the
    host otherwise, and several trainers go side by side.
    """

    def __init__(
        self, task: Task, name: str, runs: list[Run], device: str, backend: str, check_every: int,
        validation_rows: int = 1024, to_the_end: bool = False,
    ):  # fmt: skip
        self.task, self.name, self.device = task, name, device
        self.runs, self.live, self.check_every = runs, list(runs), check_every
        self.stream: Any = torch.cuda.Stream() if device == "cuda" else None
        with self.aside():
            models = [TaskModel(task, name, run.seed, backend).to(device) for run in runs]
            self.stack = Stack(models)
            rates = [run.learning_rate for run in runs]
            self.optimizer = RowAdamW(self.stack.flat, rates, task.weight_decay)
            self.feed = Feed(task, runs, check_every, device)
            self.feed.fill(0, 1)
        self.to_the_end = to_the_end
        self.validation = task.rows("validation", 0, 0, validation_rows)
        self.replay = self.record()

    def aside(self) -> Any:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def step(self) -> Tensor:
        tokens, targets, factor = self.feed.take()
        loss = losses(self.stack, tokens, targets, self.task.scored)
        loss.sum().backward()  # a model's parameters are in one of the terms
        self.optimizer.step(factor)
        return loss.detach()

    def record(self) -> Callable[[], Tensor]:
        """Returns a function that takes a step, recorded as a CUDA graph; leaves all state
        unchanged."""
        if not self.stream:
            return self.step
        optimizer = self.optimizer
        self.feed.at.zero_()  # there are no rows after the last step's
        state = optimizer.rows, optimizer.m, optimizer.v, optimizer.t, self.feed.at
        with self.aside(), torch.no_grad():
            before = [tensor.clone() for tensor in state]
            with torch.enable_grad():
                self.step()  # a first step, for lazy initialisation
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            loss = self.step()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay

    def train(self, solved: float, seconds: float = float("inf")) -> Iterator[None]:
        """Trains until every seed is solved at one of its learning rates, or until all steps or
        `seconds` are over. A run is solved if two checks in a row find a validation accuracy of at
        least `solved`; with `to_the_end` only the last two checks count. It yields after launching
        steps and before waiting for them, so that other trainers can use the GPU meanwhile."""
        started, step = time.monotonic(), 0
        while self.live and step < self.task.steps:
            count = min(self.check_every, self.task.steps - step)
            with self.aside():
                self.feed.fill(step, count)
                for _ in range(count):
                    loss = self.replay()
            step += count
            yield
            spent = time.monotonic() - started
            last = step == self.task.steps or spent > seconds
            with self.aside():
                self.check(step, loss, solved, spent, last)

    def check(self, step: int, loss: Tensor, solved: float, spent: float, last: bool) -> None:
        accuracy = accuracies(self.stack, self.validation, self.task.scored).tolist()
        for run, value, right in zip(self.live, loss.tolist(), accuracy, strict=True):
            run.step, run.loss = step, value
            run.good = run.good + 1 if right >= solved else 0
            if not np.isfinite(value):
                run.status = "diverged"
            elif run.good >= 2 and (last or not self.to_the_end):
                run.status = "solved"
        said = "  ".join(
            f"{run.seed}:{run.learning_rate:g} {run.loss:.3f} {right:.3f}"
            for run, right in zip(self.live, accuracy, strict=True)
        )
        print(
            f"{self.name:12} {step:>7} {spent:6.1f} s  seed:rate loss accuracy  {said}", flush=True
        )
        over = self.solved_rate() or last
        for run in self.live if over else []:
            if run.status == "running":
                run.status = "limit" if last else "stopped"
        self.end()

    def solved_rate(self) -> float | None:
        """Returns a learning rate at which every seed is solved, or None."""
        for rate in {run.learning_rate for run in self.runs}:
            if all(r.status == "solved" for r in self.runs if r.learning_rate == rate):
                return rate
        return None

    def end(self) -> None:
        """Tests the runs that have ended, and removes them from the stack."""
        over = [i for i, run in enumerate(self.live) if run.status != "running"]
        if not over:
            return
        going = [i for i, run in enumerate(self.live) if run.status == "running"]
        rows = self.stack.flat
        self.stack.flat = rows.detach()[over]
        test = self.task.rows("test", 0, 0, self.task.test_rows)
        accuracy = accuracies(self.stack, test, self.task.scored).tolist()
        for i, value in zip(over, accuracy, strict=True):
            run = self.live[i]
            run.accuracy = float("nan") if run.status == "diverged" else value
        self.stack.flat = self.optimizer.keep(going)
        self.live = [self.live[i] for i in going]
        if self.live:
            self.feed.choose(self.live)
            self.replay = self.record()
