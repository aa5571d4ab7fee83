"""The parts of a training step: model, optimizer, schedule, losses."""

import ctypes
import math
import re
from inspect import signature

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import flashcell  # noqa: F401  registers the model families
from training.loss import add_loss
from training.recipe import Recipe

# Parameters below which FSDP2 takes a model as one unit, gathered and reduced once a step: lstm_165m
# (164 M) on two H200s then takes 1.04 times one GPU's step; by blocks, gathered at every use, 1.18.
ONE_UNIT = 2**28
# What a block adds to the residual stream, in our families and in transformers'.
BRANCHES = ("mixer", "mlstm_layer", "self_attn", "attn", "attention", "mlp", "ffn")


LATE = {"backend", "rope_theta", "rope_scaling"}  # settings that no configuration lists


def keep_memory() -> None:
    """Tells glibc to keep large freed blocks instead of returning them to the system.

    Otherwise the system clears the pages of all activations at every step: a third of a CPU's
    time."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        library.mallopt(mmap_threshold, 2**30)
        library.mallopt(trim_threshold, 2**31 - 1)


def make_config(recipe: Recipe, tokenizer=None, backend: str = "auto"):
    """Returns the model's configuration; takes the vocabulary size from the tokenizer, if given."""
    if recipe.model.get("vocab_size", recipe.vocab_size) != recipe.vocab_size:
        raise ValueError(
            f"model.vocab_size is {recipe.model['vocab_size']}, but must be left out: vocab_size is "
            f"{recipe.vocab_size}"
        )
    values = dict(recipe.model, vocab_size=recipe.vocab_size)
    if tokenizer is not None:
        if not recipe.tokenizer:
            values["vocab_size"] = len(tokenizer)
        elif len(tokenizer) > recipe.vocab_size:
            raise ValueError(
                f"vocab_size is {recipe.vocab_size}, but must be at least {len(tokenizer)}, the "
                f"tokens of {recipe.tokenizer}"
            )
        values |= {f"{name}_token_id": tokenizer.bos_token_id for name in ("bos", "eos", "pad")}
    kind, preset = values.pop("model_type", None), values.pop("preset", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"model.model_type is {kind!r}, but must be a type that transformers knows"
        )
    make = CONFIG_MAPPING[kind]
    if preset is not None and not hasattr(make, "preset"):
        raise ValueError(f"model.preset is {preset!r}, but {kind} has no presets: leave it out")
    known = {*make().to_dict(), *make.attribute_map, *signature(make).parameters, *LATE}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"model has {', '.join(unknown)}, but {kind} has no such settings")
    try:
        config = make(**values) if preset is None else make.preset(preset, **values)
    except StrictDataclassError as error:
        raise ValueError(f"model: {error}") from error
    carries = set(getattr(config, "layer_types", None) or ()) == {"recurrent_state"}
    if recipe.carry and not carries:
        raise ValueError(f"carry is true, but must be false: {kind} has no state of a fixed size")
    if carries:
        config.backend = backend
    return config


def make_model(recipe: Recipe, tokenizer, backend: str, device: str = "cpu") -> nn.Module:
    config = make_config(recipe, tokenizer, backend)
    torch.manual_seed(recipe.seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    add_loss(model)
    if recipe.dropout:
        add_dropout(model, recipe.dropout)
    return model


def checked_model(recipe: Recipe, tokenizer, backend: str, device: torch.device) -> nn.Module:
    model = make_model(recipe, tokenizer, backend, device.type).to(device)
    if recipe.isolate:
        check_isolation(model)
    return model


def is_one_unit(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters()) < ONE_UNIT


def add_dropout(model: nn.Module, rate: float) -> None:
    """Adds dropout, in training only, to the embeddings and to the output of each residual
    branch."""

    def drop(module: nn.Module, _, output):
        first, *rest = output if isinstance(output, tuple) else (output,)
        first = dropout(first, rate, module.training)
        return (first, *rest) if rest else first

    blocks = next(m for m in model.base_model.children() if isinstance(m, nn.ModuleList))
    for block in blocks:
        parts = dict(block.named_children())
        rest = {n for n, m in parts.items() if not re.search("Norm|Dropout", type(m).__name__)}
        if not rest or (unknown := rest - set(BRANCHES)):
            raise ValueError(
                f"dropout is {rate}, but must be 0 for a {type(block).__name__}: it has "
                f"{', '.join(sorted(unknown)) if rest else 'no parts'}, and known are only norms and "
                f"{', '.join(BRANCHES)}"
            )
        for name in rest:
            parts[name].register_forward_hook(drop)
    model.get_input_embeddings().register_forward_hook(drop)


def is_decayed(name: str, parameter: nn.Parameter, embeddings: set[str]) -> bool:
    """Whether weight decay applies: to matrices and recurrent weights, not to biases or norms.

    It applies to the embedding, unless the recipe says otherwise."""
    return parameter.ndim >= 2 and not name.endswith("bias") and name not in embeddings


def make_optimizer(model: nn.Module, recipe: Recipe):
    """Returns AdamW and its schedule. `detached_decay` makes the decay of a step weight_decay times
    the schedule's factor, instead of times the learning rate (Loshchilov and Hutter 2019, in their
    paper's own form)."""
    spared = set()
    if not recipe.decay_embeddings:
        table = model.get_input_embeddings().weight
        spared = {name for name, parameter in model.named_parameters() if parameter is table}
    sides: tuple[list, list] = ([], [])
    for name, parameter in model.named_parameters():
        sides[is_decayed(name, parameter, spared)].append(parameter)
    decay = recipe.weight_decay / (recipe.learning_rate if recipe.detached_decay else 1.0)
    groups = [
        {"params": sides[1], "weight_decay": decay},
        {"params": sides[0], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=tuple(map(float, recipe.betas)), eps=recipe.eps,
        fused=next(model.parameters()).is_cuda,
    )  # fmt: skip
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(recipe))


def schedule(recipe: Recipe):
    """Returns a function from the step to the factor of the learning rate.

    Linear warm-up, half a cosine to the final rate, then linear to 0 over `cooldown` steps."""
    last = recipe.final_learning_rate / recipe.learning_rate
    end = recipe.steps - recipe.cooldown

    def factor(step: int) -> float:
        if step < recipe.warmup:
            return (step + 1) / recipe.warmup
        if step >= end and recipe.cooldown:
            return last * max(0.0, (recipe.steps - step) / recipe.cooldown)
        done = (step - recipe.warmup) / max(1, end - recipe.warmup)
        return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def model_inputs(model: nn.Module, chunk, carried, carry: bool, isolate: bool):
    """Returns the model's keyword arguments for one chunk of rows, and the chunk's targets."""
    tokens, positions, targets = (torch.from_numpy(part) for part in chunk)
    device = next(model.parameters()).device
    inputs = {"input_ids": tokens.to(device), "use_cache": carry}
    if isolate:
        inputs["position_ids"] = positions.to(device)
    if carry:
        inputs["past_key_values"] = carried
    return inputs, targets.to(device)


def training_loss(
    model: nn.Module, chunk, carried, carry: bool = True, isolate: bool = True, z_loss: float = 0.0
):
    """Returns the mean loss of one chunk of rows, with a model of make_model, and the new states.

    No gradient flows back into `carried`, the states before."""
    inputs, targets = model_inputs(model, chunk, carried, carry, isolate)
    return model(**inputs, targets=targets, z_loss=z_loss)


def chunk_loss(
    model: nn.Module, chunk, carried, reduction: str = "mean",
    carry: bool = True, isolate: bool = True,
):  # fmt: skip
    """Returns the loss of one chunk of rows, with any model, and the new states."""
    inputs, targets = model_inputs(model, chunk, carried, carry, isolate)
    output = model(**inputs)
    logits = output.logits.flatten(0, 1).float()
    loss = cross_entropy(logits, targets.flatten(), reduction=reduction)
    return loss, output.past_key_values if carry else None


@torch.no_grad()
def held_out_loss(
    model: nn.Module, lanes, length: int, carry: bool = True, isolate: bool = True
) -> float:
    """Returns the mean loss in nats over all held-out tokens and the documents' ends."""
    was_training = model.training
    model.eval()
    total, carried = 0.0, None
    for index in range(lanes.chunks(length)):
        chunk = lanes.chunk(index, length)
        loss, carried = chunk_loss(model, chunk, carried, "sum", carry, isolate)
        total += loss.item()
    model.train(was_training)
    return total / int((lanes.targets != -100).sum())


@torch.no_grad()
def check_isolation(model: nn.Module) -> None:
    """Refuses a model that lets a document see the one before it, whatever its position_ids say:
    two rows that differ in the first document only must agree about the second, bit for bit."""
    device = next(model.parameters()).device
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    was_training = model.training
    model.eval()
    second = [
        model(
            input_ids=torch.tensor([[*first, 5, 6, 7, 8]], device=device),
            position_ids=positions,
            use_cache=False,
        ).logits[:, 4:]
        for first in ([1, 2, 3, 4], [9, 8, 7, 6])
    ]
    model.train(was_training)
    if not torch.equal(*second):
        raise ValueError(
            f"isolate is true, but must be false: {model.config.model_type} lets documents of a row "
            "see each other"
        )
