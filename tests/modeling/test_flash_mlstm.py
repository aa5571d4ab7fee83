"""Tests flash_mlstm against transformers' own xLSTM, whose checkpoints it loads, and its own
options."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, xLSTMConfig, xLSTMForCausalLM

from flashcell import FlashMLSTMConfig, FlashMLSTMForCausalLM
from numerics import EPS, assert_close

# 128: transformers' cache rounds the keys' width up to 64, its layer does not.
SMALL = {"vocab_size": 61, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2}
FUSED = {  # the fused weight's name -> its parts, in order
    "mlstm_layer.qkv_opreact.weight": ("q.weight", "k.weight", "v.weight", "ogate_preact.weight"),
    "mlstm_layer.ifgate_preact.weight": ("igate_preact.weight", "fgate_preact.weight"),
    "mlstm_layer.ifgate_preact.bias": ("igate_preact.bias", "fgate_preact.bias"),
    "ffn.proj_up_gate_z.weight": ("proj_up_gate.weight", "proj_up.weight"),
}


def stir(model, amount: float = 0.3):
    """Changes the weights so that every gate moves with the token, and no norm is the identity."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    return stir(xLSTMForCausalLM(xLSTMConfig(**SMALL)), 0.2)


@pytest.fixture(scope="module")
def checkpoint(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("xlstm")
    theirs.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def load(folder, **kwargs):
    """Loads the model, with every weight from the checkpoint and none left over."""
    model, report = FlashMLSTMForCausalLM.from_pretrained(
        folder, output_loading_info=True, **kwargs
    )
    assert not any(report.values()), report
    return model.eval()


def assert_near(name: str, got, want) -> None:
    """Applies the bound for logits in fp32; these logits are of the size of some units."""
    assert got.dtype == want.dtype
    assert float((got - want).abs().max()) <= 1e-4, name


@pytest.mark.parametrize("device_map", [None, "auto"])
def test_logits_are_transformers_logits(theirs, checkpoint, tokens, device_map):
    """Prefill over whole chunks and a rest, a prompt of one token, then token by token."""
    ours = load(checkpoint, device_map=device_map)
    for length in (1, 17, 150):
        ids = tokens(2, length)
        with torch.no_grad():
            want, got = theirs(ids, use_cache=True), ours(ids, use_cache=True)
            assert_near(f"prefill of {length}", got.logits, want.logits)
            for _ in range(3):
                ids = tokens(2, 1)
                want = theirs(ids, use_cache=True, cache_params=want.cache_params)
                got = ours(ids, use_cache=True, past_key_values=got.past_key_values)
                assert_near(f"decoding after {length}", got.logits, want.logits)


def test_generates_what_transformers_generates(theirs, checkpoint, tokens):
    ids = tokens(2, 33)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    got = load(checkpoint).generate(ids, **options)
    assert torch.equal(got, theirs.generate(ids, **options))
    assert len(got[:, 33:].unique()) > 5


def test_gradients_are_transformers_gradients(theirs, checkpoint, tokens):
    """transformers omits the gradient through the divisor, which the norm after it cancels."""
    ours, ids = load(checkpoint), tokens(2, 96)
    got = torch.autograd.grad(ours(ids, labels=ids).loss, list(ours.parameters()))
    want = torch.autograd.grad(
        theirs(ids, labels=ids, use_cache=False).loss, list(theirs.parameters())
    )
    names = [name for name, _ in theirs.named_parameters()]
    assert names == [name for name, _ in ours.named_parameters()]
    for name, a, b in zip(names, got, want, strict=True):
        assert_close(name, a, b, 1e-4)


def test_saved_for_transformers(theirs, checkpoint, tokens, tmp_path):
    """transformers' own class reads what we save."""
    ours, ids = load(checkpoint), tokens(2, 9)
    ours.save_pretrained(tmp_path)
    back, report = xLSTMForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        assert torch.equal(back.eval()(ids).logits, theirs(ids).logits)


def test_nx_ai_s_spelling(theirs, tokens, tmp_path):
    """The names of their package: `embedding.weight`, embedding_dim, num_blocks, and its switches."""
    weights = {
        name.replace("backbone.embeddings", "embedding"): weight.contiguous()
        for name, weight in theirs.state_dict().items()
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "xlstm", "vocab_size": 61, "embedding_dim": 128, "num_blocks": 2,
        "num_heads": 2, "mode": "train", "chunkwise_kernel": "chunkwise--triton_xl_chunk",
        "chunk_size": 128, "autocast_kernel_dtype": "bfloat16", "add_out_norm": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, ids = load(tmp_path), tokens(2, 9)
    with torch.no_grad():
        assert_near("logits", ours(ids).logits, theirs(ids).logits)
    assert ours.config.chunk_size is None, "theirs is about their kernel"
    ours.save_pretrained(tmp_path / "ours")
    assert set(load_file(tmp_path / "ours/model.safetensors")) == set(theirs.state_dict())
    saved = json.loads((tmp_path / "ours/config.json").read_text())
    assert not {"mode", "chunkwise_kernel", "embedding_dim", "chunk_size"} & set(saved)
    assert saved["hidden_size"] == 128


def test_fused_weights(theirs, tokens, tmp_path):
    weights = {k: v.clone() for k, v in theirs.state_dict().items()}
    for i in range(2):
        for fused, parts in FUSED.items():
            folder = f"backbone.blocks.{i}.{fused.split('.')[0]}."
            joined = torch.cat([weights.pop(folder + part) for part in parts])
            weights[f"backbone.blocks.{i}.{fused}"] = joined
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    xLSTMConfig(**SMALL, weight_mode="fused").save_pretrained(tmp_path)
    ours, ids = load(tmp_path), tokens(2, 70)
    assert set(ours.state_dict()) == set(weights)
    with torch.no_grad():
        assert_near("logits", ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_against_the_equations(gate, tokens):
    """One block in float64, with the cell step by step as the papers define it."""
    options = {"num_hidden_layers": 1, "input_gate": gate, "head_norm": "rms", "eps": 0.0}
    model = stir(FlashMLSTMForCausalLM(FlashMLSTMConfig(**{**SMALL, **options}))).double()
    block, ids = model.backbone.blocks[0], tokens(2, 9)
    layer = block.mlstm_layer
    heads = lambda x: x.unflatten(-1, (2, -1))
    cap = lambda x, c: c * torch.tanh(x / c)
    with torch.no_grad():
        x = model.backbone.embeddings(ids)
        u = block.norm_mlstm(x)
        q, k, v = heads(layer.q(u)), heads(layer.k(u)), heads(layer.v(u))
        i, f = cap(layer.igate_preact(u), 15.0), cap(layer.fgate_preact(u), 15.0).sigmoid()
        i = i.exp() if gate == "exp" else i.sigmoid()
        C, n, rows = torch.zeros(2, 2, 32, 64).double(), torch.zeros(2, 2, 32).double(), []
        for t in range(9):
            C = f[:, t, :, None, None] * C + i[:, t, :, None, None] * torch.einsum(
                "bhk,bhv->bhkv", k[:, t], v[:, t]
            )
            n = f[:, t, :, None] * n + i[:, t, :, None] * k[:, t]
            h = torch.einsum("bhk,bhkv->bhv", q[:, t] / 32**0.5, C)
            if gate == "exp":
                h = h / (q[:, t] / 32**0.5 * n).sum(-1, keepdim=True).abs().clamp_min(1)
            rows.append(h)
        h = torch.stack(rows, 1)
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2)
        h = h * layer.multihead_norm.weight * layer.ogate_preact(u).sigmoid()
        x = x + layer.out_proj(h)
        x = x + block.ffn(block.norm_ffn(x))
        want = cap(model.lm_head(model.backbone.out_norm(x)), 30.0)
        got = model(ids, use_cache=True)
    assert_close("logits", got.logits, want, 64 * EPS[torch.float64])
    states = got.past_key_values.layers[0].get_states()
    assert len(states) == (3 if gate == "exp" else 1)


def test_a_fixed_input_gate(tokens):
    """A fixed gate has no weights, and equals a learnable one with zero weights."""
    fixed = stir(FlashMLSTMForCausalLM(FlashMLSTMConfig(**SMALL, learnable_input_gate=False)))
    names = set(fixed.state_dict())
    assert not any("igate" in name for name in names)
    free = FlashMLSTMForCausalLM(FlashMLSTMConfig(**SMALL)).eval()  # weights 0, biases -10
    missing, unexpected = free.load_state_dict(fixed.state_dict(), strict=False)
    assert len(missing) == 4
    assert not unexpected
    ids = tokens(2, 20)
    with torch.no_grad():
        got, want = fixed(ids).logits, free(ids).logits
    assert torch.equal(got, want)


def test_logits_are_capped_in_fp32(tokens):
    model = stir(FlashMLSTMForCausalLM(FlashMLSTMConfig(**SMALL)), 3.0).bfloat16()
    logits = model(tokens(2, 9)).logits
    assert logits.dtype == torch.float32
    assert 20 < logits.abs().max() <= 30


def test_a_static_cache_is_written_in_place(tokens):
    """Decoding changes the buffers in place, but never while gradients are recorded."""
    from transformers import StaticCache

    model, ids = stir(FlashMLSTMForCausalLM(FlashMLSTMConfig(**SMALL))), tokens(2, 6)
    static, dynamic = StaticCache(model.config, max_cache_len=8), DynamicCache(config=model.config)
    for part in ids.split([3, 1, 1, 1], dim=1):
        with torch.no_grad():
            got, want = (model(part, past_key_values=c).logits for c in (static, dynamic))
        assert torch.equal(got, want)
    loss = model(ids[:, :1], past_key_values=static).logits.sum()
    loss.backward()
    assert static.get_seq_length() == 7
