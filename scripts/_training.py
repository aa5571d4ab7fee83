"""What a training step is made of: recipe, model, optimizer, losses, and the guard against NaN."""

import copy
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import yaml
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import flashcell  # noqa: F401  registers the model families


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the numbers of a run; a file of scripts/recipes/."""

    name: str
    model: dict  # arguments of AutoConfig.for_model, model_type among them
    vocab_size: int
    python: str  # whose standard library the corpus is
    corpus_sha256: str
    held_out_in: int  # one file in so many is held out
    seed: int
    batch: int  # lanes read side by side
    length: int  # tokens of a lane in one step; the state goes on from step to step
    steps: int
    warmup: int
    learning_rate: float
    final_learning_rate: float
    weight_decay: float
    clip: float  # of the gradient's norm
    precision: str  # accelerate's: "no" or "bf16"
    log_every: int
    evaluate_every: int
    checkpoint_every: int

    @classmethod
    def read(cls, path: Path, overrides: list[str]) -> "Recipe":
        values = yaml.safe_load(path.read_text())
        names = {field.name: field.type for field in fields(cls)}
        for override in overrides:
            name, _, value = override.partition("=")
            folder, _, key = name.rpartition(".")
            if (folder or key) not in names or folder not in ("", "model"):
                raise ValueError(f"--set {override}: a recipe has {', '.join(names)}, model.<key>")
            (values[folder] if folder else values)[key] = yaml.safe_load(value)
        wrong = set(names) ^ set(values)
        if wrong:
            raise ValueError(f"{path}: missing or unknown {', '.join(sorted(wrong))}")
        for name, kind in names.items():
            accepted = (int, float) if kind is float else kind
            if not isinstance(values[name], accepted):
                raise ValueError(f"{path}: {name} is {values[name]!r}, but must be {kind.__name__}")
        for name in ("log_every", "evaluate_every", "checkpoint_every", "batch", "length", "steps"):
            if values[name] < 1:
                raise ValueError(f"{path}: {name} is {values[name]}, but must be at least 1")
        return cls(**values)

    def write(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False))


def make_model(recipe: Recipe, tokenizer, backend: str) -> nn.Module:
    torch.manual_seed(recipe.seed)
    special = {f"{name}_token_id": tokenizer.bos_token_id for name in ("bos", "eos", "pad")}
    config = AutoConfig.for_model(**recipe.model, vocab_size=len(tokenizer), **special)
    config.backend = backend
    return AutoModelForCausalLM.from_config(config)


def make_optimizer(model: nn.Module, recipe: Recipe):
    """AdamW that decays matrices only (a recurrent weight is some; biases of any shape are none),
    and a linear warm-up into half a cosine."""
    sides: tuple[list, list] = ([], [])
    for name, parameter in model.named_parameters():
        sides[parameter.ndim >= 2 and not name.endswith("bias")].append(parameter)
    groups = [
        {"params": sides[1], "weight_decay": recipe.weight_decay},
        {"params": sides[0], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    last = recipe.final_learning_rate / recipe.learning_rate

    def factor(step: int) -> float:
        if step < recipe.warmup:
            return (step + 1) / recipe.warmup
        done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def chunk_loss(model: nn.Module, chunk, carried, reduction: str = "mean"):
    """Loss of one chunk of the lanes, and the states after it; nothing flows back into `carried`."""
    tokens, positions, targets = (torch.from_numpy(part) for part in chunk)
    device = next(model.parameters()).device
    output = model(
        input_ids=tokens.to(device),
        position_ids=positions.to(device),
        past_key_values=carried,
        use_cache=True,
    )
    logits = output.logits.flatten(0, 1).float()
    loss = cross_entropy(logits, targets.to(device).flatten(), reduction=reduction)
    return loss, output.past_key_values


@torch.no_grad()
def held_out_loss(model: nn.Module, lanes, length: int) -> float:
    """Mean loss in nats over every token of the held-out documents and the end of each."""
    was_training = model.training
    model.eval()
    total, carried = 0.0, None
    for index in range(lanes.chunks(length)):
        loss, carried = chunk_loss(model, lanes.chunk(index, length), carried, "sum")
        total += loss.item()
    model.train(was_training)
    return total / int((lanes.targets != -100).sum())


def first_non_finite(model: nn.Module, chunk, carried) -> str:
    """Runs a step that went wrong again and names where: the layer, and forward or backward."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the parameter {name} is not finite before the step"
    found: list[str] = []
    handles = []

    def finite(values) -> bool:
        values = values if isinstance(values, (tuple, list)) else (values,)
        return all(v.isfinite().all() for v in values if isinstance(v, torch.Tensor))

    for name, module in model.named_modules():
        if name == "":
            continue

        def forward(module, inputs, output, name=name):
            if not finite(output):
                found.append(f"the output of {name} ({type(module).__name__}) is not finite")

        def backward(module, grad_input, grad_output, name=name):
            if finite(grad_output) and not finite(grad_input):
                found.append(f"the gradient through {name} ({type(module).__name__}) is not finite")

        handles.append(module.register_forward_hook(forward))
        handles.append(module.register_full_backward_hook(backward))
    model.zero_grad(set_to_none=True)
    loss, _ = chunk_loss(model, chunk, copy.deepcopy(carried))
    if not found:
        loss.backward()
    for handle in handles:
        handle.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            found.append(f"the gradient of {name} is not finite")
    model.zero_grad(set_to_none=True)
    return found[0] if found else "the step is finite when it runs again"
