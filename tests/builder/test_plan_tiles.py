"""Tests scripts/plan_tiles: published widths, generated files, and the memory that the model
counts."""

import subprocess
import sys
from pathlib import Path

import pytest

from commands import load_command
from flashcell.kernels.fused_rnn.devices import find_device
from flashcell.kernels.fused_rnn.tiles import GRID

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    """scripts/plan_tiles as a module; its solver is a development tool, not a dependency."""
    pytest.importorskip("ortools")
    return load_command("plan_tiles")


def test_published_widths(tool):
    from tiles import published as flashrnn

    for gpu in flashrnn.GPUS:
        assert tuple(flashrnn.widths(gpu.sms, gpu.shared_bytes)) == gpu.published, gpu.name
    assert max(flashrnn.GPUS[-1].published) == 2688


def test_model_counts_memory_as_the_kernel_does(tool):
    """The widest head that the constraint problem accepts with the build's tiles is the planner's."""
    from tiles import model
    from tiles.planner import Planner
    from tiles.sizes import backward_shape, forward_shape

    planner, dtypes = Planner(), {2: "bfloat16", 4: "float32"}
    cells = {3: "gru", 4: "lstm"}
    for name, gates, element in (("A100", 4, 2), ("A40", 4, 2), ("H200", 3, 4), ("H200", 4, 4)):
        device = find_device(name)
        shapes = (forward_shape(gates, 4, element), backward_shape(gates, 4, 7, 4, element))
        for D in range(512, 1793, 64):
            cases = [model.Case(shape, D, device) for shape in shapes]
            call = (cells[gates], 1, D, 16, dtypes[element], name)
            fits = "grid" in planner.explain(*call, precision="tf32").engines
            assert (model.solve(cases, GRID) is not None) == fits, (name, gates, element, D)


def test_pins_and_measured_registers_decide(tool):
    from tiles import model
    from tiles.sizes import forward_shape

    shape, device = forward_shape(4, 2, 2), find_device("H200")
    free = model.solve([model.Case(shape, 2048, device)], {})
    assert (free.values["units"], free.values["warps"]) == (16, 8)
    measured = model.solve([model.Case(shape, 2048, device, working=140)], {})
    assert measured.values["held"] < free.values["held"]
    assert model.solve([model.Case(shape, 768, device)], {"units": 32, "warps": 8}) is None
    assert model.solve([model.Case(shape, 768, device)], {"stages": 3}).values["stages"] == 3


LOG = """
ptxas info    : Compiling entry function '_ZN9flashcell4cuda12block_kernelINS0_12BlockForwardINS_3RnnINS_4TanhEEE6__halfLi128ELi2ELb0EEENS_13ForwardParamsEEEvT0_' for 'sm_90a'
ptxas info    : Function properties for _ZN9flashcell4cuda12block_kernelINS0_12BlockForwardINS_3RnnINS_4TanhEEE6__halfLi128ELi2ELb0EEENS_13ForwardParamsEEEvT0_
    64 bytes stack frame, 64 bytes spill stores, 100 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 64 bytes cumulative stack size
ptxas info    : Compiling entry function '_ZN9flashcell4cuda4grid11grid_kernelINS1_12BackwardPassINS_4LstmE13__nv_bfloat16EENS_14BackwardParamsEEEvT0_NS1_5RangeE' for 'sm_86'
ptxas info    : Function properties for _ZN9flashcell4cuda4grid11grid_kernelINS1_12BackwardPassINS_4LstmE13__nv_bfloat16EENS_14BackwardParamsEEEvT0_NS1_5RangeE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 254 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z11fill_kernelv' for 'sm_86'
ptxas info    : Used 20 registers
"""


def test_log_of_ptxas(tool, tmp_path):
    from tiles import ptxas

    measured = ptxas.parse(LOG, held=128)
    assert measured == {
        (90, "block-forward-rnn_tanh-16-128"): (64, 100, 128),
        (86, "grid-backward-lstm-16"): (254, 0, 128),
    }
    ptxas.write(tmp_path / "registers.csv", measured)
    assert ptxas.read(tmp_path / "registers.csv") == measured


@pytest.mark.slow
def test_generated_files_are_fresh(tool):
    command = [sys.executable, ROOT / "scripts/plan_tiles", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_shape_with_a_pin(tool):
    command = [sys.executable, ROOT / "scripts/plan_tiles", "--cell", "lstm", "--pin"]
    done = subprocess.run([*command, "stages=4"], capture_output=True, text=True)
    assert "engine=grid units=16 warps=8 tiles=8 stages=4" in done.stdout, done.stderr
    done = subprocess.run([*command, "colour=4"], capture_output=True, text=True)
    assert "--pin is 'colour=4', but must be NAME=NUMBER" in done.stderr
