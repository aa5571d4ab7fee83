"""Builds and loads flashrnn (NX-AI, PyPI, 1.0.8) as a benchmark peer.

    python scripts bench.suites.fused_rnn.flashrnn_peer lstm 12 64 16    builds one, on a GPU

It compiles a module for each (cell, heads, width, batch) and tries it on the GPU. Nothing of it is
in this repository, and its sources and flags are not touched; four things around them are:

- gpu_info reads fields that CUDA 13's cudaDeviceProp does not have, so it does not compile: the four
  numbers that the tiles are chosen by come from torch.
- it links with -lcublas, but CUDA from wheels has libcublas.so.<version> alone: CUDA_LIB becomes a
  folder where the library that torch has loaded goes by the plain name.
- it sleeps up to ten seconds before each compilation, so that many processes do not meet: no sleep.
- a new process compiles everything again, a minute for each shape: what was found is kept in
  <state folder>/flashrnn/, and `build_all` builds what is not there yet side by side.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from bench.suites.fused_rnn.providers_cuda import Unavailable

CELLS = ("lstm", "slstm")
ROOT = Path(__file__).resolve().parents[4]
STATE = Path(os.environ.get("FLASHCELL_HOME") or ROOT / ".flashcell")
LOADED = Path("/proc/self/maps")  # libraries of this process
JOBS = 4  # processes in one compilation, of six files
Shape = tuple[str, int, int, int]  # cell, heads, width, batch


@cache
def flashrnn() -> ModuleType:
    """Imports the package with the patches above; raises Unavailable if it is not installed."""
    try:
        package = import_module("flashrnn")
    except (ImportError, OSError) as error:  # OSError: no CUDA toolkit
        raise Unavailable(f"flashrnn cannot be imported: {error}") from None
    if torch.cuda.is_available():
        inner = import_module("flashrnn.flashrnn.flashrnn")
        inner.get_gpu_info = gpu_info
        find = inner.load_parametric_and_test_and_bisect
        inner.load_parametric_and_test_and_bisect = partial(find_or_load, find)
        import_module("flashrnn.flashrnn.cuda_init").time = SimpleNamespace(sleep=lambda _: None)
        os.environ["CUDA_LIB"] = str(folder_of_cublas())
    return package


def config(shape: Shape, dtype: str = "bfloat16", backend: str = "cuda_fused") -> Any:
    """Returns flashrnn's configuration: x [T, B, N, D, G], R [N, D, G, D], h [states, T, B, N,
    D]."""
    cell, heads, width, batch = shape
    return flashrnn().FlashRNNConfig(
        function=cell, backend=backend, num_heads=heads, head_dim=width, batch_size=batch,
        dtype=dtype, dtype_w=dtype, dtype_r=dtype, dtype_b=dtype,
        input_shape="TBHDG", recurrent_shape="HDGP", bias_shape="HDG", output_shape="STBHD",
    )  # fmt: skip


def gpu_info(device_id: int) -> dict[str, int]:
    found = torch.cuda.get_device_properties(device_id)
    return {
        "maxThreadsPerBlock": 1024,  # the same on every GPU so far
        "regsPerMultiprocessor": found.regs_per_multiprocessor,
        "multiProcessorCount": found.multi_processor_count,
        "sharedMemPerBlockOptin": found.shared_memory_per_block_optin,
    }


def folder_of_cublas() -> Path:
    torch.cuda.current_blas_handle()  # loads cuBLAS
    found = re.search(r"/.*/libcublas\.so.*", LOADED.read_text())
    assert found is not None, f"torch's cuBLAS is not in {LOADED}"
    link = store() / "libcublas.so"
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f"libcublas-{os.getpid()}")
    fresh.symlink_to(found.group())
    fresh.replace(link)
    return link.parent


def store() -> Path:
    """Returns the folder of built modules for this version of flashrnn, torch and Python."""
    versions = importlib.metadata.version("flashrnn"), f"torch{torch.__version__}"
    return STATE / "flashrnn" / "-".join([*versions, str(sys.implementation.cache_tag)])


def place(name: str, sizes: Iterable[int], flags: Sequence[str]) -> Path:
    digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:12]
    return store() / "-".join([name, *map(str, sizes), digest])


def find_or_load(
    find: Callable[..., ModuleType], *, name: str, model_args: tuple, extra_cflags: Sequence[str],
    **options: Any,
) -> ModuleType:  # fmt: skip
    """Loads a module built before, or runs flashrnn's search for tiles and keeps its result."""
    folder = place(name, model_args[1:], extra_cflags)
    if kept := next(folder.glob("*.so"), None):
        return load_library(kept)
    options |= {"name": name, "model_args": model_args, "extra_cflags": extra_cflags}
    with TemporaryDirectory() as scratch:
        module = find(**options, build_directory=scratch, verbose=False)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(module.__file__), folder)
    return module


def load_library(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_kept(shape: Shape) -> bool:
    wanted = config(shape)
    sizes = wanted.batch_size, wanted.hidden_dim, wanted.num_heads
    return any(place(f"{shape[0]}_f", sizes, wanted.defines).glob("*.so"))


def build_all(shapes: Iterable[Shape]) -> None:
    """Builds missing modules in parallel; a failure is reported when the case runs."""
    missing = [shape for shape in dict.fromkeys(shapes) if not is_kept(shape)]
    if not missing:
        return
    print(f"flashrnn compiles {len(missing)} modules, a minute or two for each", flush=True)
    environment = os.environ | {"MAX_JOBS": str(JOBS)}
    build = lambda shape: subprocess.run(
        [
            sys.executable,
            ROOT / "scripts",
            "bench.suites.fused_rnn.flashrnn_peer",
            *map(str, shape),
        ],
        env=environment,
        capture_output=True,
    )
    with ThreadPoolExecutor(max(1, 2 * (os.cpu_count() or 1) // JOBS)) as pool:
        list(pool.map(build, missing))


def build(shape: Shape) -> None:
    """Builds a module by running one step forward and backward."""
    _, N, D, B = shape
    leaves = [(2, B, N, D, 4), (N, D, 4, D), (N, D, 4)]
    x, weight, bias = (
        torch.zeros(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in leaves
    )
    h, _ = flashrnn().flashrnn(x, weight, bias, config=config(shape))
    h.sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    cell, *sizes = sys.argv[1:]
    heads, width, batch = map(int, sizes)
    build((cell, heads, width, batch))
