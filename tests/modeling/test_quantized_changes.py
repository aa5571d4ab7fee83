"""Tests what is done to a model after its weights were quantised: other vocabularies, merged adapters."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode_cases import DTYPE, KINDS, QUANTIZED_CONFIGS, logits, small_model, tokens
from flashcell import QuantizationConfig, quantize_weights
from flashcell.quantization.config import DTYPES
from flashcell.quantization.linear import QuantizedLinear
from numerics import assert_bitwise, assert_close

EPS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[DTYPE]


@pytest.fixture(params=QUANTIZED_CONFIGS)
def model(request):
    return small_model(request.param)


@pytest.mark.parametrize("size", [80, 40, 64])
@pytest.mark.parametrize("weights", KINDS)
def test_another_vocabulary(tmp_path, model, weights, size):
    twin = copy.deepcopy(model)
    model = quantize_weights(model, QuantizationConfig(weights))
    x, old = tokens() % 40, model.get_output_embeddings()
    model.generate(x, max_new_tokens=3, do_sample=False)  # a recorded step has the old head
    with torch.no_grad():
        twin.get_output_embeddings().weight.copy_(old.dequantized(DTYPE))
        before = model(x).logits
        for one in (twin, model):
            torch.manual_seed(1)
            one.resize_token_embeddings(size, mean_resizing=False)
        after, head = model(x).logits, model.get_output_embeddings()
    kept = min(size, 64)
    assert type(head) is QuantizedLinear
    assert head.weight.dtype == old.weight.dtype
    assert after.shape[-1] == head.out_features == model.config.vocab_size == size
    assert_bitwise(
        "weights", head.weight[:kept].view(torch.uint8), old.weight[:kept].view(torch.uint8)
    )
    assert_bitwise("scales", head.scale[:kept], old.scale[:kept])
    new = [one.get_output_embeddings() for one in (model, twin)]
    values = new[0].dequantized(DTYPE)[kept:], new[1].weight[kept:]
    if not twin.config.tie_word_embeddings:  # a head that shared them draws rows of its own
        assert_close("new rows", *values, 0.2)  # those that the float model draws, in 8 or 4 bits
    elif size > kept:
        assert 0.8 < values[0].std() / values[1].std() < 1.25
    assert head.config is model.config
    assert_close("logits", after[..., :kept], before[..., :kept], EPS)
    assert after.isfinite().all()
    assert model.generate(x, max_new_tokens=3, do_sample=False).shape == (2, 10)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert_close("loaded", again(x).logits, after, EPS)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_adapters_are_merged_into_dequantized_weights(model, weights, dora):
    peft = pytest.importorskip("peft")
    model = quantize_weights(model, QuantizationConfig(weights))
    last = "down_proj" if hasattr(model, "model") else "proj_down"
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=[last], r=2, use_dora=dora)
    ).eval()
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    want = logits(wrapped)
    wrapped.get_base_model().dequantize()
    merged = wrapped.merge_and_unload()
    assert not any(isinstance(m, QuantizedLinear) for m in merged.modules())
    assert_close("merged", logits(merged), want, EPS)


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_large_inputs_in_fp16(weights):
    """x times whole numbers passes fp16's largest number long before x W^T does."""
    layer, x = torch.nn.Linear(64, 8, bias=False).half(), torch.randn(3, 64).half()
    x[:, 5] = 600
    narrow = QuantizedLinear.of(layer, DTYPES[weights])
    found = narrow(x)
    assert found.isfinite().all()
    assert_close(
        "rows", found, torch.nn.functional.linear(x, narrow.dequantized(torch.float16)), 2e-3
    )
