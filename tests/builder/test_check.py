"""Tests scripts/build_kernels --check: what it finds, what it accepts, and that it compiles
everything."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tooling.builder import abi_check, build_toml, gencode, subset, toolchain

ROOT = Path(__file__).resolve().parents[2]
AXPY = Path(__file__).resolve().parent / "axpy"

needs_nvcc = pytest.mark.skipif(toolchain.machine_nvcc() is None, reason="no nvcc on this machine")
KERNELS = ("fused-rnn", "diagonal-rnn", "tfla")


def cuda_sources(name):
    kernel = build_toml.read_kernel(ROOT / "kernel_builds" / name)
    return [s for c in kernel.components_for("cuda") for s in c.sources if s.endswith(".cu")]


@pytest.mark.parametrize("name", KERNELS)
def test_every_engine_and_every_cell_is_compiled(name):
    sources = cuda_sources(name)
    left = set(subset.only_read(name, sources))
    assert subset.problems(name, sources) == []
    assert left < set(sources)
    split = lambda chosen: [Path(s).stem.partition("_") for s in chosen]
    compiled = split(set(sources) - left)
    assert {engine for engine, _, _ in split(left)} <= {engine for engine, _, _ in compiled}
    assert {cell for _, _, cell in split(left)} <= {cell for _, _, cell in compiled}
    if name != "fused-rnn":
        assert not left


@pytest.mark.parametrize(
    ("changed", "added", "message"),
    [
        ({"block": ("gru", "mgu")}, [], "names block_mgu.cu, but build.toml does not"),
        ({"grid": ()}, [], "compiles no cell of grid"),
        ({}, ["block_mgu.cu", "grid_mgu.cu"], "compiles mgu with no engine"),
    ],
)
def test_a_subset_that_hides_something_is_refused(monkeypatch, changed, added, message):
    monkeypatch.setitem(subset.SUBSET, "fused-rnn", subset.SUBSET["fused-rnn"] | changed)
    found = subset.problems("fused-rnn", cuda_sources("fused-rnn") + added)
    assert len(found) == 1
    assert message in found[0]


def check(project, *arguments):
    command = [sys.executable, ROOT / "scripts/build_kernels", "--kernel", project, "--here"]
    options = ["--backend", "cuda", "--archs", "9.0a", "--check", "--jobs", "2"]
    home = ["--home", project.parent / "home"]
    return subprocess.run([*command, *options, *home, *arguments], capture_output=True, text=True)


KERNEL = "if (i < size) y[i] += a * x[i];"
FAR = "__shared__ float far[1 << 20];\n  far[i] = a;\n  __syncthreads();\n  y[i] = far[i ^ 1];"
# What is broken, which program finds it, and its message; the fast tier tries ptxas' error only.
BROKEN = {
    "PTX": (KERNEL, 'asm volatile("nonsense.f32;");', "Not a name of any known instruction"),
    "shared memory": (KERNEL, FAR, "uses too much shared data"),
    "C++": (KERNEL, "y[i] += missing * x[i];", 'identifier "missing" is undefined'),
    "an arch's code": (
        KERNEL,
        "#if __CUDA_ARCH__ == 900\n  missing();\n#endif",
        'identifier "missing" is undefined',
    ),
    "link": (
        "  axpy_kernel<<<",
        "  void nowhere();\n  nowhere();\n  axpy_kernel<<<",
        "imports nowhere()",
    ),
}


@needs_nvcc
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "PTX" else pytest.mark.slow) for n in BROKEN]
)
def test_an_error_is_found(tmp_path, name):
    project = Path(shutil.copytree(AXPY, tmp_path / "axpy"))
    source = project / "csrc" / "cuda.cu"
    old, new, message = BROKEN[name]
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))
    done = check(project)
    assert (done.returncode, message in done.stdout) == (1, True), done.stdout


@needs_nvcc
@pytest.mark.slow  # CI's own build shows that it succeeds.
def test_nothing_is_written(tmp_path):
    project = Path(shutil.copytree(AXPY, tmp_path / "axpy"))
    done = check(project)
    assert done.returncode == 0, done.stdout
    assert "axpy cuda for 9.0a: compiles" in done.stdout
    assert not (project / "build").exists()


@needs_nvcc
def test_what_the_front_end_reads_is_whole_for_the_linker(tmp_path):
    """A source that --check passes through the compiler's front end only still fails if it has an
    error, and its object file still defines its functions, so that the library links."""
    sources = [f"csrc/cuda/instantiations/grid_{cell}.cu" for cell in ("lstm", "gru")]
    left = subset.launcher("fused-rnn", sources)
    assert left[-1] == sources[0]
    nvcc = [
        str(toolchain.machine_nvcc()),
        "-gencode=arch=compute_90a,code=sm_90a",
        "-Xcompiler=-fPIC",
    ]
    source = tmp_path / sources[0]
    source.parent.mkdir(parents=True)
    template = "template <int n> __global__ void k(int* p) {{ static_assert(n < {0}); *p = n; }}\n"
    call = 'extern "C" void run(int* p) {{ k<3><<<1, 1>>>(p); }}\n'
    for limit, passes in ((4, True), (3, False)):
        source.write_text((template + call).format(limit))
        command = [*left, *nvcc, "-c", str(source), "-o", str(tmp_path / "k.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode == 0) == passes, done.stderr
        assert passes or "static assertion failed" in done.stderr
    symbols = subprocess.run(["nm", tmp_path / "k.o"], capture_output=True, text=True, check=True)
    assert " T run" in symbols.stdout


@needs_nvcc
def test_every_source_file_is_for_the_same_archs(tmp_path):
    """code.cuh reads the archs of one source file, so abi_check verifies that those of all others are
    the same, or those of a component of build.toml."""
    nvcc, archs = str(toolchain.machine_nvcc()), {"a": ["8.0+PTX", "9.0a"], "b": ["9.0a"]}
    for name, own in archs.items():
        (tmp_path / f"{name}.cu").write_text(f"__global__ void {name}() {{}}")
        source = ["-Xcompiler=-fPIC", "-c", tmp_path / f"{name}.cu", "-o", tmp_path / f"{name}.o"]
        subprocess.run([nvcc, *gencode(tuple(own)), *source], check=True)
    for objects, held in (("a", archs["a"]), ("b", archs["b"]), ("ab", archs["a"])):
        library, parts = tmp_path / f"{objects}.so", [tmp_path / f"{name}.o" for name in objects]
        subprocess.run(["g++", "-shared", *parts, "-o", library], check=True)
        include = Path(torch.__file__).parent / "include"
        given = library, "2.10", include, build_toml.HERE, tuple(held)
        found = abi_check.problems(*given, stripped=True)
        said = f"has a source file with code for {archs['b']}, but must for {held}"
        assert (said in found) == (objects == "ab"), found
        for own, passes in ((("9.0a",), True), (("8.0",), objects != "ab")):
            found = abi_check.problems(*given, stripped=True, parts=[own])
            assert (said not in found) == passes, found


def test_it_is_for_cuda_alone(tmp_path):
    project = Path(shutil.copytree(AXPY, tmp_path / "axpy"))
    command = [sys.executable, ROOT / "scripts/build_kernels", "--kernel", project, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--check is for --backend cuda, but --backend is cpu universal" in done.stderr
