"""Tests bench/suites/fused_rnn/flashrnn_peer.py with a fake flashrnn package, without a GPU or
compiler."""

import importlib
import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

PACKAGE = {
    "__init__.py": "from .flashrnn import FlashRNNConfig, flashrnn\n",
    "flashrnn/__init__.py": "from .flashrnn import FlashRNNConfig, flashrnn\n",
    "flashrnn/cuda_init.py": "import time\n",
    "flashrnn/flashrnn.py": """
import shutil
from types import SimpleNamespace
from . import cuda_init

searches = []

def get_gpu_info(device_id):
    raise RuntimeError("does not compile on CUDA 13")

def load_parametric_and_test_and_bisect(*, name, model_args, extra_cflags, build_directory, **_):
    cuda_init.time.sleep(10)
    searches.append(name)
    path = f"{build_directory}/{name}_HS{model_args[2]}.so"
    open(path, "w").close()
    return SimpleNamespace(__file__=path, found=True)

class FlashRNNConfig:
    def __init__(self, **options):
        self.__dict__ |= options
        self.hidden_dim = self.num_heads * self.head_dim

    @property
    def defines(self):
        return [f"-D{name}={value}" for name, value in sorted(self.__dict__.items())]

def flashrnn(config):
    get_gpu_info(device_id=0)
    return load_parametric_and_test_and_bisect(
        name=config.function + "_f", extra_cflags=config.defines,
        model_args=(True, config.batch_size, config.hidden_dim, config.num_heads),
    )
""",
}
H200 = SimpleNamespace(
    regs_per_multiprocessor=65536, multi_processor_count=132, shared_memory_per_block_optin=232448
)
NAME = "bench.suites.fused_rnn.flashrnn_peer"


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """Fakes a GPU, cuBLAS under its numbered name, and a flashrnn that needs both; returns the
    module."""
    for name, text in PACKAGE.items():
        path = tmp_path / "site/flashrnn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    maps = "7f00-7f01 r--p 00000000 08:01 5    /opt/nvidia/lib/libcublasLt.so.13\n"
    maps += "7f02-7f03 r--p 00000000 08:01 6    /opt/nvidia/lib/libcublas.so.13\n"
    (tmp_path / "maps").write_text(maps)
    version = importlib.metadata.version
    fakes = {
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "get_device_properties"): lambda device: H200,
        (torch.cuda, "current_blas_handle"): lambda: 0,
        (importlib.metadata, "version"): lambda n: "1.0.8" if n == "flashrnn" else version(n),
    }
    for (owner, name), fake in fakes.items():
        monkeypatch.setattr(owner, name, fake)
    monkeypatch.setenv("FLASHCELL_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_LIB", "as flashrnn sets it")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    # a package that another test imported keeps its builds elsewhere
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    package, _, own = NAME.rpartition(".")
    monkeypatch.setattr(importlib.import_module(package), own, None, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "LOADED", tmp_path / "maps")
    yield module
    for name in [n for n in sys.modules if n == NAME or n.split(".")[0] == "flashrnn"]:
        sys.modules.pop(name)


def test_a_shape_is_built_once_and_kept(peer, monkeypatch):
    loaded = []
    monkeypatch.setattr(peer, "load_library", loaded.append)
    shape = ("lstm", 12, 64, 16)
    assert not peer.is_kept(shape)
    call = peer.flashrnn().flashrnn
    assert call(peer.config(shape)).found
    inner = sys.modules["flashrnn.flashrnn.flashrnn"]
    assert peer.is_kept(shape)
    call(peer.config(shape))
    assert inner.searches == ["lstm_f"]
    (kept,) = loaded
    assert kept.name == "lstm_f_HS768.so"
    assert kept.parent.name.startswith("lstm_f-16-768-12-")
    others = [("slstm", 12, 64, 16), ("lstm", 6, 128, 16), ("lstm", 12, 64, 32)]
    assert not any(map(peer.is_kept, others))
    call(peer.config(others[0]))
    assert inner.searches == ["lstm_f", "slstm_f"]


def test_what_cuda_13_lacks_comes_from_torch(peer):
    peer.flashrnn()
    info = sys.modules["flashrnn.flashrnn.flashrnn"].get_gpu_info(device_id=0)
    assert info == {
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": 65536,
        "multiProcessorCount": 132,
        "sharedMemPerBlockOptin": 232448,
    }
    library = Path(os.environ["CUDA_LIB"]) / "libcublas.so"
    assert os.readlink(library) == "/opt/nvidia/lib/libcublas.so.13"


def test_only_what_is_missing_is_built(peer, monkeypatch, capsys):
    built = []
    run = lambda command, **options: built.append((command[-4:], options["env"]["MAX_JOBS"]))
    monkeypatch.setattr(peer.subprocess, "run", run)
    have = ("lstm", 12, 64, 16)
    peer.flashrnn().flashrnn(peer.config(have))
    peer.build_all([have, ("lstm", 1, 768, 16), ("lstm", 1, 768, 16)])
    assert built == [(["lstm", "1", "768", "16"], "4")]
    assert "compiles 1 modules" in capsys.readouterr().out
    peer.build_all([have])
    assert len(built) == 1


def test_without_flashrnn_it_says_so(peer, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashrnn", None)
    with pytest.raises(peer.Unavailable, match="cannot be imported"):
        peer.flashrnn()
