"""Tests a decoded token's linear layers in few launches: same results, and no hook or module is
bypassed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cases import DEVICE
from decode_cases import decode
from flashcell import modeling_flash_mlstm, recurrent_model
from flashcell.generation.known_code import why_called, why_not_weights
from flashcell.kernels import diagonal_rnn
from flashcell.kernels import tfla as reference
from flashcell.layers import decode_linear
from flashcell.layers.decode_linear import PLAIN, ROWS, many_rows, packed
from flashcell.layers.diagonal_mixer import DiagonalMixer
from numerics import assert_close

CASES = ["flash_mlstm", "flash_mlstm-sigmoid", "lstm", "slstm", "flash_gru", "flash_lstm"]
PLACES = modeling_flash_mlstm, decode_linear, recurrent_model


def is_plain(module, x):
    return why_not_weights(module, x, PLAIN) is None


def by_the_modules(monkeypatch, model, ids):
    with monkeypatch.context() as patch:
        for place in PLACES:
            patch.setattr(place, "find_step_linear", lambda *_: None)
        return decode(model, ids)


@pytest.fixture
def taken(monkeypatch):
    """Records the steps taken, by the reference wherever the tests run."""
    steps = []

    def find(x, backend, modules, around=(), overwrites=False):
        plain = not any(map(why_called, around)) and all(is_plain(m, x) for m in modules)
        if x.shape[1] != 1 or torch.is_grad_enabled() or not plain:
            return None
        steps.append(len(modules))
        return reference.linear_step if x.shape[0] <= ROWS else many_rows(reference, overwrites)

    for place in PLACES:
        monkeypatch.setattr(place, "find_step_linear", find)
    fused = lambda mixer, x: diagonal_rnn if mixer.is_plain(x) else None
    monkeypatch.setattr(DiagonalMixer, "find_kernel", fused)
    return steps


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [2, ROWS + 2])
def test_is_the_same_model(make_model, tokens, taken, monkeypatch, case, batch):
    model, ids = make_model(case), tokens(batch, 6)
    model.decoder.mode = "eager"
    got = decode(model, ids)
    head = not case.startswith("flash_mlstm") or batch <= ROWS
    assert len(taken) == 6 * (model.config.num_hidden_layers + head)
    assert_close("logits", got, by_the_modules(monkeypatch, model, ids), 1e-6)


@pytest.mark.parametrize("overwrites", [False, True])
def test_many_rows_give_the_residual_its_sum_where_they_may(overwrites):
    x, weight, residual = torch.randn(20, 24), torch.randn(16, 24), torch.randn(20, 16)
    before = residual.clone()
    got = many_rows(reference, overwrites)(x, [weight], residual=residual)[0]
    assert_close("sum", got, torch.nn.functional.linear(x, weight) + before, 1e-6)
    assert (got is residual) == overwrites
    assert torch.equal(residual, before) != overwrites


OWN_WAYS = {
    "hook": lambda m: m.ffn.proj_up.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.norm_ffn.register_forward_pre_hook(lambda *_: None),
    "another class": lambda m: setattr(m.ffn, "proj_down", nn.Sequential(m.ffn.proj_down)),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.mlstm_layer.out_proj),
    "forward replaced": lambda m: setattr(m.mlstm_layer.q, "forward", m.mlstm_layer.q.forward),
    "columns": lambda m: setattr(
        m.ffn.proj_down.weight, "data", m.ffn.proj_down.weight.mT.contiguous().mT
    ),
    "an odd width": lambda m: setattr(m.ffn, "proj_down", nn.Linear(36, 32, bias=False)),
    "another dtype": lambda m: m.mlstm_layer.fgate_preact.double(),
}


@pytest.mark.parametrize("way", OWN_WAYS)
def test_a_module_with_its_own_way_is_called(make_model, way):
    model = make_model("flash_mlstm")
    block = model.backbone.blocks[0]
    x = torch.randn(2, 1, 32)
    leaves = [m for m in block.modules() if next(m.children(), None) is None]
    norm = block.mlstm_layer.multihead_norm
    assert all(is_plain(m, x) for m in leaves if m is not norm)
    OWN_WAYS[way](block)
    linears = [
        *(m for group in block.mlstm_layer.projections for m in group), *block.ffn.projections,
        block.mlstm_layer.out_proj, block.ffn.proj_down, block.norm_mlstm, block.norm_ffn,
    ]  # fmt: skip
    assert not all(is_plain(m, x) for m in linears)


AROUND = {
    "hook": lambda b: b.mlstm_layer.register_forward_hook(lambda m, x, y: 2 * y),
    "pre-hook": lambda b: b.ffn.register_forward_pre_hook(lambda m, x: (2 * x[0],)),
    "forward replaced": lambda b: setattr(b.ffn, "forward", torch.zeros_like),
    "another class": lambda b: setattr(b, "ffn", nn.Sequential(b.ffn, nn.Tanh())),
}


@pytest.mark.parametrize("way", AROUND)
def test_what_is_around_the_layers_is_called_too(make_model, tokens, taken, monkeypatch, way):
    model, ids = make_model("flash_mlstm"), tokens(2, 4)
    model.decoder.mode, before = "eager", decode(model, ids)
    AROUND[way](model.backbone.blocks[0])
    del taken[:]
    got = decode(model, ids)
    assert len(taken) == 4 * 2, "the other block and the head"
    assert_close("logits", got, by_the_modules(monkeypatch, model, ids), 1e-6)
    assert not torch.allclose(got, before, atol=1e-3)


def doubles(module):
    return module.register_forward_hook(lambda m, x, y: (2 * y[0], *y[1:]))


MIXED = {
    "convolution": lambda mixer: doubles(mixer.conv),
    "cell": lambda mixer: doubles(mixer.cell),
    "heads' product": lambda mixer: doubles(mixer.cell.in_proj),
    "norm": lambda mixer: mixer.norm.register_forward_hook(lambda m, x, y: 2 * y),
    "forward replaced": lambda mixer: setattr(
        mixer.conv, "forward", lambda x, *_: (x, x.new_zeros(len(x), 3, x.shape[2]))
    ),
}


@pytest.mark.parametrize("case", ["flash_gru", "flash_lstm"])
@pytest.mark.parametrize("part", MIXED)
def test_what_is_between_the_layers_is_called_too(
    make_model, tokens, taken, monkeypatch, case, part
):
    model, ids = make_model(case), tokens(2, 4)
    model.decoder.mode, before = "eager", decode(model, ids)
    MIXED[part](model.model.layers[0].mixer)
    got = decode(model, ids)
    assert_close("logits", got, by_the_modules(monkeypatch, model, ids), 1e-6)
    assert not torch.allclose(got, before, atol=1e-3)


UNREADABLE = {
    "width": nn.Linear(12, 8, bias=False),
    "order": nn.Linear(8, 16, bias=False),
    "place": nn.Linear(16, 8, bias=False),
    "bias": nn.Linear(16, 8),
}
UNREADABLE["order"].weight.data = torch.ones(8, 16).mT
UNREADABLE["place"].weight.data = torch.ones(129)[1:].view(8, 16)


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_weight_the_kernel_cannot_read_is_called(what):
    assert not is_plain(UNREADABLE[what], torch.ones(1))
    assert is_plain(nn.Linear(16, 8, bias=False), torch.ones(1))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs FLASHCELL_TEST_DEVICE=cuda")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, 9, 40])
def test_loses_nothing_in_16_bits(make_model, tokens, monkeypatch, case, batch):
    """Compared with the model in fp32, it is no further off than the modules are."""
    sizes = {"hidden_size": 256, "num_heads": 4}
    model, ids = make_model(case, **sizes).bfloat16(), tokens(batch, 8)
    model.decoder.mode = "eager"
    got, peer = decode(model, ids), by_the_modules(monkeypatch, model, ids)
    assert not torch.equal(got, peer), "it was not taken"
    want = decode(model.float(), ids)
    error, allowed = (float((y.float() - want).square().mean().sqrt()) for y in (got, peer))
    assert error <= 1.5 * allowed


def test_packing_moves_weights_and_nothing_else(make_model, tmp_path):
    """One product has one storage; parameters, checkpoints and gradients do not change."""
    model = make_model("flash_mlstm")
    mixer, before = model.backbone.blocks[0].mlstm_layer, {}
    parameters = [m.weight for m in mixer.projections[0]]
    for name, w in model.state_dict().items():
        before[name] = w.clone()
    (whole,) = packed(parameters)
    assert [m.weight for m in mixer.projections[0]] == parameters
    assert whole.shape == (sum(map(len, parameters)), 32)
    assert packed(parameters)[0].data_ptr() == whole.data_ptr(), "packed again"
    whole[0, 0] = before["backbone.blocks.0.mlstm_layer.q.weight"][0, 0] = 7
    model.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    for name, w in read.state_dict().items():
        assert torch.equal(w, before[name]), name
        assert torch.equal(model.state_dict()[name], before[name]), name
    ids = torch.arange(6).view(2, 3)
    model(ids, labels=ids).loss.backward()
    assert all(w.grad is not None and w.grad.shape == w.shape for w in parameters)
    with torch.inference_mode():
        loose = [torch.ones(2, 4), torch.ones(3, 4)]
        assert packed(loose) == loose, "weights would become inference tensors"


@pytest.mark.skipif(DEVICE != "cuda", reason="needs FLASHCELL_TEST_DEVICE=cuda")
def test_packing_on_another_stream_than_the_weights():
    """The freed memory belongs to a stream that does not wait for this one."""
    weights = [torch.ones(2**18, 8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)
        (whole,) = packed(weights)
    for _ in range(8):
        torch.full((2**18, 8), float("nan"), device="cuda")
    torch.cuda.synchronize()
    assert bool((whole == 1).all())


def test_weights_whose_place_others_know_stay(tmp_path):
    """Views of an optimizer's flat buffer, and any weight that FSDP may gather in place, are not
    moved."""
    flat = torch.arange(40.0)
    weights = [flat[:16].view(4, 4), flat[20:].view(5, 4)]
    assert packed(weights) == weights
    assert [w.data_ptr() - flat.data_ptr() for w in weights] == [0, 80]
    own = [torch.ones(2, 4), torch.ones(3, 4)]
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert packed(own) == own
    finally:
        dist.destroy_process_group()
    assert len(packed(own)) == 1
