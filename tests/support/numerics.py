"""Defines what "equal" means, for all tests.

Exactness is measured against float64. A kernel may be as far from it as the torch reference in
the same dtype is, times two (sums are taken in another order), plus a few roundings of the
output's dtype, in case the reference happens to be luckier. The bound grows with the reference's
own error.
"""

import torch

EPS = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
# Roundings on top of the reference's error, in units of the last place. 16-bit: one, of the output.
# fp32 and fp64: two functions of 1-2 units each, and two orders to sum D terms, whose difference
# grows with sqrt(D). For fp64 there is nothing wider to compare with, so this is the whole distance,
# of both sides' functions: sLSTM has five a step, and torch takes exp from another library on Intel
# CPUs (worst seen there 11.3 where 10 are summed, elsewhere 11.4 at D 520).
UNITS = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 2.5, torch.float64: 8.0}
UNITS_PER_SUM = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 0.25, torch.float64: 1.0}


def rms(x: torch.Tensor) -> float:
    return float(x.detach().double().pow(2).mean().sqrt()) if x.numel() else 0.0


def worst(got: torch.Tensor, want: torch.Tensor) -> str:
    """Returns where two tensors differ most, and by what."""
    gap = (got.double() - want.double()).abs().nan_to_num(nan=float("inf"))
    index = torch.unravel_index(gap.argmax(), gap.shape)
    at = tuple(int(i) for i in index)
    return f"worst at {at}: got {got[at].item():.9g}, want {want[at].item():.9g}"


# What CUDA with 16-bit I/O adds to the reference's error, in units of the I/O dtype. Gradients: it
# keeps the values for the backward in 16 bits, as cuDNN and FlashRNN do, and a gradient takes two
# or three factors so rounded (worst seen 1.3). Values: bf16 uses tanh.approx, within 2^-11; fp16
# only ex2 and rcp.
UNITS_OF_SAVED = 1.5
UNITS_OF_APPROX = {torch.bfloat16: 2.0**-3, torch.float16: 2.0**-7}


def assert_as_accurate(name: str, got, exact, peer, terms: int = 1, on_cuda=None) -> None:
    """Asserts that `got` is at most twice as far from the float64 `exact` as the same-dtype `peer`.

    `on_cuda` is (x's dtype, whether it is a gradient) of a value from CUDA. `terms` is how many
    products a sum has. Fewer than eight values may cancel to almost nothing: their errors are
    compared with the size of their terms, one.
    """
    assert got.shape == exact.shape, f"{name}: shape {list(got.shape)}, want {list(exact.shape)}"
    if got.numel() == 0:
        return
    scale = rms(exact) if got.numel() >= 8 else max(rms(exact), 1.0)
    roundings = (UNITS[got.dtype] + UNITS_PER_SUM[got.dtype] * terms**0.5) * EPS[got.dtype]
    if on_cuda is not None and on_cuda[0] in UNITS_OF_APPROX:
        io, is_gradient = on_cuda
        roundings += (UNITS_OF_SAVED if is_gradient else UNITS_OF_APPROX[io]) * EPS[io]
    error, allowed = rms(got - exact), 2 * rms(peer - exact) + roundings * scale
    if not error <= allowed:  # also true for NaN
        raise AssertionError(
            f"{name} {got.dtype}: rms error {error:.3g} > {allowed:.3g} "
            f"(rms value {scale:.3g}); {worst(got, exact)}"
        )


def assert_close(name: str, got, want, tolerance: float) -> None:
    """Asserts rms(got - want) <= tolerance * rms(want); the caller says where `tolerance` comes
    from."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, want {list(want.shape)}"
    if got.numel() and not rms(got.double() - want.double()) <= tolerance * rms(want):
        error = rms(got.double() - want.double()) / max(rms(want), 1e-300)
        raise AssertionError(
            f"{name}: relative rms error {error:.3g} > {tolerance:.3g}; {worst(got, want)}"
        )


def assert_bitwise(name: str, got, want) -> None:
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, want {list(want.shape)}"
    same = (got == want) | (got.isnan() & want.isnan())
    assert bool(same.all()), (
        f"{name}: {int((~same).sum())} of {same.numel()} differ; {worst(got, want)}"
    )
