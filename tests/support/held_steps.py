"""Checks whether a held step's values matter: NaN there must change no bit of any result."""

import torch

from cases import DEVICE

B, T = 2, 37
BACKENDS = [DEVICE, "reference"]
DTYPES = [torch.float32, torch.bfloat16]


def held():
    hold = torch.rand(B, T) < 0.4
    hold[0, 0] = hold[1, -1] = True
    return hold


def results(run, tensors, held_in, hold, value):
    """Returns h, the states and all gradients; the first `held_in` tensors are [B, T, ...] and hold
    `value`."""
    torch.manual_seed(1)
    leaves = [t.clone() for t in tensors]
    for t in leaves[:held_in]:
        t[hold] = value
    leaves = [t.requires_grad_() for t in leaves]
    h, states = run(*leaves)
    dh = torch.randn_like(h)
    dh[hold] = value
    wanted = [h, *(s for s in states if s.requires_grad)]
    grads = torch.autograd.grad(wanted, leaves, [dh, *map(torch.ones_like, wanted[1:])])
    return [h.detach(), *(s.detach() for s in states), *grads]


def check(run, tensors, held_in, hold):
    clean, dirty = (results(run, tensors, held_in, hold, x) for x in (0.5, float("nan")))
    for k, (a, b) in enumerate(zip(clean, dirty, strict=True)):
        assert torch.equal(a, b), k
    for x in (dirty[0], *dirty[len(dirty) - len(tensors) :][:held_in]):
        assert not x[hold].count_nonzero()
