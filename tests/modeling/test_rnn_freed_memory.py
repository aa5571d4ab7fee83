"""Tests that the stand-ins' calls on a GPU read nothing that they have not written: the memory that
torch's allocator hands out is NaN before each call."""

import copy

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import flashcell
from cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs FLASHCELL_TEST_DEVICE=cuda")
# Widths that are padded in fp16 (not multiples of 16), some of them also in fp32, and one that is not.
WIDTHS = [20, 50, 75, 131, 250, 333, 512]
NETS = {
    "one layer": {},
    "both directions": {"bidirectional": True},
    "three layers": {"num_layers": 3},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "projected": {"proj_size": 9},
    "no bias": {"bias": False},
}
TOLERANCE = {torch.float16: 0.02, torch.float32: 2e-5}


def fill_freed_memory() -> None:
    """Fills the blocks of torch's allocator with NaN: large ones and those of small tensors."""
    for count, elements in ((512, 128), (128, 16_384), (24, 500_000), (6, 8_000_000)):
        held = [torch.full((elements,), float("nan"), device="cuda") for _ in range(count)]
        del held


def run(module, x, state, lengths, trains):
    x = x.clone().requires_grad_(trains)
    given = x if lengths is None else pack_padded_sequence(x, lengths, enforce_sorted=False)
    with torch.set_grad_enabled(trains):
        y, last = module(given, state)
    y = y if lengths is None else y.data
    results = [y, *(last if isinstance(last, tuple) else (last,))]
    if trains:
        loss = sum(
            (r.float() * torch.linspace(-1, 1, r.numel(), device=r.device).view(r.shape)).sum()
            for r in results
        )
        results += torch.autograd.grad(loss, [x, *module.parameters()])
    return [r.detach().float().cpu() for r in results]


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_calls_read_what_they_wrote(fused_rnn, monkeypatch, kind, net, dtype, T, trains):
    options = NETS[net]
    if "proj_size" in options and kind != "LSTM":
        pytest.skip("torch projects the LSTM only")
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")
    torch.manual_seed(0)
    for i, D in enumerate(WIDTHS):
        B = (1, 5, 40)[i % 3]
        theirs = getattr(torch.nn, kind)(24, D, **options).to("cuda", dtype)
        ours = copy.deepcopy(theirs)
        flashcell.replace(ours)
        x = torch.randn(T, B, 24, device="cuda", dtype=dtype)
        heads = theirs.num_layers * (2 if theirs.bidirectional else 1)
        widths = (options.get("proj_size", D), D)[: 2 if kind == "LSTM" else 1]
        states = tuple(torch.randn(heads, B, w, device="cuda", dtype=dtype) for w in widths)
        state = states if kind == "LSTM" else states[0]
        packable = kind != "LSTM" or "proj_size" not in options
        lengths = torch.randint(1, T + 1, (B,), device="cpu") if packable and i % 2 else None
        if lengths is not None:
            lengths[0] = T
        for given in (state, None):
            want = run(theirs, x, given, lengths, trains)
            fill_freed_memory()
            got = run(ours, x, given, lengths, trains)
            for k, (a, b) in enumerate(zip(got, want, strict=True)):
                scale = b.abs().max().item() + 1e-3
                error = (a - b).abs().max().item() / scale
                assert error <= TOLERANCE[dtype], (
                    f"D {D} B {B} given {given is not None}: {k} {error}"
                )
