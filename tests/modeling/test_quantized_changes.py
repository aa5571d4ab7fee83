"""Tests what is done to a model after its weights were quantised: other vocabularies, merged adapters."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from flashcell import QuantizationConfig, quantize_weights
from flashcell.quantization.linear import QuantizedLinear
from modeling.test_quantized import DTYPE, KINDS, logits, model, tokens  # noqa: F401  (fixtures)
from numerics import assert_bitwise, assert_close

EPS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[DTYPE]


@pytest.mark.parametrize("size", [80, 40, 64])
@pytest.mark.parametrize("weights", KINDS)
def test_another_vocabulary(tmp_path, model, weights, size):  # noqa: F811
    model = quantize_weights(model, QuantizationConfig(weights))
    x, old = tokens() % 40, model.get_output_embeddings()
    with torch.no_grad():
        before = model(x).logits
        model.resize_token_embeddings(size)
        after, head = model(x).logits, model.get_output_embeddings()
    kept = min(size, 64)
    assert type(head) is QuantizedLinear
    assert head.weight.dtype == old.weight.dtype
    assert after.shape[-1] == head.out_features == model.config.vocab_size == size
    assert_bitwise(
        "weights", head.weight[:kept].view(torch.uint8), old.weight[:kept].view(torch.uint8)
    )
    assert_bitwise("scales", head.scale[:kept], old.scale[:kept])
    assert_close("logits", after[..., :kept], before[..., :kept], EPS)
    assert after.isfinite().all()
    assert model.generate(x, max_new_tokens=3, do_sample=False).shape == (2, 10)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert_close("loaded", again(x).logits, after, EPS)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_adapters_are_merged_into_dequantized_weights(model, weights):  # noqa: F811
    peft = pytest.importorskip("peft")
    model = quantize_weights(model, QuantizationConfig(weights))
    last = "down_proj" if hasattr(model, "model") else "proj_down"
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=[last], r=2)).eval()
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    want = logits(wrapped)
    wrapped.get_base_model().dequantize()
    merged = wrapped.merge_and_unload()
    assert not any(isinstance(m, QuantizedLinear) for m in merged.modules())
    assert_close("merged", logits(merged), want, EPS)
