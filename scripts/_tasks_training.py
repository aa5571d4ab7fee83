"""Trains a stack of models on a synthetic task until they have solved it, and measures them."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from _tasks_data import IGNORED, Rows, Task
from _tasks_models import TaskModel
from _tasks_stack import Stack
from torch import Tensor
from torch.nn.functional import cross_entropy

VALIDATION_ROWS = 1024
ROWS_AT_ONCE = 512  # of an evaluation


@dataclass
class Run:
    """One seed at one learning rate, and how it went."""

    seed: int
    learning_rate: float
    status: str = "running"  # then solved, limit, stopped (another rate has solved it) or diverged
    step: int = 0
    loss: float = float("nan")
    accuracy: float = float("nan")  # on the test rows, at the end
    good: int = 0  # checks in a row at which it was solved


class RowAdamW:
    """AdamW (arXiv 1711.05101) on the rows of one matrix, each with a learning rate of its own.

    m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2
    x' = x - rate (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + decay x)
    """

    betas, eps = (0.9, 0.999), 1e-8

    def __init__(self, rows: Tensor, rates: list[float], decay: float):  # rows [S, P]
        self.rows, self.decay, self.t = rows, decay, 0
        self.rates = torch.tensor(rates, device=rows.device, dtype=rows.dtype)[:, None]
        self.m, self.v = torch.zeros_like(rows), torch.zeros_like(rows)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        grad, (b1, b2) = self.rows.grad, self.betas
        self.t += 1
        self.m.lerp_(grad, 1 - b1)
        self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        divisor = (self.v / (1 - b2**self.t)).sqrt_().add_(self.eps)
        update = (self.m / (1 - b1**self.t)).div_(divisor).add_(self.rows, alpha=self.decay)
        self.rows.sub_(update.mul_(factor * self.rates))
        self.rows.grad = None

    def keep(self, chosen: list[int]) -> Tensor:
        """Goes on with these rows alone; returns them."""
        self.rows = self.rows.detach()[chosen].requires_grad_()
        self.rates, self.m, self.v = self.rates[chosen], self.m[chosen], self.v[chosen]
        return self.rows


def rate_factor(task: Task, step: int) -> float:
    """Linear warm-up, then half a cosine down to `task.last_rate`."""
    warmup = task.warmup * task.steps
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, task.steps - warmup)
    return task.last_rate + (1 - task.last_rate) * 0.5 * (1 + np.cos(np.pi * done))


def losses(stack: Stack, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over what is asked of each model: tokens, targets [S, B, T] -> [S]."""
    logits = stack(tokens).permute(2, 3, 0, 1)  # [S, V, B, T]
    each = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return each.sum((1, 2)) / (targets != IGNORED).sum((1, 2))


@torch.no_grad()
def accuracies(stack: Stack, rows: Rows) -> Tensor:
    """The share of what is asked that each model says, [S]: all read the same rows."""
    device, asked = stack.flat.device, 0
    right = torch.zeros(len(stack), dtype=torch.long, device=device)
    for at in range(0, len(rows[0]), ROWS_AT_ONCE):
        x, y = (torch.from_numpy(part[at : at + ROWS_AT_ONCE]).to(device) for part in rows)
        said = stack(x.expand(len(stack), -1, -1)).argmax(-1)  # [B, T, S]
        right += ((said == y[..., None]) & (y != IGNORED)[..., None]).sum((0, 1))
        asked += int((y != IGNORED).sum())
    return right / asked


class Trainer:
    """Runs of one model on one task, all of them at once; each leaves the stack when it is over."""

    def __init__(self, task: Task, name: str, runs: list[Run], device: str, backend: str):
        self.task, self.device = task, device
        self.runs, self.live = runs, list(runs)
        models = [TaskModel(task, name, run.seed, backend).to(device) for run in runs]
        self.stack = Stack(models)
        rates = [run.learning_rate for run in runs]
        self.optimizer = RowAdamW(self.stack.flat, rates, task.weight_decay)
        self.kept: dict[int, Rows] = {}
        self.validation = task.rows("validation", 0, 0, VALIDATION_ROWS)

    def train(self, check_every: int, solved: float) -> list[Run]:
        """Until every seed is solved at some learning rate, or the steps are over. A run is solved when
        two checks in a row find a validation accuracy of at least `solved`."""
        started, step = time.monotonic(), 0
        while self.live and step < self.task.steps:
            loss = self.step(step)
            step += 1
            if step % check_every and step < self.task.steps:
                continue
            accuracy = accuracies(self.stack, self.validation).tolist()
            for run, value, right in zip(self.live, loss.tolist(), accuracy, strict=True):
                run.step, run.loss = step, value
                run.good = run.good + 1 if right >= solved else 0
                if not np.isfinite(value):
                    run.status = "diverged"
                elif run.good == 2:
                    run.status = "solved"
            spent = time.monotonic() - started
            said = "  ".join(
                f"{run.seed}:{run.learning_rate:g} {run.loss:.3f} {right:.3f}"
                for run, right in zip(self.live, accuracy, strict=True)
            )
            print(f"{step:>7} {spent:6.0f} s  seed:rate loss accuracy  {said}", flush=True)
            over = self.solved_rate() or step == self.task.steps
            for run in self.live if over else []:
                if run.status == "running":
                    run.status = "limit" if step == self.task.steps else "stopped"
            self.end()
        return self.runs

    def step(self, step: int) -> Tensor:
        parts = [self.task.training_batch(run.seed, step, self.kept) for run in self.live]
        tokens, targets = (
            torch.from_numpy(np.stack(part)).to(self.device) for part in zip(*parts, strict=True)
        )
        loss = losses(self.stack, tokens, targets)
        loss.sum().backward()  # a model's parameters are in one of the terms
        self.optimizer.step(rate_factor(self.task, step))
        return loss.detach()

    def solved_rate(self) -> float | None:
        """A learning rate at which every seed is solved."""
        for rate in {run.learning_rate for run in self.runs}:
            if all(r.status == "solved" for r in self.runs if r.learning_rate == rate):
                return rate
        return None

    def end(self) -> None:
        """Measures the runs that are over on the test rows, and goes on without them."""
        over = [i for i, run in enumerate(self.live) if run.status != "running"]
        if not over:
            return
        going = [i for i, run in enumerate(self.live) if run.status == "running"]
        rows = self.stack.flat
        self.stack.flat = rows.detach()[over]
        test = self.task.rows("test", 0, 0, self.task.test_rows)
        for i, value in zip(over, accuracies(self.stack, test).tolist(), strict=True):
            run = self.live[i]
            run.accuracy = float("nan") if run.status == "diverged" else value
        self.stack.flat = self.optimizer.keep(going)
        self.live = [self.live[i] for i in going]
