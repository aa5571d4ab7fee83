"""Tests that trajectories within rows run as if each had been run alone."""

import pytest
import torch
from torch import nn

from flashcell.integrations.trajectories import find_trajectories, run_trajectories

B, T, I, H, L = 3, 7, 4, 8, 2
MARKS = {
    "none": [],
    "first steps only": [(0, 0), (1, 0), (2, 0)],
    "in the middle": [(0, 3), (2, 1), (2, 2), (2, 6)],
    "everywhere": [(b, t) for b in range(B) for t in range(T)],
}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("marked", MARKS)
def test_each_as_if_alone(kind, marked):
    module = kind(I, H, L, batch_first=True).double()
    marks = torch.zeros(B, T, dtype=torch.bool)
    for place in MARKS[marked]:
        marks[place] = True
    x = torch.randn(B, T, I, dtype=torch.double, requires_grad=True)
    stored = tuple(
        torch.randn(B, T, L, H, dtype=torch.double, requires_grad=True)
        for _ in range(2 if kind is nn.LSTM else 1)
    )
    want_y, want_last = torch.zeros(B, T, H, dtype=torch.double), {}
    for b in range(B):
        begins = [t for t in range(T) if t == 0 or marks[b, t]]
        for begin, end in zip(begins, [*begins[1:], T], strict=True):
            hx = tuple(s[b, begin].unsqueeze(1) for s in stored)
            y, last = module(x[b : b + 1, begin:end], hx if len(hx) > 1 else hx[0])
            want_y = want_y.index_put((torch.tensor(b), torch.arange(begin, end)), y[0])
            last = last if len(hx) > 1 else (last,)
            want_last[b * T + end - 1] = [s[:, 0] for s in last]

    found = find_trajectories(marks)
    first = tuple(s.flatten(0, 1)[found.starts] for s in stored)
    y, last = run_trajectories(module, x, found, first)
    torch.testing.assert_close(y, want_y, rtol=0, atol=1e-14)
    assert sorted(found.ends.tolist()) == sorted(want_last)
    for at, end in enumerate(found.ends.tolist()):
        for got, want in zip(last, want_last[end], strict=True):
            torch.testing.assert_close(got[at], want, rtol=0, atol=1e-14)

    inputs = (x, *stored, *module.parameters())
    weight = torch.randn_like(y)
    want_sum = (want_y * weight).sum() + sum(s.sum() for each in want_last.values() for s in each)
    got_sum = (y * weight).sum() + sum(s.sum() for s in last)
    want_grads = torch.autograd.grad(want_sum, inputs)
    for got, want in zip(torch.autograd.grad(got_sum, inputs), want_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_default_device_does_not_matter():
    marks = torch.rand(3, 5, device="cpu") < 0.4
    want = find_trajectories(marks)
    with torch.device("meta"):
        found = find_trajectories(marks)
    for got, expected in zip(found, want, strict=True):
        assert torch.equal(got, expected)
