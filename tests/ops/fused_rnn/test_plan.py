"""Tests explain_plan: the binary's planner against the functions that the CUDA launches call."""

import random
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

from flashcell.kernels import fused_rnn as reference
from flashcell.kernels.fused_rnn.cells import CELLS
from flashcell.kernels.fused_rnn.devices import DEVICES, Device, find_device, with_code
from flashcell.kernels.fused_rnn.explain import Limit, explain_with

BUILDS = Path(__file__).resolve().parents[3] / "kernel_builds"
H200, B200, RTX_5090 = (find_device(name) for name in ("H200", "B200", "RTX 5090"))
FOREIGN = (  # GPUs with a library that has no code of its own for them
    with_code(H200, "7.5+PTX"),
    with_code(H200, "8.0+PTX"),
    with_code(H200, "9.0"),
    with_code(B200, "9.0+PTX"),
    with_code(RTX_5090, "9.0+PTX"),
)
WIDTHS = (1, 7, 8, 32, 60, 64, 65, 72, 128, 136, 256, 320, 512)
WIDTHS += (768, 1024, 1312, 1408, 2048, 2112, 2304)
ALL = ("engine", "runs", "instead_of", "tile", "thread_blocks", "width", "clusters", "members")
ALL += ("units", "backward", "tiles", "takes_turns", "launches", "saving.tile", "saving.units")
ALL_PASSES = ("threads", "shared_bytes", "units", "warps", "split", "tile", "members", "launches")
ALL_PASSES += ("heads", "groups", "tiles", "chunks_held", "chunks_shared")


WAYS = ("forward", "backward")
NAMES = ("cell", "sequences", "steps", "heads", "width", "element_bytes", "tf32")
NAMES += ("arch", "code_arch", "code_is_sm_90a", "sms", "shared_bytes")  # arguments of the op


@pytest.fixture(scope="module")
def directly(tmp_path_factory):
    """Returns the fields of many calls at once, from planner.cpp."""
    program = tmp_path_factory.mktemp("planner") / "planner"
    include = [f"-I{BUILDS}", f"-I{BUILDS / 'fused-rnn/csrc'}"]
    source = Path(__file__).with_name("planner.cpp")
    subprocess.run(["g++", "-std=c++20", "-Wall", *include, source, "-o", program], check=True)

    def ask(calls: list) -> list[dict[str, str]]:
        lines = "\n".join(
            " ".join(str(v if isinstance(v, str) else int(v)) for v in c) for c in calls
        )
        done = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
        answers = done.stdout.strip().split("\n\n")
        return [dict(line.split(" ", 1) for line in answer.splitlines()) for answer in answers]

    return ask


def arguments(cell: str, S: int, T: int, N: int, D: int, e: int, tf32: bool, d: Device) -> tuple:
    """Returns the arguments of the op explain_plan."""
    return (cell, S, T, N, D, e, tf32, d.arch, *d.code, d.sms, d.shared_bytes)


def random_calls(count: int) -> list[tuple]:
    draw = random.Random(0)
    devices = (*DEVICES, *FOREIGN, *[H200] * 4)
    return [
        arguments(
            draw.choice(list(CELLS)),
            draw.choice((1, 3, 16, 64, 130, 600)),
            draw.choice((1, 2, *[1024] * 8)),
            draw.choice((1, 1, 2, 12, 48)),
            draw.choice((draw.choice(WIDTHS), 8 * draw.randint(1, 300))),
            draw.choice((2, 2, 4)),
            draw.choice((True, True, False)),
            draw.choice(devices),
        )
        for _ in range(count)
    ]


def test_every_field_is_what_the_launch_does(fused_rnn, directly):
    calls = random_calls(2000)
    calls += [arguments("lstm", S, 9, 1, 768, 2, False, H200) for S in (16, 64, 129, 600)]
    seen: set[str] = set()
    for call, wanted in zip(calls, directly(calls), strict=True):
        text = fused_rnn.dispatch.ops.explain_plan(*call)
        rows = [line.split("\t") for line in text.splitlines()]
        fields = {row[0]: row[1] for row in rows if row[0] not in ("limit", "refused")}
        assert fields == wanted, call
        limits = {row[1]: row[2:] for row in rows if row[0] == "limit"}
        for way in WAYS:
            if f"{way}.shared_bytes" in fields:
                used, most, unit = limits[f"{way} shared memory"]
                assert (used, int(most), unit) == (fields[f"{way}.shared_bytes"], call[-1], "bytes")
                assert int(used) <= int(most), call
        block = "block" in (fields["engine"], fields.get("instead_of"))  # no engine comes before it
        assert bool([r for r in rows if r[0] == "refused"]) == (not block), call
        seen |= {fields["engine"], *fields, *(f"{way}.{fields.get(f'{way}.tile')}" for way in WAYS)}
    assert {"block", "cluster", "grid", "step", "gemm", "fma", "batch", "wide"} <= seen
    assert {"forward.8", "forward.16", "backward.16"} <= seen
    assert {f"{way}.{name}" for way in WAYS for name in ALL_PASSES} | set(ALL) <= seen


def test_the_plan_of_a_tall_head(fused_rnn):
    """Blocks of 24 units, which the grid engine uses if they allow more groups."""
    plan = fused_rnn.explain_plan("lstm", 1, 768, 64, "bfloat16", "H200")
    found = plan.engine, plan.fields["forward.members"], plan.fields["forward.chunks_held"]
    assert found == ("grid", "32", "2")
    assert Limit("forward shared memory", 124288, 232448, "bytes") in map(tuple, plan.limits)
    assert "1 heads x 4 groups x 32 thread blocks, 1 launches" in str(plan)
    assert "2 in registers, 1 in shared memory" in str(plan)


def test_it_names_engine_and_binding_limit(fused_rnn):
    explain_plan = fused_rnn.explain_plan
    shown = str(explain_plan("lstm", 1, 768, 16, "bfloat16", "sm_90a"))
    assert "lstm 1x768, batch 16, 1024 steps, bfloat16 on H200 (sm_90): grid engine" in shown
    assert "1 heads x 2 groups x 48 thread blocks, 1 launches" in shown
    assert explain_plan("lstm", 12, 64, 16, "torch.bfloat16", "H100").engine == "block"
    wide = explain_plan("lstm", 1, 2688, 16, "float16", 90)
    assert (wide.engine, wide.refused[-1].unit) == ("gemm", "bytes")
    assert ("thread blocks at once", 168, 132, "SMs") in map(tuple, wide.refused)
    assert explain_plan("lstm", 3, 256, 16, "bfloat16", "H200").engine == "cluster"
    full = explain_plan("lstm", 1, 512, 64, "bfloat16", "H200")
    assert (full.engine, full.refused[-1].name) == ("grid", "clusters at once")
    assert "48 thread blocks" in str(explain_plan("gru", 1, 768, 128, "bfloat16", "H200"))
    most = {
        S: explain_plan("lstm", 1, 320, S, "float32", "H100").engine for S in (524_280, 524_281)
    }
    assert most == {524_280: "gemm", 524_281: "step"}  # 65,535 rows of thread blocks
    exact = explain_plan("gru", 1, 64, 16, "float32", "9.0a")
    assert (exact.engine, exact.fields["instead_of"]) == ("fma", "step")
    assert "exact fp32" in exact.refused[0].name
    assert "16 thread blocks, 1 sequences each" in str(exact)
    assert "2 clusters of 7 thread blocks" in str(explain_plan("lstm", 1, 200, 2, "float32", 90))
    for S, told in ((56, "56 clusters"), (100, "50 clusters"), (133, "34 clusters")):
        many = explain_plan("rnn_tanh", 1, 200, S, "float32", 90)
        assert f"{told} of 2 thread blocks, {-(-S // int(told[:2]))} sequences each" in str(many)
    for S, told in ((64, "64 clusters"), (100, "50 clusters"), (133, "34 clusters")):
        many = explain_plan("gru", 1, 100, S, "float32", 90)
        assert f"{told} of 2 thread blocks, {-(-S // int(told[:2]))} sequences each" in str(many)
    old = explain_plan("rnn_tanh", 1, 128, 199, "float32", "A100")
    assert "50 thread blocks, 4 sequences each" in str(old)
    large = explain_plan("lstm", 1, 1152, 1024, "bfloat16", "H100")
    assert (large.engine, large.fields["instead_of"]) == ("batch", "gemm")
    assert "256 of 128 sequences x 36 units, which two warpgroups take in turns" in str(large)
    assert "backward pass: gemm engine" in str(large)
    assert explain_plan("lstm", 1, 1152, 1024, "bfloat16", "A100").engine == "gemm"
    assert explain_plan("lstm", 1, 1152, 1024, "float32", "H100").engine == "gemm"
    tf32 = explain_plan("lstm", 1, 1152, 1024, "float32", "H100", precision="tf32")
    assert (tf32.engine, tf32.fields["instead_of"]) == ("batch", "gemm")
    assert "232 of 128 sequences x 40 units" in str(tf32)
    tf32 = explain_plan("gru", 1, 768, 1024, "float32", "H100", precision="tf32")
    assert (tf32.engine, tf32.fields["units"]) == ("batch", "32")
    few = explain_plan("lstm", 1, 1024, 256, "float32", "H100", precision="tf32")
    assert (few.engine, few.fields["tile"], few.fields["units"]) == ("batch", "128", "16")
    elman = explain_plan("rnn_tanh", 1, 1152, 1024, "float32", "H100", precision="tf32")
    assert (elman.engine, elman.fields["instead_of"]) == ("batch", "gemm")
    old = explain_plan("lstm", 1, 200, 2, "float32", "A100")
    assert (old.engine, old.refused[-1].name) == ("step", "thread blocks of a cluster")
    wide = explain_plan("lstm", 1, 260, 2, "float32", 90)
    assert (wide.engine, wide.refused[-1].name) == ("wide", "width of a head in fp32 registers")
    assert "1 heads x 1 groups x 130 thread blocks, 1 launches" in str(wide)
    large = explain_plan("lstm", 1, 2048, 2, "float32", 90)  # 64 MB of weights
    assert (large.engine, large.fields["forward.held"]) == ("wide", "768")
    for width, S, gpu, steps, refused in (
        (2304, 2, 90, 16, ("weights and sequences that the thread blocks do not hold", 1, 0, "")),
        (260, 2, "B200", 16, ("code for other archs than 9.0a", 1, 0, "")),
        (260, 101, 90, 16, ("sequences of exact fp32", 101, 100, "sequences")),
        (260, 2, 90, 5, ("steps too few for exact fp32", 3, 0, "steps")),
        (2048, 2, 90, 15, ("steps too few for exact fp32", 1, 0, "steps")),
    ):
        plan = explain_plan("lstm", 1, width, S, "float32", gpu, steps)
        assert (plan.engine in ("step", "gemm"), plan.refused[-1]) == (True, refused)
    turing = explain_plan("lstm", 1, 64, 16, "float32", "T4", precision="tf32")
    assert (turing.engine, turing.fields["instead_of"]) == ("fma", "step")
    assert "exact fp32" in turing.refused[0].name
    turing = explain_plan("lstm", 1, 256, 16, "float16", "T4")
    assert (turing.engine, turing.engines) == ("step", ("step", "gemm"))
    assert [limit.name for limit in turing.refused] == [
        "row of the weight in registers",
        "thread blocks of a cluster",
        "barriers in shared memory, of code for 8.0 or later",
    ]
    with pytest.raises(ValueError, match="arch is 'sm_70', but must be one of"):
        find_device("sm_70")
    with pytest.raises(ValueError, match="cell is 'lstmp'"):
        explain_plan("lstmp", 1, 64, 16, "bfloat16", 90)


def test_engines_are_those_of_the_code(fused_rnn):
    """A library without code for 9.0a uses no clusters, wide tiles or tall blocks on Hopper."""
    explain_plan = fused_rnn.explain_plan
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
        assert "of 16 sequences" not in str(explain_plan(*call, code=code))
    foreign = explain_plan("lstm", 1, 512, 1, "bfloat16", "RTX 5090", code="9.0+PTX")
    assert ("thread blocks of a cluster", 16, 8, "blocks") in map(tuple, foreign.refused)
    foreign = explain_plan("lstm", 1, 64, 16, "bfloat16", "H200", code="7.5+PTX")
    assert foreign.engine == "block"
    assert foreign.limits[0].limit == 65536  # what a GPU of 7.5 has
    for code in ("10.0", "sm_80", "9.0b", "", 80, "8.0a"):
        with pytest.raises(ValueError, match=r"code is .*, but must be an arch that"):
            explain_plan(*call, code=code)


@pytest.mark.parametrize(
    "change", [{"width": 0}, {"batch": -1}, {"heads": 1.0}, {"steps": None}, {"heads": True}]
)
def test_it_names_what_is_no_size(fused_rnn, change):
    call = {"heads": 1, "width": 64, "batch": 16, "dtype": "bfloat16", "arch": "H200"}
    (name, value), *_ = change.items()
    with pytest.raises(ValueError, match=f"{name} is {value}, but must be an int >= 1"):
        fused_rnn.explain_plan("lstm", **{**call, **change})
    with pytest.raises(ValueError, match="precision is 'high', but must be one of highest, tf32"):
        fused_rnn.explain_plan("lstm", **call, precision="high")


def test_the_op_refuses_what_is_no_call(fused_rnn):
    """Callers of the op itself get an error that names the argument; nothing overflows or divides
    by 0."""
    values = arguments("lstm", 16, 9, 1, 768, 2, False, H200)
    good = dict(zip(NAMES, values, strict=True))
    op = fused_rnn.dispatch.ops.explain_plan
    most = dict.fromkeys(("sequences", "steps", "heads", "width", "shared_bytes"), 2**31 - 1)
    assert op(**{**good, **most}).startswith("engine\tstep\n")
    assert op(**{**good, **most, "width": 768}).startswith("engine\tgrid\n")
    wrong = {"cell": ["", "LSTM", "lstm\t"], "element_bytes": [0, 1, 8]}
    wrong |= {"tf32": [], "code_is_sm_90a": []}  # torch's own errors
    for name in NAMES:
        for value in wrong.get(name, [0, -1, 2**31, 2**63 - 1]):
            with pytest.raises(RuntimeError, match=f"{name} is .*, but must be"):
                op(**{**good, name: value})


def test_a_copy_without_binary_says_so():
    with pytest.raises(RuntimeError, match="the planner is a part of the kernel's binary"):
        reference.explain_plan("lstm", 1, 64, 16, "bfloat16", "H200")


def test_block_engine_fits_every_arch(fused_rnn):
    """Any arch's thread block may have the memory that the block engine's passes need."""
    least = min(device.shared_bytes for device in DEVICES if device.arch >= 80)
    planner = fused_rnn.dispatch.ops.explain_plan
    calls = [("A40", *c) for c in ((32, "float32"), (64, "float32"), (128, "bfloat16"))]
    calls += [("T4", width, dtype) for width in (32, 64) for dtype in ("float16", "bfloat16")]
    for cell, (gpu, width, dtype) in product(CELLS, calls):
        plan = explain_with(planner, cell, 1, width, 100, dtype, gpu, precision="tf32")
        assert plan.engine == "block"
        most = 65536 if gpu == "T4" else least
        assert [limit.used <= most for limit in plan.limits] == [True, True], plan


def test_the_guides_table_of_engines(fused_rnn):
    """The widest head of an LSTM that each engine takes on each GPU, as README.md says."""
    planner = fused_rnn.dispatch.ops.explain_plan
    widths = range(16, 2700, 16)

    def widest(gpu: str, dtype: str) -> dict[str, str]:
        plans = (
            explain_with(planner, "lstm", 1, width, 16, dtype, gpu, precision="tf32")
            for width in widths
        )
        return {plan.engine: str(width) for plan, width in zip(plans, widths, strict=True)}

    page = (BUILDS / "fused-rnn/README.md").read_text().split("## How it runs")[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.match(r"\| .*\(sm_\d+\) \|", line)
    ]
    assert [row[0].rpartition(" (")[0] for row in rows] == [
        *("T4", "A100", "RTX 3090", "RTX 4090", "H100, H200", "B200", "RTX 5090")
    ]
    for names, *cells in rows:
        gpus, arch = names.split(" (sm_")
        for gpu in gpus.split(", "):
            assert find_device(gpu).arch == int(arch.rstrip(")"))
            half, tf32 = widest(gpu, "bfloat16"), widest(gpu, "float32")
            for engine, said in zip(("block", "cluster", "grid"), cells, strict=True):
                both = f"{half.get(engine, '-')} ({tf32.get(engine, '-')})"
                assert said == both.replace("- (-)", "-"), (gpu, engine)


def test_a_gpu_with_few_multiprocessors_has_a_plan(fused_rnn):
    """Fewer than a cluster needs, as a part of a GPU may have."""
    for cell, exact, width in product(("lstm", "gru"), (False, True), (64, 128, 200, 256)):
        size = 4 if exact else 2
        call = (cell, 4, False, 100, 1000, width, size, not exact, 90, 90, True, 16, 232448)
        assert fused_rnn.dispatch.ops.plan_layers(*call) >= 0
