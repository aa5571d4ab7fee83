"""Loss curves of small models that differ in one thing, for scripts/convergence.

A curve is the loss of every step of AdamW on the same batches, from the same weights: bytes of this
repository's own Python sources, rows of one piece of text each. On a GPU the step is one CUDA graph,
so that the reference, a loop over time in torch, takes seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from _loss import add_loss
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 256
LEARNING_RATE, CLIP = 2e-3, 1.0


@dataclass(frozen=True)
class Side:
    """One curve: a model, the precision of its products, and what moves its first weights."""

    name: str
    make: Callable[[], nn.Module]
    bf16: bool = False
    nudge: int = 0  # seed of one unit in the last place of every weight, up or down; 0: none
    tf32: bool = False  # in torch.nn's recurrent modules, where torch has it by default


def draw_batches(steps: int, batch: int, length: int, device: str) -> Tensor:
    """[steps, B, T + 1]: windows of the sources, the same wherever they are drawn."""
    files = sorted([*ROOT.glob("modeling/*.py"), *ROOT.glob("kernel_builds/*/torch-ext/*/*.py")])
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - length - 1, (steps, batch, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long().to(device)


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        sign = torch.randint(2, weight.shape, generator=generator) * 2 - 1
        weight.mul_(1 + sign * torch.finfo(weight.dtype).eps)


def train(side: Side, batches: Tensor) -> Tensor:
    """The losses [steps] of one side."""
    device = batches.device.type
    torch.backends.cudnn.rnn.fp32_precision = "tf32" if side.tf32 else "ieee"
    torch.manual_seed(0)
    model = side.make().train()
    if side.nudge:
        nudge(model, side.nudge)
    add_loss(model)
    model.to(device)
    cuda = device == "cuda"
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=cuda,
        capturable=cuda,
    )  # fmt: skip
    rows = batches[0].clone()

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=side.bf16):
            loss, _ = model(input_ids=rows[:, :-1], targets=rows[:, 1:], use_cache=False)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    if cuda:
        step = record(step, model, optimizer)
    losses = []
    for batch in batches:
        rows.copy_(batch)
        losses.append(step().clone())
    return torch.stack(losses).double().cpu()


def record(
    step: Callable[[], Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], Tensor]:
    """`step` as a CUDA graph; model and optimizer are as they were."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # everything lazy happens here
        step()
    torch.cuda.current_stream().wait_stream(stream)
    model.load_state_dict(before)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def distance(a: Tensor, b: Tensor) -> float:
    """Root of the mean square, over the steps, of the difference of two curves."""
    return (a - b).square().mean().sqrt().item()
