"""Newton's method on all steps of a recurrence, multiple shooting, and the sequential finish.

Here f(h [N, *S], xs of rows [N, ...]) is a step of any cell; unknowns are states [B, T, *S].
"""

from typing import Any, Callable, List, NamedTuple, Tuple

import torch
from torch import Tensor

Rows = Tuple[Tensor, ...]
Step = Callable[[Tensor, Rows], Tensor]
Linearize = Callable[..., Tuple[Tensor, Tensor]]  # (h, xs) -> f(h, xs), J


class Options(NamedTuple):
    tol: float  # relative to max(1, |h|)
    max_iters: int
    bounds: Any  # (low, high) of every state, or None


class Iterated(NamedTuple):
    """The result of an iteration, and how far it got."""

    h: Tensor  # [B, T, *S]
    right: int  # number of steps from the start that satisfy the recurrence
    converged: bool
    residuals: Tuple[float, ...]  # largest residual before each iteration


def shift(h0: Tensor, h: Tensor) -> Tensor:
    """Returns the states before each step, as rows [B T, *S]."""
    return torch.cat([h0.unsqueeze(1), h[:, :-1]], 1).flatten(0, 1)


def iterate(
    linearize: Linearize,
    solve_linear: Callable[[Tensor, Tensor], Tensor],
    h0: Tensor,  # [B, *S]
    xs: Rows,  # [B, T, ...]
    guess: Tensor,  # [B, T, *S]
    options: Options,
) -> Iterated:
    """Solves by Newton's method. By causality every iteration makes at least one more step right.

    A step is right if its residual is at most tol and its correction so small that the square of
    it vanishes in rounding. The residual alone is not enough: a cell that remembers a thousand
    steps adds up a thousand residuals, and only the correction, which is applied, includes that.
    """
    B, T = guess.shape[:2]
    rows, h, right = tuple(x.flatten(0, 1) for x in xs), guess, 0
    residuals: List[float] = []
    reach = max(torch.finfo(h.dtype).eps ** 0.5, options.tol)
    while len(residuals) < options.max_iters and right < T:
        after, jacobian = linearize(shift(h0, h), rows)
        after, jacobian = after.unflatten(0, (B, T)), jacobian.unflatten(0, (B, T))
        r, size = after - h, h.abs().clamp(min=1)
        d = solve_linear(jacobian, r)
        # Written as <=, so that NaN counts as not converged.
        good = (r.abs() <= options.tol * size) & (d.abs() <= reach * size)
        count = good.flatten(2).all(2).all(0).long().cumprod(0).sum()
        largest = r.abs().nan_to_num(float("inf")).max()
        # The host waits once.
        residual, known = torch.stack([largest.double(), count.double()]).tolist()
        residuals.append(residual)
        right = int(known)
        h = _limit(h + d, after, guess, options.bounds)
    return Iterated(h, right, right == T, tuple(residuals))


def _limit(h: Tensor, after: Tensor, guess: Tensor, bounds: Any) -> Tensor:
    """Replaces overflowed elements of an iterate by f there, or else the guess; then clips to known
    bounds."""
    h = torch.where(h.isfinite(), h, torch.where(after.isfinite(), after, guess))
    return h if bounds is None else torch.maximum(torch.minimum(h, bounds[1]), bounds[0])


def multiple_shooting(
    step: Step,
    linearize: Callable[..., Tuple[Tensor, Tensor]],  # (step, h, xs) -> step(h, xs), J
    solve_linear: Callable[[Tensor, Tensor], Tensor],
    h0: Tensor,
    xs: Rows,
    guess: Any,  # [B, T, *S] or None
    chunk: int,
    options: Options,
) -> Iterated:
    """Solves by Newton's method for the states at the ends of chunks of C steps; f runs inside the
    chunks."""
    B, T = xs[0].shape[:2]
    C, W = min(chunk, T), -(-T // min(chunk, T))
    time = torch.arange(W * C, device=h0.device)
    inside = (time < T).view(1, W, C).expand(B, W, C)  # the last chunk may be shorter
    at = time.clamp(max=T - 1)
    chunks = tuple(x[:, at].unflatten(1, (W, C)) for x in xs)  # [B, W, C, ...]

    def run(h: Tensor, rows: Rows) -> Tensor:
        *given, inside = rows
        for c in range(C):
            h = _where(inside[:, c], step(h, tuple(x[:, c] for x in given)), h)
        return h

    if guess is None:
        rows = tuple(x.flatten(0, 1) for x in (*chunks, inside))
        guess = run(h0.new_zeros(B * W, *h0.shape[1:]), rows).unflatten(0, (B, W))
    else:
        guess = guess[:, at.view(W, C)[:, -1]]
    at_chunks = lambda h, rows: linearize(run, h, rows)
    ends = iterate(at_chunks, solve_linear, h0, (*chunks, inside), guess, options)

    h, states = shift(h0, ends.h), []
    for c in range(C):
        h = step(h, tuple(x[:, :, c].flatten(0, 1) for x in chunks))
        states.append(h.unflatten(0, (B, W)))
    inner = torch.stack(states, 2).flatten(1, 2)[:, :T]
    # The first chunk that is not right has a right initial state.
    right = min((ends.right + 1) * C, T)
    return Iterated(inner, right, ends.converged, ends.residuals)


def _where(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (yes.dim() - 1)), yes, no)


def finish(step: Step, h0: Tensor, xs: Rows, done: Iterated) -> Tensor:
    """Computes the steps that are not right yet, one after another."""
    if done.right == done.h.shape[1]:
        return done.h
    h = done.h[:, done.right - 1] if done.right else h0
    rest = []
    for t in range(done.right, done.h.shape[1]):
        h = step(h, tuple(x[:, t] for x in xs))
        rest.append(h)
    return torch.cat([done.h[:, : done.right], torch.stack(rest, 1)], 1)


def sequential(step: Step, h0: Tensor, xs: Rows) -> Tensor:
    """Computes all steps in a plain loop."""
    states, h = [], h0
    for t in range(xs[0].shape[1]):
        h = step(h, tuple(x[:, t] for x in xs))
        states.append(h)
    return torch.stack(states, 1) if states else h0.new_zeros(len(h0), 0, *h0.shape[1:])
