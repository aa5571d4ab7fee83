"""The processes of test_context_parallel.py: a sequence split over them must have the logits, the loss
and the gradients of the whole sequence.

    python context_worker.py CHECKPOINTS STORE    STORE is a file through which they find each other
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import flashcell  # noqa: F401  (registers the families)
from flashcell.state.context_parallel import ContextParallel
from model_cases import blocks

RANKS, BATCH, PART = 3, 2, 5
# Relative, in fp64: sums are in another order. Observed 1.7e-14; transformers' own loss, which is
# in fp32 for any logits, has 2.1e-7.
BOUNDS = {"logits": 6e-14, "loss": 6e-7}


def gradients(model, value) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.backward()
    return {f"d {name}": p.grad.clone() for name, p in model.named_parameters()}


def whole(model, way, inputs, targets) -> dict[str, torch.Tensor]:
    if way == "loss":
        loss = model(**inputs, labels=targets, shift_labels=targets).loss
        return gradients(model, loss) | {"loss": loss.detach()}
    logits = model(**inputs).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    return gradients(model, loss) | {"loss": loss.detach(), "logits": logits.detach()}


def split(model, way, inputs, targets, context) -> dict[str, torch.Tensor]:
    """Computes logits, loss and gradients from every rank's part: the logits concatenated, the rest
    averaged over the ranks."""
    inputs = {name: context.split(value) for name, value in inputs.items()}
    targets, ranks, found = context.split(targets), dist.get_world_size(), {}
    if way == "loss":
        loss = context(**inputs, targets=targets).loss
    else:
        logits = context(**inputs).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        parts = [torch.empty_like(logits) for _ in range(ranks)]
        dist.all_gather(parts, logits.detach())
        found["logits"] = torch.cat(parts, 1)
    means = gradients(model, loss) | {"loss": loss.detach().clone()}
    for value in means.values():
        dist.all_reduce(value)
        value /= ranks
    return found | means


def check(checkpoint: Path, tokens: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    context = ContextParallel(model)
    inputs, targets = {"input_ids": tokens[:, :-1]}, tokens[:, 1:].contiguous()
    length = targets.shape[1]
    # Documents cross the borders of parts.
    packed = torch.stack([torch.arange(length) % n for n in (4, 7)])
    padded = torch.ones(BATCH, length, dtype=torch.long)
    padded[0, :7], padded[1, 3:8] = 0, 0  # includes the whole of one part
    numbered = torch.stack([torch.arange(length) // n for n in (PART, 4)])
    begins = torch.ones_like(
        padded
    )  # documents begin with padding at, and before, a part's first token
    begins[0, PART], begins[1, PART - 1] = 0, 0
    counted = torch.stack([torch.arange(length) - n for n in (PART, PART - 1)])
    counted = torch.where(counted < 0, counted + PART, counted)
    both = {"position_ids": counted, "attention_mask": begins}
    for extra in (
        {}, {"position_ids": packed}, {"attention_mask": padded}, {"seq_idx": numbered}, both,
    ):  # fmt: skip
        for way, bound in BOUNDS.items():
            want = whole(model, way, inputs | extra, targets)
            for what, got in split(model, way, inputs | extra, targets, context).items():
                error = (got - want[what]).norm() / want[what].norm()
                where = f"{checkpoint.name} {[*extra]} {way}: {what}: relative error {error:.2g}"
                assert error <= bound, where
                print(where)


def check_uneven_targets(checkpoint: Path, tokens: torch.Tensor) -> None:
    """With a part of few targets, one without any, or none anywhere, the loss is the mean over the
    whole."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    context, inputs = ContextParallel(model), {"input_ids": tokens[:, :-1]}
    targets = tokens[:, 1:].clone()
    targets[:, : PART + 2] = -100  # all targets of the first part, some of the second
    want = whole(model, "loss", inputs, targets)
    for what, got in split(model, "loss", inputs, targets, context).items():
        error = (got - want[what]).norm() / want[what].norm()
        assert error <= BOUNDS["loss"], f"uneven targets: {what}: relative error {error:.2g}"
    nothing = split(model, "loss", inputs, torch.full_like(targets, -100), context)
    assert all((value == 0).all() for value in nothing.values())


def shard(model: torch.nn.Module) -> torch.nn.Module:
    for block in blocks(model):
        fully_shard(block)
    return fully_shard(model)


def check_wrapped(checkpoint: Path, tokens: torch.Tensor) -> None:
    """With DistributedDataParallel and FSDP2 every rank has the whole sequence's gradients."""
    targets = tokens[:, 1:].contiguous()
    for wrap in (DistributedDataParallel, shard):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        want = whole(model, "loss", {"input_ids": tokens[:, :-1]}, targets)
        context = ContextParallel(wrap(model))
        inputs = context.split(tokens[:, :-1])
        got = gradients(model, context(input_ids=inputs, targets=context.split(targets)).loss)
        for what, value in got.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            error = (value - want[what]).norm() / want[what].norm()
            assert error <= BOUNDS["loss"], f"{wrap.__name__}: {what}: relative error {error:.2g}"


def check_guards(checkpoint: Path, tokens: torch.Tensor) -> None:
    """A gradient that would be missing is an error on the rank that would miss it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    context = ContextParallel(model)
    part = context.split(tokens[:, :-1])
    model(input_ids=part, past_key_values=context.begin(part), use_cache=True)
    try:
        context.begin(part)
        refused = False
    except RuntimeError as error:
        refused = "no loss of it went through join" in str(error)
    assert refused == (context.p2p.rank < context.p2p.size - 1)
    context.join(torch.zeros(()))
    with torch.no_grad():  # without gradients nothing is refused
        for _ in range(2):
            model(input_ids=part, past_key_values=context.begin(part), use_cache=True)


@torch.no_grad()
def check_long_part(checkpoint: Path) -> None:
    """A part is read in one call, even one that would be split if it were alone."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    context, model.prompt_tokens = ContextParallel(model), 1
    tokens = torch.randint(2, 60, (1, 300 * dist.get_world_size()))
    want = model(input_ids=tokens).logits[:, -1:]
    got = context(input_ids=context.split(tokens), logits_to_keep=1).logits
    if context.p2p.rank == context.p2p.size - 1:
        error = (got - want).norm() / want.norm()
        assert error <= BOUNDS["logits"], f"long part: relative error {error:.2g}"


def check_all(rank: int, folder: str, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    tokens = torch.randint(2, 60, (BATCH, PART * dist.get_world_size() + 1))
    checkpoints = sorted(Path(folder).iterdir())
    for checkpoint in checkpoints:
        check(checkpoint, tokens)
    check_uneven_targets(checkpoints[0], tokens)
    check_wrapped(checkpoints[0], tokens)
    check_guards(checkpoints[0], tokens)
    check_long_part(checkpoints[0])
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    # Forks have imported everything; if one fails, the others are ended.
    torch.multiprocessing.start_processes(
        check_all, sys.argv[1:], nprocs=RANKS, start_method="fork"
    )


if __name__ == "__main__":
    main()
