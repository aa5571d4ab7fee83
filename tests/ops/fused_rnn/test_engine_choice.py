"""Tests which CUDA engine the planner chooses, and with how many launches; no GPU is needed."""

import random
from itertools import product

import pytest

TORCH_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def test_heads_that_do_not_fit_into_l2_together_are_launched_one_after_another(fused_rnn):
    def plan(cell, heads, width, dtype):
        return fused_rnn.explain_plan(cell, heads, width, 2048, dtype, "H200", precision="tf32")

    both = plan("lstm", 2, 1800, "float16")
    assert "thread blocks in each of 2 launches, one after another for parts of the heads" in str(
        both
    )
    # The last ones are those of engine_cases.PARTS.
    calls = {("lstm", 2, 1536, "float16"): "1", ("gru", 2, 2048, "float32"): "2",
             ("lstm", 3, 1608, "float16"): "2", ("lstm", 3, 1608, "float32"): "3"}  # fmt: skip
    assert {call: plan(*call).fields.get("launches") for call in calls} == calls


def test_a_backward_pass_has_an_engine_of_its_own(fused_rnn):
    def engines(cell, heads, width, batch, dtype, gpu, steps=60, precision="highest"):
        plan = fused_rnn.explain_plan(cell, heads, width, batch, dtype, gpu, steps, precision)
        return plan.engine, plan.fields.get("backward", plan.engine)

    assert engines("lstm", 1, 264, 1024, "bfloat16", "H200") == ("batch", "gemm")
    assert engines("lstm", 1, 264, 512, "bfloat16", "H200")[1] == "grid"
    assert engines("lstm", 1, 336, 128, "float32", "H200", 20) == ("gemm", "gemm")
    assert engines("lstm", 1, 336, 16, "float32", "H200") == ("wide", "wide")
    assert engines("lstm", 1, 336, 16, "float32", "B200")[0] == "step"
    assert engines("lstm", 1, 1280, 24, "float32", "H200") == ("wide", "gemm")
    # One-gate cells of two heads and few sequences, but not on GPUs that multiply by cuBLAS.
    assert engines("rnn_tanh", 2, 2048, 4, "float32", "B200") == ("step", "step")
    assert engines("rnn_tanh", 2, 2048, 512, "float32", "A100", 20) == ("gemm", "gemm")
    assert engines("lstm", 1, 512, 1, "float32", "B200") == ("step", "gemm")
    assert engines("lstm", 1, 512, 1, "float32", "H200", 1) == ("step", "step")
    tf32 = {"precision": "tf32"}
    assert engines("gru", 1, 1536, 1, "float32", "H200", **tf32) == ("step", "gemm")
    assert engines("lstm", 2, 1152, 4, "float32", "H200", **tf32) == ("batch", "step")


def test_when_the_wide_engine_runs(fused_rnn):
    """From eight steps on, from 16 if a part of the weight streams in; not of many sequences."""

    def engine(cell, width, batch, steps, heads=1, precision="highest", gpu="H200"):
        call = (cell, heads, width, batch, "float32", gpu, steps, precision)
        return fused_rnn.explain_plan(*call).engine

    assert [engine("lstm", 512, 1, T) for T in (7, 8)] == ["step", "wide"]
    assert [engine("lstm", 2048, 2, T) for T in (15, 16)] == ["step", "wide"]
    assert [engine("rnn_tanh", 400, B, 50) for B in (100, 101)] == ["wide", "gemm"]
    assert [engine("lstm", 512, B, 50) for B in (32, 33)] == ["wide", "step"]
    assert [engine("gru", D, 4, 50) for D in (256, 260)] == ["fma", "wide"]
    assert [engine("lstm", 1024, 8, 50, heads) for heads in (1, 2, 6)] == ["wide", "wide", "step"]
    assert engine("lstm", 512, 1, 50, precision="tf32") != "wide"
    assert engine("lstm", 512, 1, 50, gpu="A100") != "wide"


def test_what_multiplies_a_layers_input(fused_rnn):
    """The batch engine where it is faster, of cells that add the product to h's; nothing else can."""

    def plan(cell, width, batch, input_width, arch="H200", **options):
        return fused_rnn.explain_plan(
            cell, 1, width, batch, "bfloat16", arch, input_width=input_width, **options
        )

    wide = plan("lstm", 1152, 1024, 1152)
    assert (wide.engine, wide.fields["input"]) == ("batch", "engine")
    assert "input: multiplied by the engine" in str(wide)
    assert "input" not in plan("lstm", 1152, 1024, 0).fields
    before = plan("lstm", 264, 2048, 4096)
    assert (before.engine, before.fields["input"]) == ("batch", "product")
    assert "input: multiplied before" in str(before)
    draw, found = random.Random(0), set()
    for _ in range(300):
        width, batch, input_width = (
            int(2 ** draw.uniform(*e)) for e in ((5, 11), (0, 12), (0, 12))
        )
        for cell, arch in product(TORCH_CELLS, ("H200", "A100", "B200", "T4")):
            steps = draw.choice((1, 2, 50))
            call = plan(cell, -(-width // 8) * 8, batch, input_width, arch, steps=steps)
            found.add((cell, arch, call.engine, call.fields["input"]))
    assert {(cell, arch, engine) for cell, arch, engine, way in found if way == "engine"} == {
        (cell, "H200", "batch") for cell in ("lstm", "rnn_tanh", "rnn_relu")
    }
    with pytest.raises(ValueError, match="heads is 2, but must be 1 where input_width is given"):
        fused_rnn.explain_plan("lstm", 2, 64, 8, "bfloat16", "H200", input_width=64)
    for bad in (-1, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="input_width is"):
            plan("lstm", 64, 8, bad)
