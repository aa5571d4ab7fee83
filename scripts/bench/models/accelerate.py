"""Times transformers' xLSTM before and after flashcell.accelerate, for bench_models --accelerate.

It times a token, a prompt and a training step of blocks of xLSTM-7B with random weights. Both
models run the same code around the mLSTM. Both train in fp32 without a cache, the only way that
transformers' own model supports.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import flashcell
from bench.models.decode import call, make_model, new_cache, step_of
from flashcell import load_kernel
from measurement.record import Row, append, provenance

BLOCKS = 4
PROMPT, DOCUMENT = 8192, 2048  # tokens read at once, and trained on
TIMES = {"a token": 50, "a prompt": 5, "a training step": 5}


def median_ms(run: Callable[[], Any], times: int, device: str) -> float:
    wait, spent = torch.cuda.synchronize if device == "cuda" else lambda: None, []
    for _ in range(2 + times):
        wait()
        start = time.perf_counter()
        run()
        wait()
        spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spent[2:])


def runs(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Returns the timed calls; the training step is last, because it leaves the model in fp32."""
    prompt = torch.randint(1, 1000, (1, PROMPT), device=model.device)
    step = torch.no_grad()(step_of(model, new_cache("xlstm", model, 0)))

    @torch.no_grad()
    def read() -> None:
        call(model, prompt, new_cache("xlstm", model, 0))

    def train() -> None:
        model.float().train().zero_grad()
        ids = prompt[:, :DOCUMENT]
        model(ids, labels=ids, use_cache=False).loss.backward()

    return {"a token": step, "a prompt": read, "a training step": train}


def run(arguments: Any) -> None:
    device = arguments.device
    model = make_model("xlstm", torch.bfloat16, device, num_hidden_layers=BLOCKS)
    rows: dict[str, Row] = {
        what: {"model": "xlstm", "what": what, "blocks": BLOCKS, "tokens": tokens}
        for what, tokens in zip(TIMES, (1, PROMPT, DOCUMENT), strict=True)
    }
    for provider in ("theirs", "ours"):
        model.to(torch.bfloat16).eval()
        if provider == "ours":
            flashcell.accelerate(model, backend=arguments.backend)
        for what, go in runs(model).items():
            rows[what][f"{provider}_ms"] = median_ms(go, TIMES[what], device)
    stamp = provenance(device, load_kernel("tfla", device, arguments.backend), arguments.commit)
    for row in rows.values():
        row["faster"] = row["theirs_ms"] / row["ours_ms"]
        print(f"{row['what']}: {row['theirs_ms']:.2f} ms, accelerated {row['ours_ms']:.2f} ms")
    if arguments.append:
        append([row | stamp for row in rows.values()], arguments.results, "accelerate")
