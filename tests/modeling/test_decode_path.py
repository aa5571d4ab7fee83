"""Tests which steps are recorded, by whose engine, and what `decoder.path` and `decoder.reason` say
about it."""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from cases import DEVICE
from decode_cases import decode, greedy, same_as_plain, without_engine
from model_cases import VOCABULARY


def test_a_mode_of_the_caller_sees_every_op(make_model, tokens):
    class Counts(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            # not counted: the kernels' checks call these more or less often, by the tensors' memory
            self.seen += func.__name__ not in ("is_contiguous", "__get__")
            return func(*args, **(kwargs or {}))

    model, ids = make_model(), tokens(2, 6)
    decode(model, ids)

    def count():
        with Counts() as counts:
            logits = decode(model, ids)
        return torch.tensor(counts.seen), logits

    assert model.decoder.path != "plain"
    (seen, logits), (want, plain) = count(), without_engine(model, count)
    assert seen >= want > 100
    assert torch.equal(logits, plain)


def test_flags_of_torch_count(make_model, tokens):
    model, ids = make_model(), tokens(2, 5)
    decode(model, ids)
    recorded = list(model.decoder._recordings.values())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before == "highest" else "highest")
    try:
        same_as_plain(model, lambda: decode(model, ids))
    finally:
        torch.set_float32_matmul_precision(before)
    assert not any(r in recorded for r in model.decoder._recordings.values())


def test_a_shallow_copy_decodes_with_what_is_its_own(make_model, tokens):
    model, ids = make_model(), tokens(2, 5)
    want = decode(model, ids)
    twin = copy.copy(model)
    twin._modules = dict(twin._modules)
    twin.lm_head = nn.Linear(32, VOCABULARY, bias=False)
    assert twin.decoder is not model.decoder
    got = same_as_plain(twin, lambda: decode(twin, ids))
    assert not torch.allclose(got, want)
    assert torch.equal(decode(model, ids), want)
    assert torch.equal(same_as_plain(twin, lambda: greedy(twin, ids)), greedy(twin, ids))


def test_a_replica_decodes_with_what_is_its_own(make_model, tokens):
    """A replica, as DataParallel makes it for one call, decodes with its own modules."""
    model, ids = make_model(), tokens(2, 5)
    want = decode(model, ids)
    replica = model._replicate_for_data_parallel()
    replica.lm_head = nn.Linear(32, VOCABULARY, bias=False)
    got = decode(replica, ids)
    with torch.no_grad():
        hidden = replica.model(ids, use_cache=True).last_hidden_state
        assert torch.allclose(got, replica.lm_head(hidden), atol=1e-5)
    assert not torch.allclose(got, want)


OFFLOADS = {
    "cpu_offload": lambda accelerate, m, path: accelerate.cpu_offload(m, execution_device=DEVICE),
    "disk_offload": lambda accelerate, m, path: accelerate.disk_offload(
        m, path, execution_device=DEVICE
    ),
    "embedding on disk": lambda accelerate, m, path: accelerate.dispatch_model(
        m,
        {"model.embed_tokens": "disk", "model.layers": DEVICE, "model.norm": DEVICE,
         "lm_head": DEVICE},
        main_device=DEVICE, offload_dir=path, force_hooks=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", OFFLOADS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_offloaded_weights_are_brought(make_model, tokens, tmp_path, way, options):
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_model(), tokens(2, 5)

    def text():
        torch.manual_seed(0)
        return greedy(model, ids, **options)

    want = text()
    model = OFFLOADS[way](accelerate, model, str(tmp_path)) or model
    assert torch.equal(text(), want)
    assert model.decoder.path == "plain"


def test_path_and_reason_say_what_ran(make_model, tokens):
    model, ids = make_model(), tokens(2, 5)
    assert (model.decoder.path, model.decoder.reason) == (None, None)
    greedy(model, ids)
    recorded = "tape" if DEVICE == "cpu" else "graph"
    assert (model.decoder.path, model.decoder.reason) == (recorded, None)
    without_engine(model, lambda: greedy(model, ids))
    assert (model.decoder.path, model.decoder.reason) == ("plain", 'mode is "eager"')
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    greedy(model, ids)
    assert model.decoder.path == "plain"
    assert "RMSNorm has hooks" in model.decoder.reason
    handle.remove()
    greedy(model, ids)
    assert (model.decoder.path, model.decoder.reason) == (recorded, None)


def test_a_model_that_changes_with_every_token_is_not_recorded_each_time(make_model, tokens):
    model, made = make_model(), []
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for t, token in enumerate(tokens(1, 12).split(1, 1)):
            model.model.norm.eps = 1e-6 * (t + 1)
            model(token, past_key_values=cache)
            made += [r for r in model.decoder._recordings.values() if r not in made]
    assert len(made) <= 1
    assert "has just changed" in model.decoder.reason


def test_every_family_keeps_its_recording(case, make_model, tokens):
    """Neither generate nor a step changes what a step reads, which would make it be recorded again."""
    model, ids = make_model(case), tokens(2, 5)
    greedy(model, ids)
    (first,) = model.decoder._recordings.values()
    greedy(model, ids, num_beams=1)
    greedy(model, ids, do_sample=True)
    decode(model, ids)
    model.generation_config.max_length = 77
    greedy(model, ids)
    with torch.inference_mode():
        greedy(model, ids)
    assert list(model.decoder._recordings.values()) == [first]


@pytest.mark.skipif(DEVICE != "cpu", reason="gloo")
def test_fsdp_modules_are_called(make_model, tokens):
    """Modules wrapped by FSDP are called directly, because their state refers to nearly every object
    of the process, which must not be compared token by token."""
    model, ids = make_model(), tokens(2, 5)
    want = greedy(model, ids)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for block in model.model.layers:
            fully_shard(block)
        assert torch.equal(greedy(fully_shard(model), ids), want)
        assert model.decoder.path == "plain"
    finally:
        dist.destroy_process_group()


class Everything:
    def __init__(self):
        self.modules, self.itself, self.chain = sys.modules, self, None


def test_modules_that_hold_everything(make_model, tokens):
    """A module that refers to a huge graph of objects, with cycles and long chains, is decoded
    without the engine, and decoder.reason says why."""
    model, ids = make_model(), tokens(2, 5)
    want, notes = greedy(model, ids), Everything()
    model.model.layers[0].notes = [notes]
    for _ in range(5000):
        notes.chain = [notes.chain]
    assert torch.equal(greedy(model, ids), want)
    assert "hold more than 1000" in model.decoder.reason
    del model.model.layers[0].notes
    greedy(model, ids)
    assert model.decoder.path != "plain"


def test_forward_mode_is_left_to_the_model(make_model, tokens):
    model, ids = make_model(), tokens(2, 3)
    with forward_ad.dual_level():
        decode(model, ids)
    assert "forward mode" in model.decoder.reason


def test_weights_are_swapped_as_torch_will(case, make_model, tokens, monkeypatch):
    """torch.__future__ swaps only tensors of which nothing else has a view, as a tape has."""
    model, ids = make_model(case), tokens(2, 5)
    greedy(model, ids)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model.load_state_dict({name: 2 * w for name, w in model.state_dict().items()})
    same_as_plain(model, lambda: greedy(model, ids))
    same_as_plain(model.double(), lambda: greedy(model, ids))
