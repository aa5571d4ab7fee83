"""Without any one private name of torch or transformers, the documented thing happens."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flashcell
from flashcell.hub import kernel_loader
from flashcell.utils import private_names
from model_cases import cpu_only

pytestmark = cpu_only
ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("missing_names_worker.py")
worker = runpy.run_path(str(WORKER))
SOURCES = (
    "modeling/utils/private_names.py",
    "kernel_builds/common/python/private_names.py",
)
# name -> what differs: decoding has no recorded step, or generate runs transformers' loop
EAGER = {
    "torch._C._are_functorch_transforms_active",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._push_on_torch_dispatch_stack",
    "torch._C._pop_torch_dispatch_stack",
    "torch.autograd.forward_ad._current_level",
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._device.DeviceContext",
    "torch.utils._python_dispatch.TorchDispatchMode",
    *("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_schema"),
}
LOOP = {"_sample", "_prefill", "_pad_token_tensor", "_is_user_defined"}
LOOP |= {"StopCheck", "DeferredStopCheck"}
ERROR = {"_init_weights", "_tied_weights_keys"}
ERROR |= {name for name in worker["cases"]() if name.startswith(("cache_utils.", "utils."))}
NAMES = sorted(worker["cases"]())


@pytest.fixture(scope="module")
def behaviour(fused_rnn, diagonal_rnn, tfla) -> dict:
    folders = (f"flashcell/{name}={ROOT / 'kernel_builds' / name}" for name in worker["KERNELS"])
    env = {"LOCAL_KERNELS": ":".join(folders), **os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, WORKER]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line["name"]: line for line in lines}
    assert found.keys() == {"", *NAMES}, done.stderr[-3000:]
    return found


def test_with_all_names(behaviour):
    usual = behaviour[""]
    assert usual["warnings"] == []
    assert usual["error"] is None
    assert usual["found"]["RNN path"] == usual["found"]["XLSTM path"] == "tape"
    assert usual["found"]["own loop"] == 2
    assert any(any(row) for step in usual["found"]["forward mode"] for row in step)


@pytest.mark.parametrize("name", NAMES)
def test_without(name, behaviour):
    row, usual = behaviour[name], behaviour[""]["found"]
    assert "failed" not in row, row["failed"]
    last = name.rpartition(".")[2]
    if name in ERROR:
        assert row["warnings"] == []
        assert re.search(rf"\b{last}\b", row["error"])
        return
    assert row["error"] is None
    assert len(row["warnings"]) == 1, row["warnings"]
    assert re.search(rf"\b{last}\b", row["warnings"][0])
    found = dict(row["found"])
    paths = {found.pop(f"{family} path") for family in ("RNN", "XLSTM")}
    reasons = {found.pop(f"{family} reason") for family in ("RNN", "XLSTM")}
    loops = found.pop("own loop")
    if last == "_current_level":  # a transform may hide tangents then, so the reference runs
        got, want = (torch.tensor(row["transform"]) for row in (found, usual))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        del found["transform"]
    assert found == {key: usual[key] for key in found}, "another result"
    if name in EAGER:
        assert paths == {"plain"}
        assert last in reasons.pop()
        assert loops in (0, 2)
    else:
        assert paths == {"tape"}
        assert reasons == {None}
        assert loops == (0 if name in LOOP else 2)


def test_every_name_is_taken_away():
    tried = {name.rpartition(".")[2] for name in NAMES} | set(private_names.NEW)
    for source in SOURCES:
        tree = ast.parse((ROOT / source).read_text())
        for node in ast.walk(tree):
            text = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", "")
            if isinstance(text, str) and re.fullmatch(r"(\w+\.)*_{1,2}[a-zA-Z]\w*(?<!__)", text):
                last = text.rpartition(".")[2]
                assert last in tried, f"{source}:{node.lineno}: {text}"


def test_every_override_of_a_private_name_is_listed():
    """Every private name that our classes override in torch or transformers is in a list."""
    listed = {name for _, name in private_names.READ} | set(private_names.NEW)
    listed |= {"_sample", "_init_weights", "_tied_weights_keys"}
    kinds = [getattr(flashcell, name) for name in dir(flashcell)]
    kinds = {k for kind in kinds if isinstance(kind, type) for k in kind.__mro__}
    ours = [k for k in kinds if k.__module__.startswith("flashcell.")]
    assert any(k.__name__ == "RecurrentGeneration" for k in ours)
    for kind in ours:
        bases = [k for k in kind.__mro__ if not k.__module__.startswith("flashcell.")]
        for name in vars(kind):
            if re.match(r"_[a-zA-Z]", name) and any(name in vars(base) for base in bases):
                assert name in listed or name == "_abc_impl", f"{kind.__name__}.{name}"


def test_the_loader_is_a_constant_to_dynamo():
    """assume_constant_result, whose import of Dynamo the loader saves, sets the same attribute."""

    def function():
        return 1

    torch.compiler.assume_constant_result(function)
    (name,) = vars(function)
    assert getattr(kernel_loader._load_once, name) is True


def test_own_parameters():
    """private_names.parameters_of returns what named_parameters does."""
    layer = nn.LSTM(3, 4)
    want = [p for _, p in layer.named_parameters(recurse=False)]
    got = private_names.parameters_of(layer)
    assert len(got) == len(want)
    assert all(a is b for a, b in zip(got, want, strict=True))
