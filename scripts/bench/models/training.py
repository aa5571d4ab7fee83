"""Times training steps of recurrent models against a Transformer's, for bench_models --training.

A case is a recipe of scripts/recipes/ at its local batch: micro-steps forward and backward in bf16
autocast over fp32 parameters, clipping, AdamW, as scripts/train takes them. Both providers get the same
tokens, loss and optimizer, and their blocks go through torch.compile either on both or on neither.
The Transformer is transformers' Llama with nothing but flash attention allowed. A row is one
document, so that nothing is masked.

Times are of the wall clock from one finished step to the next, so a GPU that waits for the host
shows. "layer" cases are one block of that width, between an embedding and a head of 256 tokens.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.models.training_peers import PEERS
from bench.profile import profile_step
from flashcell import load_kernel
from measurement.record import RESULTS, Row, append, first_line, provenance
from training.recipe import Recipe
from training.speed import flops_per_token
from training.step import make_model, make_optimizer, training_loss

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
WARM_STEPS, STEPS = 3, 20
LAYER_VOCABULARY = 256


class Provider(NamedTuple):
    """One provider of a case: a model, given by a recipe's variant at the local batch."""

    file: str  # a recipe in scripts/recipes/
    variant: str
    micro_steps: int = 1
    rows: int = 0  # rows of a micro-step; 0: as in the recipe
    length: int = 0
    one_layer: bool = False
    model: tuple[tuple[str, Any], ...] = ()  # changes to the recipe's model
    layer: str = ""  # a layer of training_peers.py, in the place of ours

    def recipe(self) -> Recipe:
        recipe = Recipe.read(RECIPES / self.file, [], self.variant)
        rows, length = self.rows or recipe.micro_batch, self.length or recipe.length
        recipe = replace(recipe, batch=rows, length=length, gradient_checkpointing=False)
        model = recipe.model | dict(self.model)
        if self.one_layer:
            recipe = replace(recipe, vocab_size=LAYER_VOCABULARY)
            model["num_hidden_layers"] = 1
        return replace(recipe, model=model)


class Case(NamedTuple):
    name: str
    kernel: str
    ours: Provider
    transformer: Provider
    limit: float  # limit on our time divided by the Transformer's


class Measured(NamedTuple):
    """The measurements: ms of every step, host ms of the median one, and peak memory in GiB."""

    times: list[float]
    host: float
    peak: float
    tokens: int
    parameters: int
    flops: int  # in a step; see flops_per_token

    def row(self) -> Row:
        p50, seconds = statistics.median(self.times), statistics.median(self.times) / 1e3
        p95 = statistics.quantiles(self.times, n=20, method="inclusive")[-1]
        figures = {
            "p50_ms": p50, "p95_ms": p95, "max_ms": max(self.times), "host_ms": self.host,
            "tokens_s": self.tokens / seconds, "tflops": self.flops / seconds / 1e12,
            "peak_gib": self.peak,
        }  # fmt: skip
        row: Row = {"parameters": self.parameters, "samples": len(self.times)}
        return row | {name: f"{value:.4g}" for name, value in figures.items()}


def _cases() -> Iterator[Case]:
    """Yields the cases; their limits are targets for one H200."""
    for variant, limit in (("lstm_165m", 1.08), ("lstm_165m_1head", 1.6), ("slstm_165m", 1.12)):
        provider = Provider("flashrnn.yaml", variant, micro_steps=2)
        yield Case(
            variant, "fused-rnn", provider, provider._replace(variant="transformer_165m"), limit
        )
    for cell, limit in (("flash_gru", 1.0), ("flash_lstm", 1.03)):
        for size in ("400m", "7b"):
            provider = Provider("pararnn.yaml", f"{cell}_{size}", one_layer=size == "7b")
            name = f"{cell}_{size}" + "_layer" * provider.one_layer
            peer = provider._replace(variant=f"transformer_{size}")
            yield Case(name, "diagonal-rnn", provider, peer, limit)
    provider = Provider("tfla.yaml", "flash_mlstm_400m_8heads", length=8192)
    yield Case(
        "flash_mlstm_400m", "tfla", provider, provider._replace(variant="transformer_400m"), 0.85
    )
    # xLSTM-7B (arXiv 2503.13427), whose training has no recipe here, and a Llama of its width
    provider = Provider("tfla.yaml", "flash_mlstm_1.4b_8heads", rows=4, length=8192, one_layer=True)
    wide = {"hidden_size": 4096, "intermediate_size": 10944, "num_attention_heads": 32}
    peer = provider._replace(variant="transformer_1.4b", model=tuple(wide.items()))
    provider = provider._replace(model=(("preset", "flash_mlstm_7b"),))
    yield Case("flash_mlstm_7b_layer", "tfla", provider, peer, 0.85)


CASES = {case.name: case for case in _cases()}


def choose(patterns: list[str]) -> list[Case]:
    """Returns the cases that match `patterns`, in the patterns' order, each once."""
    names = dict.fromkeys(n for pattern in patterns for n in CASES if fnmatch(n, pattern))
    return [CASES[name] for name in names]


def unknown(patterns: list[str]) -> str | None:
    """Returns what is wrong with the patterns of --training, or None."""
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in CASES):
            return f"--training is {pattern}, but must fit at least one of {', '.join(CASES)}"
    return None


def draw_chunk(recipe: Recipe) -> tuple[numpy.ndarray, ...]:
    """Draws random tokens and their targets, without positions, since a row is one document."""
    generator = numpy.random.default_rng(0)
    tokens = generator.integers(0, recipe.vocab_size, (recipe.batch, recipe.length + 1))
    return tokens[:, :-1].copy(), numpy.zeros(0), tokens[:, 1:].copy()


def make_step(
    model: nn.Module, recipe: Recipe, micro_steps: int, device: str,
    around: Callable[[bool], AbstractContextManager] = lambda last: nullcontext(),
) -> Callable[[], float]:  # fmt: skip
    """Returns a function that takes one training step on random tokens, as training/loop.py does.

    The function returns the host's seconds. `around` gives the context managers that a parallel
    model needs around its micro-steps, the last one and the others."""
    chunk = draw_chunk(recipe)
    optimizer, schedule = make_optimizer(getattr(model, "module", model), recipe)
    parameters = list(model.parameters())
    options = {"carry": False, "isolate": False, "z_loss": recipe.z_loss}

    def step() -> float:
        start = time.perf_counter()
        for k in range(micro_steps):
            with around(k == micro_steps - 1):
                with torch.autocast(device, torch.bfloat16):
                    loss, _ = training_loss(model, chunk, None, **options)
                (loss / micro_steps).backward()
        norm = nn.utils.clip_grad_norm_(parameters, recipe.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        enqueued = time.perf_counter() - start
        if not (loss.isfinite() and norm.isfinite()):
            raise FloatingPointError(f"loss {loss.item()}, gradient norm {norm.item()}")
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item()
        return enqueued

    return step


def measure(provider: Provider, device: str, backend: str, steps: int, compiled: bool, look: bool):
    recipe = provider.recipe()
    model = make_model(recipe, None, backend, device)
    parameters, flops = sum(p.numel() for p in model.parameters()), flops_per_token(model)
    if provider.layer:
        PEERS[provider.layer](model, recipe.batch)
    if compiled:
        blocks = next(m for m in model.base_model.children() if isinstance(m, nn.ModuleList))
        for block in blocks:
            block.compile()
    step = make_step(model, recipe, provider.micro_steps, device)
    cuda = device == "cuda"
    only_flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if cuda else nullcontext()
    wait = torch.cuda.synchronize if cuda else lambda: None
    times, host = [], []
    with only_flash:
        for _ in range(WARM_STEPS):
            step()
        gc.collect()  # so that none happens while a step is timed
        gc.freeze()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            wait()
            start = time.perf_counter()
            host.append(step() * 1e3)
            wait()
            times.append((time.perf_counter() - start) * 1e3)
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
        if look:
            print(profile_step(step, statistics.median(times)), flush=True)
    gc.unfreeze()
    tokens = provider.micro_steps * recipe.batch * recipe.length
    return Measured(times, statistics.median(host), peak, tokens, parameters, flops * tokens)


def release(device: str) -> None:
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def compare(arguments: Any) -> bool:
    """Measures, prints and stores the cases; returns whether all are within their limits."""
    device, backend, done = arguments.device, arguments.backend, {}
    how = arguments.steps, arguments.compile, arguments.profile
    within = True
    for case in choose(arguments.training):
        rows = {}
        kernel = load_kernel(case.kernel, device, backend)
        peers = [(name, case.ours._replace(layer=name)) for name in arguments.peers]
        for name, provider in (("ours", case.ours), ("transformer", case.transformer), *peers):
            try:
                if provider not in done:
                    done[provider] = measure(provider, device, backend, *how)
            except Exception as error:  # our times are kept if a peer fails
                if not provider.layer:
                    raise
                print(f"{case.name:20} {name}: {first_line(error)}", flush=True)
                continue
            finally:
                release(device)
            recipe = provider.recipe()
            setting = {"B": recipe.batch, "T": recipe.length, "micro_steps": provider.micro_steps}
            head = {"case": case.name, "provider": name, **setting, "compiled": arguments.compile}
            rows[name] = row = head | done[provider].row()
            figures = (
                f"{key[:-3]} {row[key]}" for key in ("p50_ms", "p95_ms", "max_ms", "host_ms")
            )
            print(
                f"{case.name:20} {name:14}{' '.join(figures)} ms  {float(row['tokens_s']):.0f} "
                f"tokens/s  {row['tflops']} TFLOP/s  {row['peak_gib']} GiB",
                flush=True,
            )
        ratio = float(rows["ours"]["p50_ms"]) / float(rows["transformer"]["p50_ms"])
        for row in rows.values():
            row |= {"ratio": "", "limit": ""}
        rows["ours"] |= {"ratio": f"{ratio:.3f}", "limit": case.limit}
        stamp = provenance(device, kernel, arguments.commit)
        verdict = "within" if ratio <= case.limit else "ABOVE"
        print(
            f"{case.name:20} {ratio:.3f} of the Transformer's time, {verdict} {case.limit}",
            flush=True,
        )
        within &= ratio <= case.limit
        if arguments.append:
            append([row | stamp for row in rows.values()], arguments.results, "training")
    return within


def add_arguments(parser: Any) -> None:
    """Adds the arguments of --training to the parser."""
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=STEPS, help="how many to time")
    add(
        "--peers",
        action="extend",
        nargs="+",
        choices=PEERS,
        default=[],
        help="their layers in our model",
    )
    add("--compile", action="store_true", help="torch.compile every block, of both providers")
    add("--profile", action="store_true", help="print where a step's time goes")
    add("--append", action="store_true", help="keep the rows")
    add("--results", type=Path, default=RESULTS, help="folder of the CSV")
    add("--commit", help="for the rows, where there is no git")
