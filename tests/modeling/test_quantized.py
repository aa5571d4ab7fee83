"""Tests models whose linear layers have weights of 8 or 4 bits: loading, saving, decoding, adapters."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from cases import DEVICE
from decode_cases import (
    DTYPE,
    KINDS,
    QUANTIZED_CONFIGS,
    QUANTIZED_SIZES,
    logits,
    small_model,
    tokens,
)
from flashcell import FlashRNNConfig, QuantizationConfig, quantize_weights
from flashcell.kernels.tfla.int4 import unpack_int4
from flashcell.quantization.linear import QuantizedLinear, quantize


@pytest.fixture(params=QUANTIZED_CONFIGS)
def model(request):
    return small_model(request.param)


def test_4_bits_are_the_closest_of_several_scales():
    torch.manual_seed(0)
    weight = torch.randn(9, 64) * torch.logspace(-45, 30, 9)[:, None]
    weight[4] = weight[5, :32] = 0
    bits, scale = quantize(weight, torch.uint8)
    assert (bits.dtype, bits.shape) == (torch.uint8, (9, 32))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (9, 2))
    values = unpack_int4(bits, scale).double()
    error = (values - weight).norm(dim=1)
    groups = weight.view(9, 2, 32)
    plain = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().double()  # the largest weight is 7
    rounded = ((groups / plain).round() * plain).nan_to_num().view(9, 64)
    plain_error = (rounded - weight).norm(dim=1) + 1e-40
    assert (error <= 1.0001 * plain_error).all()
    assert (error / plain_error).mean() < 0.95
    assert not values[4].any()
    assert not values[5, :32].any()
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight / 0, torch.uint8)


def test_the_head_of_int4_is_int8(model):
    quantize_weights(model, QuantizationConfig("int4"))
    kinds = {n: m.weight.dtype for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert kinds.pop("lm_head") == torch.int8
    assert set(kinds.values()) == {torch.uint8}


def test_a_width_that_int4_cannot_have_is_named():
    sizes = QUANTIZED_SIZES | {"intermediate_size": 96}
    model = AutoModelForCausalLM.from_config(FlashRNNConfig(**sizes, cell="gru"), dtype=DTYPE)
    says = "down_proj has 96 inputs, which are no multiple of 64: name it in modules_to_not_convert"
    with pytest.raises(ValueError, match=says):
        quantize_weights(model, QuantizationConfig("int4"))
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    config = QuantizationConfig("int4", modules_to_not_convert=["down_proj"])
    quantize_weights(model.eval(), config)
    assert model.generate(tokens(), max_new_tokens=3, do_sample=False).shape == (2, 10)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_cast_scales_are_decoded_by_modules(model, weights):
    """peft.prepare_model_for_kbit_training casts scales of bf16, and users cast parameters."""
    quantize_weights(model, QuantizationConfig(weights))
    want = logits(model)
    other = torch.float32 if weights == "int4" else torch.bfloat16
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.scale.data = module.scale.data.to(other)
    assert model.generate(tokens(), max_new_tokens=3, do_sample=False).shape == (2, 10)
    assert "is no contiguous" in model.decoder.explain()
    assert (logits(model) - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_dequantize(model, weights):
    quantize_weights(model, QuantizationConfig(weights))
    want = logits(model)
    model.dequantize()
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    bound = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[DTYPE]
    assert (logits(model) - want).norm() < bound * want.norm()
    quantize_weights(model, QuantizationConfig(weights))  # and back


def test_a_floating_state_dict_is_refused(model):
    given = copy.deepcopy(model.state_dict())
    quantize_weights(model, QuantizationConfig())
    with pytest.raises(RuntimeError, match=r"weight is torch\.\w+, but must be torch.int8"):
        model.load_state_dict(given, strict=False)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_weight_is_its_scale_times_8_bits(weights):
    config = QuantizationConfig(weights)
    eight = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[config.weights]
    weight = torch.randn(9, 33) * torch.logspace(-45, 30, 9)[:, None]
    weight[4] = 0
    bits, scale = quantize(weight, eight)
    step = {"int8": 0.5 / 127, "fp8": 2.0**-4}[weights]  # half a step of the largest value
    most = weight.abs().amax(1, keepdim=True)
    error = (bits.double() * scale.double()[:, None] - weight).abs()
    assert bits.dtype == eight
    assert scale.dtype == torch.float32
    assert (error <= step * 1.001 * most + 1e-40).all()
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight / 0, eight)


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_is_saved_and_loaded(tmp_path, model, weights):
    model.save_pretrained(tmp_path / "float")
    config = QuantizationConfig(weights)
    small = AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=config
    ).eval()
    kinds = {name: type(m) for name, m in small.named_modules() if isinstance(m, torch.nn.Linear)}
    linears = {n for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert {name for name, kind in kinds.items() if kind is QuantizedLinear} == linears
    assert "lm_head" in linears
    want, given = logits(small), logits(model)
    most = {"int8": 0.02, "fp8": 0.1, "int4": 0.3}[weights]
    # The activations' rounding: what they would be in fp32 is not what either model sees.
    rounding = (logits(copy.deepcopy(model).float()) - given).norm()
    assert 0 < (want - given).norm() < most * given.norm() + 2 * rounding

    small.save_pretrained(tmp_path / weights)
    said = json.loads((tmp_path / weights / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["weights"]) == ("flashcell", weights)
    size = lambda name: (tmp_path / name / "model.safetensors").stat().st_size
    assert size(weights) < size("float")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / weights).eval()
    assert torch.equal(logits(again), want)
    assert again.lm_head.weight.dtype == small.lm_head.weight.dtype
    other = quantize_weights(copy.deepcopy(model), config)
    assert torch.equal(logits(other), want), "the same in memory"


def test_dtypes_of_the_rest_follow_the_call(tmp_path, model):
    quantize_weights(model, QuantizationConfig()).save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for loaded in (half, model.to(torch.bfloat16)):
        head, table = loaded.lm_head, loaded.get_input_embeddings()
        assert head.weight.dtype == torch.int8
        assert head.scale.dtype == torch.float32
        assert table.weight.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.scale, model.lm_head.scale)


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("weights", KINDS)
def test_decodes_what_the_whole_text_gives(model, weights, batch):
    model = quantize_weights(model, QuantizationConfig(weights))
    ids = tokens(batch)
    with torch.no_grad():
        cache = model(ids[:, :3], use_cache=True).past_key_values
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(3, 7)]
        want = model(ids).logits[:, 3:]
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[DTYPE]
    assert (torch.cat(steps, 1) - want).norm() <= bound * want.norm()
    assert model.decoder.path in ("tape", "graph")
    said = model.decoder.explain(batch)
    fused = batch <= 16 or DEVICE == "cuda"
    assert ("block_step" in said or "linear_step" in said) is fused
    lines = [line for line in said.splitlines() if line.lstrip().startswith(("layers", "blocks"))]
    assert all("modules" not in line for line in lines) is fused


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has a kernel for 8-bit floats")
def test_what_has_no_kernel_calls_modules(model):
    half = copy.deepcopy(model)
    said = quantize_weights(model, QuantizationConfig("fp8")).decoder.explain()
    assert "8-bit floats have no kernel on a CPU" in said
    part = "mlp" if hasattr(half, "model") else "ffn"
    said = quantize_weights(
        half, QuantizationConfig(modules_to_not_convert=[part])
    ).decoder.explain()
    assert "some linear layers are quantised in another way than others" in said
    assert "lm_head   linear_step" in said


def test_a_pure_8_bit_model_is_not_trained(model, tmp_path):
    model = quantize_weights(model, QuantizationConfig()).train()
    with pytest.raises(
        RuntimeError, match="weights in int8, and nothing in it can be trained: add"
    ):
        model(tokens(), labels=tokens())
    with pytest.raises(ValueError, match="quantized"):
        Trainer(model, TrainingArguments(str(tmp_path), report_to=[], use_cpu=DEVICE == "cpu"))
    assert model.eval()(tokens(), labels=tokens()).loss.isfinite()


def test_adapters_are_trained_and_decode(model):
    peft = pytest.importorskip("peft")
    model = quantize_weights(model, QuantizationConfig())
    last = "down_proj" if hasattr(model, "model") else "proj_down"
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=[last], r=2))
    before = wrapped.eval().generate(input_ids=tokens(), max_new_tokens=4, do_sample=False)
    assert (
        "lora" in model.decoder.explain().lower() or "Linear is another" in model.decoder.explain()
    )
    optimizer = torch.optim.SGD([w for w in wrapped.parameters() if w.requires_grad], lr=0.5)
    losses = []
    for _ in range(8):
        loss = wrapped.train()(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert (
        wrapped.eval().generate(input_ids=tokens(), max_new_tokens=4, do_sample=False).shape
        == before.shape
    )


def test_a_classifier_begins_with_a_head_to_train(tmp_path, model):
    model.save_pretrained(tmp_path)
    config = QuantizationConfig()
    found = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, quantization_config=config, num_labels=3
    )
    trained = {name for name, w in found.named_parameters() if w.requires_grad}
    assert trained == {"score.weight"}
    assert type(found.score) is torch.nn.Linear


def test_arguments_are_named(model):
    with pytest.raises(
        ValueError, match=r"weights is \['int8'\], but must be one of int8, fp8, int4"
    ):
        QuantizationConfig(["int8"])
    with pytest.raises(ValueError, match="weights is 'int3', but must be one of int8, fp8"):
        QuantizationConfig("int3")
    with pytest.raises(TypeError, match="modules_to_not_convert is 'lm_head', but must be a list"):
        QuantizationConfig(modules_to_not_convert="lm_head")
    with pytest.raises(TypeError, match="config is a str, but must be a QuantizationConfig"):
        quantize_weights(model, "int8")
    quantize_weights(model, QuantizationConfig())
    with pytest.raises(ValueError, match="model is quantised, but must have floating weights"):
        quantize_weights(model, QuantizationConfig())


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("folder", ["flash-gru-python-5m", "flash-rnn-python-5m"])
def test_shipped_checkpoints_keep_their_text(folder, weights):
    path = Path(__file__).resolve().parents[2] / "model_cards" / folder
    models = [
        AutoModelForCausalLM.from_pretrained(path, **options).eval()
        for options in ({}, {"quantization_config": QuantizationConfig(weights)})
    ]
    text = torch.randint(
        3, 3000, (4, 64), generator=torch.Generator("cpu").manual_seed(0), device="cpu"
    ).to(DEVICE)
    with torch.no_grad():
        losses = [model(text, labels=text).loss.item() for model in models]
    assert abs(losses[1] / losses[0] - 1) < 0.005
    assert isinstance(models[1].lm_head, QuantizedLinear)


def test_a_refused_weight_changes_nothing(make_model):
    model = make_model("lstm")
    model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        quantize_weights(model, QuantizationConfig())
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert getattr(model, "hf_quantizer", None) is None
