"""Any cell, parallel in time: Newton's method on all steps at once (ParaRNN, arXiv 2510.21450).

The states of h_t = f(h_{t-1}, x_t) solve T equations. From a guess h, one iteration takes

    r_t = f(h_{t-1}, x_t) - h_t        J_t = df/dh at (h_{t-1}, x_t)       of all steps at once
    d_t = J_t d_{t-1} + r_t            h_t <- h_t + d_t                    one linear scan

until r is at roundings, and what does not get there is run step by step. A cell of three lines:

    >>> def cell(h, x, w):                      # h [N, 8], x [N, 2, 8]: N rows, none sees another
    ...     z = torch.sigmoid(w[0] * h + x[:, 0])
    ...     return z * h + (1 - z) * torch.tanh(w[1] * h + x[:, 1])
    >>> x, w = torch.randn(4, 100, 2, 8), torch.randn(2, 8, requires_grad=True)
    >>> h, last, info = solve(cell, x, params=(w,), state_shape=(8,), return_info=True)
    >>> h.shape, last.shape, info.structure
    (torch.Size([4, 100, 8]), torch.Size([4, 8]), 'diagonal')
    >>> h.sum().backward()                      # exact: one scan back, then the cell's own vjp

How many iterations it takes depends on the cell: a handful where old states fade, as many as there
are steps where they do not (then `chunk` or mode "sequential" serve better). The result is the same.
A fused kernel of your own diagonal cell: README.md, "A fused cell of your own".
"""

from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from .arguments import check_tolerance
from .checks import (
    check_choice,
    check_flag,
    check_floating,
    check_shape,
    check_tensor,
    check_whole,
)
from .dispatch import without_autocast
from .formulas import in_forward_mode, is_transformed
from .iteration import Options, finish, iterate, multiple_shooting, sequential, shift
from .memory import check_memory
from .problem import Inputs, Problem, check_bounds, check_params, check_sizes, check_state, check_x
from .structures import STRUCTURES, choose_mode, find_structure, fits_everywhere, solve_linear

MODES = ("auto", "scan", "torch", "sequential")
MAX_ITERS = 24  # beyond it, running the remaining steps one after another is faster


class SolveInfo(NamedTuple):
    """What `solve` did."""

    mode: str  # "scan", "torch" or "sequential"
    structure: str  # structure of the Jacobian; the one found by "auto"
    iterations: int
    residual: float  # largest residual before the last iteration; 0 for "sequential"
    residuals: Tuple[float, ...]  # largest residual before each iteration
    converged: bool  # False if steps had to be run one after another
    finished: int  # how many steps were; 0 for "sequential"


def can_iterate() -> bool:
    """Whether the iteration may take Jacobians, by torch.func.vjp: nothing follows its tensors."""
    if in_forward_mode() or is_transformed():
        return False
    try:
        torch.func.vjp(torch.neg, torch.zeros(()))
    except RuntimeError:  # a hook takes saved tensors, as in torch.utils.checkpoint
        return False
    return True


NOTHING = SolveInfo("sequential", "auto", 0, 0.0, (), True, 0)
OPTIONS = {"structure", "jacobian_fn", "chunk", "tol", "max_iters", "bounds", "mode"}


@torch.compiler.disable
def solve(
    cell: Callable[..., Tensor], x: Inputs, h0: Optional[Tensor] = None, params: Tuple = (), *,
    state_shape: Optional[Tuple[int, ...]] = None, structure: str = "auto",
    jacobian_fn: Optional[Callable[..., Tensor]] = None, guess: Optional[Tensor] = None,
    chunk: int = 1, tol: Optional[float] = None, max_iters: Optional[int] = None,
    bounds: Optional[Tuple[Any, Any]] = None, mode: str = "auto", return_info: bool = False,
):  # fmt: skip
    """h_t = cell(h_{t-1}, x_t, *params) for all t. B batch, T time, N = any number of rows.

    cell         (h [N, *S], x [N, ...], *params) -> [N, *S], row by row; no row may see another (no
                 batch statistics) and no call may differ from the next (no dropout)
    x            [B, T, ...], or a tuple of such tensors, which the cell gets as a tuple. Floating
                 ones come to the cell in the state's dtype: fp32, or fp64 if the first one is fp64
    h0           [B, *S], or None for zeros of state_shape = S; differentiable
    params       further arguments of the cell; tensors are cast to the state's dtype. Parameters that
                 the cell closes over (an nn.Module's) get their gradients too
    structure    of J: "diagonal"; "block", blocks [n, n] of S's last dimension n; "dense"; a name
                 given to `register_structure`; "auto" takes the narrowest of the first three that fits.
                 A few rows are checked before the iteration and, for gradients, all rows at the
                 solution. If J is not so there, "auto" changes to "dense"; a structure asked for by
                 name raises ValueError in either check
    jacobian_fn  as cell -> J of a named structure: [N, *S], [N, *S, n] or [N, m, m] with m numbers in
                 a state. Default: torch.func.vjp of the cell, 1, n or m times, as always through a chunk
    guess        [B, T, *S]; default f(0, x)
    chunk        C > 1 is multiple shooting: the unknowns are every C-th state, the cell runs C steps
                 between them, fewer iterations are needed
    tol          the iteration stops when everywhere |r| <= tol max(1, |h|), default 4 eps, and |d| <=
                 sqrt(eps): after the last correction an error of about |d|^2 is left
    max_iters    default 24; 0 is the plain loop
    bounds       (low, high), numbers or tensors that h's elements are known to stay between: keeps
                 an iteration that overshoots from overflowing
    mode         "scan" solves the linear system in this package's binary, "torch" in torch, "auto" in
                 whichever is here; "sequential" is the plain loop, differentiable any number of times.
                 Fully fused cells are flash_gru and flash_lstm

    Returns (h [B, T, *S] in the dtype of the first floating x, last [B, *S] in the state's dtype),
    and with return_info a `SolveInfo`. Steps before the first unconverged one do not depend on it,
    so they are right; from there the cell is run step by step: what is returned satisfies the
    recurrence to tol everywhere, NaN where it has NaN. Gradients are those at the solution, no
    iteration is recorded; there are no second derivatives. In forward mode, transforms of torch.func
    and torch.utils.checkpoint "auto" is the plain loop. The host waits for the device once an iteration, and torch.compile breaks its graph here.
    Wrong arguments raise TypeError or ValueError naming the argument, what it was and what it must
    be.
    """
    if isinstance(mode, str) and mode == "fused":
        raise ValueError(
            "mode is 'fused', but only flash_gru and flash_lstm are: call these instead"
        )
    check_choice("mode", mode, MODES)
    if not callable(cell):
        raise TypeError(f"cell is a {type(cell).__name__}, but must be a function or an nn.Module")
    check_choice("structure", structure, ("auto", *STRUCTURES))
    if jacobian_fn is not None and not callable(jacobian_fn):
        raise TypeError(f"jacobian_fn is a {type(jacobian_fn).__name__}, but must be a function")
    if jacobian_fn is not None and structure == "auto":
        raise ValueError("structure is 'auto', but must be named when jacobian_fn is given")
    xs, dtype = check_x(x)
    h0 = check_state(xs[0], h0, state_shape, dtype)
    check_whole("chunk", chunk, 1, "an int >= 1")
    if max_iters is not None:
        check_whole("max_iters", max_iters, 0, "an int >= 0")
    check_tolerance(tol)
    check_params(params, h0)
    check_flag("return_info", return_info)
    B, T = xs[0].shape[:2]
    if guess is not None:
        check_tensor("guess", guess, h0.device)
        check_floating("guess", guess)
        check_memory(("guess", "guess"), guess)
        check_shape("guess", guess, (B, T, *h0.shape[1:]), "[B, T, *S]")
        guess = guess.detach().to(dtype)
    bounds = check_bounds(bounds, h0)
    if mode != "sequential" and not can_iterate():
        if mode != "auto":
            raise NotImplementedError(
                f"mode is {mode!r}, but must be 'auto' or 'sequential' for derivatives in forward mode, "
                "in transforms of torch.func, and where hooks take saved tensors (checkpoint)"
            )
        mode = "sequential"
    problem = Problem(cell, h0, xs, params, not isinstance(x, tuple), jacobian_fn)
    with without_autocast(h0.device.type):
        if mode == "sequential" or h0.numel() * T == 0:
            h = sequential(problem.step, h0, problem.xs)
            info = NOTHING._replace(structure=structure)
        else:
            tol = 4 * torch.finfo(dtype).eps if tol is None else tol
            options = Options(tol, MAX_ITERS if max_iters is None else max_iters, bounds)
            h, info = _parallel(problem, structure, mode, guess, chunk, options)
    last = (h[:, -1] if T else h0).clone()
    h = h.to(next((v.dtype for v in xs if v.is_floating_point()), dtype))
    return (h, last, info) if return_info else (h, last)


def _parallel(problem: Problem, wanted: str, mode: str, guess, chunk: int, options: Options):
    """Computes h [B, T, *S] and the report; differentiable once."""
    h0, xs = problem.h0.detach(), tuple(v.detach() for v in problem.xs)
    B, T = xs[0].shape[:2]
    rows = tuple(v.flatten(0, 1) for v in xs)
    with torch.no_grad():
        first = problem.step(h0.new_zeros(B * T, *h0.shape[1:]), rows)
        structure = find_structure(lambda *at: problem.linearize(*at)[1:], first, rows, wanted)
        mode = choose_mode(mode, structure, first)
        linear = lambda a, b, reverse=False: solve_linear(structure, a, b, reverse, mode)
        if chunk == 1:
            guess = first.unflatten(0, (B, T)) if guess is None else guess
            linearize = lambda h, v: problem.linearize(structure, h, v)[:2]
            done = iterate(linearize, linear, h0, xs, guess, options)
        else:
            through = lambda step, h, v: problem.linearize(structure, h, v, step)[:2]
            done = multiple_shooting(problem.step, through, linear, h0, xs, guess, chunk, options)
        h = finish(problem.step, h0, xs, done)
    largest = done.residuals[-1] if done.residuals else float("inf")
    counts = len(done.residuals), largest, done.residuals
    info = SolveInfo(mode, structure.name, *counts, done.converged, T - done.right)
    if not torch.is_grad_enabled():
        return h, info
    # One more application, which autograd records at the solution. Its vjp takes gradients to x,
    # the parameters (also those that the cell closes over) and h0; Adjoint feeds it the gradients
    # of all steps.
    before = shift(problem.h0, h)
    after = problem.step(before, tuple(v.flatten(0, 1) for v in problem.xs))
    if after.requires_grad:
        with torch.no_grad():
            found = problem.linearize(structure, before.detach(), rows)[1:]
            if not fits_everywhere(structure, found, before.detach(), wanted):
                structure = STRUCTURES["dense"]  # the iteration has converged with less
                info = info._replace(structure="dense")
                linear = lambda a, b, reverse=False: solve_linear(structure, a, b, reverse, "torch")
                found = problem.linearize(structure, before.detach(), rows)[1:]
        jacobian = found[0].unflatten(0, (B, T))
        h = Adjoint.apply(after.view_as(h), h, jacobian, structure, linear)
    return h, info


class Adjoint(torch.autograd.Function):
    """Returns the solution h. Its backward turns the gradient dh of h into that of f(h_{t-1}, x_t),
    which is g_t = dh_t + J_{t+1}^T g_{t+1}."""

    @staticmethod
    def forward(ctx, after, h, jacobian, structure, linear):
        ctx.save_for_backward(after, jacobian)
        ctx.structure, ctx.linear = structure, linear
        return h.view_as(h)

    @staticmethod
    def backward(ctx, dh):
        after, jacobian = ctx.saved_tensors
        with torch.no_grad():
            later = ctx.structure.transpose(jacobian)[:, 1:]
            a = torch.cat([later, torch.zeros_like(jacobian[:, :1])], 1)
            # For one step the scan returns its input.
            dh = dh.clone(memory_format=torch.contiguous_format)
            g = ctx.linear(a, dh, True)
        # dh is often a constant. g depends on the states, so a second derivative must be refused
        # here.
        return NoSecondDerivative.apply(g, after), None, None, None, None


class NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, after):
        return g.view_as(g)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "solve has second derivatives only with mode='sequential', which autograd differentiates "
            "any number of times"
        )


class ParallelRNN(nn.Module):
    """A cell over time as a module: forward(x, h0=None) -> h [B, T, *S], last [B, *S].

    `cell` is a function or an nn.Module (whose parameters become this module's) called as
    cell(h [N, *S], x [N, ...]); `options` are those of `solve`: structure, mode, chunk, tol, ...

        rnn = ParallelRNN(cell, state_shape=(8,))
        h, last = rnn(torch.randn(4, 100, 2, 8))

    The cell runs in fp32 (fp64 for fp64 x): parameters in 16 bits are for the cell to widen.
    """

    def __init__(self, cell: Callable[..., Tensor], state_shape: Tuple[int, ...], **options: Any):
        super().__init__()
        wrong = sorted(set(options) - OPTIONS)
        if wrong:
            raise TypeError(
                f"an option is {wrong[0]!r}, but must be one of {', '.join(sorted(OPTIONS))}"
            )
        self.cell, self.state_shape, self.options = cell, check_sizes(state_shape), options

    def forward(self, x: Inputs, h0: Optional[Tensor] = None, return_info: bool = False):
        options = {"state_shape": self.state_shape, **self.options}
        return solve(self.cell, x, h0, return_info=return_info, **options)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{k}={v!r}" for k, v in {"state_shape": self.state_shape, **self.options}.items()
        )
