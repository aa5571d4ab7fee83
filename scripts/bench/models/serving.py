"""Times continuous batching against padded static batches of equal size, for bench_models
--serving."""

import math
import random
import resource
import time
from typing import NamedTuple

import torch

import flashcell
from measurement.record import Row

PROMPT, OUTPUT = (8, 2048), (1, 1024)  # tokens, log-uniform between these
Texts = dict[int, list[int]]  # a request's tokens


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


def run_continuous(
    model, load: Load, slots: int, prefill_rows: int | None
) -> tuple[list[float], Texts]:
    """Runs the load by continuous batching; returns memory peaks at each request's end, and
    tokens."""
    peaks, texts = [], {}
    engine = flashcell.generate_many(
        model, requests_of(load), slots=slots, prefill_rows=prefill_rows
    )
    for done in engine:
        if done.error is not None or len(done.tokens) != load.outputs[done.index]:
            raise RuntimeError(f"request {done.index} ended by {done.reason}: {done.error}")
        peaks.append(peak_bytes(model))
        texts[done.index] = done.tokens
    return peaks, texts


def requests_of(load: Load) -> list[flashcell.Request]:
    return list(map(flashcell.Request, load.prompts, load.outputs))


def drawn_batches(load: Load, slots: int, batches: int) -> Load:
    """Draws `batches` whole static batches at random; 0 takes all of them."""
    starts = list(range(0, len(load.prompts), slots))
    if batches:
        starts = sorted(random.Random(0).sample(starts, min(batches, len(starts))))
    rows = [row for start in starts for row in range(start, start + slots)]
    rows = [row for row in rows if row < len(load.prompts)]
    return Load([load.prompts[row] for row in rows], [load.outputs[row] for row in rows])


def run_static(
    model, load: Load, slots: int, prefill_rows: int | None
) -> tuple[list[float], Texts]:
    """Runs the load in static batches, in order of arrival; returns memory peaks at each batch's
    end.

    A batch takes as long as its longest prompt and its longest output."""
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
    return peaks, {}


def same_alone(model, load: Load, together: Texts, slots: int, prefill_rows: int | None) -> bool:
    """Whether each request, run alone, gets the same tokens as in `together`."""
    wrong = []
    for index, request in enumerate(requests_of(load)):
        engine = flashcell.generate_many(model, [request], slots=slots, prefill_rows=prefill_rows)
        if next(engine).tokens != together[index]:
            wrong.append(index)
    same, tokens = len(load.outputs) - len(wrong), sum(load.outputs)
    print(f"{same} of {len(load.outputs)} requests, {tokens} tokens, are the same alone", *wrong)
    return not wrong


def peak_bytes(model) -> float:
    """Returns the peak memory so far, of the device or else of the process."""
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare(
    model, requests: int, slots: int, prefill_rows: int | None, batches: int = 0, checked: int = 0
) -> tuple[list[Row], bool]:
    """Times both methods; prints and returns a row for each.

    A row has seconds, tokens/s, the peak memory when a tenth and when all of the requests had
    ended, and the ratio to the static batches' tokens/s. `batches` static batches are drawn at
    random, 0 for all. Also returns whether the first `checked` requests, run alone, get the same
    tokens. On the CPU it measures CPU time, which other programs hardly change.
    """
    whole, rows, texts = draw_load(requests, model.config.vocab_size), [], {}
    sides = {
        "continuous": (run_continuous, whole),
        "static": (run_static, drawn_batches(whole, slots, batches)),
    }
    for name, (run, load) in sides.items():
        read, written = sum(map(len, load.prompts)), sum(load.outputs)
        print(
            f"{len(load.prompts)} requests, {read} prompt tokens, {written} new ones, {slots} at a time"
        )
        run(model, Load(load.prompts[:4], [2] * 4), slots, prefill_rows)  # warms everything up
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, busy = time.perf_counter(), time.process_time()
        peaks, texts[name] = run(model, load, slots, prefill_rows)
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
    print(f"continuous batching is {rows[0]['times_static']:.2f} times as fast", flush=True)
    load = Load(whole.prompts[:checked], whole.outputs[:checked])
    return rows, not checked or same_alone(model, load, texts["continuous"], slots, prefill_rows)
