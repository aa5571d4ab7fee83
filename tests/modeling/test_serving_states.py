"""Tests of what a server needs of a Batcher: states before and after a prompt, log-probabilities."""

import pytest
import torch
from transformers import DynamicCache

from flashcell import Batcher, Request, generate_many
from flashcell.state.rows import take_row
from model_cases import state_tensors
from serving_cases import alone, collect

pytestmark = pytest.mark.usefixtures("read_at_once_and_late")


def states_of(model, prompt, new=9, keep_at=(), **options) -> dict[int, tuple]:
    """Returns the tokens and the cache that a request gave out, by the number of tokens."""
    given = {}

    def keep(ids, state):
        assert len(ids) not in given
        given[len(ids)] = ids, state

    request = Request(prompt, new, keep_at=keep_at, on_state=keep, **options)
    others = [Request(torch.arange(70) % 61, 5), Request(torch.arange(1, 7), 30)]
    results = collect(generate_many(model, [others[0], request, others[1]], slots=2))
    assert results[1] == alone(model, prompt, new=new)
    return given


def close(model, state, ids) -> None:
    """Asserts that a state is the one after reading `ids`."""
    want = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[None].to(model.device), past_key_values=want)
    assert state.get_seq_length() == len(ids)
    for got, s in zip(state_tensors(state), state_tensors(want), strict=True):
        torch.testing.assert_close(got, s, atol=2e-5, rtol=2e-5)


@pytest.mark.thin
def test_states_at_cuts_and_at_the_end(case, make_model, tokens):
    model, prompt = make_model(case), tokens(150)
    given = states_of(model, prompt, keep_at=(150, 40, 40, 129))
    text = torch.cat([prompt.cpu(), torch.tensor(alone(model, prompt, new=9), device="cpu")])
    end = max(given)
    assert set(given) == {40, 129, 150, end}
    assert end in (158, 159)  # the last token is read where the next step ran ahead of it
    for length, (ids, state) in given.items():
        assert torch.equal(ids, text[:length])
        close(model, state, ids)


@pytest.mark.thin
def test_a_prompt_goes_on_from_a_state(case, make_model, tokens):
    """Only the rest of the prompt is read, also by the Batcher's first request."""
    model, prompt = make_model(case), tokens(150)
    want = alone(model, prompt, new=9)
    state = states_of(model, prompt, keep_at=(100,))[100][1]
    before = [s.clone() for s in state_tensors(state)]
    seen = []
    forward = model.forward

    def count(*args, attention_mask=None, **kwargs):
        read = attention_mask
        if read is None and {"input_ids", "logits_to_keep"} <= kwargs.keys():
            read = torch.ones_like(kwargs["input_ids"])  # the call of one prompt has no mask
        seen.append(0 if read is None else int(read.sum()))
        return forward(*args, attention_mask=attention_mask, **kwargs)

    model.forward = count
    mine = Request(prompt, 9, past_key_values=state)
    results = collect(generate_many(model, [mine, Request(prompt[:5], 4), mine], slots=2))
    assert results[0] == results[2] == want
    assert sum(seen) == 50 + 5 + 50
    assert all(torch.equal(a, b) for a, b in zip(before, state_tensors(state), strict=True))


def test_what_a_state_must_be(make_model, tokens):
    model, prompt = make_model(), tokens(20)
    state = states_of(model, prompt, keep_at=(10,))[10][1]
    two = DynamicCache(config=model.config)
    model(tokens(2, 10), past_key_values=two)
    other = make_model(hidden_size=64)
    wide = DynamicCache(config=other.config)
    other(tokens(1, 10), past_key_values=wide)
    doubled = take_row(state, 0, 10, model.config)
    doubled.layers[0].map_states(torch.Tensor.double)
    wrong = {
        "past_key_values is a str, but must be None or a Cache": {"past_key_values": "x"},
        "past_key_values holds 10 tokens, but must hold": {"past_key_values": state, "prompt": [1] * 10},
        "past_key_values holds 0 tokens": {"past_key_values": DynamicCache(config=model.config)},
        "but must be \\[1, 2, 16\\] torch.float32": {"past_key_values": two},
        "past_key_values: layers.0": {"past_key_values": wide},
        "torch.float64, but must be": {"past_key_values": doubled},
        "keep_at is 5, but must be a sequence": {"keep_at": 5},
        "keep_at is \\[0\\], but must be a sequence": {"keep_at": [0]},
        "keep_at has 21, but the prompt has 20 tokens": {"keep_at": [21]},
        "on_state is 5, but must be callable": {"on_state": 5},
        "logprobs is -1, but must be None or an integer in 0..61": {"logprobs": -1},
        "logprobs is 62, but must be": {"logprobs": 62},
        "mine": {"keep_at": [3], "on_state": lambda *_: raises()},
    }  # fmt: skip

    def raises():
        raise ValueError("mine")

    good = alone(model, prompt, new=8)
    requests = [
        r
        for bad in wrong.values()
        for r in (Request(**{"prompt": prompt} | bad), Request(prompt, 8))
    ]
    results = {c.index: c for c in generate_many(model, requests, slots=3)}
    for i, message in enumerate(wrong):
        with pytest.raises((ValueError, TypeError), match=message):
            raise results[2 * i].error
        assert results[2 * i + 1].tokens == good


def test_states_that_a_cancelled_request_gives(make_model, tokens):
    """None at its end: nobody waits for it."""
    model, given = make_model(), []
    many = Batcher(model, slots=2)
    index = many.submit(Request(tokens(5), 50, on_state=lambda ids, state: given.append(len(ids))))
    for _ in range(5):
        many.step()
    many.cancel(index)
    assert [c.reason for c in many] == ["cancelled"]
    assert given == []


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.5, "seed": 3}])
def test_logprobs(make_model, tokens, options):
    """They are the model's own, whatever sampling does, and do not change the tokens."""
    model, prompt, came = make_model(), tokens(30), []
    plain = Request(prompt, 12, **options)
    told = Request(prompt, 12, logprobs=4, on_token=lambda *given: came.append(given), **options)
    results = {c.index: c for c in generate_many(model, [plain, told], slots=2)}
    assert results[0].tokens == results[1].tokens
    assert results[0].logprobs == []
    text = torch.cat([prompt, torch.tensor(results[1].tokens)])
    with torch.no_grad():
        wanted = model(text[None]).logits[0, 29:-1].float().log_softmax(-1)
    assert [token for token, _ in came] == results[1].tokens
    assert [logprobs for _, logprobs in came] == results[1].logprobs
    for want, token, got in zip(wanted, results[1].tokens, results[1].logprobs, strict=True):
        assert got.token == pytest.approx(float(want[token]), abs=1e-4)
        values, ids = want.topk(4)
        assert [i for i, _ in got.top] == ids.tolist()
        assert [p for _, p in got.top] == pytest.approx(values.tolist(), abs=1e-4)
