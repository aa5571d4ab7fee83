"""Records 20 steps of another program's training: each loss, gradient and parameter.

A script of this folder trains with one program and ends in `record(train)`; `train(flashcell)`
returns the trained module. With --flashcell it gets the package, otherwise functions of the same
names that change nothing. Either way the steps are recorded by torch's own hooks in the file
named by --out, so the program itself need not report its losses.
"""

import argparse
import contextlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 20
# Limit of the gradient's norm, far below that of these models at first, so that clipping happens.
CLIP = 0.1
TRAINER: dict[str, Any] = {  # options for the programs that use Lightning's Trainer
    "accelerator": "cpu",
    "gradient_clip_val": CLIP,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
UNCHANGED = SimpleNamespace(
    replace=lambda model: None, drop_in=contextlib.nullcontext, LSTM=nn.LSTM
)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def record(train: Callable[..., nn.Module], models: tuple[str, ...] = ()) -> None:
    """Runs `train` as a script that records losses and gradients; with `models`, its argument is one of
    their names, which `train` gets second."""
    parser = argparse.ArgumentParser(description="trains 20 steps and records them")
    parser.add_argument("--flashcell", action="store_true", help="with flashcell's modules")
    parser.add_argument("--out", required=True, help="the .npz file to write")
    parser.add_argument("--double", action="store_true", help="in fp64")
    if models:
        parser.add_argument("model", choices=models)
    arguments = parser.parse_args()
    chosen = [arguments.model] if models else []
    if arguments.double:
        TRAINER["precision"] = "64-true"
        torch.set_default_dtype(torch.float64)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the programs draw from the global generator
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: dict[str, list[Any]] = {"losses": [], "gradients": [], "parameters": []}
    _watch(rows)
    if arguments.flashcell:
        import flashcell

        model = train(flashcell, *chosen)
    else:
        model = train(UNCHANGED, *chosen)
    kinds = [type(m).__mro__ for m in model.modules() if isinstance(m, RECURRENT)]
    ours = [any(k.__module__.startswith("flashcell.") for k in mro) for mro in kinds]
    np.savez(arguments.out, ours=ours, **{name: np.stack(row) for name, row in rows.items()})


def fit(model: nn.Module, losses: list[Callable[[], Tensor]]) -> nn.Module:
    """Takes one step for each loss, for programs that leave training to their user."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for loss in losses:
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model


def _watch(rows: dict[str, list[Any]]) -> None:
    """Records the loss at every backward, and gradients and parameters at every optimizer step."""
    backward = Tensor.backward

    def backward_of_a_loss(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        rows["losses"].append(loss.detach().numpy().copy())
        backward(loss, *args, **kwargs)

    def flat(tensors: list[Tensor]) -> np.ndarray:
        return torch.cat([t.detach().flatten() for t in tensors]).numpy()

    def after_a_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A closure computes the gradients inside the step, and nothing clears them before it ends.
        given = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in given]
        rows["gradients"].append(flat(gradients))
        rows["parameters"].append(flat(given))

    Tensor.backward = backward_of_a_loss  # type: ignore[method-assign]
    register_optimizer_step_post_hook(after_a_step)
