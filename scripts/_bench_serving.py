"""Continuous batching against padded static batches of the same size, for bench_models --serving."""

import math
import resource
import time
from typing import NamedTuple

import torch

import flashcell

PROMPT, OUTPUT = (8, 2048), (1, 1024)  # tokens, log-uniform between these


class Load(NamedTuple):
    prompts: list[torch.Tensor]
    outputs: list[int]


def draw_load(requests: int, vocabulary: int, seed: int = 0) -> Load:
    generator = torch.Generator().manual_seed(seed)

    def log_uniform(low: int, high: int) -> list[int]:
        u = torch.rand(requests, generator=generator)
        return (low * torch.exp(u * math.log((high + 1) / low))).long().clamp(low, high).tolist()

    lengths, outputs = log_uniform(*PROMPT), log_uniform(*OUTPUT)
    prompts = [torch.randint(1, vocabulary, (n,), generator=generator) for n in lengths]
    return Load(prompts, outputs)


def run_continuous(model, load: Load, slots: int) -> None:
    requests = [
        flashcell.Request(prompt, output)
        for prompt, output in zip(load.prompts, load.outputs, strict=True)
    ]
    for done in flashcell.generate_many(model, requests, slots=slots):
        if done.error is not None or len(done.tokens) != load.outputs[done.index]:
            raise RuntimeError(f"request {done.index} ended by {done.reason}: {done.error}")


def run_static(model, load: Load, slots: int) -> None:
    """In the order of arrival; a batch takes as long as its longest prompt and its longest output."""
    for start in range(0, len(load.prompts), slots):
        prompts = load.prompts[start : start + slots]
        longest, new = max(map(len, prompts)), max(load.outputs[start : start + slots])
        pads = [longest - len(p) for p in prompts]
        ids = torch.stack(
            [torch.nn.functional.pad(p, (n, 0)) for p, n in zip(prompts, pads, strict=True)]
        )
        mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long()
        model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), do_sample=False,
            max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
        )  # fmt: skip


def compare(model, requests: int, slots: int) -> float:
    """Prints both; returns how many times faster continuous batching is."""
    load, seconds = draw_load(requests, model.config.vocab_size), {}
    read, written = sum(map(len, load.prompts)), sum(load.outputs)
    print(f"{requests} requests, {read} prompt tokens, {written} new ones, {slots} at a time")
    for name, run in (("continuous", run_continuous), ("static", run_static)):
        run(model, Load(load.prompts[:4], [2] * 4), slots)  # everything lazy
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        run(model, load, slots)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        rate = written / seconds[name]
        print(
            f"{name:>10} {seconds[name]:8.1f} s {rate:9.0f} tokens/s, peak memory +{grown:.0f} MB"
        )
    ratio = seconds["static"] / seconds["continuous"]
    print(f"continuous batching is {ratio:.2f} times as fast")
    return ratio
