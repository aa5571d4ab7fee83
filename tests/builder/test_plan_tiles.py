"""scripts/plan_tiles: the published widths, the generated files, and plan.py against csrc/cuda/plan.h."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from commands import load_command
from flashcell.kernels.fused_rnn import plan
from flashcell.kernels.fused_rnn.cells import CELLS
from flashcell.kernels.fused_rnn.explain import explain_plan

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "kernel_builds/fused-rnn/csrc/cuda"
SHARED = ROOT / "kernel_builds"
TILES = ROOT / "kernel_builds/fused-rnn/tiles"


@pytest.fixture(scope="module")
def tool():
    """scripts/plan_tiles as a module; its solver is a development tool, not a dependency."""
    pytest.importorskip("ortools")
    return load_command("plan_tiles")


PROGRAM = r"""
#include <cstdio>

#include "plan.h"
using namespace flashcell::cuda;

int main() {
  Problem p{};
  Device d{};
  int tf32, aligned, sm_90a;
  const char* names[] = {"block", "cluster", "grid", "step"};
  while (std::scanf("%ld %ld %ld %ld %d %d %d %d %d %d %d %d %d", &p.S, &p.T, &p.N, &p.D, &p.gates,
                    &p.io_bytes, &tf32, &aligned, &d.arch, &d.code.arch, &sm_90a, &d.sms,
                    &d.shared_bytes) == 13) {
    p.tf32 = tf32, p.aligned = aligned, d.code.sm_90a = sm_90a;
    const auto forward = grid::forward_shape(p.gates, 4, p.io_bytes);
    const auto backward = grid::backward_shape(p.gates, 4, 7, 4, p.io_bytes);
    const Engine engine = select_engine(p, d);
    std::printf("%s %d %ld %ld %d %d %d %d\n", names[int(engine)], tile_of(engine, p, d),
                long(grid::shared_bytes(forward, p.D)), long(grid::shared_bytes(backward, p.D)),
                grid::takes_wide_tiles(forward, p.S, p.N, p.D, d),
                grid::takes_wide_tiles(backward, p.S, p.N, p.D, d),
                grid::takes_tall_blocks(forward, p.S, p.N, p.D, d),
                grid::takes_tall_blocks(backward, p.S, p.N, p.D, d));
  }
}
"""


H200, B200 = plan.find_device("H200"), plan.find_device("B200")
FOREIGN = (  # a GPU whose library has no code of its own for it
    plan.with_code(H200, "8.0+PTX"),
    plan.with_code(H200, "9.0"),
    plan.with_code(B200, "9.0+PTX"),
    plan.with_code(plan.find_device("RTX 5090"), "9.0+PTX"),
)


def problems():
    widths = (1, 7, 8, 32, 60, 64, 65, 72, 128, 136, 256, 320, 512)
    widths += (768, 1024, 1312, 1408, 2048, 2112, 2304)
    some = itertools.product(widths, (1, 3, 4), (2, 4), (True, False), plan.DEVICES + FOREIGN)
    for i, (D, gates, element, tf32, device) in enumerate(some):
        S, N, T, aligned = (1, 16, 130)[i % 3], (1, 12, 48)[i // 3 % 3], 1 + i % 5, i % 7 > 0
        yield plan.Problem(S, T, N, D, gates, element, tf32, aligned), device


def test_plan_is_the_binarys(tmp_path):
    (tmp_path / "plan.cpp").write_text(PROGRAM)
    command = ["g++", "-std=c++20", f"-I{CSRC}", f"-I{SHARED}", tmp_path / "plan.cpp"]
    subprocess.run([*command, "-o", tmp_path / "plan"], check=True)
    asked = list(problems())
    flat = lambda d: (d.arch, *d.code, d.sms, d.shared_bytes)
    text = "\n".join(" ".join(str(int(v)) for v in (*p, *flat(d))) for p, d in asked)
    done = subprocess.run([tmp_path / "plan"], input=text, capture_output=True, text=True)
    answers = done.stdout.splitlines()
    assert len(answers) == len(asked) > 1000
    for (p, device), answer in zip(asked, answers, strict=True):
        shapes = (
            plan.forward_shape(p.gates, 4, p.io_bytes),
            plan.backward_shape(p.gates, 4, 7, 4, p.io_bytes),
        )
        engine = plan.select_engine(p, device)[0]
        tile = {"block": plan.block_tile, "cluster": plan.cluster_tile}.get(engine, lambda *_: 8)
        ours = [engine, tile(p, device)]
        ours += [plan.grid_shared_bytes(shape, p.D) for shape in shapes]
        ours += [int(plan.takes_wide_tiles(p.S, p.N, p.D, device, b)) for b in (False, True)]
        ours += [int(plan.takes_tall_blocks(p, device))] * 2  # forward, backward
        assert " ".join(map(str, ours)) == answer, (p, device)
    assert {plan.select_engine(p, d)[0] for p, d in asked} == {"block", "cluster", "grid", "step"}


@pytest.mark.parametrize(
    "change", [{"width": 0}, {"batch": -1}, {"heads": 1.0}, {"steps": None}, {"heads": True}]
)
def test_explain_plan_names_what_is_no_size(change):
    call = {"heads": 1, "width": 64, "batch": 16, "dtype": "bfloat16", "arch": "H200"}
    (name, value), *_ = change.items()
    with pytest.raises(ValueError, match=f"{name} is {value}, but must be an int >= 1"):
        explain_plan("lstm", **{**call, **change})
    with pytest.raises(ValueError, match="precision is 'high', but must be one of highest, tf32"):
        explain_plan("lstm", **call, precision="high")


def test_explain_plan_names_engine_and_binding_limit():
    shown = str(explain_plan("lstm", 1, 768, 16, "bfloat16", "sm_90a"))
    assert "lstm 1x768, batch 16, 1024 steps, bfloat16 on H200 (sm_90): grid engine" in shown
    assert "1 heads x 2 groups x 48 thread blocks, 1 launches" in shown
    assert "binding: thread blocks at once" in shown
    assert explain_plan("lstm", 12, 64, 16, "torch.bfloat16", "H100").engine == "block"
    wide = explain_plan("lstm", 1, 2688, 16, "float16", 90)
    assert (wide.engine, wide.refused[-1].unit) == ("step", "bytes")
    assert plan.Limit("thread blocks at once", 168, 132, "SMs") in wide.refused
    assert explain_plan("lstm", 3, 256, 16, "bfloat16", "H200").engine == "cluster"
    full = explain_plan("lstm", 1, 512, 64, "bfloat16", "H200")
    assert (full.engine, full.refused[-1].name) == ("grid", "clusters at once")
    tall = explain_plan("lstm", 1, 768, 128, "bfloat16", "H200")
    assert "1 heads x 4 groups x 32 thread blocks" in str(tall)
    assert "48 thread blocks" in str(explain_plan("gru", 1, 768, 128, "bfloat16", "H200"))
    exact = explain_plan("gru", 1, 64, 16, "float32", "9.0a")
    assert "exact fp32" in exact.refused[0].name
    with pytest.raises(ValueError, match="arch is 'sm_70', but must be one of"):
        plan.find_device("sm_70")
    with pytest.raises(ValueError, match="cell is 'lstmp'"):
        explain_plan("lstmp", 1, 64, 16, "bfloat16", 90)


def test_engines_are_those_of_the_code():
    """What a library without code for 9.0a does on Hopper: no clusters, no wide tiles, no tall blocks."""
    for D, batch in ((336, 3), (200, 1), (256, 16)):
        call = ("lstm", 1, D, batch, "bfloat16", "H200")
        assert explain_plan(*call).engine == explain_plan(*call, code="9.0").engine == "cluster"
        shown = explain_plan(*call, code="8.0+PTX")
        assert shown.engine == "grid"
        assert "code: compiled for sm_80" in str(shown)
        assert "thread blocks of a cluster" in str(shown.refused)
    call = ("lstm", 1, 768, 129, "bfloat16", "H200")
    assert "32 thread blocks" in str(explain_plan(*call))
    for code in ("8.0", "9.0"):
        assert "48 thread blocks" in str(explain_plan(*call, code=code))
        assert "two at a time" not in str(explain_plan(*call, code=code))
    assert plan.cluster_limits(plan.Problem(1, 9, 1, 512, 4, 2), FOREIGN[3])[1].limit == 8
    for code in ("10.0", "sm_80", "9.0b", "", 80, "8.0a"):
        with pytest.raises(ValueError, match=r"code is .*, but must be an arch that"):
            explain_plan(*call, code=code)


def test_block_engine_fits_every_arch():
    """Any arch's thread block can ask for what the block engine's passes take."""
    least = min(device.shared_bytes for device in plan.DEVICES)
    for cell, element, width in itertools.product(CELLS.values(), (2, 4), (32, 64, 128)):
        for direction in ("forward", "backward"):
            if width * element <= plan.BLOCK["row_bytes"]:
                used = plan.block_shared_bytes(cell, width, element, direction)
                assert used <= least, (cell.name, element, width, direction)


def test_published_widths(tool):
    from tiles import published as flashrnn

    for gpu in flashrnn.GPUS:
        assert tuple(flashrnn.widths(gpu.sms, gpu.shared_bytes)) == gpu.published, gpu.name
    assert max(flashrnn.GPUS[-1].published) == 2688


def test_model_counts_memory_as_the_kernel_does(tool):
    """The widest head the constraint problem accepts with the build's tiles is select_engine's."""
    from tiles import model

    pins = dict(plan.GRID)
    for name, gates, element in (("A100", 4, 2), ("A40", 4, 2), ("H200", 3, 4), ("H200", 4, 4)):
        device = plan.find_device(name)
        shapes = (
            plan.forward_shape(gates, 4, element),
            plan.backward_shape(gates, 4, 7, 4, element),
        )
        for D in range(512, 1793, 64):
            cases = [model.Case(shape, D, device) for shape in shapes]
            limits = plan.grid_limits_of_every_cell(gates, element, D, device)
            fits = all(limit.holds for limit in limits)
            assert (model.solve(cases, pins) is not None) == fits, (name, gates, element, D)


def test_pins_and_measured_registers_decide(tool):
    from tiles import model

    shape, device = plan.forward_shape(4, 2, 2), plan.find_device("H200")
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
