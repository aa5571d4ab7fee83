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
from numerics import EPS, assert_bitwise, assert_close
from ops.tfla import test_bf16, test_cuda, test_nan
from ops.tfla import test_epilogue as epilogue
from ops.tfla import test_reset as reset
from ops.tfla import test_sequence as tests

ROOT = Path(__file__).resolve().parents[3]
SANITIZE = "FLASHCELL_EMULATOR_SANITIZE"
LINEAR = ["x", "weights", "biases", "capped", "cap", "norm_weight", "norm_eps", "residual", "gated"]
LINEARS = [(1, 8, [24]), (3, 40, [24, 17]), (8, 1096, [40]), (16, 2056, [48]), (17, 256, [33])]
LINEARS += [(40, 200, [20]), (2, 0, [24])]
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


@pytest.mark.parametrize("shared", [227, 99])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("B", "K", "rows"), LINEARS)
def test_linear_step(tfla, order, dtype, B, K, rows, shared):
    """Tests several matrices, bounded ones, the norm, the sum and the gate: on three SMs, so that a
    thread block takes several tiles, for 16 rows of x also in one pass, and with the shared memory
    of an H200 and of sm_86 and sm_120."""
    op = tfla.dispatch.ops.linear_step
    x, scale = torch.randn(B, K).to(dtype), torch.randn(K).to(dtype)
    draw = lambda n: (torch.randn(n, K) / (K + 1) ** 0.5).to(dtype)
    plain, gates = ([draw(n) for n in ns] for ns in (rows, (8, 3)))
    biases = [torch.randn(n).to(dtype) for n in (8, 3)]
    residual = torch.randn(B, rows[0]).to(dtype)
    calls = [
        (x, plain + gates, biases, 2, 3.0, None, 0.1, None, False),
        (x, plain + gates, biases, 2, 3.0, scale, 0.1, None, False),
        (x, plain[:1], [], 0, 0.0, scale, 0.1, residual, False),
        (x, [plain[0], plain[0].flip(0)], [], 0, 0.0, scale, 0.1, None, True),
    ]
    for call in calls:
        results = []
        for words in ORDERS[:2]:
            order(f"{words} processors=3 shared={shared}")
            results.append(op(*call))
        for one, other in zip(*results, strict=True):
            assert_bitwise("the other order", other, one)
        arguments = dict(zip(LINEAR, call, strict=True))
        wide = upcast(arguments)
        for name in ("weights", "biases"):
            wide[name] = [w.double() for w in arguments[name]]
        want = reference.linear_step(**wide)
        count = len(want) - call[3]
        got = [*results[0][0].split([w.shape[1] for w in want[:count]], 1)]
        got += results[0][1].split([w.shape[1] for w in want[count:]], 1) if call[3] else []
        for y, exact in zip(got, want, strict=True):
            assert_close("linear_step", y, exact, 1.5 * EPS[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("B", "K"), [(1, 8), (5, 1096), (2, 8200)])
def test_between_products(tfla, order, dtype, B, K):
    """norm_step with gates, and gate_step of two halves of one tensor."""
    ops = tfla.dispatch.ops
    x, scale, bias = (torch.randn(*shape).to(dtype) for shape in ((B, K), (K,), (19,)))
    weights = [(torch.randn(n, K) * K**-0.5).to(dtype) for n in (8, 19)]
    results = []
    for words in ORDERS[:2]:
        order(words)
        results.append([*ops.norm_step(x, scale, 0.1, weights, [bias], 3.0), ops.gate_step(x, x)])
    for one, other in zip(*results, strict=True):
        assert_bitwise("the other order", other, one)
    y, bounded, _ = results[0]
    want = reference.norm_step(x.double(), scale.double(), 0.1)[0]
    assert_close("norm", y, want, 1.5 * EPS[dtype])
    wide = [w.double() for w in weights]
    gates = reference.linear_step(y.double(), wide, [bias.double()], capped=2, cap=3.0)
    assert_close("gates", bounded, torch.cat(gates, 1), 16 * EPS[torch.float32])
    halves = torch.randn(B, 2 * K).to(dtype).chunk(2, -1)
    want = reference.gate_step(*(h.double() for h in halves))
    assert_close("gate", ops.gate_step(*halves), want, 1.5 * EPS[dtype])
