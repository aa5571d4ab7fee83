"""Continuous batching against padded static batches of the same size, for bench_models --serving."""

import math
import random
import resource
import time
from typing import NamedTuple

import torch
from _bench_common import Row

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


def run_continuous(model, load: Load, slots: int) -> list[float]:
    """The peak of memory as each request ended."""
    peaks, requests = (
        [],
        [
            flashcell.Request(prompt, output)
            for prompt, output in zip(load.prompts, load.outputs, strict=True)
        ],
    )
    for done in flashcell.generate_many(model, requests, slots=slots):
        if done.error is not None or len(done.tokens) != load.outputs[done.index]:
            raise RuntimeError(f"request {done.index} ended by {done.reason}: {done.error}")
        peaks.append(peak_bytes(model))
    return peaks


def drawn_batches(load: Load, slots: int, batches: int) -> Load:
    """So many of the static batches, whole, drawn at random; all of them with 0."""
    starts = list(range(0, len(load.prompts), slots))
    if batches:
        starts = sorted(random.Random(0).sample(starts, min(batches, len(starts))))
    rows = [row for start in starts for row in range(start, start + slots)]
    rows = [row for row in rows if row < len(load.prompts)]
    return Load([load.prompts[row] for row in rows], [load.outputs[row] for row in rows])


def run_static(model, load: Load, slots: int) -> list[float]:
    """In the order of arrival; a batch takes as long as its longest prompt and its longest output.
    Returns the peak of memory as each batch ended."""
    peaks = []
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
        peaks.append(peak_bytes(model))
    return peaks


def compare_alone(model, requests: int, slots: int, checked: int) -> bool:
    """Whether the first `checked` requests get the tokens they get when nobody is beside them."""
    if not checked:
        return True
    load = draw_load(requests, model.config.vocab_size)
    all_of_them = [
        flashcell.Request(prompt, output)
        for prompt, output in zip(load.prompts, load.outputs, strict=True)
    ][: max(checked, slots)]
    together = {c.index: c.tokens for c in flashcell.generate_many(model, all_of_them, slots=slots)}
    wrong = [
        i
        for i, request in enumerate(all_of_them[:checked])
        if next(flashcell.generate_many(model, [request], slots=slots)).tokens != together[i]
    ]
    tokens = sum(load.outputs[:checked])
    print(f"{checked - len(wrong)} of {checked} requests, {tokens} tokens, are the same alone")
    return not wrong


def peak_bytes(model) -> float:
    """The most so far: of the device's memory, or the process's."""
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare(model, requests: int, slots: int, batches: int = 0) -> list[Row]:
    """Prints both and returns a row for each: seconds, tokens/s, the peak of memory when a tenth of the
    requests had ended and when all had, and how many times the static batches' tokens/s it has. Of the
    static batches so many are run, drawn at random; all with 0.

    On the CPU by the processor's time, which other work on the machine hardly lengthens.
    """
    whole, rows = draw_load(requests, model.config.vocab_size), []
    sides = {
        "continuous": (run_continuous, whole),
        "static": (run_static, drawn_batches(whole, slots, batches)),
    }
    for name, (run, load) in sides.items():
        read, written = sum(map(len, load.prompts)), sum(load.outputs)
        print(
            f"{len(load.prompts)} requests, {read} prompt tokens, {written} new ones, {slots} at a time"
        )
        run(model, Load(load.prompts[:4], [2] * 4), slots)  # everything lazy
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, busy = time.perf_counter(), time.process_time()
        peaks = run(model, load, slots)
        wall, busy = time.perf_counter() - start, time.process_time() - busy
        seconds = busy if model.device.type == "cpu" else wall
        early, last = peaks[len(peaks) // 10], peaks[-1]
        rows.append({
            "what": name, "dtype": str(model.dtype).removeprefix("torch."), "requests": len(load.prompts),
            "slots": slots, "prompt_tokens": read, "new_tokens": written, "seconds": seconds,
            "tokens_per_s": written / seconds, "early_peak_mib": early / 2**20,
            "peak_mib": last / 2**20,
        })  # fmt: skip
        print(
            f"{name:>10}: {wall:.1f} s, of them {seconds:.1f} at work, {written / seconds:.0f} tokens/s "
            f"of these, peak memory {early / 2**20:.0f} MiB at a tenth, {last / 2**20:.0f} at the end",
            flush=True,
        )
    for row in rows:
        row["times_static"] = row["tokens_per_s"] / rows[-1]["tokens_per_s"]
    print(f"continuous batching is {rows[0]['times_static']:.2f} times as fast")
    return rows
