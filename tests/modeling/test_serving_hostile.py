"""Tests that whatever one request, its callbacks or the source do, the others' tokens stay the
same."""

import itertools
import signal
import threading

import numpy as np
import pytest
import torch

from flashcell import Batcher, Request, generate_many
from flashcell.generation.slots import Batch
from model_cases import VOCABULARY
from serving_cases import (
    MORE_THAN_EXCEPTIONS,
    WRONG_SCORES,
    alone,
    collect,
    once,
    outcome,
    processed,
    raises,
)

pytestmark = pytest.mark.usefixtures("read_at_once_and_late")


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_scores_that_are_no_scores(make_model, tokens, sample):
    model, good = make_model(), tokens(6)
    want = alone(model, good, new=8)
    options = {"do_sample": sample, "seed": 0}
    bad = [
        Request(good, 8, logits_processor=processed(f), **options) for f in WRONG_SCORES.values()
    ]
    requests = [r for b in bad for r in (b, Request(good, 8))]
    results, raised = outcome(generate_many(model, requests, slots=3, prefill_rows=2))
    assert not raised
    for i, message in enumerate(WRONG_SCORES):
        assert results[2 * i].reason == "error"
        assert isinstance(results[2 * i].error, (ValueError, TypeError))
        assert f"logits_processor {message}" in str(results[2 * i].error)
        assert results[2 * i + 1].tokens == want, message


@pytest.mark.parametrize("kind", ["tensor", "numpy", "list"])
def test_prompts_are_copied_when_they_are_taken(make_model, kind):
    model, length = make_model(), 5
    prompts = [[(7 * i + k) % VOCABULARY for k in range(length)] for i in range(6)]
    want = {i: alone(model, torch.tensor(p), new=6) for i, p in enumerate(prompts)}
    buffer = {
        "tensor": torch.zeros(length, dtype=torch.long, device="cpu"),
        "numpy": np.zeros(length, dtype=np.int64),
        "list": [0] * length,
    }[kind]

    def write(prompt):
        for k, token in enumerate(prompt):
            buffer[k] = token
        return buffer

    source = (Request(write(p), 6) for p in prompts)
    assert collect(generate_many(model, source, slots=2, prefill_rows=2)) == want
    many = Batcher(model, slots=2, prefill_rows=2)
    request = Request(buffer, 6, logits_processor=[])
    for prompt in prompts:
        write(prompt)
        many.submit(request)
    write([0] * length)
    request.max_new_tokens, request.eos_token_id = 1, list(range(VOCABULARY))
    request.logits_processor.append(raises(KeyError("late")))
    assert collect(many) == want


@pytest.mark.parametrize("kind", [*MORE_THAN_EXCEPTIONS, StopIteration, StopAsyncIteration])
@pytest.mark.parametrize("where", ["on_token", "logits_processor"])
def test_what_a_callback_raises(make_model, tokens, kind, where):
    """The request ends with the exception. One that is no Exception is also raised, once, and the
    batch continues with the next call."""
    model, prompts = make_model(), [tokens(n) for n in (5, 9, 70, 4, 8)]
    want = [alone(model, p, new=10) for p in prompts]
    error = kind("mine")
    callback = once(raises(error), at=4)
    hook = {"on_token": callback}
    if where == "logits_processor":
        hook = {"logits_processor": [lambda ids, scores: callback() or scores]}
    requests = [Request(p, 10, **(hook if i == 1 else {})) for i, p in enumerate(prompts)]
    results, raised = outcome(generate_many(model, requests, slots=4, prefill_rows=3))
    assert results[1].reason == "error"
    assert results[1].error is error
    assert results[1].tokens == want[1][: 4 - (where == "logits_processor")]
    assert raised == ([] if issubclass(kind, Exception) else [error])
    assert all(results[i].tokens == want[i] for i in (0, 2, 3, 4))
    assert all(results[i].reason == "length" for i in (0, 2, 3, 4))


@pytest.mark.parametrize("call", ["step", "next", "iterate", "a thread's step"])
def test_a_callback_does_not_run_the_batch(make_model, tokens, call):
    model, prompts = make_model(), [tokens(n) for n in (5, 9, 70, 4)]
    want = [alone(model, p, new=10) for p in prompts]
    caught = []

    def in_thread():
        def work():
            try:
                many.step()
            except RuntimeError as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise caught[0]

    action = {
        "step": lambda: many.step(),
        "next": lambda: next(many),
        "iterate": lambda: list(many),
        "a thread's step": in_thread,
    }[call]
    requests = [
        Request(p, 10, on_token=once(action, at=4) if i == 1 else None)
        for i, p in enumerate(prompts)
    ]
    many = generate_many(model, requests, slots=3, prefill_rows=3)
    results, raised = outcome(many)
    assert not raised
    assert isinstance(results[1].error, RuntimeError)
    assert "is running" in str(results[1].error)
    assert all(results[i].tokens == want[i] for i in (0, 2, 3))


def test_a_source_that_raises_loses_nothing(make_model, tokens):
    """If a source of requests raises, the requests before the error are completed first; then the
    error is raised, and the rest of the source can still be read."""
    model, prompts = make_model(), [tokens(n) for n in (5, 9, 70, 4, 6)]
    want = {i: alone(model, p, new=3 + 4 * i) for i, p in enumerate(prompts)}

    class Source:
        def __init__(self):
            self.at, self.failed = 0, False

        def __iter__(self):
            return self

        def __next__(self):
            if self.at == 3 and not self.failed:
                self.failed = True
                raise ConnectionError("the queue is gone")
            if self.at == len(prompts):
                raise StopIteration
            self.at += 1
            return Request(prompts[self.at - 1], 3 + 4 * (self.at - 1))

    for slots in (1, 2, 8):
        many, seen = generate_many(model, Source(), slots=slots, prefill_rows=2), {}
        with pytest.raises(ConnectionError, match="the queue is gone"):
            seen.update((done.index, done.tokens) for done in many)
        assert seen == {i: want[i] for i in range(3)}
        assert {**seen, **collect(many)} == want


@pytest.mark.parametrize("kind", MORE_THAN_EXCEPTIONS)
def test_a_source_is_interrupted(make_model, tokens, kind):
    """Ctrl-C while the source waits is raised at once, and nothing is lost."""
    model, prompts = make_model(), [tokens(n) for n in (5, 9, 70, 4)]
    want = {i: alone(model, p, new=40) for i, p in enumerate(prompts)}
    feed = iter([*prompts[:2], kind("stop"), *prompts[2:]])

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            item = next(feed)
            if isinstance(item, BaseException):
                raise item
            return Request(item, 40)

    many = generate_many(model, Source(), slots=2, prefill_rows=2)
    with pytest.raises(kind):
        [many.step() for _ in range(10)]
    assert many.batch.running, "it did not wait for what is under way"
    assert collect(many) == want


def test_a_source_that_uses_the_batch(make_model, tokens):
    """It may submit and cancel, but not step; anything it yields besides requests is an error."""
    model, prompt = make_model(), tokens(5)
    want = alone(model, prompt, new=6)

    def source():
        with pytest.raises(RuntimeError, match="is running"):
            many.step()
        yield Request(prompt, 6)
        many.submit(Request(prompt, 6))
        yield None
        many.cancel(4)
        yield Request(prompt, 6)
        yield Request(prompt, 6)

    many = Batcher(model, slots=2, prefill_rows=1).reading(source())
    results, raised = outcome(many)
    assert not raised
    assert {i: c.reason for i, c in results.items()} == {
        0: "length", 1: "length", 2: "error", 3: "length", 4: "cancelled"
    }  # fmt: skip
    assert "request is a NoneType, but must be a Request" in str(results[2].error)
    assert all(results[i].tokens == want for i in (0, 1, 3))


def test_cancel_from_a_signal_handler_and_of_what_is_not_read_yet(make_model, tokens):
    model, prompt = make_model(), tokens(5)
    many = generate_many(model, [Request(prompt, 20) for _ in range(6)], slots=2, prefill_rows=1)
    before = signal.signal(signal.SIGUSR1, lambda *_: [many.cancel(i) for i in range(3, 9)])
    try:
        many.submit(Request(prompt, 20, on_token=once(lambda: signal.raise_signal(signal.SIGUSR1))))
        results, _ = outcome(many)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert {i: c.reason for i, c in results.items()} == {
        **dict.fromkeys(range(3), "length"), **dict.fromkeys(range(3, 7), "cancelled")
    }  # fmt: skip
    with pytest.raises(TypeError):
        many.cancel([0])


def test_a_step_that_is_broken_off(make_model, tokens, monkeypatch):
    """An interrupt, or the model's own error, in the middle of a step: running sequences end with
    an error, waiting ones are right, and no token is wrong."""
    model, prompts = make_model(), [tokens(n) for n in (5, 9, 70, 4, 3, 8)]
    want = [alone(model, p, new=12) for p in prompts]
    call = Batch._choose
    for kind in (KeyboardInterrupt, MemoryError):
        for at in range(1, 12):
            monkeypatch.setattr(Batch, "_choose", call)
            many = generate_many(model, prompts, max_new_tokens=12, slots=2, prefill_rows=2)
            broken = once(raises(kind("stop")), at=at)
            monkeypatch.setattr(
                Batch, "_choose", lambda *args, broken=broken: broken() or call(*args)
            )
            results, raised = outcome(many)
            assert [type(e) for e in raised] == [kind]
            assert results.keys() == set(range(6))
            ended = [i for i, c in results.items() if c.reason == "error"]
            assert 0 < len(ended) <= 4
            for i, done in results.items():
                assert done.tokens == want[i][: len(done.tokens)]
                assert done.reason == "error" or done.tokens == want[i]
            assert "was broken off" in str(results[ended[0]].error)


def test_a_request_ends_once_though_its_last_step_is_broken_off(make_model, tokens, monkeypatch):
    """An interrupt after its end is noted, before it leaves the batch: the reason stays."""
    model, prompt = make_model(), tokens(5)
    many = generate_many(model, [prompt], max_new_tokens=4, slots=2, prefill_rows=2)
    leave, broken = Batcher._leave, once(raises(KeyboardInterrupt("stop")), at=1)
    monkeypatch.setattr(Batcher, "_leave", lambda *args: broken() or leave(*args))
    with pytest.raises(KeyboardInterrupt):
        all(step() == [] for step in itertools.repeat(many.step))
    (done,) = many.step()
    assert (done.reason, done.tokens) == ("length", alone(model, prompt, new=4))


def test_threads_that_submit_cancel_and_step(make_model, tokens):
    model, prompts = make_model(), [tokens(1 + 9 * i % 40) for i in range(24)]
    want = [alone(model, p, new=1 + i % 9) for i, p in enumerate(prompts)]
    many, mine, results, refused = Batcher(model, slots=4, prefill_rows=2), {}, {}, []
    to_come = threading.Semaphore(0)

    def submit(first):
        for i in range(first, 24, 4):
            index = many.submit(Request(prompts[i], 1 + i % 9))
            mine[index] = i
            if i % 12 == first:
                many.cancel(index)
        to_come.release()

    def step():
        while len(results) < 24:
            try:
                for done in many.step():
                    assert done.index not in results
                    results[done.index] = done
            except RuntimeError as error:
                refused.append(error)

    workers = [threading.Thread(target=submit, args=(k,)) for k in range(4)]
    workers += [threading.Thread(target=step) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all("is running" in str(error) for error in refused)
    for index, done in results.items():
        text = want[mine[index]]
        assert done.error is None
        assert done.tokens == (text if done.reason == "length" else text[: len(done.tokens)])
