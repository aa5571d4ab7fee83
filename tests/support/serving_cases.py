"""Helpers for tests of serving: each request run alone, and requests that do harm."""

import asyncio

import torch
from transformers import LogitsProcessorList

from decode_cases import greedy

MORE_THAN_EXCEPTIONS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]


def alone(model, prompt, **kwargs) -> list[int]:
    """Returns the tokens that model.generate gives a prompt [n]."""
    out = greedy(model, prompt[None], **kwargs)
    return out[0, len(prompt) :].tolist()


def collect(results) -> dict[int, list[int]]:
    """Returns the tokens by request; none may end with an error."""
    done = {}
    for completion in results:
        assert completion.error is None
        done[completion.index] = completion.tokens
    return done


def once(action, at: int = 2):
    """Returns a callback that does `action` at its call number `at`."""
    calls = []

    def callback(*_):
        calls.append(1)
        if len(calls) == at:
            action()

    return callback


def raises(error: BaseException):
    def callback(*_):
        raise error

    return callback


def processed(change):
    """Returns a processor that returns change(scores)."""
    return LogitsProcessorList([lambda ids, scores: change(scores)])


def outcome(many) -> tuple[dict, list[BaseException]]:
    """Returns every completion, and what was raised between them."""
    results, raised = {}, []
    while True:
        try:
            done = next(many, None)
        except BaseException as error:
            raised.append(error)
            continue
        if done is None:
            return results, raised
        assert done.index not in results
        results[done.index] = done


WRONG_SCORES = {
    "returned scores [1, 122], but must return [1, 61]": lambda s: torch.cat([s, s + 1], 1),
    "returned scores [1, 60], but must return [1, 61]": lambda s: s[:, 1:],
    "returned scores [61], but must return [1, 61]": lambda s: s[0],
    "returned scores [2, 61], but must return [1, 61]": lambda s: s.expand(2, -1),
    "returned scores of torch.int64, but must return a floating dtype": lambda s: s.long(),
    "returned scores of torch.complex64, but must return a floating dtype": lambda s: s + 0j,
    "returned scores on meta, but must return them on": lambda s: s.to("meta"),
    "returned a NoneType, but must return a tensor of scores": lambda s: None,
    "returned a list, but must return a tensor of scores": lambda s: s.tolist(),
    "left a score of NaN": lambda s: s.index_fill(1, torch.tensor([7]), torch.nan),
    "left no token with a finite score": lambda s: s.fill_(-torch.inf),
}
