"""Counts bytes and FLOPs of our LSTM and cuDNN's with ncu, for bench_ops --roofline.

ncu runs this module with each phase between two of torch's sleep kernels. Clocks are left alone and
caches are not flushed, so that a kernel finds in the L2 what the one before left there.
"""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from measurement.record import PROJECT, ROOT, Row, output_of

SEPARATOR = "spin_kernel"  # the kernel of torch.cuda._sleep
COUNTED = {  # our name -> ncu's metric
    "dram_bytes": "dram__bytes.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "sm_cycles": "sm__cycles_elapsed.avg",
    "time_ns": "gpu__time_duration.sum",
}
# Cycles of an SM's tensor cores: the first of these that this ncu and this chip know.
TENSOR = ("sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active",
          "sm__inst_executed_pipe_tensor")  # fmt: skip
STEPS = {"cudnn-bf16": 32}  # fewer steps: ncu takes milliseconds for each small kernel
PROVIDERS = ("ours", "cudnn-fp16", "cudnn-bf16")
CASES = ("lstm-12x64", "lstm-1x768-linear")


def phases() -> Iterator[tuple[str, str, str]]:
    """Yields (case, provider, pass) in the order in which they run."""
    for name in CASES:
        for provider in PROVIDERS if name.endswith("linear") else PROVIDERS[:1]:
            yield name, provider, "forward"
            yield name, provider, "backward"


def profiled() -> None:
    """Runs all phases: the program that ncu profiles."""
    from bench.suites.fused_rnn.cases_cuda import parameters, select
    from bench.suites.fused_rnn.peers import make_peer
    from bench.suites.fused_rnn.providers_cuda import make_ours
    from flashcell import load_kernel

    kernel = load_kernel("fused-rnn", "cuda", "cuda")
    ready = []
    for name, provider_name in dict.fromkeys((name, provider) for name, provider, _ in phases()):
        case = select(["must"], [name])[0]
        case = replace(case, steps=STEPS.get(provider_name, case.steps))
        p = parameters(case, "cuda")
        ours = provider_name == "ours"
        provider = make_ours(case, p, kernel, "cuda") if ours else make_peer(provider_name, case, p)
        x, dh = provider.native(p["x"]).detach().requires_grad_(), provider.native_dh(p["dh"])
        torch.autograd.grad(provider(x), [x, *provider.leaves], dh)  # warms up
        ready.append((provider, x, dh))
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for provider, x, dh in ready:
        h = provider(x)
        torch.cuda._sleep(1)
        torch.autograd.grad(h, [x, *provider.leaves], dh)
        torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def read_log(text: str, tensor: str) -> list[dict[str, float]]:
    """Sums ncu's raw CSV page by phase."""
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError("ncu wrote no table: " + " ".join(lines[-3:])[:300])
    found: list[dict[str, float]] = [{}]
    for record in list(csv.DictReader(lines[start:]))[1:]:  # the first has the units
        if SEPARATOR in record["Kernel Name"]:
            found.append({})
            continue
        phase = found[-1]
        phase["kernels"] = phase.get("kernels", 0) + 1
        for key, metric in (COUNTED | {"tensor": f"{tensor}.avg"}).items():
            value = record.get(metric, "").replace(",", "")
            phase[key] = phase.get(key, 0.0) + float(value or "nan")
    return found[:-1]


def make_rows(found: list[dict[str, float]], stamp: dict[str, str]) -> list[Row]:
    from bench.suites.fused_rnn.cases_cuda import select, work

    rows = []
    for (name, provider, which), sums in zip(phases(), found, strict=True):
        case = select(["must"], [name])[0]
        case = replace(case, steps=STEPS.get(provider, case.steps))
        flops = work(case, "forward")[0]
        if which == "backward":
            flops = work(case, "train")[0] - flops
        seconds = sums["time_ns"] * 1e-9
        values = {"us": seconds * 1e6, "dram_mb": sums["dram_bytes"] / 1e6}
        values |= {"l2_mb": sums["l2_bytes"] / 1e6, "gflop": flops / 1e9}
        values |= {
            "tflops": flops / seconds / 1e12,
            "dram_gbps": sums["dram_bytes"] / seconds / 1e9,
        }
        values |= {"flop_per_dram_byte": flops / sums["dram_bytes"]}
        values |= {"tensor_share": sums["tensor"] / sums["sm_cycles"]}
        row = {"case": name, "provider": provider, "pass": which, "T": case.steps}
        row |= {"kernels": int(sums["kernels"])} | {k: f"{v:.4g}" for k, v in values.items()}
        rows.append(row | stamp)
    return rows


def run_roofline(stamp: dict[str, str]) -> tuple[list[Row], str]:
    ncu = shutil.which("ncu") or next(
        map(str, Path("/opt/nvidia").glob("nsight-compute/*/ncu")), ""
    )
    if not ncu:
        return [], "ncu is not there"
    known = output_of(ncu, "--query-metrics") or ""
    tensor = next((name for name in TENSOR if name in known), TENSOR[0])
    metrics = ",".join([*COUNTED.values(), f"{tensor}.avg"])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        options = ["--clock-control", "none", "--cache-control", "none", "--profile-from-start"]
        options += [
            "off",
            "--csv",
            "--page",
            "raw",
            "--print-units",
            "base",
            "--log-file",
            str(log),
        ]
        environment = dict(os.environ, LOCAL_KERNELS=f"flashcell/fused-rnn={PROJECT}")
        environment["LOCAL_KERNELS"] = os.environ.get("LOCAL_KERNELS", environment["LOCAL_KERNELS"])
        command = [ncu, *options, "--metrics", metrics, sys.executable, str(ROOT / "scripts")]
        command += ["bench.ops.roofline"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    if done.returncode:
        return [], f"ncu failed: {(done.stderr or done.stdout or text).strip()[-600:]}"
    rows = make_rows(read_log(text, tensor), stamp)
    for row in rows:
        print("{case:18} {provider:11} {pass:9} {us:>7} us {kernels:>4} kernels {dram_mb:>7} MB of DRAM, "
              "{l2_mb:>7} of L2, {tflops:>6} TFLOP/s, tensor {tensor_share}".format(**row))  # fmt: skip
    return rows, ""


if __name__ == "__main__":
    profiled()
