"""Tests that a cache's states are its own: at any time, reading them gives what its tokens left
there."""

import copy
import pickle
import random
import threading
import time

import pytest
import torch
from transformers import DynamicCache

import flashcell
from cases import DEVICE
from decode_cases import decode, greedy, without_engine
from model_cases import CASES, state_tensors

FAMILIES = [name for name in CASES if name != "rnn-relu"]


def decoded(model, ids):
    """A cache that has been decoded, whose states are in a recording's buffers."""
    cache = DynamicCache(config=model.config)
    decode(model, ids, cache)
    return cache


def values(cache):
    return [s.clone() for s in state_tensors(cache)]


READS = {
    "states": lambda cache: [g for layer in cache.layers for g in layer.states.values()],
    "get_states": lambda cache: [layer.get_states("cell") for layer in cache.layers],
    "pickle": lambda cache: state_groups(pickle.loads(pickle.dumps(cache))),
    "copy": lambda cache: state_groups([copy.copy(layer) for layer in cache.layers]),
    "deepcopy": lambda cache: state_groups(copy.deepcopy(cache)),
}


def state_groups(cache):
    layers = getattr(cache, "layers", cache)
    return [g for layer in layers for g in layer.states.values()]


@pytest.mark.parametrize("read", READS)
def test_what_was_read_stays(make_model, tokens, read):
    """States read from a cache keep their values while it, or another cache, is decoded."""
    model, ids = make_model(), tokens(2, 6)
    want = values(without_engine(model, lambda: decoded(model, ids)))
    cache = decoded(model, ids)
    got = [s for group in READS[read](cache) for s in group]
    decode(model, tokens(2, 3), cache)
    decoded(model, tokens(2, 4))
    assert all(map(torch.equal, got, want))
    decode(model, ids[:, :1], cache)
    assert all(map(torch.equal, got, want))


def test_another_cache_is_decoded_while_states_are_mapped(make_model, tokens):
    model, ids, others = make_model(), tokens(2, 6), tokens(2, 6)
    want = values(without_engine(model, lambda: decoded(model, ids)))
    mine, other = decoded(model, ids), DynamicCache(config=model.config)
    step = iter(others.split(1, 1))
    decode(model, next(step), other)
    decode(model, ids[:, :0], mine)
    cache = decoded(model, ids)

    def change(s):
        decode(model, others[:, :1], other)
        return s

    for layer in cache.layers:
        layer.map_states(change)
    assert all(map(torch.equal, state_tensors(cache), want))


def test_layers_that_change_places(make_model, tokens):
    """The buffers belong to layers in an order: another order of the same ones is another cache."""
    model, ids = make_model(), tokens(2, 5)

    def run():
        cache = decoded(model, ids)
        cache.layers.reverse()
        return decode(model, ids, cache)

    assert torch.equal(run(), without_engine(model, run))


def test_a_cache_counts_every_token(make_model, tokens):
    """The cache counts the tokens of calls, and those of `generate` except its last one."""
    model, ids = make_model(), tokens(2, 6)
    cache = decoded(model, ids)
    assert cache.get_seq_length() == 6
    text = greedy(model, torch.cat([ids, tokens(2, 2)], 1), new=5, past_key_values=cache)
    assert cache.get_seq_length() == text.shape[1] - 1


def test_changes_of_states_in_place_count(make_model, tokens):
    """`layer.states` are the cache's: the next token reads what is written there."""
    model, ids = make_model(), tokens(2, 6)

    def run():
        cache = decoded(model, ids)
        for layer in cache.layers:
            for group in layer.states.values():
                for s in group:
                    s[0].mul_(0.5)
            layer.states["cell"] = tuple(2 * s for s in layer.states["cell"])
        return decode(model, ids, cache)

    assert torch.equal(run(), without_engine(model, run))


def test_a_pickled_or_copied_cache_goes_its_own_way(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 5)

    def run():
        cache = decoded(model, ids)
        caches = [cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        logits = [decode(model, (ids + i) % 7, c) for i, c in enumerate(caches)]
        return torch.cat(logits + [decode(model, ids, c) for c in caches])

    assert torch.equal(run(), without_engine(model, run))


def test_a_cache_may_be_given_to_another_model(make_model, tokens):
    """Two threads each move a cache between two models at every token, in opposite order: the
    logits are right, and the locks of the two decode engines do not deadlock."""
    torch.manual_seed(0)
    first = make_model()
    second, ids = copy.deepcopy(first), tokens(2, 40)
    want = decode(first, ids)
    got = [None, None]

    def run(i):
        cache, logits = DynamicCache(config=first.config), []
        for t, part in enumerate(ids.split(1, 1)):
            logits.append(decode((first, second)[(i + t) % 2], part, cache))
        got[i] = torch.cat(logits, 1)

    in_threads(run, 2)
    assert all(torch.equal(logits, want) for logits in got)


def test_rows_are_copied_where_they_lie(make_model, tokens):
    from flashcell.state.cache import copy_rows

    model = make_model()
    target, origin = decoded(model, tokens(3, 5)), decoded(model, tokens(2, 5))
    other = decoded(model, tokens(3, 1))
    decode(model, tokens(3, 1), target)
    want, rows = values(target), values(origin)
    copy_rows(target, origin, [(2, 0), (0, 1)])
    for w, r in zip(want, rows, strict=True):
        w[2], w[0] = r[0], r[1]
    decode(model, tokens(3, 1), other)
    assert all(map(torch.equal, state_tensors(target), want))


def in_threads(run, count):
    errors = []

    def guarded(i):
        try:
            stream = torch.cuda.Stream() if DEVICE == "cuda" else None
            with torch.cuda.stream(stream), torch.device(DEVICE):
                run(i)
                if stream is not None:
                    stream.synchronize()
        except BaseException as error:
            errors.append(error)

    if DEVICE == "cuda":
        # The states that the threads read were made in this thread's stream.
        torch.cuda.synchronize()
    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def conversation(model, ids, cuts):
    """Runs pieces of several tokens and of one token from one cache."""
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in torch.tensor_split(ids, cuts, dim=1):
            logits.append(model(part, past_key_values=cache).logits[:, -1])
    return torch.stack(logits, 1)


def continued(model, ids, options):
    first = greedy(model, ids, new=4, return_dict_in_generate=True, **options)
    text = first.sequences
    cache = first.past_key_values
    return greedy(model, text, new=4, past_key_values=cache) if not options else text


def many(model, ids):
    """Runs two slots; every sequence must be as it is alone."""
    done = flashcell.generate_many(
        model, ids.tolist(), slots=2, prefill_rows=2, prefill_chunk=4, max_new_tokens=6
    )
    return torch.tensor([d.tokens for d in sorted(done, key=lambda d: d.index)])


JOBS = {
    "beams": lambda model, ids: greedy(model, ids, new=6, num_beams=2),
    "greedy": lambda model, ids: greedy(model, ids, new=8),
    "scores": lambda model, ids: torch.stack(
        greedy(model, ids, new=6, output_logits=True, return_dict_in_generate=True).logits
    ),
    "continued": lambda model, ids: continued(model, ids, {}),
    "pieces": lambda model, ids: conversation(model, ids, [3, 4, 5, 6]),
    "many": many,
}


def storm(models, seconds, seed):
    """Runs four threads, each with random jobs on all models; returns how many results were right.

    On a busy machine a thread goes on until it has done two."""
    draw = random.Random(seed)
    jobs = []
    for name, model in models.items():
        for kind, job in JOBS.items():
            rows = 4 if kind == "many" else 2 if kind == "beams" else draw.choice([1, 2, 4])
            ids = torch.randint(0, 60, (rows, draw.choice([7, 9])))
            jobs.append((f"{kind} of {name}", model, job, ids, job(model, ids)))
            plain = without_engine(model, lambda: job(model, ids))  # noqa: B023
            assert torch.equal(jobs[-1][-1], plain), f"{kind} of {name}, alone"
    for model in models.values():
        model.decoder.release()
    end, right = time.monotonic() + seconds, []

    def work(i):
        mine, done = random.Random(seed + i), 0
        while time.monotonic() < end or done < 2:
            name, model, job, ids, want = mine.choice(jobs)
            assert torch.equal(job(model, ids), want), name
            right.append(name)
            done += 1

    in_threads(work, 4)
    return len(right)


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_that_share_a_model(make_model, family):
    """Several threads use one model in every way at once for a second."""
    assert storm({family: make_model(family)}, 0.8, seed=1) > 4


@pytest.mark.slow
def test_threads_that_share_nine_models(make_model):
    """Threads decode with one model of every family and cell for a minute."""
    assert storm({name: make_model(name) for name in FAMILIES}, 60, seed=2) > 200
