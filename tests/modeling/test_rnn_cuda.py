"""Tests the stand-ins on a GPU against torch.nn in float64 on the CPU, with cuDNN's fp32 error as
the measure."""

import copy

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import flashcell
from cases import DEVICE
from numerics import rms

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs FLASHCELL_TEST_DEVICE=cuda")
OPTIONS = {
    "plain": {},
    "bidirectional": {"bidirectional": True},
    "stacked": {"num_layers": 3},
    "batch-first": {"batch_first": True},
    "projected": {"proj_size": 24},
    "packed": {},
}


def results(module, x, dy, lengths):
    x = x.clone().requires_grad_()
    given = x if lengths is None else pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, last = module(given)
    y = y if lengths is None else y.data
    last = last if isinstance(last, torch.Tensor) else last[1]
    loss = (y * dy[: y.numel()].view(y.shape)).sum() + last.sum()
    return [y, last, *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize("width", [48, 160])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_as_exact_as_cudnn(fused_rnn, monkeypatch, kind, option, width):
    if option == "projected" and kind != "LSTM":
        pytest.skip("torch projects the LSTM only")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    T = 520 if option == "stacked" else 40
    cudnn = getattr(torch.nn, kind)(32, width, **OPTIONS[option])
    ours = copy.deepcopy(cudnn)
    flashcell.replace(ours)
    assert type(ours) is getattr(flashcell, kind)
    exact = copy.deepcopy(cudnn).double().cpu()
    x = torch.randn(T, 5, 32)
    dy = torch.randn(T * 5 * 2 * width)
    lengths = torch.tensor([T, 3, 17, 1, T - 1], device="cpu") if option == "packed" else None
    got, peer = (results(m, x, dy, lengths) for m in (ours, cudnn))
    want = results(exact, x.double().cpu(), dy.double().cpu(), lengths)
    for k, (a, b, c) in enumerate(zip(got, peer, want, strict=True)):
        a, b = a.double().cpu(), b.double().cpu()
        assert rms(a - c) <= 3 * rms(b - c) + 1e-6 * rms(c), (
            f"{k}: {rms(a - c)}, cuDNN {rms(b - c)}"
        )
