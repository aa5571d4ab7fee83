"""Tests a decoded step from a tape on a CPU: bitwise the step's ops, and every change is noticed."""

import copy
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from transformers import DynamicCache

from cases import DEVICE
from decode_cases import greedy, without_engine
from flashcell.generation import op_tape
from flashcell.generation.op_tape import Tape, Unrecordable

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has graphs")
RECORDING = op_tape.__file__, _python_dispatch.__file__


def record(function):
    with torch.no_grad():
        return Tape().record(function)


def test_ops_are_run_again_on_what_is_there():
    """Weights and buffers are read and written in place; a view of them is made once."""
    weight, buffer = torch.randn(4, 4), torch.zeros(3, 4)
    linear = nn.Linear(4, 4)

    def step():
        row = buffer[1]
        y = linear(buffer)[:, None].squeeze(1).view(3, 2, 2).flatten(1) @ weight.T
        row.add_(1)
        left, right = y.chunk(2, -1)
        return torch.cat([right, left.clone().mul_(2)], -1)

    run = record(step)
    other = copy.deepcopy(buffer)
    for change in (lambda: None, lambda: weight.mul_(2), lambda: linear.weight.data.add_(1)):
        change()
        got, after = run(), buffer.clone()
        buffer.copy_(other)
        with torch.no_grad():
            want = step()
        assert torch.equal(got, want)
        assert torch.equal(buffer, after)
        other = after


def test_views_of_results_are_one_or_none():
    x = torch.ones(2, 6)

    def step():
        y = x * 2
        z = y[:, None, :].view(2, 3, 2).transpose(0, 1)[1]
        return z + y[:, None][:, 0][:, 2:4]

    run = record(step)
    assert torch.equal(run(), step())
    assert run.__code__.co_nlocals == 3, "a product, one view of it, a sum"


READS = {
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "equal": lambda x: x if torch.equal(x, x) else -x,
    "list": lambda x: x * float(x[0]),
}


@pytest.mark.parametrize("way", READS)
def test_a_value_in_python_is_refused(way):
    x = torch.ones(3)
    with pytest.raises(Unrecordable, match="reads a value"):
        record(lambda: READS[way](x))


def test_an_interrupt_while_recording_leaves_nothing_behind():
    """Ctrl-C leaves no half-made recording, wherever Python can deliver it: after a call of a C
    function, or at the beginning of a Python function."""
    x, places, stop, left = torch.ones(3), [], 0, []

    def watch(frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename in RECORDING:
            places.append((frame.f_code.co_name, frame.f_lineno))
            if len(places) == stop:
                raise KeyboardInterrupt

    def watched():
        places.clear()
        sys.setprofile(watch)
        try:
            Tape().record(lambda: x + 1)
        finally:
            sys.setprofile(None)

    watched()
    for stop in range(1, len(places) + 1):  # noqa: B007  `watch` reads it
        with suppress(KeyboardInterrupt):  # an exception in a destructor is printed and dropped
            watched()
        if torch._C._len_torch_dispatch_stack():
            torch._C._pop_torch_dispatch_stack(None)  # otherwise every later test would be recorded
            left.append(places[-1])
    assert stop > 50
    assert not left


def decoded(model, ids, between=lambda step: None):
    """Returns the logits of every token, and whether the last step came from a tape."""
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for t, token in enumerate(ids.split(1, 1)):
            between(t)
            logits.append(model(token, past_key_values=cache).logits)
    recordings = model.decoder._recordings.values()
    return torch.cat(logits, 1), any(r.replay is not None for r in recordings)


def test_every_family_has_a_tape_and_is_the_same(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 6)
    logits, taped = decoded(model, ids)
    assert taped
    assert not logits.is_inference()
    assert torch.equal(logits, without_engine(model, lambda: decoded(model, ids)[0]))


def test_the_reference_is_called_as_it_is(make_model, tokens):
    assert not decoded(make_model(backend="reference"), tokens(2, 4))[1]


class Listening(nn.Linear):
    def forward(self, x):
        return super().forward(x) * len(str(x))


OWN_WAYS = {
    "hook": lambda m: m.model.layers[0].mlp.register_forward_hook(lambda _, x, y: 2 * y),
    "another package's class": lambda m: setattr(
        m.model.layers[0].mlp.up_proj, "__class__", Listening
    ),
    "forward replaced": lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("way", OWN_WAYS)
def test_what_a_tape_would_miss_is_called(make_model, tokens, way):
    model, ids = make_model(), tokens(2, 6)
    model.model.layers[0].mlp.up_proj.weight.data.normal_()
    OWN_WAYS[way](model)
    logits, taped = decoded(model, ids)
    assert not taped
    assert torch.equal(logits, without_engine(model, lambda: decoded(model, ids)[0]))


CHANGES = {
    "hook": lambda m: m.model.layers[0].register_forward_hook(lambda _, x, y: 2 * y),
    "weight in place": lambda m: m.lm_head.weight.data.mul_(2),
    "weight elsewhere": lambda m: setattr(m.lm_head.weight, "data", 2 * m.lm_head.weight),
    "module": lambda m: setattr(m.model, "norm", nn.Identity()),
    "backend": lambda m: setattr(m.config, "backend", "reference"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_two_tokens_are_seen(make_model, tokens, change):
    model, ids = make_model(), tokens(2, 6)

    def changed(model):
        return decoded(model, ids, lambda t: CHANGES[change](model) if t == 4 else None)[0]

    twin, before = copy.deepcopy(model), decoded(model, ids)[0]
    got = changed(model)
    twin.decoder.mode = "eager"
    assert torch.equal(got, changed(twin))
    if change != "backend":
        assert not torch.allclose(got[:, 4], before[:, 4])


@pytest.mark.parametrize("threads", [1, 2])
def test_generate_with_a_streamer_and_an_end(make_model, tokens, threads):
    """The fast loop returns the tokens, on time, for rows that end at different lengths."""
    model, ids = make_model(), tokens(3, 4)
    torch.set_num_threads(threads)
    whole = greedy(model, ids, new=12)
    model.generation_config.eos_token_id = int(whole[0, 8])
    want = without_engine(model, lambda: greedy(model, ids, new=12))
    torch.set_num_threads(1)
    assert torch.equal(greedy(model, ids, new=12), want)
