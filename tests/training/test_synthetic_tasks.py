"""Tests scripts/tasks: the tasks are what they claim, and a stack of models equals its models."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from synthetic_tasks.data import IGNORED, TASKS, keep_nth, mqar
from synthetic_tasks.models import TaskModel, count_parameters
from synthetic_tasks.results import NAMES
from synthetic_tasks.stack import Stack
from synthetic_tasks.training import losses


def rows(name: str, split: str = "train", count: int = 50):
    return TASKS[name].rows(split, 3, 1, count)


class TestGenerators:
    @pytest.mark.parametrize("name", TASKS)
    def test_a_seed_names_its_rows(self, name):
        x, y = rows(name)
        assert x.shape == y.shape == (50, TASKS[name].lengths[1])
        assert 0 <= x.min() < x.max() < TASKS[name].vocabulary
        assert ((y == IGNORED) | ((y >= 0) & (y < TASKS[name].vocabulary))).all()
        again = rows(name)
        assert (again[0] == x).all()
        assert (again[1] == y).all()
        lengths = TASKS[name].lengths
        alike = dataclasses.replace(TASKS[name], test_lengths=lengths)
        for other in (("test", 3, 1), ("train", 4, 1), ("train", 3, 2)):
            assert (alike.rows(*other, 50)[0] != x).any()

    def test_no_number_of_a_seed_changes_by_itself(self):
        x, y = TASKS["mqar-zoology"].rows("test", 0, 0, 2)
        assert x[0, :4].tolist() == [42, 108, 34, 72]
        assert np.flatnonzero(y[0] >= 0).tolist() == [60, 64]

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_parity_at_the_end_of_each_row(self, split):
        x, y = rows("parity-extrapolation", split, 500)
        low, high = (1, 40) if split == "train" else (40, 256)
        last = (y != IGNORED).argmax(1)
        assert ((y != IGNORED).sum(1) == 1).all()
        assert (last + 1).min() <= low + 3
        assert (last + 1).max() >= high - 3
        for row, target, end in zip(x, y, last, strict=True):
            assert target[end] == row[: end + 1].sum() % 2
            assert not row[end + 1 :].any()

    def test_keep_nth(self):
        x, y = rows("keep-5th")
        assert (y[:, -1] == x[:, 4]).all()
        assert (y[:, :-1] == IGNORED).all()

    @pytest.mark.parametrize(("name", "first"), [("mqar", 64), ("mqar-zoology", 0)])
    def test_mqar(self, name, first):
        tokens, targets = rows(name)
        noise = tokens[:, 4:][targets[:, 4:] == IGNORED]
        assert first <= noise.min() < first + 3
        assert noise.max() == 127
        for x, y in zip(tokens, targets, strict=True):
            pairs = dict(zip(x[0:4:2], x[1:4:2], strict=True))
            scored = np.flatnonzero(y != IGNORED)
            assert len(scored) == len(pairs) == 2
            assert {x[i] for i in scored} == set(pairs)
            for i in scored:
                assert i >= 4
                assert y[i] == pairs[x[i]]
                assert x[i] < 64 <= y[i]

    @pytest.mark.parametrize(("name", "k"), [("1-hop", 1), ("2-hop", 2)])
    def test_k_hop(self, name, k):
        for x, y in zip(*rows(name), strict=True):
            for i in range(len(x)):
                found = np.flatnonzero(x[:i] == x[i])
                assert y[i] == (x[found[-k] + 1] if len(found) >= k else IGNORED)

    def test_find_k(self):
        for x, y in zip(*rows("2-find"), strict=True):
            for i in range(len(x)):
                at = i
                for _ in range(2):
                    found = [] if at is None else np.flatnonzero(x[:at] == x[at])
                    at = found[-1] + 1 if len(found) else None
                assert y[i] == (IGNORED if at is None else x[at])

    def test_wrong_arguments_are_named(self):
        rng = np.random.default_rng(0)
        with pytest.raises(ValueError, match=r"lengths are \(5, 9\), but must be one length"):
            mqar(rng, 1, (5, 9), 16, 1, 0)
        with pytest.raises(ValueError, match="shortest length is 3, but must be at least n = 5"):
            keep_nth(rng, 1, (3, 9), 16, 5)
        with pytest.raises(ValueError, match="split is 'dev', but must be one of train"):
            TASKS["mqar"].rows("dev", 0, 0, 1)
        with pytest.raises(ValueError, match="model is 'rwkv', but must be one of rnn"):
            TaskModel(TASKS["mqar"], "rwkv", 0)

    def test_an_epoch_reads_every_row_once(self):
        task = dataclasses.replace(TASKS["1-hop"], training_rows=48)
        kept: dict = {}
        parts = [task.training_batch(0, step, kept)[0] for step in range(3)]
        every = task.training_set(0)[0]
        assert sorted(map(tuple, np.concatenate(parts))) == sorted(map(tuple, every))
        assert (task.training_batch(0, 3, kept)[0] != parts[0]).any()


@pytest.mark.parametrize(
    ("name", "counts"),
    [  # arXiv 2510.21450, table 6, in thousands
        ("keep-5th", {"transformer": 48.1, "flash_gru": 19.8, "flash_lstm": 20.0}),
        ("parity", {"transformer": 31.8, "flash_gru": 3.8, "flash_lstm": 4.0}),
        ("mqar", {"transformer": 48.1, "flash_gru": 32.7, "flash_lstm": 32.8}),
        ("1-hop", {"transformer": 32.8, "flash_gru": 17.6, "flash_lstm": 17.7}),
        ("2-hop", {"transformer": 32.2, "flash_gru": 17.0, "flash_lstm": 17.1}),
    ],
)
def test_parameters_are_the_published_ones(name, counts):
    found = {model: round(count_parameters(TASKS[name], model) / 1000, 1) for model in counts}
    assert found == counts


@pytest.mark.parametrize("name", ["flash_gru", "flash_lstm"])
def test_gates_that_hold(name):
    """From h = 1 on and without input, a channel's state decays to 1 / e within about n steps."""
    cell = TaskModel(TASKS["keep-5th"], name, 0, "reference").mixer
    update = torch.sigmoid(cell.in_proj.bias[0].detach())
    forgets = update if name == "flash_gru" else 1 - update
    steps = (1 / forgets - 1).sort().values
    assert 1 <= steps[0] < 12
    assert 88 < steps[-1] <= 100
    other = TaskModel(TASKS["parity"], name, 0, "reference").mixer
    assert (other.in_proj.bias == 0).all()
    assert (cell.in_proj.bias[1:] == 0).all()


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("name", ["parity-extrapolation", "keep-5th", "1-hop"])
def test_a_stack_is_its_models(name, model):
    """Values and gradients, each model on tokens of its own; and no model sees later tokens."""
    V = TASKS[name].vocabulary
    models = [TaskModel(TASKS[name], model, seed, "reference") for seed in range(3)]
    stack = Stack(models)
    assert (stack.flat[0] != stack.flat[1]).any()
    tokens, targets = torch.randint(V, (2, 3, 2, 13))
    targets[torch.rand(targets.shape) < 0.3] = IGNORED
    loss = losses(stack, tokens, targets)
    loss.sum().backward()
    grads = []
    for m, x, y, found in zip(models, tokens, targets, loss, strict=True):
        alone = cross_entropy(m(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
        alone.backward()
        grads.append(torch.cat([p.grad.flatten() for p in m.parameters()]))
        torch.testing.assert_close(found, alone, atol=0, rtol=5e-7)  # observed 1e-7
    error = (stack.flat.grad - torch.stack(grads)).abs().max()
    assert error <= 2e-6 * stack.flat.grad.abs().max()  # observed 4e-7
    with torch.no_grad():
        later = tokens.clone()
        later[:, :, 7:] = (later[:, :, 7:] + 1) % V
        change = (stack(later) - stack(tokens)).abs().amax((0, 2, 3))
    assert change[7:].max() > 1e-4
    assert change[:7].max() == 0
