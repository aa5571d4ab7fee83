"""A model is compared by one counter of changes, as Python >= 3.12 has it, or by every dict's version."""

import itertools

import pytest
import torch
from torch import nn

from decode_cases import CHANGES, decode, same_as_plain
from flashcell.generation import fingerprint
from flashcell.generation.fingerprint import Fingerprint, counts_changes

pytestmark = pytest.mark.skipif(not fingerprint.has_guard, reason="this torch has no dict versions")


class Watcher:
    """dict_version as from Python 3.12 on: it numbers the changes of the dicts that it knows."""

    def __init__(self):
        self.known, self.numbers = {}, itertools.count(1)

    def __call__(self, table):
        for key, (known, copy, _) in self.known.items():
            if not same(known, copy):
                self.known[key] = known, dict(known), next(self.numbers)
        if id(table) not in self.known:
            number = next(self.numbers)
            if not table:  # a new one, which is thrown away
                return number
            self.known[id(table)] = table, dict(table), number
        return self.known[id(table)][2]


def same(table, copy):
    pairs = zip(table.items(), copy.items(), strict=False)
    return len(table) == len(copy) and all(a is c and b is d for (a, b), (c, d) in pairs)


class Calls(list):
    counter = False


@pytest.fixture(params=["counter", "versions"])
def summed(request, monkeypatch):
    """Counts how often the versions of all dicts are added up, for both ways to notice a change."""
    calls, add = Calls(), Fingerprint._add_versions
    if request.param == "counter":
        monkeypatch.setattr(fingerprint, "dict_version", Watcher())
        monkeypatch.setattr(fingerprint, "COUNTS", True)
    else:
        monkeypatch.setattr(fingerprint, "COUNTS", False)
    monkeypatch.setattr(Fingerprint, "_add_versions", lambda *args: calls.append(1) or add(*args))
    calls.counter = request.param == "counter"
    return calls


def other_class(m):
    m.lm_head.__class__ = type("Linear", (nn.Linear,), {"forward": lambda self, x: 3 * x})


def other_dict(m):
    m.model.norm.__dict__ = {**vars(m.model.norm), "eps": 0.5}


def other_dict_of_the_model(m):
    m.__dict__ = {**vars(m), "config": type(m.config)(**m.config.to_dict())}


def hook_by_table(m):
    m.lm_head._forward_hooks[0] = lambda *_: None


def buffers_at_once(m):
    m.lm_head._buffers.update(extra=torch.zeros(1))


def rows_dropped(m):
    m.lm_head.weight.data = m.lm_head.weight.data[:-8]


def transposed(m):
    with torch.no_grad():
        m.lm_head.weight.t_()


MORE = {
    "a class": other_class,
    "a dict": other_dict,
    "the model's dict": other_dict_of_the_model,
    "an attribute": lambda m: vars(m.model.norm).update(eps=0.5),
    "an attribute of a block": lambda m: setattr(m.model.layers[0], "layer_idx", 7),
    "a table": lambda m: m.model.layers._modules.pop("1"),
    "a hook in its table": hook_by_table,
    "buffers": buffers_at_once,
    "the configuration": lambda m: setattr(m.config, "norm_eps", 0.5),
    "rows": rows_dropped,
    "columns": transposed,
    "mode": lambda m: m.eval() and setattr(m, "training", True),
}


@pytest.mark.parametrize("change", [*CHANGES, *MORE])
def test_each_change_is_seen_and_seen_again(make_model, summed, change):
    model = make_model()
    with torch.no_grad():
        seen = Fingerprint(model, model.device)
        assert [seen.holds(model) for _ in range(4)] == [True] * 4
        {**CHANGES, **MORE}[change](model)
        assert [seen.holds(model) for _ in range(3)] == [False] * 3


def test_the_counter_saves_the_versions(make_model, summed):
    model = make_model()
    with torch.no_grad():
        seen = Fingerprint(model, model.device)
        seen.holds(model)
        summed[:] = []
        assert all(seen.holds(model) for _ in range(5))
        assert len(summed) == (0 if summed.counter else 5)
        norm = model.model.norm
        norm.normalized_shape = (*norm.normalized_shape,)  # an equal but new object
        assert all(seen.holds(model) for _ in range(5))
        assert len(summed) == (2 if summed.counter else 10 + 1)


def test_two_models_are_told_apart(make_model, summed):
    models = [make_model(), make_model("gru")]
    with torch.no_grad():
        prints = [Fingerprint(m, m.device) for m in models]
        for _ in range(3):
            assert all(p.holds(m) for p, m in zip(prints, models, strict=True))
        models[0].lm_head.weight = nn.Parameter(models[0].lm_head.weight + 1)
        assert [p.holds(m) for p, m in zip(prints, models, strict=True)] == [False, True]


def test_a_token_sees_a_change(make_model, tokens, summed):
    model, ids = make_model(), tokens(2, 6)
    decode(model, ids)
    model.model.norm.eps = 0.5
    same_as_plain(model, lambda: decode(model, ids))


def test_a_counter_is_told_from_versions():
    assert counts_changes(Watcher())
    every_dict = itertools.count()
    assert not counts_changes(lambda _: next(every_dict))  # whatever changes meanwhile
    assert not counts_changes(lambda _: 0)
