"""Tests the recorded calls of several tokens by which assisted decoding reads what it tries."""

import pytest
import torch

from cases import DEVICE
from decode_cases import check_same
from decode_cases import greedy_with_cache as greedy
from flashcell.generation.captured_call import RecordedCall
from flashcell.state import assisted


@pytest.mark.thin
@pytest.mark.parametrize("reread", [0, 8])
def test_calls_are_recorded_and_replayed(case, make_model, tokens, monkeypatch, reread):
    """Calls of a length that was seen before are replayed, with every cache, and follow the weights."""
    monkeypatch.setattr(assisted, "REREAD", reread)
    replayed, read = [], RecordedCall.read

    def count(call, ids, *rest):
        replayed.append(ids.shape[1])
        return read(call, ids, *rest)

    monkeypatch.setattr(RecordedCall, "read", count)
    model, ids = make_model(case), tokens(1, 9).repeat(1, 4)
    for change in (None, "values", "tensor", "mode"):
        with torch.no_grad():
            if change == "values":
                model.lm_head.weight.mul_(-1)
            elif change == "tensor":
                model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.decoder.mode = "eager" if change == "mode" else "auto"
        want = greedy(model, ids, new=40)
        del replayed[:]
        for _ in range(3):
            check_same(greedy(model, ids, new=40, prompt_lookup_num_tokens=4), want)
        assert (len(replayed) > 10) == (change != "mode"), (change, replayed)


def test_a_streamer_that_changes_the_model_is_seen(make_model, tokens):
    """A replayed call has the weights of its time."""
    ids = tokens(1, 9).repeat(1, 4)

    class Changing:
        def __init__(self, model):
            self.model, self.seen, self.other = model, 0, torch.randn_like(model.lm_head.weight)

        def put(self, value):
            self.seen += value.numel()
            if self.seen > ids.numel() + 40 and self.other is not None:
                self.model.lm_head.weight = torch.nn.Parameter(self.other)
                self.other = None

        def end(self):
            pass

    texts = []
    for mode in ("auto", "eager"):
        torch.manual_seed(0)
        model = make_model("lstm")
        model.decoder.mode = mode
        for _ in range(2):
            options = {"prompt_lookup_num_tokens": 4, "streamer": Changing(model)}
            texts.append(greedy(model, ids, new=80, **options).sequences)
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and FLASHCELL_TEST_DEVICE=cuda")
def test_a_call_that_cannot_be_captured_leaves_the_step_recorded(make_model, tokens, monkeypatch):
    model, ids = make_model("lstm"), tokens(1, 9).repeat(1, 4)
    want = greedy(model, ids, new=40)
    compute = RecordedCall.compute

    def waiting(call, model):
        float(call.tokens.float().sum())  # waits for the GPU
        return compute(call, model)

    monkeypatch.setattr(RecordedCall, "compute", waiting)
    stream = torch.cuda.current_stream()
    for _ in range(2):
        check_same(greedy(model, ids, new=40, prompt_lookup_num_tokens=4), want)
    check_same(greedy(model, ids, new=40), want)
    assert model.decoder.path == "graph"
    assert torch.cuda.current_stream() == stream
