"""Tests by what a quantised linear layer multiplies on a GPU: the kernel for few rows of x."""

import pytest
import torch

from cases import DEVICE
from flashcell import load_kernel
from flashcell.quantization.linear import QuantizedLinear
from numerics import assert_close


@pytest.mark.skipif(DEVICE != "cuda", reason="on a GPU")
@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_multiplied_by_the_kernel(monkeypatch, weights, bias):
    plain = torch.nn.Linear(192, 72, bias=bias, dtype=torch.bfloat16)
    kept = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}[weights]
    layer = QuantizedLinear.of(plain, kept)
    x = torch.randn(2, 7, 192, dtype=torch.bfloat16)
    exact = torch.nn.functional.linear(x.double(), layer.dequantized(torch.float32).double())
    exact = exact if plain.bias is None else exact + plain.bias.double()
    calls, kernel = [], load_kernel("tfla", "cuda")
    step = kernel.linear_step
    monkeypatch.setattr(kernel, "linear_step", lambda *a, **k: (calls.append(1), step(*a, **k))[1])
    got = layer(x)
    assert len(calls) == 1
    assert_close("few rows", got.double(), exact, 0.01)
    assert_close("by columns", layer(x.mT.contiguous().mT).double(), got.double(), 1e-9)
    layer(x.expand(20, 2, 7, 192)), layer(x.requires_grad_()).sum().backward()
    layer.config = type("Config", (), {"backend": "reference"})
    assert_close("widened", layer(x.detach()).double(), exact, 0.01)
    assert len(calls) == 2
