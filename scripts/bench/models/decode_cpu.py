"""Times decoding of a checkpoint on a CPU, kernels against reference, for bench_models
--decode-cpu.

The same model runs the same `generate` with backend "cpu" and with backend "reference", alternating
in one run on the same threads. Nothing is timed unless both choose the same tokens. A ratio is the
reference's time over the kernel's: the median over neighbouring pairs. With weights of 8 bits, the
kernels with fp32 weights take the place of the reference, and the ratio with one row must be at
least REQUIRED_OF_WEIGHTS.
"""

import argparse
import gc
import os
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from flashcell import QuantizationConfig, load_kernel
from measurement.record import KERNELS, Row, append, provenance

PROMPT = 16
TOKENS = 256  # of a sample; the prompt and generate's preparations (30 ms) take little beside them
SAMPLES = 9
REQUIRED, REQUIRED_OF_WEIGHTS = 5.0, 1.4
BATCHES = (1, 8)


def generate(model: Any, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Runs generate; returns milliseconds per step (one token of every row) and the tokens."""
    start = time.perf_counter()
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
        pad_token_id=0, eos_token_id=model.config.vocab_size,  # an end token that never comes
    )  # fmt: skip
    return (time.perf_counter() - start) / TOKENS * 1e3, tokens


def compare(models: dict[str, Any], batch: int, timed: tuple[str, str]) -> Row:
    """Compares the times of two of the models; "cpu" and "reference" must choose the same tokens."""
    vocabulary = models["cpu"].config.vocab_size
    ids = torch.randint(3, vocabulary, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    chosen = {name: generate(model, ids)[1] for name, model in models.items()}
    if not torch.equal(chosen["cpu"], chosen["reference"]):
        raise SystemExit(
            f"error: batch {batch}: the kernels and the reference choose different tokens: not timed"
        )
    times: dict[str, list[float]] = {name: [] for name in timed}
    gc.disable()
    for sample in range(SAMPLES):
        for name in timed[:: 1 if sample % 2 == 0 else -1]:
            times[name].append(generate(models[name], ids)[0])
    gc.enable()
    ours, theirs = times.values()
    p20, p50, p80 = statistics.quantiles(ours, n=10, method="inclusive")[1:8:3]
    values = {
        "p20_ms": p20,
        "p50_ms": p50,
        "p80_ms": p80,
        "reference_p50_ms": statistics.median(theirs),
        "ratio": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
    }
    shape = {"batch": batch, "prompt": PROMPT, "tokens": TOKENS, "samples": SAMPLES}
    return shape | {key: f"{value:.4g}" for key, value in values.items()}


def load(folder: Any, backend: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, backend=backend, **options).eval()


def run(arguments: argparse.Namespace) -> bool:
    """Prints and stores the rows; returns whether every ratio reaches REQUIRED."""
    folders = ":".join(f"flashcell/{name}={folder}" for name, folder in KERNELS.items())
    os.environ.setdefault("LOCAL_KERNELS", folders)
    rows, weights = [], arguments.weights
    config = {"quantization_config": QuantizationConfig(weights)} if weights else {}
    timed, required = ("cpu", "reference"), dict.fromkeys(BATCHES, REQUIRED)
    if weights:
        timed, required = ("cpu", "fp32"), {1: REQUIRED_OF_WEIGHTS}
    for folder in arguments.decode_cpu:
        models = {backend: load(folder, backend, **config) for backend in ("cpu", "reference")}
        if weights:
            models["fp32"] = load(folder, "cpu")
        diagonal = models["cpu"].config.cell.startswith("flash_")
        kernel = load_kernel("diagonal-rnn" if diagonal else "fused-rnn", "cpu", "cpu")
        stamp = provenance("cpu", kernel, arguments.commit)
        for batch in BATCHES:
            row = compare(models, batch, timed)
            target = required.get(batch, 1.0)
            print(
                f"{folder.name} batch {batch}: {row['p50_ms']} ms a token "
                f"({1e3 / float(row['p50_ms']):.0f} tokens/s a row), {timed[1]} "
                f"{row['reference_p50_ms']} ms, {row['ratio']}x, target {target}x",
                flush=True,
            )
            dtype = weights or "float32"
            named = {"model": folder.name, "dtype": dtype, "thread_count": arguments.threads}
            rows.append(named | row | {"required": target} | stamp)
    if arguments.append:
        print(f"{len(rows)} rows appended to {append(rows, arguments.results, 'decode')}")
    return all(float(row["ratio"]) >= float(row["required"]) for row in rows)
