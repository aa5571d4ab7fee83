"""Tests tfla's CUDA kernels without a GPU: tests/emulator runs them, with the bounds of the CPU
engine.

Every call runs twice, threads, blocks and copies in either order: the results are bitwise the same.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import emulate
from cases import DEVICE, upcast
from flashcell.kernels import tfla as reference
from mlstm_cases import CASES, Case, make
from numerics import assert_bitwise, assert_close
from ops.tfla import test_bf16, test_cuda, test_nan
from ops.tfla import test_epilogue as epilogue
from ops.tfla import test_reset as reset
from ops.tfla import test_sequence as tests

ROOT = Path(__file__).resolve().parents[3]
SANITIZE = "FLASHCELL_EMULATOR_SANITIZE"
ORDERS = ("", "backwards early", "backwards", "early")
DTYPES = [torch.bfloat16, torch.float32]
TILES = [
    Case(2, 131, 1, 40, 136, ("state",), 64),
    Case(1, 130, 1, 136, 24, ("state", "reset"), 128),
    Case(1, 300, 1, 16, 8, ("state",), 256),
    Case(1, 200, 2, 32, 32, ("state",), 64, 10.0, -2.0),
]
FAST = [case for case in CASES if case.T <= 45 and max(case.K, case.V) < 1024] + TILES
pytestmark = [
    pytest.mark.skipif(not emulate.SUPPORTED, reason="the emulator needs Linux on x86_64"),
    pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU to run the kernels"),
    pytest.mark.usefixtures("poisoned", "no_float64"),
]


@pytest.fixture(scope="session")
def tfla():
    from kernels import get_local_kernel

    sanitize = SANITIZE in os.environ
    home = Path(os.environ.get("FLASHCELL_HOME") or ROOT / ".flashcell").resolve()
    out = home / "emulated" / ("tfla-sanitized" if sanitize else "tfla")
    emulate.build(ROOT / "kernel_builds/tfla", out, sanitize)
    return get_local_kernel(out, backend="cpu")


@pytest.fixture(params=["exp", "sigmoid"])
def cell(request):
    return request.param


@pytest.fixture
def no_float64(monkeypatch):
    """Uses the widest dtype that CUDA has, as on a GPU."""
    monkeypatch.setattr(tests, "EXACT", torch.float32)
    monkeypatch.setattr(tests, "DOUBLE", False)


@pytest.fixture
def order(monkeypatch):
    return lambda words: monkeypatch.setenv("FLASHCELL_EMULATOR", words)


def run_orders(tfla, order, call, given, orders=ORDERS[:2], device=""):
    """Returns the first order's results, after comparing the others bitwise."""
    results = []
    for words in orders:
        order(f"{words} {device}")
        results.append(tests.run(tfla, call, given, backend="cpu"))
    for words, other in zip(orders[1:], results[1:], strict=True):
        for key, value in other.items():
            assert_bitwise(f"{key}, {words}", value, results[0][key])
    return results[0]


def check_case(tfla, order, cell, case, dtype, **options):
    call = make(cell, case, dtype)
    given = tests.upstream(call, dtype)
    got = run_orders(tfla, order, call, given, **options)
    near, exact = tests.run(tests.Peer, call, given), tests.run(reference, upcast(call), given)
    assert got.keys() == exact.keys()
    lost = 2**-25 if dtype == torch.float16 else 0.0  # half of the smallest step of an operand
    for key in exact:
        if near[key].isfinite().all():  # operands of fp16 overflow in the reference too at i = 10
            tests.assert_near(key, key, got[key], exact[key], near[key], dtype, case.T == 1, lost)


@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=tests.short)
@pytest.mark.parametrize("case", FAST, ids=str)
def test_as_exact_as_the_reference_in_any_order(tfla, order, cell, case, dtype):
    check_case(tfla, order, cell, case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=tests.short)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cell", ["exp", "sigmoid", "sigmoid floor"])
def test_every_case_in_every_order(tfla, order, cell, case, dtype):
    check_case(tfla, order, cell, case, dtype, orders=ORDERS)


@pytest.mark.parametrize("dtype", DTYPES, ids=tests.short)
def test_a_smaller_gpu_has_shorter_chunks(tfla, order, cell, dtype):
    """Results are right on a GPU with 99 KB of shared memory, as sm_86 and sm_120 have."""
    check_case(
        tfla, order, cell, Case(1, 300, 1, 24, 16, ("state",), 256), dtype, device="shared=99"
    )


@pytest.mark.parametrize("case", TILES, ids=str)
def test_without_wgmma(tfla, order, cell, case):
    check_case(tfla, order, cell, case, torch.bfloat16, device="arch=80")


@pytest.mark.thin
@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize("options", [("state", "reset"), ("state", "lengths", "hold")], ids=str)
def test_few_processors_take_many_parts_each(tfla, order, cell, options, processors):
    """In the backward a few blocks of rows are left for each."""
    case = Case(2, 300, 2, 136, 264, options, 256)
    check_case(tfla, order, cell, case, torch.bfloat16, device=f"processors={processors}")


@pytest.mark.parametrize("masks", test_cuda.KEPT, ids=str)
def test_backward_from_kept_states(tfla, cell, masks):
    test_cuda.test_backward_from_kept_states(tfla, cell, masks)


def test_a_row_that_has_most_of_the_gradient(tfla):
    test_bf16.test_a_row_that_has_most_of_the_gradient(tfla)


def test_segments_join(tfla, order):
    """Results are right with one segment (on one SM) and across the border of two (on many)."""
    call = make("exp", Case(1, 1100, 2, 16, 8, ("state",), 64, f=6.0), torch.float32)
    given = tests.upstream(call, torch.float32)
    exact = tests.run(reference, upcast(call), given)
    for processors, orders in ((1, ORDERS[:1]), (132, ORDERS[:2])):
        device = f"processors={processors}"
        got = run_orders(tfla, order, call, given, orders=orders, device=device)
        for key in exact:
            assert_close(f"{key}, {device}", got[key].double(), exact[key], 4e-5)


@pytest.mark.parametrize("words", ORDERS[:2])
@pytest.mark.parametrize("dtype", DTYPES, ids=tests.short)
def test_step(tfla, order, cell, dtype, words):
    order(words)
    tests.test_step(tfla, cell, dtype)


@pytest.mark.parametrize("case", test_cuda.STEPS[-2:], ids=str)
def test_step_of_usual_widths(tfla, order, cell, case):
    for words, dtype in zip(ORDERS[:2], DTYPES, strict=True):
        order(words)
        test_cuda.test_tiny(tfla, cell, "step", case, dtype)


@pytest.mark.parametrize("size", epilogue.SIZES, ids=str)
@pytest.mark.parametrize("parts", epilogue.PARTS, ids="-".join)
def test_epilogue(tfla, order, parts, size):
    for words, dtype in zip(ORDERS[:2], DTYPES, strict=True):
        order(words)
        epilogue.test_as_exact_as_the_reference(tfla, parts, size, dtype)


def test_epilogue_without_rows(tfla):
    epilogue.test_no_rows_add_nothing_to_the_weight(tfla)


@pytest.mark.parametrize("parts", [epilogue.PARTS[k] for k in (0, 3, 5)], ids="-".join)
@pytest.mark.parametrize("V", epilogue.WIDTHS)
def test_epilogue_of_a_step(tfla, cell, order, parts, V):
    for words, dtype in zip(ORDERS[:2], DTYPES, strict=True):
        order(words)
        epilogue.test_step(tfla, parts, cell, dtype, V)


@pytest.mark.parametrize(
    "test",
    [
        tests.test_documents_equal_separate_sequences,
        tests.test_held_steps_keep_the_state_unrounded,
        tests.test_inputs_are_left_alone,
        test_nan.test_nan_stays_in_its_head_and_after_its_chunk,
        tests.test_shards_compose,
        test_nan.test_what_a_held_step_holds,
        test_cuda.test_rows_at_any_address,
    ],
    ids=lambda test: test.__name__,
)
def test_shared_tests(tfla, order, cell, test):
    order("backwards")
    test(tfla, cell)


def test_offsets_that_decrease(tfla):
    test_cuda.test_offsets_that_decrease(tfla, torch.int32)


@pytest.mark.parametrize("t", [0, 17, 39])
def test_reset(tfla, cell, t):
    reset.test_reset_at_every_position(tfla, cell, t)
    test_nan.test_reset_ends_a_state_that_is_nan(tfla, cell, t)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
def test_bf16_at_a_models_width(tfla, cell, size):
    test_bf16.test_bf16_at_a_models_width(tfla, cell, 0.0, 3.0, size)


@pytest.mark.slow
@pytest.mark.skipif(SANITIZE in os.environ, reason="is what runs")
def test_nothing_is_read_or_written_out_of_bounds():
    """Runs the fast comparisons under AddressSanitizer, which has to be loaded first."""
    find = lambda name: subprocess.check_output(["g++", f"-print-file-name={name}"], text=True)
    first = f"{find('libasan.so').strip()} {find('libstdc++.so.6').strip()}"
    env = {**os.environ, SANITIZE: "1", "LD_PRELOAD": first, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", __file__]
    # -s: so that its report is seen.
    command += ["-m", "not slow", "-k", "any_order and exp or test_step"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout
