"""Times the engine's check for changes before each decoded token, for bench_models --decode-check.

Before a recorded step the engine checks whether any Python value that the step reads has changed.
The same calls of one model are timed with and without the check, alternating in one run; the
percentage is the median over neighbouring pairs. The calls are `generate`, greedy and with four
beams, and a loop of calls of the model, where user code runs between two tokens: as it is, and in
`assume_unchanged`.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import flashcell
from bench.models.decode import make_model
from flashcell.generation.fingerprint import Fingerprint
from measurement.record import KERNELS

PROMPT, TOKENS, SAMPLES = 16, 64, 41
ALLOWED = 3.0  # percent of a token's time
SMALL = {
    "lstm": (flashcell.FlashRNNConfig, {"cell": "lstm"}),
    "gru": (flashcell.FlashRNNConfig, {"cell": "gru"}),
    "rnn": (flashcell.FlashRNNConfig, {"cell": "rnn"}),
    "flash_mlstm": (flashcell.FlashMLSTMConfig, {}),
}
SIZES = {"vocab_size": 3072, "hidden_size": 256, "num_hidden_layers": 5, "num_heads": 2}


def load(name: str, device: str, dtype: torch.dtype) -> Any:
    """Loads a checkpoint folder, or makes a preset or a cell of the shipped checkpoint's size."""
    if Path(name).is_dir():
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    if name not in SMALL:
        return make_model(name, dtype, device)
    kind, changes = SMALL[name]
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **changes), dtype=dtype)
    return model.to(device).eval()


def generate(model: Any, ids: torch.Tensor, **options: Any) -> None:
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
        do_sample=False, pad_token_id=0, **options,
    )  # fmt: skip


@torch.no_grad()
def loop(model: Any, ids: torch.Tensor) -> None:
    cache = DynamicCache(config=model.config)
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    for _ in range(TOKENS):
        logits = model(logits.argmax(-1), past_key_values=cache).logits


def promised(model: Any, ids: torch.Tensor) -> None:
    with model.decoder.assume_unchanged():
        loop(model, ids)


PATHS: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "greedy": generate,
    "4 beams": lambda model, ids: generate(model, ids, num_beams=4),
    "loop": loop,
    "promised": promised,
}


@contextmanager
def unchecked() -> Any:
    holds, Fingerprint.holds = Fingerprint.holds, lambda self, model: True  # type: ignore
    try:
        yield
    finally:
        Fingerprint.holds = holds  # type: ignore[method-assign]


def microseconds(path: Callable[..., None], model: Any, ids: torch.Tensor) -> float:
    """Returns the time per token; on a CPU it is the thread's CPU time."""
    if not ids.is_cuda:
        start = time.thread_time()
        path(model, ids)
        return (time.thread_time() - start) / TOKENS * 1e6
    torch.cuda.synchronize()
    start = time.perf_counter()
    path(model, ids)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TOKENS * 1e6


def compare(path: Callable[..., None], model: Any) -> tuple[float, float, list[float]]:
    """Returns us per token with and without the check, and quintiles of the overhead in percent."""
    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    for _ in range(2):
        path(model, ids)
    if model.decoder.path == "plain":
        raise SystemExit(f"error: no step is recorded: {model.decoder.reason}")
    checked, bare = list[float](), list[float]()

    def without() -> None:
        with unchecked():
            bare.append(microseconds(path, model, ids))

    turns = [lambda: checked.append(microseconds(path, model, ids)), without]
    gc.disable()
    for sample in range(SAMPLES):
        for turn in turns[:: 1 if sample % 2 == 0 else -1]:
            turn()
    gc.enable()
    added = [(a / b - 1) * 100 for a, b in zip(checked, bare, strict=True)]
    quintiles = statistics.quantiles(added, n=10, method="inclusive")[1:8:3]
    return statistics.median(checked), statistics.median(bare), quintiles


def run(arguments: argparse.Namespace) -> bool:
    """Prints a table; returns whether the overhead of every path is allowed."""
    folders = ":".join(f"flashcell/{name}={folder}" for name, folder in KERNELS.items())
    os.environ.setdefault("LOCAL_KERNELS", folders)
    print(
        "| model | path | us a token | without | added, % | p20 | p80 |\n|---|---|---|---|---|---|---|"
    )
    most = 0.0
    for name in arguments.decode_check:
        model = load(name, arguments.device, getattr(torch, arguments.dtype))
        for path, call in PATHS.items():
            with_check, without, (low, middle, high) = compare(call, model)
            most = max(most, middle)
            print(
                f"| {Path(name).name} | {path} | {with_check:.0f} | {without:.0f} | {middle:.1f} "
                f"| {low:.1f} | {high:.1f} |",
                flush=True,
            )
    return most <= ALLOWED
