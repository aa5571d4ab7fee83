"""Tests a library that was compiled for another arch than the GPU's: right values, or an error that
says so.

FLASHCELL_TEST_KERNEL, FLASHCELL_TEST_DIAGONAL_KERNEL and FLASHCELL_TEST_TFLA_KERNEL name
finished builds, such as those of `scripts/build_kernels --backend cuda --archs "8.0+PTX" --out
DIR`. torch.empty is filled with NaN here, so that the output of a kernel without a body is
noticed.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import mlstm_cases
from arch_cases import Called, built_for, choose, code_of, every_op, ops_of
from cases import DEVICE, Case, make, upcast
from flashcell.hub.kernel_variants import runs_on
from flashcell.kernels import diagonal_rnn as diagonal_reference
from flashcell.kernels import fused_rnn as reference
from flashcell.kernels.fused_rnn.devices import Code
from numerics import assert_as_accurate, assert_close
from ops.diagonal_rnn import test_conv as conv
from ops.diagonal_rnn import test_cuda as diagonal
from ops.diagonal_rnn import test_mixer_step as mixer
from ops.diagonal_rnn import test_scan as scan
from ops.fused_rnn.engine_cases import MASKS
from ops.fused_rnn.test_cuda import compare, far_from_zero
from ops.tfla import test_linear as linear
from ops.tfla import test_sequence as mlstm
from tooling.builder import default_archs, gencode, parse_archs, read_kernel, toolkits

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "kernel_builds"
KERNELS = ("fused-rnn", "diagonal-rnn", "tfla")
# The compute capabilities of all GPUs since Turing.
GPUS = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
NO_JIT = "CUDA_DISABLE_PTX_JIT"
pytestmark = pytest.mark.usefixtures("poisoned")
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda")
short = lambda dtype: str(dtype)[6:]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(3, 1, 336), (1, 2, 200), (129, 1, 768)]  # sequences, heads, width
REFUSALS = (  # errors of an engine asked for by name
    r"fused_rnn: the cluster engine, .*, has no code for .* of compute capability \d+\.\d: "
    r".*compiled for .*--archs|does not run a head of width|grid engine cannot run heads of width"
)


def test_what_cuda_takes_of_a_build():
    assert choose(("8.0+PTX",), (9, 0)) == Code(80)
    assert choose(("8.0", "9.0a", "12.0+PTX"), (9, 0)) == Code(90, sm_90a=True)
    assert choose(("8.0", "8.6", "9.0+PTX"), (8, 9)) == Code(86)
    assert choose(("8.0+PTX", "9.0a"), (10, 0)) == Code(80)
    assert choose(("9.0a",), (10, 0)) is choose(("8.0",), (9, 0)) is None
    archs = ("7.5", "8.0", "8.0+PTX", "8.6", "9.0", "9.0a", "9.0a+PTX", "10.0f", "10.0+PTX", "12.0")
    for arch, capability in product(archs, GPUS):
        assert (choose((arch,), capability) is not None) == runs_on(arch, capability)


def test_the_guides_table_of_gpus():
    """Which code the default build has for every GPU since Turing, as the kernels' README says."""
    page = (BUILDS / "README.md").read_text().split("Every NVIDIA GPU since Turing")[1]
    rows = re.findall(r"^\| .* \| (\d+)\.(\d) \| (\S+)(, PTX)? \| .* \|$", page, re.MULTILINE)
    assert [(int(major), int(minor)) for major, minor, *_ in rows] == list(GPUS)
    for kernel, (major, minor, code, ptx) in product(KERNELS, rows):
        archs = default_archs(read_kernel(BUILDS / kernel), toolkits.DEFAULT)
        machine = tuple(arch.removesuffix("+PTX") for arch in archs)
        capability = int(major), int(minor)
        number = code.rstrip("a").replace(".", "")
        chosen = Code(int(number), sm_90a=code.endswith("a"))
        assert choose(archs, capability) == chosen, (kernel, capability)
        assert choose(machine, capability) == (None if ptx else chosen), (kernel, capability)
    later = choose(default_archs(read_kernel(BUILDS / KERNELS[0]), toolkits.DEFAULT), (13, 0))
    assert later == Code(100)


@pytest.mark.parametrize("capability", [(8, 7), (8, 9), (10, 3), (11, 0), (12, 1)], ids=str)
def test_a_build_for_any_gpu_is_a_build(capability):
    """The archs that an error message asks for are compiled, though build.toml does not name them."""
    arch = "{}.{}".format(*capability)
    for kernel in KERNELS:
        for component in read_kernel(BUILDS / kernel).components:
            if component.backend != "cuda":
                continue
            assert component.archs_for((arch,)) == (arch,)
            assert component.archs_for(("7.0", "9.0a")) == ("9.0a",)
            only_90a = component.archs == ("9.0a",)
            both = (arch + "+PTX", "9.0a")
            assert component.archs_for(both) == (both[1:] if only_90a else both)
            plain = component.archs_for(("7.0", "10.3a", "8.0"))
            assert plain == (("7.0",) if only_90a else ("8.0",))


@on_gpu
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "archs",
    [
        "7.5",
        "7.5+PTX",
        "8.0",
        "8.0+PTX",
        "9.0",
        "9.0+PTX",
        "9.0a",
        "8.0+PTX,9.0a",
        "10.0",
        "12.0+PTX",
    ],
)
def test_the_library_knows_its_code(tmp_path, archs):
    """Machine code and PTX, with and without the instructions of 9.0a: the host is told what the
    preprocessor saw."""
    include = f"-I{ROOT / 'kernel_builds'}"
    source, program = ROOT / "tests/ops/arch_probe.cu", tmp_path / "probe"
    command = ["nvcc", "-std=c++20", include, *gencode(parse_archs(archs)), source, "-o", program]
    subprocess.run(command, check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.strip()
    capability = torch.cuda.get_device_capability()
    code = choose(parse_archs(archs), capability)
    if code is not None:
        assert said == "{0:d} {1:d} {0:d} {1:d}".format(*code)
        return
    gpu, number = torch.cuda.get_device_name(), "{}.{}".format(*capability)
    assert f"probe: this library has no code for {gpu}, of compute capability {number}: " in said
    numbers = [arch.removesuffix("+PTX").rstrip("a") for arch in parse_archs(archs)]
    assert f"the library was compiled for {', '.join(numbers)}. Take a build" in said


def compiled_for(module):
    """Returns how an error message lists a library's archs."""
    numbers = [arch.removesuffix("+PTX").rstrip("a") for arch in built_for(module)]
    return f"the library was compiled for {', '.join(numbers)}"


@pytest.fixture(params=reference.CELLS)
def name(request):
    return request.param


@on_gpu
@pytest.mark.parametrize("dtype", [*DTYPES, "tf32"], ids=str)
@pytest.mark.parametrize("options", [(), MASKS], ids=["plain", "masks"])
@pytest.mark.parametrize(("B", "N", "D"), [*SHAPES, (17, 2, 64)])
@pytest.mark.parametrize("engine", ["", "block", "cluster", "grid", "step"])
def test_recurrent_cells(fused_rnn, monkeypatch, name, B, N, D, options, dtype, engine):
    """The chosen engine is right; one asked for by name is right or refuses."""
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
    tf32 = {"precision": "tf32"} if dtype == "tf32" else {}
    io = torch.float32 if tf32 else dtype
    change = far_from_zero if name == "rnn_relu" else dict
    try:
        got, peer, exact = compare(fused_rnn, name, Case(B, 33, N, D, options), io, change, **tf32)
    except RuntimeError as error:
        if not engine or not re.search(REFUSALS, str(error)):
            raise
        return
    for key in exact:
        label = f"{name} {B}x{N}x{D} {engine} {key}"
        if tf32:
            assert_close(label, got[key].double(), exact[key], 2e-3)
        else:
            values = got[key], exact[key], peer[key]
            assert_as_accurate(label, *values, D, (io, key[0] == "d"))


@on_gpu
@pytest.mark.parametrize(("B", "T", "N", "D"), [(3, 1019, 1, 336), (1, 400, 2, 200)])
def test_long_lstm(fused_rnn, B, T, N, D):
    """Long sequences of widths for which the cluster engine is chosen, if there is code for it."""
    got, peer, exact = compare(fused_rnn, "lstm", Case(B, T, N, D), torch.bfloat16)
    for key in exact:
        values = got[key], exact[key], peer[key]
        assert_as_accurate(f"lstm {N}x{D} {key}", *values, D, (torch.bfloat16, key[0] == "d"))


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("B", "N", "D"), SHAPES)
def test_recurrent_steps(fused_rnn, name, B, N, D, dtype):
    """Consecutive steps: overlapping launches wait for each other, or do not overlap."""
    call = make(reference.CELLS[name], Case(B, 12, N, D, ("state",)), dtype)
    x, state, given = call["x"], call["state"], (call["weight"], call["bias"])
    hs = []
    for t in range(x.shape[1]):
        h, state = fused_rnn.recurrent_step(name, x[:, t], *given, state)
        hs.append(h)
    exact, _ = reference.recurrent(name, **upcast(call))
    peer, _ = reference.recurrent(name, **call)
    assert_as_accurate(f"{name} steps", torch.stack(hs, 1), exact, peer, D, (dtype, False))


@on_gpu
def test_a_cluster_without_code_is_an_error(fused_rnn, monkeypatch):
    if torch.cuda.get_device_capability()[0] < 9 or code_of(fused_rnn).arch >= 90:
        pytest.skip("needs a GPU with clusters and a build without: 7.5+PTX or 8.0+PTX")
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", "cluster")
    call = make(reference.CELLS["lstm"], Case(3, 5, 1, 336), torch.bfloat16)
    with pytest.raises(RuntimeError, match=REFUSALS) as caught:
        fused_rnn.lstm(**call)
    assert torch.cuda.get_device_name() in str(caught.value)
    said = f"clusters need code for 9.0 or later, and {compiled_for(fused_rnn)}"
    assert said in str(caught.value)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("B", "N", "D"), SHAPES)
@pytest.mark.parametrize("cell", mlstm_cases.CELLS)
def test_tfla(tfla, cell, B, N, D, dtype):
    case = mlstm_cases.Case(B, 70, N, D, D, ("state", "reset"), 64)
    mlstm.test_kernel_is_as_exact_as_the_reference(tfla, cell, case, dtype)
    mlstm.test_step(tfla, cell, dtype)
    if dtype != torch.float32:
        linear.test_several_matrices(tfla, dtype, min(B, 40), D, True)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("B", "N", "D"), SHAPES)
@pytest.mark.parametrize("cell", diagonal_reference.CELLS)
def test_diagonal(diagonal_rnn, cell, B, N, D, dtype):
    for method in diagonal.METHODS:
        case = Case(B, 70, 1, N * D, MASKS)
        diagonal.test_every_method_is_as_exact_as_the_reference(
            diagonal_rnn, cell, method, case, dtype
        )
    mixer.test_mixer_step(diagonal_rnn, cell, dtype, (B, N, D), True)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("B", "N", "D"), SHAPES)
def test_scans_and_convolutions(diagonal_rnn, B, N, D, dtype):
    shape = (B, 70, N * D)
    for n in scan.BLOCKS:
        scan.test_values(diagonal_rnn, shape, n, False, dtype)
    conv.test_is_its_definition(diagonal_rnn, shape, ("bias", "window"), 4, True, dtype)
    mixer.test_conv_step(diagonal_rnn, dtype, (B, N, D), True)


def test_every_op_runs(fused_rnn, diagonal_rnn, tfla):
    """Tests the calls that the test below makes, where there is code for them, and that they are of
    every op."""
    with Called() as called:
        for what, call in every_op(fused_rnn, diagonal_rnn, tfla):
            tensors = [t for t in tree_leaves(call()) if torch.is_tensor(t)]
            assert all(t.isfinite().all() for t in tensors), what
    ops = ops_of(fused_rnn, diagonal_rnn, tfla)
    assert len(ops) > 30
    assert ops - called.names == set()


@on_gpu
def test_a_gpu_without_code_is_refused_by_name(fused_rnn, diagonal_rnn, tfla):
    """In a process whose driver compiles no PTX, a build with only PTX for this GPU has no code for
    it."""
    capability = torch.cuda.get_device_capability()
    for archs in map(built_for, (fused_rnn, diagonal_rnn, tfla)):
        machine = tuple(arch.removesuffix("+PTX") for arch in archs)
        if choose(machine, capability) or not choose(archs, capability):
            pytest.skip("needs builds of whose code the GPU runs the PTX alone: 7.5+PTX or 8.0+PTX")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "test_every_op_refuses"]
    no_jit = {NO_JIT: "1", "CUDA_CACHE_DISABLE": "1"}  # nor code that it compiled before
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **no_jit}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout, done.stdout


@on_gpu
@pytest.mark.skipif(NO_JIT not in os.environ, reason="run by the test above")
def test_every_op_refuses(fused_rnn, diagonal_rnn, tfla):
    for what, call in every_op(fused_rnn, diagonal_rnn, tfla):
        for _ in range(2):  # the second call must fail, too
            with pytest.raises(
                RuntimeError, match=r"(rnn|tfla): this library has no code"
            ) as caught:
                call()
            said = str(caught.value)
            assert f"no code for {torch.cuda.get_device_name()}, of compute" in said, what
            assert f"{compiled_for(fused_rnn)}. Take a build for this GPU" in said, what
    torch.ones(3).sum().item()  # torch still works
