"""Tests flash_xlstm against the `xlstm` package, whose weights it loads, and its own options.

The package itself is used where it is installed (`pip install --no-deps xlstm==2.0.6
mlstm_kernels==2.0.6` beside einops and PyYAML). Elsewhere its recorded results are:
data/xlstm_package.json has its logits for weights that a formula gives, made by `python
tests/modeling/test_flash_xlstm.py`.
"""

import json
import math
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import DynamicCache

from flashcell import FlashXLSTMConfig, FlashXLSTMForCausalLM
from flashcell.convert_xlstm import BIAS, RECURRENT
from flashcell.layers.headwise_linear import HeadwiseLinear
from numerics import EPS, assert_close

RECORDED = Path(__file__).parent / "data/xlstm_package.json"
VOCABULARY = 11
PREFIX = "xlstm_block_stack.blocks."


def formula(name: str, shape: list[int]) -> torch.Tensor:
    """Weights that are the same on every machine: sines whose phase depends on the name."""
    start = zlib.crc32(name.encode()) % 1000
    count = math.prod(shape)
    values = torch.sin(start + 0.7 * torch.arange(count, dtype=torch.float64))
    return (values / math.sqrt(shape[-1] if len(shape) > 1 else 4)).float().view(shape)


def package(width: int, blocks: int, vocabulary: int, slstm_at, tied: bool = False):
    """An xLSTMLMModel on the CPU, with weights not yet drawn."""
    xlstm = pytest.importorskip("xlstm", reason="the xlstm package is not installed")
    mlstm = xlstm.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2)
    slstm = xlstm.sLSTMLayerConfig(backend="vanilla", conv1d_kernel_size=4, num_heads=4)
    feedforward = xlstm.FeedForwardConfig(proj_factor=1.3, act_fn="gelu")
    config = xlstm.xLSTMLMModelConfig(
        vocab_size=vocabulary,
        embedding_dim=width,
        num_blocks=blocks,
        context_length=128,
        slstm_at=slstm_at,
        tie_weights=tied,
        mlstm_block=xlstm.mLSTMBlockConfig(mlstm=mlstm),
        slstm_block=xlstm.sLSTMBlockConfig(slstm=slstm, feedforward=feedforward),
    )
    return xlstm.xLSTMLMModel(config).eval()


STACKS = {"[2:1]": [1], "[1:1]": [0, 2], "[1:0]": [], "[0:1]": "all", "tied": [0]}


@pytest.fixture(params=STACKS)
def theirs(request):
    blocks = 4 if request.param == "[1:1]" else 3
    model = package(64, blocks, VOCABULARY, STACKS[request.param], request.param == "tied")
    model.reset_parameters()
    with torch.no_grad():
        for parameter in model.parameters():  # else gates, norms and recurrence start trivial
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def draw(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape)


def test_the_package_s_logits(theirs):
    """Our logits equal those of the xlstm package in fp32, for the whole text and step by step; they
    are of the size of some units."""
    ours, ids = FlashXLSTMForCausalLM.from_xlstm(theirs.state_dict()), draw(2, 70)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == theirs.config.tie_weights
    state, cache = None, DynamicCache(config=ours.config)
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids)).abs().max() <= 1e-4
        for t in range(9):
            want, state = theirs.step(ids[:, t : t + 1], state=state)
            got = ours(ids[:, t : t + 1], past_key_values=cache).logits
            assert (got - want).abs().max() <= 1e-4


def without_eps(theirs):
    """Sets eps to 0: ours and theirs start with different m, which matters only through eps."""
    for block in theirs.xlstm_block_stack.blocks:
        cell = getattr(block.xlstm, "mlstm_cell", None)
        if cell is not None:
            cell.backend_fn = partial(cell.backend_fn, eps=0.0)
    return theirs.double()


def test_the_package_s_logits_and_gradients_in_float64(theirs):
    theirs = without_eps(theirs)
    ours, ids = FlashXLSTMForCausalLM.from_xlstm(theirs.state_dict(), eps=0.0), draw(2, 20)
    got, want = ours(ids).logits, theirs(ids)
    assert_close("logits", got, want, 64 * EPS[torch.float64])
    weight = torch.randn_like(want)
    embeddings = ours.model.embed_tokens.weight, theirs.token_embedding.weight
    got = torch.autograd.grad((got * weight).sum(), embeddings[0])[0]
    want = torch.autograd.grad((want * weight).sum(), embeddings[1])[0]
    assert_close("d embeddings", got, want, 64 * EPS[torch.float64])


def test_the_package_s_other_layout():
    """The package's "cuda" backend stores recurrent weight and bias transposed."""
    theirs = package(64, 2, VOCABULARY, [1])
    cell = theirs.xlstm_block_stack.blocks[1].xlstm.slstm_cell
    with torch.no_grad():
        cell._recurrent_kernel_.normal_()
        cell._bias_.normal_()
    weights = theirs.state_dict()
    other = dict(weights)
    name = f"{PREFIX}1.{RECURRENT}"  # [N, in, gates, out], which both backends call external
    other[name] = cell._recurrent_kernel_int2ext(weights[name]).reshape(4, 16, 64)
    name = f"{PREFIX}1.{BIAS}"
    other[name] = cell._bias_int2ext(weights[name]).reshape(-1)
    vanilla, cuda = (FlashXLSTMForCausalLM.from_xlstm(w) for w in (weights, other))
    for (name, a), b in zip(vanilla.state_dict().items(), cuda.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture(scope="module")
def recorded():
    data = json.loads(RECORDED.read_text())
    weights = {name: formula(name, shape) for name, shape in data["shapes"].items()}
    return weights, torch.tensor(data["ids"]), torch.tensor(data["logits"])


def test_the_package_s_recorded_logits(recorded):
    """A model of one mLSTM and one sLSTM block has the recorded logits, to fp32's digits."""
    weights, ids, want = recorded
    model = FlashXLSTMForCausalLM.from_xlstm(weights)
    config = model.config
    assert config.slstm_at == [1]
    assert (config.num_heads, config.slstm_num_heads) == (2, 4)
    assert (config.inner_size, config.intermediate_size) == (64, 64)
    with torch.no_grad():
        assert_close("logits", model(ids).logits, want, 16 * EPS[torch.float32])


def test_what_it_does_not_have_is_refused(recorded):
    weights, _, _ = recorded
    bias = {f"{PREFIX}0.xlstm.proj_up.bias": torch.zeros(128)}
    with pytest.raises(ValueError, match=r"proj_up\.bias too much, and nothing is missing"):
        FlashXLSTMForCausalLM.from_xlstm({**weights, **bias})
    bare = {k: w for k, w in weights.items() if "group_norm" not in k}
    with pytest.raises(ValueError, match=r"nothing too much, and .*head_norm\.weight is missing"):
        FlashXLSTMForCausalLM.from_xlstm(bare)
    for gone in ("xlstm_block_stack.post_blocks_norm.weight", "lm_head.weight"):
        with pytest.raises(ValueError, match=f"no {gone}"):
            FlashXLSTMForCausalLM.from_xlstm({k: w for k, w in weights.items() if k != gone})
    gap = {k.replace(f"{PREFIX}1.", f"{PREFIX}2."): w for k, w in weights.items()}
    with pytest.raises(ValueError, match=r"has these blocks: 0, 2, but must be .* without a gap"):
        FlashXLSTMForCausalLM.from_xlstm(gap)
    with pytest.raises(ValueError, match="has these blocks: none"):
        FlashXLSTMForCausalLM.from_xlstm({k: w for k, w in weights.items() if PREFIX not in k})


def test_sizes_and_parameter_count():
    """Counted by hand, for xLSTM[1:1] with 2 blocks; sizes are rounded up to 64 as in the package."""
    config = FlashXLSTMConfig(hidden_size=672, num_hidden_layers=2, slstm_at=[1], vocab_size=100)
    assert (config.inner_size, config.intermediate_size) == (1344, 896)
    d, i, f, heads = 672, 1344, 896, 4
    mlstm = d * 2 * i + i * d + 3 * i * 4 + 5 * i + 2 * (3 * i * heads + heads) + 2 * i + d
    slstm = 5 * d + 4 * d * d // heads + 4 * d * d // heads + 4 * d + d + d + d + 3 * d * f
    with torch.device("meta"):
        count = FlashXLSTMForCausalLM(config).num_parameters()
    assert count == 2 * 100 * d + mlstm + slstm + d


def test_initial_weights():
    config = FlashXLSTMConfig(hidden_size=64, num_hidden_layers=4, slstm_at=[1, 3], vocab_size=61)
    model = FlashXLSTMForCausalLM(config)
    small, residual = math.sqrt(2 / (5 * 64)), 2 / (4 * 8)
    first, second, _, last = model.model.layers
    mixer = first.mixer
    assert torch.equal(mixer.fgate.bias, torch.linspace(3, 6, 4))
    assert not mixer.fgate.weight.any()
    assert not mixer.igate.weight.any()
    assert 0 < mixer.igate.bias.std() < 0.5
    assert (mixer.skip == 1).all()
    assert mixer.conv.weight.abs().max() <= 0.5
    assert 0.2 < mixer.conv.weight.std() < 0.4  # uniform: 0.5 / sqrt(3)
    assert 0.9 < mixer.proj_down.weight.std() / residual < 1.1
    for layer in (mixer.proj_up, mixer.qk_proj, second.mixer.if_proj, second.mlp.proj_up):
        assert 0.9 < layer.weight.std() / small < 1.1
    assert 0.9 < second.mlp.proj_down.weight.std() / residual < 1.1
    assert not second.mixer.recurrent_weight.any()
    for block, depth in ((second, 1 / 3), (last, 1.0)):
        forget = block.mixer.gate_bias[1]
        fall = torch.linspace(0, 1, forget.shape[1]) ** (0.3 + 1.3 * depth)
        torch.testing.assert_close(forget, (5 - 12 * fall).expand_as(forget))
        assert not block.mixer.gate_bias[[0, 2, 3]].any()
    middle = slice(1, -1)
    assert (last.mixer.gate_bias[1, :, middle] > second.mixer.gate_bias[1, :, middle]).all()


def test_block_diagonal_projections_beside_lora(tokens):
    """ "all-linear" passes over them; modules_to_save trains them whole, and merging keeps that."""
    peft = pytest.importorskip("peft")
    config = FlashXLSTMConfig(hidden_size=32, num_hidden_layers=2, slstm_at=[1], vocab_size=61)
    model, ids = FlashXLSTMForCausalLM(config), tokens(2, 9)
    lora = peft.LoraConfig(target_modules="all-linear", modules_to_save=["qk_proj", "zo_proj"])
    model = peft.get_peft_model(model, lora)
    wide = {n for n, m in model.named_modules() if isinstance(m, HeadwiseLinear)}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n.split(".")[-1] for n in trained if "lora" in n} <= {"weight"}
    assert not any("v_proj.lora" in n or "if_proj.lora" in n for n in trained)
    assert sum("modules_to_save" in n for n in trained) == 2
    assert len(wide) == 4 + 2  # with the two originals kept beside them
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "modules_to_save" in n)


def test_a_spoilt_past_ends_with_its_document(tokens):
    """NaN states do not reach the next document, even with padding between them."""
    config = FlashXLSTMConfig(hidden_size=32, num_hidden_layers=2, slstm_at=[1], vocab_size=61)
    model, ids = FlashXLSTMForCausalLM(config).eval(), tokens(1, 4)
    mask, begins = torch.tensor([[1, 1, 1, 0, 1, 1, 1]]), torch.tensor([[0, 0, 1, 2]])
    with torch.no_grad():
        cache = model(ids[:, :3], use_cache=True).past_key_values
        for layer in cache.layers:
            layer.map_states(lambda s: torch.full_like(s, float("nan")))
        options = {"attention_mask": mask, "position_ids": begins}
        got = model(ids, past_key_values=cache, **options).logits
        want = model(ids[:, 1:]).logits
        assert_close("logits", got[:, 1:], want, 16 * EPS[torch.float32])
        got = model(ids[:, :1], past_key_values=cache).logits
        want = model(torch.cat([ids[:, 1:], ids[:, :1]], 1)).logits[:, -1:]
        assert_close("the next token's", got, want, 16 * EPS[torch.float32])


BAD = {
    "sizes": ({"num_heads": 0}, "num_heads is 0, but must be at least 1"),
    "position": ({"slstm_at": [24]}, "slstm_at is .24., but must be 'all', or indices .* 0 to 23"),
    "negative": ({"slstm_at": [-1]}, "slstm_at is .-1., but must be"),
    "word": ({"slstm_at": "some"}, "'slstm_at'.*some"),
    "heads": ({"num_heads": 5}, "num_heads is 5, but 8 num_heads must divide inner_size = 1536"),
    "slstm heads": (
        {"slstm_at": "all", "slstm_num_heads": 5},
        "slstm_num_heads is 5, but it must divide hidden_size = 768",
    ),
    "blocks": ({"qkv_block_size": 7}, "qkv_block_size is 7, but it must divide inner_size = 1536"),
    "conv": ({"conv_kernel_size": 1}, "conv_kernel_size is 1, but must be at least 2"),
    "eps": ({"eps": -1.0}, "eps is -1.0, but must be a finite number >= 0"),
    "chunk": ({"chunk_size": 0}, "chunk_size is 0, but must be None or from 1 to"),
    "norm": ({"norm_eps": 0.0}, "norm_eps is 0.0, but must be a positive, finite number"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_values_are_named(what):
    changes, message = BAD[what]
    with pytest.raises(StrictDataclassError, match=f"(?s){message}"):
        FlashXLSTMConfig(**changes)


def record() -> None:
    model = package(16, 2, VOCABULARY, [1])
    shapes = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict({name: formula(name, shape) for name, shape in shapes.items()})
    ids = (torch.arange(24) * 7 % VOCABULARY)[None]
    with torch.no_grad():
        logits = model.double()(ids).float()
    RECORDED.parent.mkdir(exist_ok=True)
    data = {"shapes": shapes, "ids": ids.tolist(), "logits": logits.tolist()}
    RECORDED.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    record()
