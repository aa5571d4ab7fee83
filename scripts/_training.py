"""What a training step is made of: model, optimizer, losses, and the guard against NaN."""

import copy
import ctypes
import math
import warnings

import torch
from _recipe import Recipe
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import flashcell  # noqa: F401  registers the model families


def keep_memory() -> None:
    """Tells glibc to keep large freed blocks. It gives them back to the system by default, which
    then clears the pages of every activation again at every step: a third of the time on a CPU."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        library.mallopt(mmap_threshold, 2**30)
        library.mallopt(trim_threshold, 2**31 - 1)


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules return no tensor, and have no such gradient
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
