"""One process of the fuzzer: runs calls `begin` to `end`, reporting each before it runs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fuzzing.calls import RAW_ONLY, entries
from fuzzing.calls_diagonal import is_of_cell
from fuzzing.draw import MAKERS, Draw, with_gradient
from fuzzing.faults import spoil
from fuzzing.oracle import (
    DECODING,
    EPS,
    MLSTM,
    check_refusal,
    computed_in,
    differences,
    is_of_decoding,
    is_out_of_memory,
    is_torchs,
    is_valid,
    leave_products_out,
    nudge,
    outcome,
    shorten,
    spare_large,
    tensors,
    widen,
)
from fuzzing.raw import Recorder, check_raw, namespace

COUNTERS = struct.Struct("<4q")  # index of the call at work, calls, accepted, refused
MEMORY = 6 * 2**30
RECURRENT = {f"{n}{s}" for n in ("lstm", "gru", "rnn", "slstm", "recurrent") for s in ("", "_step")}
SHARE = 5000  # calls of one process, so that leaks do not add up


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills torch.empty with NaN in the block, so that unwritten memory is noticed."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Fuzzer:
    def __init__(self, folder: Path, kernels: list[str], kinds: list[str], seed: int):
        from kernels import get_local_kernel

        self.seed, self.kinds = seed, kinds
        self.entries: list[tuple[str, str, Callable, Callable]] = []
        self.ops: dict[str, dict[str, Any]] = {}
        self.modules: dict[str, Any] = {}
        for name in kernels:
            kernel = self.modules[name] = get_local_kernel(folder / name, backend="cpu")
            reference = importlib.import_module(f"flashcell.kernels.{name.replace('-', '_')}")
            self.ops[name] = namespace(kernel)
            for entry, function in entries(kernel).items():
                self.entries.append((name, entry, function, getattr(reference, entry)))

    def run(self, index: int) -> tuple[str, bool, list[str]]:
        """Runs call `index`; returns its text, whether it was accepted, and the findings."""
        kind = self.kinds[index % len(self.kinds)]
        draw = Draw(f"{self.seed} {index}")
        kernel, name, entry, reference = draw.pick(self.entries)
        if kind == "raw" or name in RAW_ONLY:
            return self.run_op(index, kernel, name, entry)
        return self.run_entry(index, name, entry, reference)

    def make(self, index: int, name: str, entry: Callable) -> tuple[dict, list[str], Draw]:
        draw = Draw(f"{self.seed} {index} {name}")
        call = MAKERS[name](draw)
        if draw.chance(0.7):
            wants = lambda: draw.chance(0.8)
            call = {k: with_gradient(v, wants) for k, v in call.items()}
        done = spoil(draw, call, parameters(entry))
        return call, done, draw

    def run_entry(self, index: int, name: str, entry: Callable, reference: Callable):
        call, done, draw = self.make(index, name, entry)
        grad = not (name.endswith(DECODING) and draw.chance(0.7))  # decoded steps have no gradients
        title = f"{name}({', '.join(done)})"
        names = parameters(entry)
        with torch.set_grad_enabled(grad):
            try:
                with poisoned():
                    got = outcome(entry(**call), call, index)
            except Exception as error:
                problem = check_refusal(error, names, done, raw=False)
                if is_of_cell(error) or is_out_of_memory(error, done):
                    problem = None
                if problem is None and is_valid(done) and not is_of_decoding(name, error):
                    problem = f"a valid call is refused: {shorten(str(error))}"
                return title, False, [problem] if problem else []
            try:
                return title, True, self.compare(index, name, entry, reference, got)
            except Exception as error:
                # Only the reference may run out of memory: it copies expanded views, and saves more.
                if is_out_of_memory(error, done) or is_torchs(error, done, raw=False):
                    return title, True, []
                return title, True, [f"the reference refuses: {shorten(repr(error))}"]

    def compare(
        self, index: int, name: str, entry: Callable, reference: Callable, got: dict
    ) -> list[str]:
        # mlstm_ring reads the shape of its argument, and no value.
        no_values = name.startswith("explain_") or name == "mlstm_ring"
        if no_values or any(t.is_meta for t in got.values()):
            return []
        again = lambda change, **other: self.rerun(index, name, entry, reference, change, other)
        exact, peer = again(widen), again(keep)
        terms = max([1, *(t.numel() for t in got.values())])
        wild, carried = self.sizes(index, name, entry)
        if wild and name in ("mlstm", "mlstm_step", "mlstm_replay_step"):
            result = "result" if name == "mlstm_replay_step" else "result[0]"
            h = again(widen, norm=None, norm_weight=None)[result]
            spare_large(h, exact[result], peer[result], computed_in(got))
        weight = self.recurrent_weight(index, name, entry)
        if weight is not None:
            for found, change in ((exact, widen), (peer, keep)):
                finite = weight.nan_to_num(0.0, 0.0, 0.0).requires_grad_(weight.requires_grad)
                leave_products_out(found, again(change, weight=change(finite)), got, weight)
        found = differences(got, exact, peer, terms, wild=wild)
        if found:
            io = computed_in(got)
            moved = [again(lambda v, s=s: nudge(widen(v), io, s)) for s in range(4)]
            relative = MLSTM[io] if name.startswith("mlstm") else 0.0
            found = differences(got, exact, peer, terms, moved, relative, io, wild, carried)
        return [shorten(text) for text in found]

    def recurrent_weight(self, index: int, name: str, entry: Callable) -> torch.Tensor | None:
        """Returns the recurrent weight of the call if it is not finite."""
        if name not in RECURRENT:
            return None
        with torch.enable_grad():
            weight = self.make(index, name, entry)[0].get("weight")
        has_values = isinstance(weight, torch.Tensor) and not weight.is_meta
        return (
            None
            if not has_values or bool(weight.isfinite().all())
            else weight.detach().requires_grad_(weight.requires_grad)
        )

    def sizes(self, index: int, name: str, entry: Callable) -> tuple[bool, float]:
        """Returns whether an argument's square overflows, and the largest state or norm weight."""
        with torch.enable_grad():
            call, _, _ = self.make(index, name, entry)
        given = [t for k, v in call.items() for _, t in tensors(v, k) if t.dtype in EPS]
        largest = min([torch.finfo(t.dtype).max for t in given], default=1.0) ** 0.5
        factors = tensors((call.get("state"), call.get("norm_weight")), "")
        sizes = [float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) for _, t in factors if t.numel()]
        return not all(bool((t.abs() < largest).all()) for t in given), max(sizes, default=0.0)

    def rerun(
        self, index: int, name: str, entry: Callable, reference: Callable, change: Callable,
        other: dict[str, Any],
    ) -> dict:  # fmt: skip
        with torch.enable_grad():  # as in the first call
            call, _, _ = self.make(index, name, entry)
            call = {k: v if k == "scales" else change(v) for k, v in call.items()} | other
        if change is not keep and "chunk_size" in call:
            call["chunk_size"] = 1  # a chunk multiplies NaN of later steps by 0, which is NaN
        if call.get("backend") == "cpu":
            call["backend"] = "reference"
        return outcome(reference(**call), call, index)

    def run_op(self, index: int, kernel: str, name: str, entry: Callable):
        """Runs a raw op that the public function called, with its arguments changed once more."""
        draw = Draw(f"{self.seed} {index} {name}")
        call = MAKERS[name](draw)
        if draw.chance(0.7) and not (name.endswith("_step") and draw.chance(0.7)):
            call = {k: with_gradient(v) for k, v in call.items()}
        recorder = Recorder(self.ops[kernel])
        with recorder, contextlib.suppress(Exception):
            outcome(entry(**call), call, index)
        if not recorder.calls:
            return f"{name} reaches no op", True, []
        return check_raw(draw, *draw.pick(recorder.calls), poisoned)


def keep(value: Any) -> Any:
    return value


def parameters(entry: Callable) -> list[str]:
    return list(inspect.signature(entry).parameters)


def main() -> None:
    """Imports once, then forks processes that run the calls, so that a crash costs little."""
    job = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not job["asan"]:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    fuzzer = Fuzzer(Path(job["folder"]), job["kernels"], job["kinds"], job["seed"])
    if job["plant"]:
        exec(job["plant"], {"fuzzer": fuzzer, "torch": torch})
    ops = sorted(op for ops in fuzzer.ops.values() for op in ops)
    print(json.dumps({"ops": ops}), flush=True)
    counters, at, end = mmap.mmap(-1, COUNTERS.size), job["begin"], job["end"]  # shared when forked
    while at < end:
        counters[:] = COUNTERS.pack(at, 0, 0, 0)
        stop = min(end, at + SHARE)
        with tempfile.TemporaryFile("w+") as errors:
            pid = os.fork()
            if pid == 0:
                os.dup2(errors.fileno(), 2)
                work(fuzzer, counters, at, stop)
            status, answers = watch(pid, counters, job["patience"])
            errors.seek(0)
            said = errors.read()
        at, calls, accepted, refused = COUNTERS.unpack(counters[:])
        if status != 0 or not answers:
            problem = how_it_ended(status, answers, said)
            told = {"index": at, "title": "the process", "problem": problem}
            print(json.dumps(told) if problem else "", flush=True)
            at, calls = at + 1, calls + 1
        print(json.dumps({"counts": [calls, accepted, refused]}), flush=True)


def work(fuzzer: Fuzzer, counters: mmap.mmap, begin: int, end: int) -> None:
    calls, accepted, refused = 0, 0, 0
    reached: dict[str, int] = {}
    try:
        for index in range(begin, end):
            counters[:] = COUNTERS.pack(index, calls, accepted, refused)
            title, was_accepted, found = fuzzer.run(index)
            calls, accepted = calls + 1, accepted + was_accepted
            refused += not was_accepted
            name = title.partition("(")[0]
            if name not in reached:
                print(json.dumps({"reached": name}), flush=True)
            reached[name] = 1
            for problem in found:
                print(json.dumps({"index": index, "title": title, "problem": problem}), flush=True)
        counters[:] = COUNTERS.pack(end, calls, accepted, refused)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def watch(pid: int, counters: mmap.mmap, patience: float) -> tuple[int, bool]:
    """Waits for a process; returns its status (negative: signal), and False if a call timed out."""
    seen, since, answers = -1, time.monotonic(), True
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), answers
        index = COUNTERS.unpack(counters[:])[0]
        if index != seen:
            seen, since = index, time.monotonic()
        elif time.monotonic() - since > patience and answers:
            os.kill(pid, signal.SIGKILL)
            answers = False
        time.sleep(0.05)


def how_it_ended(status: int, answers: bool, errors: str) -> str:
    if not answers:
        return "gives no answer"
    lines = errors.strip().splitlines()
    summary = [line for line in lines if "SUMMARY: AddressSanitizer" in line]
    if summary and "out-of-memory" in summary[0] and "operator new" in errors:
        return ""  # without AddressSanitizer it is an exception, which such a run judges
    if summary:
        frames = [line.split(" in ", 1)[-1] for line in lines if " in " in line and "#" in line]
        own = next((frame for frame in frames if "csrc/" in frame), frames[0] if frames else "")
        return f"{summary[0].split('SUMMARY: ')[1].split(' (')[0][:100]}: {own[:120]}"
    if status < 0:
        return f"ends with {signal.Signals(-status).name}"
    return f"exits with {status}: {lines[-1][:200] if lines else ''}"


if __name__ == "__main__":
    main()
