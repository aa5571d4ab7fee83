"""Tests a storm of requests of which every second one is hostile: the others must not be affected."""

import random

import pytest
import torch

from flashcell import Request, generate_many
from model_cases import VOCABULARY
from serving_cases import (
    MORE_THAN_EXCEPTIONS,
    WRONG_SCORES,
    alone,
    once,
    outcome,
    processed,
    raises,
)

pytestmark = pytest.mark.usefixtures("read_at_once_and_late")


def storm_of(model, draw: random.Random, count: int, many, submitted: list, taken: list):
    """Requests and their options, None for the hostile ones, which are of every kind."""
    kept = []

    def keep_and_spoil(ids, scores):
        kept.append((ids, scores))
        for old, s in kept:
            old.fill_(-5)
            s.fill_(torch.nan)
        return scores

    def generate(*_):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
        model(torch.zeros(4, 1, dtype=torch.long))

    def leave_gradients_on(*_):
        torch.set_grad_enabled(True)

    def change_requests(*_):
        for request in taken:
            request.max_new_tokens, request.seed = 1, 99

    hostile = [
        *(lambda f=f: {"logits_processor": processed(f)} for f in WRONG_SCORES.values()),
        *(lambda k=k: {"on_token": once(raises(k("mine")), draw.randint(1, 5))}
          for k in (*MORE_THAN_EXCEPTIONS, KeyError, StopIteration, RecursionError, MemoryError)),
        lambda: {"logits_processor": [keep_and_spoil]},
        lambda: {"on_token": lambda _: many().step()},
        lambda: {"on_token": lambda _: next(many())},
        lambda: {"on_token": lambda _: many().cancel(draw.randrange(10**6, 10**7))},
        lambda: {"on_token": lambda _: submitted.append(many().submit(Request([1, 2], 3)))},
        lambda: {"on_token": generate},
        lambda: {"on_token": leave_gradients_on},
        lambda: {"on_token": change_requests},
        lambda: {"prompt": draw.choice([[], None, "text", [1.5], [VOCABULARY], [-1], [[1]], {1: 2}])},
        lambda: {"max_new_tokens": draw.choice([0, -1, 2.5, None])},
        lambda: {"do_sample": True, "temperature": -1.0},
        lambda: {"seed": "x", "do_sample": True},
        lambda: {"logits_processor": 5},
        lambda: {"on_token": 5},
        lambda: {"eos_token_id": "5"},
    ]  # fmt: skip
    kinds = list(hostile)
    for i in range(count):
        prompt = [
            draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 2, 9, 63, 64, 65, 130]))
        ]
        options = {"prompt": prompt, "max_new_tokens": draw.randint(1, 30)}
        if draw.random() < 0.3:
            options |= {"do_sample": True, "seed": i, "top_k": 20, "temperature": 0.9}
        is_hostile = draw.random() < 0.5
        if is_hostile:
            options |= kinds.pop()()
            kinds = kinds or list(hostile)
        yield Request(**options), None if is_hostile else options


@pytest.mark.parametrize(("seed", "count"), [(1, 60), pytest.param(2, 150, marks=pytest.mark.slow)])
def test_storm(case, make_model, seed, count):
    """Half of the requests misbehave; the others have the tokens that they have alone."""
    if count == 60 and case not in ("lstm", "flash_gru", "mlstm"):
        pytest.skip("in the slow storms")
    model, draw, submitted, taken = make_model(case), random.Random(seed), [], []
    sizes = {"slots": 4, "prefill_rows": 3, "prefill_chunk": 64}
    requests = list(storm_of(model, draw, count, lambda: many, submitted, taken))
    want = {}
    for i, (_, options) in enumerate(requests):
        if options is not None:
            (done,) = generate_many(model, [Request(**options)], **sizes)
            want[i] = done.tokens
            if not options.get("do_sample"):
                ids = torch.tensor(options["prompt"])
                assert done.tokens == alone(model, ids, new=options["max_new_tokens"])

    def source():
        for request, _ in requests:
            yield request
            taken.append(request)

    many = generate_many(model, source(), **sizes)
    results, _ = outcome(many)
    numbers = sorted(results.keys() - set(submitted))  # the source's requests
    assert len(numbers) == count
    for i, number in enumerate(numbers):
        if i in want:
            assert (i, results[number].tokens) == (i, want[i])
            assert results[number].reason == "length"
    (extra,) = {tuple(results[number].tokens) for number in submitted}
    assert extra == tuple(alone(model, torch.tensor([1, 2]), new=3))
