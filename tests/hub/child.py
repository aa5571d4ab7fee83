"""Forks processes that load the kernel step by step and write the results as JSON.

Reads requests from stdin, one JSON object a line, forks for each and prints the pid: torch is
imported once for all; huggingface_hub, kernels and the loader start anew in every process.

A request is {"environment": variables, "path": for sys.path, "steps": [step, ...], "out": FILE}, a
step {"device": "cpu", "backend": "auto", "path": a folder that imports look into first, "run": Python to
execute first, "compile": a backend of torch.compile, "package": the loader's}, of which every part may
be left out. A variable that is null is not set.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo


def take(step: dict) -> dict:
    sys.path[:0] = [step["path"]] if "path" in step else []
    exec(step.get("run", ""), {})
    arguments = ("fused-rnn", step.get("device", "cpu"), step.get("backend", "auto"))
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = load(arguments, step.get("compile"), step.get("package", "flat"))
        except Exception as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
    outcome["warnings"] = [str(w.message) for w in caught if "fused-rnn" in str(w.message)]
    return outcome | {"seconds": time.monotonic() - started}


def load(arguments: tuple, compiler: str | None, package: str) -> dict:
    kernel_loader = importlib.import_module(f"{package}.hub.kernel_loader")
    call = lambda x: kernel_loader.load_kernel(*arguments).lstm(x)
    outcome = {}
    if compiler is not None:
        compiled = torch.compile(call, fullgraph=True, backend=compiler)
        outcome["value"] = compiled(torch.ones(1)).item()
    module = kernel_loader.load_kernel(*arguments)
    info = kernel_loader.kernel_info(*arguments)
    if info.source != "reference":  # the test kernel's lstm doubles its input
        outcome.setdefault("value", call(torch.ones(1)).item())
    return outcome | {"source": info.source, "file": module.__file__, "info": str(info)}


def answer(request: dict) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for name, value in request["environment"].items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    sys.path.insert(0, request["path"])
    try:
        result = json.dumps([take(step) for step in request["steps"]])
    except BaseException:
        result = json.dumps(traceback.format_exc())
    out = Path(request["out"])
    out.with_suffix(".new").write_text(result)
    out.with_suffix(".new").replace(out)
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # finished processes do not stay as zombies
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            answer(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
