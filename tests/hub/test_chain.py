"""Tests the real kernels from their builds, over the Hub, into a process that compiles with them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashcell.hub import checkout, kernel_sources
from repo_checks import pages

pytestmark = pytest.mark.hub
ROOT = Path(__file__).resolve().parents[2]
# The first call of the compiled function loads the kernel while Dynamo traces.
USE = """
import sys
import torch
from flashcell import kernel_info, load_kernel
import flashcell.kernels.diagonal_rnn, flashcell.kernels.fused_rnn, flashcell.kernels.tfla

name, function, shapes = sys.argv[1], sys.argv[2], eval(sys.argv[3])
reference = getattr(flashcell.kernels, name.replace("-", "_"))

def gradients(function):
    torch.manual_seed(0)
    inputs = [torch.randn(shape).mul(0.5).requires_grad_() for shape in shapes]
    h, (_, c, *_) = function(*inputs)
    (h.sum() + c.sum()).backward()
    return [h.detach(), c.detach(), *(tensor.grad for tensor in inputs)]

expected = gradients(getattr(reference, function))
for backend in ("eager", "aot_eager"):
    torch._dynamo.reset()
    call = lambda *inputs: getattr(load_kernel(name, inputs[0].device.type), function)(*inputs)
    torch.testing.assert_close(gradients(torch.compile(call, fullgraph=True, backend=backend)), expected)
module = load_kernel(name, "cpu", "cpu")
torch.testing.assert_close(gradients(getattr(module, function)), expected)
assert module.BACKEND == "cpu"
print(kernel_info(name).source)
"""
KERNELS = {
    "fused-rnn": ("lstm", "(2, 7, 4, 3, 8), (4, 3, 8, 8), (4, 3, 8)"),
    "diagonal-rnn": ("flash_lstm", "(2, 7, 3, 8), (3, 8), (2, 8)"),
    "tfla": ("mlstm", "(2, 7, 3, 8), (2, 7, 3, 8), (2, 7, 3, 16), (2, 7, 3), (2, 7, 3)"),
}


def run(*command, **more) -> str:
    return subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, text=True, **more
    ).stdout


# On every change one of the real kernels is tested all the way.
ALWAYS = "tfla"
MARKED = [pytest.param(k, marks=() if k == ALWAYS else pytest.mark.slow) for k in KERNELS]


@pytest.mark.parametrize("name", MARKED)
def test_real_kernel(request, name, local_hub, tmp_path):
    request.getfixturevalue(name.replace("-", "_"))  # builds the kernel
    hub, lock = local_hub.LocalHub(tmp_path / "store").start(), tmp_path / "lock.py"
    try:
        build = [ROOT / "scripts/build_kernels", "--here", "--kernel", name]
        run(*build)  # the CPU variant exists; this adds torch-universal
        publish = [ROOT / "scripts/publish_kernels", "--kernel", name, "--lock", lock]
        assert "lock.py pins" in run(*publish, "--endpoint", hub.url)
        user = {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"}
        user |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "FLASHCELL_LOCK": str(lock)}
        assert run("-c", USE, name, *KERNELS[name], env=user) == "hub\n"
    finally:
        hub.stop()


@pytest.mark.parametrize("name", KERNELS)
def test_the_card_runs(request, name):
    """The program of a kernel's card, on the built kernel instead of the Hub's."""
    built = request.getfixturevalue(name.replace("-", "_"))
    page = (ROOT / "kernel_builds" / name / "build/CARD.md").read_text()
    load = f"get_local_kernel(__import__('pathlib').Path({str(Path(built.__file__).parent)!r}))"
    code, count = re.subn(r"get_kernel\([^)]*\)", load, pages.program(page))
    assert count == 1
    exec(code.replace("import get_kernel", "import get_local_kernel"), {})


def test_a_second_kernel_from_disk(diagonal_rnn):
    variant = Path(diagonal_rnn.__file__).parent
    # Complete without the variant beside it.
    assert not any(path.is_symlink() for path in variant.rglob("*"))
    env = {**os.environ, "LOCAL_KERNELS": f"flashcell/diagonal-rnn={variant}"}
    name = "diagonal-rnn"
    assert run("-c", USE, name, *KERNELS[name], env=env) == "local\n"


def test_the_build_of_a_checkout(diagonal_rnn, monkeypatch):
    """A checkout's build is used unless LOCAL_KERNELS or FLASHCELL_LOCK names another."""
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_KERNELS", "FLASHCELL_LOCK")}
    tell = "from flashcell import kernel_info; info = kernel_info('diagonal-rnn', 'cpu')\n"
    source, path = run("-c", f"{tell}print(info.source, info.path)", env=env).split()
    assert (source, Path(path)) == ("local", Path(diagonal_rnn.__file__).parent)

    call = ("diagonal-rnn", "flashcell/diagonal-rnn", "cpu")
    for name in ("LOCAL_KERNELS", "FLASHCELL_LOCK"):
        monkeypatch.delenv(name, raising=False)
    _, info = kernel_sources.from_disk(*call)
    assert info.path == Path(diagonal_rnn.__file__).parent
    assert kernel_sources.from_disk(*call[:2], "mps") is None  # no build for mps: no error
    lock = {"FLASHCELL_LOCK": str(ROOT / "modeling/hub/kernels_lock.py")}
    for other in ({"LOCAL_KERNELS": ""}, {"LOCAL_KERNELS": "a/b=/c"}, lock):
        with monkeypatch.context() as changed:
            for name, value in other.items():
                changed.setenv(name, value)
            assert kernel_sources.from_disk(*call) is None, other


@pytest.mark.parametrize(
    ("place", "is_checkout"),
    [
        ("modeling/hub/checkout.py", True),
        ("site-packages/flashcell/hub/checkout.py", False),
        ("flashcell/hub/checkout.py", False),
        ("a/repository/hub_checkout.py", False),
    ],
)
def test_an_installed_or_exported_copy_is_no_checkout(monkeypatch, tmp_path, place, is_checkout):
    """Beside it may lie a folder that somebody else can write to."""
    monkeypatch.delenv("FLASHCELL_LOCK", raising=False)
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / place))
    for root in (tmp_path, (tmp_path / place).parents[2]):
        (root / "kernel_builds/fused-rnn/build").mkdir(parents=True, exist_ok=True)
    found = checkout.build_of_checkout("fused-rnn")
    assert found == (tmp_path / "kernel_builds/fused-rnn/build" if is_checkout else None)


def test_a_second_kernel_that_is_unpublished(tmp_path):
    """ "auto" falls back to its own reference with a warning; a backend asked for by name does not."""
    code = """
import warnings
from flashcell.hub.kernel_loader import KernelUnavailable, load_kernel
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    module = load_kernel("diagonal-rnn", "cpu")
print(module.__name__, [str(w.message) for w in caught if "diagonal-rnn" in str(w.message)])
try:
    load_kernel("diagonal-rnn", "cpu", "cpu")
except KernelUnavailable as error:
    print(error)
"""
    env = {k: v for k, v in os.environ.items() if k != "FLASHCELL_LOCK"} | {"LOCAL_KERNELS": ""}
    first, second = run("-c", code, env=env).splitlines()
    assert first.startswith("flashcell.kernels.diagonal_rnn ['diagonal-rnn runs as the torch")
    assert "flashcell/diagonal-rnn is unpublished" in first
    assert "flashcell/diagonal-rnn is unpublished" in second


def test_universal_variant_is_whole(tmp_path, monkeypatch):
    """The package without a binary is imported from a directory of its own."""
    build = [ROOT / "scripts/build_kernels", "--here", "--backend", "universal", "--out", tmp_path]
    run(*build, "--kernel", "diagonal-rnn")
    code = "import sys, torch\n"
    code += "k = __import__(sys.argv[1]); h, _ = k.flash_gru(torch.ones(1, 2, 3, 4), torch.ones(3, 4))\n"
    code += "print(k.BACKEND, tuple(h.shape))"
    package = tmp_path / "diagonal-rnn/torch-universal"
    (tmp_path / "site").mkdir()
    package.rename(tmp_path / "site/universal_diagonal")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert run("-c", code, "universal_diagonal") == "None (1, 2, 4)\n"
