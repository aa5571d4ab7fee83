"""Tests tfla with machine code that was compiled for another GPU: features that this code lacks are
not used, or asking for them is an error."""

import os
from pathlib import Path

import pytest
import torch

import emulate
from mlstm_cases import make
from numerics import assert_bitwise
from ops.tfla import test_cuda, test_linear_emulated
from ops.tfla import test_sequence as tests
from ops.tfla.test_emulated import (  # noqa: F401  (fixtures)
    FAST,
    ROOT,
    TILES,
    cell,
    check_case,
    no_float64,
    order,
    pytestmark,
    tfla,
)
from ops.tfla.test_linear_emulated import LINEARS
from ops.tfla.test_validation import op_arguments

TURING = "arch=75 processors=40 shared=64"  # a T4
TURINGS = [TURING, "arch=75 processors=3 shared=64"]  # the second has more tiles than SMs
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HOPPER = "arch=90 code=80"  # 9.0 runs PTX for 8.0: no wgmma, no clusters, no overlapping launches


@pytest.fixture(scope="session")
def tfla_turing():
    """The same sources, compiled for Turing, which takes more than a minute: its tests are slow."""
    from kernels import get_local_kernel

    home = Path(os.environ.get("FLASHCELL_HOME") or ROOT / ".flashcell").resolve()
    out = emulate.build(ROOT / "kernel_builds/tfla", home / "emulated/tfla-turing", turing=True)
    return get_local_kernel(out, backend="cpu")


@pytest.mark.parametrize("code", [80, 90])  # 90 is not 90a, which alone has wgmma
@pytest.mark.parametrize("case", TILES[:2], ids=str)
def test_hopper_runs_code_without_wgmma(tfla, order, cell, case, code):  # noqa: F811
    check_case(tfla, order, cell, case, torch.bfloat16, device=f"arch=90 code={code}")


@pytest.mark.slow
@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=tests.short)
@pytest.mark.parametrize("case", [*FAST[::3], *TILES], ids=str)
def test_turing(tfla_turing, order, cell, case, dtype):  # noqa: F811
    """Chunks of 64 steps in 64 KB, one stage of loads, and bf16 and fp32 without a matrix
    instruction."""
    check_case(tfla_turing, order, cell, case, dtype, device=TURING)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=tests.short)
def test_a_step_on_turing(tfla_turing, order, cell, dtype):  # noqa: F811
    order(TURING)
    tests.test_step(tfla_turing, cell, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("machine", TURINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("B", "K", "rows"), LINEARS, ids=str)
def test_linear_steps_on_turing(tfla_turing, order, dtype, B, K, rows, machine):  # noqa: F811
    test_linear_emulated.test_linear_step(tfla_turing, order, dtype, B, K, rows, machine)


@pytest.mark.slow
@pytest.mark.parametrize("machine", TURINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("eight", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_eight_bits_on_turing(tfla_turing, order, eight, dtype, machine):  # noqa: F811
    case = eight, dtype, 9, 1104, [40], machine
    test_linear_emulated.test_eight_bits(tfla_turing, order, *case)


@pytest.mark.slow
@pytest.mark.parametrize("machine", TURINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int4_on_turing(tfla_turing, order, dtype, machine):  # noqa: F811
    test_linear_emulated.test_int4(tfla_turing, order, dtype, 9, 1088, [40], machine)


@pytest.mark.slow
def test_code_for_turing_on_hopper(tfla_turing, order, cell):  # noqa: F811
    """It uses no more than Turing's 64 KB, and keeps no states of chunks longer than fit there."""
    order("arch=90 code=75")
    given = op_arguments(cell, ("state", "reset"), 150)
    given = [t.detach() if torch.is_tensor(t) else t for t in given]
    given[:3], given[-1] = [t.bfloat16() for t in given[:3]], 128
    ops, chunks = tfla_turing.dispatch.ops, 2 * len(given[1])
    h, C, n, _, total, kept_C, kept_n = ops.mlstm_fwd(*given, kept=chunks)
    given = [torch.ones_like(h), None, None, C, n, h, total], given
    kept = kept_C, kept_n if kept_n.numel() else None
    got = ops.mlstm_bwd(*given[0], *kept, *given[1])
    want = ops.mlstm_bwd(*given[0], None, None, *given[1])
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(f"gradient {number}", a, b)


def test_kept_states_of_code_for_8_0(tfla, order, cell):  # noqa: F811
    order(HOPPER)
    test_cuda.test_backward_from_kept_states(tfla, cell, test_cuda.KEPT[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=tests.short)
def test_a_step_of_code_for_8_0(tfla, order, cell, dtype):  # noqa: F811
    order(HOPPER)
    tests.test_step(tfla, cell, dtype)


def test_between_products_of_code_for_8_0(tfla, order):  # noqa: F811
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(24, 64).bfloat16()
    ops = tfla.dispatch.ops
    calls = [
        lambda: ops.linear_step(x, [weight], [], [], 0, 0.0, None, 0.1, None, False)[0],
        lambda: ops.norm_step(x, x[0], 0.1, [weight], [], 0.0)[0],
        lambda: ops.gate_step(x, x),
    ]
    for call in calls:
        results = []
        for device in ("", HOPPER):
            order(device)
            results.append(call())
        assert torch.equal(*results)


def test_no_code_is_refused_by_name(tfla, order):  # noqa: F811
    """Refused at every call: neither an error nor an answer for another GPU is cached."""
    call = make("exp", TILES[0], torch.bfloat16)
    for device in ("arch=100 code=0", "", "arch=100 code=0"):
        order(device)
        if not device:
            assert tfla.mlstm(**call)[0].isfinite().all()
            continue
        with pytest.raises(RuntimeError) as caught:
            tfla.mlstm(**call)
        said = str(caught.value)
        for part in (
            "tfla: this library has no code for Emulator, of compute capability 10.0",
            'CUDA says "no kernel image is available for execution on the device"',
            "the library was compiled for 9.0",
            "scripts/build_kernels --backend cuda --archs 10.0",
            'backend="reference"',
        ):
            assert part in said, said
