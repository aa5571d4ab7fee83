"""Tests which CUDA engine the planner chooses, and with how many launches; no GPU is needed."""


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
    assert engines("lstm", 1, 336, 16, "float32", "H200")[0] == "step"
    # One-gate cells of two heads and few sequences, but not on GPUs that multiply by cuBLAS.
    assert engines("rnn_tanh", 2, 2048, 4, "float32", "H200") == ("step", "step")
    assert engines("rnn_tanh", 2, 2048, 512, "float32", "A100", 20) == ("gemm", "gemm")
    assert engines("lstm", 1, 512, 1, "float32", "H200") == ("step", "gemm")
    assert engines("lstm", 1, 512, 1, "float32", "H200", 1) == ("step", "step")
    tf32 = {"precision": "tf32"}
    assert engines("gru", 1, 1536, 1, "float32", "H200", **tf32) == ("step", "gemm")
    assert engines("lstm", 2, 1152, 4, "float32", "H200", **tf32) == ("batch", "step")
