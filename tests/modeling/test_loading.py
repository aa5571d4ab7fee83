"""Tests saving, loading and placing: through the Auto classes, whole, in shards, and over devices."""

import json
import re

import pytest
import torch
from accelerate import infer_auto_device_map
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from model_cases import CASES, blocks, cpu_only, kinds

HEADS = {
    "ForCausalLM": AutoModelForCausalLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
    "Model": AutoModel,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(case, make_model, tokens, tmp_path, tied, dtype):
    model, ids = make_model(case, tie_word_embeddings=tied).to(dtype), tokens(2, 7)
    model.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in names) != tied
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert type(loaded) is type(model)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == dtype
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    head, embeddings = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    assert (head.weight is embeddings.weight) == tied


def test_every_head_takes_the_base_model_s_weights(case, make_model, tmp_path):
    model = make_model(case)
    model.save_pretrained(tmp_path)
    want = model.base_model.state_dict()
    for head, auto in HEADS.items():
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded).__name__ == CASES[case].family + head
        assert type(auto.from_config(model.config)) is type(loaded)
        got = loaded.base_model.state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want), head


def test_missing_weights_begin_as_new_ones(case, make_model, tmp_path):
    """Weights that a checkpoint lacks are initialised; the others are not touched."""
    model = make_model(case)
    weights = {n: p for n, p in model.state_dict().items() if "0." not in n}
    saved = set(weights)
    model.save_pretrained(tmp_path, state_dict=weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert parameter.isfinite().all(), name
        same = torch.equal(parameter, model.get_parameter(name))
        constant = bool((parameter == parameter.flatten()[0]).all())  # weights of norms
        assert same == (name in saved) or constant, name


@pytest.mark.parametrize("kind", kinds())
def test_any_one_missing_weight_begins(kind, make_model, tmp_path, poisoned):
    """A weight that a checkpoint lacks is initialised, and no other weight of its module is.

    transformers by itself initialises whole modules."""
    model = make_model(kind, num_hidden_layers=1)
    weights = model.state_dict()
    for name in weights:
        rest = {n: w for n, w in weights.items() if n != name}
        model.save_pretrained(tmp_path, state_dict=rest)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert loaded[name].isfinite().all(), name
        assert all(torch.equal(loaded[n], w) for n, w in rest.items()), name


def test_run_time_fields_are_never_saved(case, make_model, tokens, tmp_path):
    model, paths = make_model(case), CASES[case].paths
    for path in paths:
        for name, value in path.items():
            setattr(model.config, name, value)
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert not set(path) & set(saved)
        default = AutoConfig.from_pretrained(tmp_path)
        assert all(getattr(default, name) != value for name, value in path.items())
        chosen = AutoModelForCausalLM.from_pretrained(tmp_path, **path).config
        assert all(getattr(chosen, name) == value for name, value in path.items())
        assert all(getattr(model.config, name) == value for name, value in path.items())


@cpu_only
def test_spread_over_devices(case, make_model, tokens, tmp_path):
    """A model saved in shards loads with half of its blocks on disk; no block is split, and a
    conversation works."""
    model, ids = make_model(case), tokens(2, 5)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    first, second = (sum(p.nbytes for p in b.parameters()) for b in blocks(model)[:2])
    room = {"cpu": model.get_input_embeddings().weight.nbytes + first + second // 2, "disk": 10**9}
    device_map = infer_auto_device_map(
        model, max_memory=room, no_split_module_classes=model._no_split_modules
    )
    names = [name for name, module in model.named_modules() if module in list(blocks(model))]
    assert not any(placed.startswith(f"{name}.") for placed in device_map for name in names)
    assert {"cpu", "disk"} == set(device_map.values())
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    want = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(spread.generate(ids, attention_mask=mask, **options), want)


def test_plans_name_modules(case, make_model):
    """Every entry of the sharding plans matches a module, and every block is a unit of its own."""
    model = make_model(case)
    names = dict(model.named_modules())
    anywhere = {re.sub(r"\.\d+", ".*", name) for name in names}
    assert type(blocks(model)[0]).__name__ in model._no_split_modules
    for plan in (model._fsdp_plan, model._tp_plan):
        assert plan
        for entry in plan:
            assert entry in anywhere, entry
    whole = {id(names[entry.removesuffix(".*")]) for entry in model._fsdp_plan}
    assert {id(blocks(model)), id(model.get_input_embeddings()), id(model.lm_head)} <= whole
