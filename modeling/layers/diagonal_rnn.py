"""FlashGRU and FlashLSTM: recurrent layers whose channels do not mix over time (ParaRNN,
arXiv 2510.21450), on the diagonal-rnn kernel.

Both are an input projection, [B, T, input_size] -> gates, and a cell:

    input_size, hidden_size
    num_heads      head n of the projection maps slice n of the input to slice n of the channels
    bias           of the projection
    max_recurrent  bound of every |a| and |p|, as published 0.5; None for no bound
    method         "auto"|"sequential"|"multiple_shooting"|"newton", backend "auto"|"cuda"|"cpu"|"reference": see the
                   kernel's functions

    forward(x [B, T, input_size], state=None, *, reset=None, hold=None, lengths=None,
            cu_seqlens=None, **path) -> h [B, T, hidden_size], state
    step(x [B, input_size], state=None, *, backend=None) -> h [B, hidden_size], state

state: a tuple of [B, hidden_size] ([S, hidden_size] for S packed documents), fp32 (fp64 for fp64),
None for zeros. reset and hold [B, T] bool, lengths [B] and cu_seqlens [S + 1] int: the kernel's own
arguments (document boundaries, padding). path: method, tol, max_iters and backend of this call instead of
the layer's. dtypes bf16, fp16, fp32, fp64; h comes in the projection's,
so under torch.autocast in autocast's. Wrong arguments raise TypeError or ValueError naming the
argument, what it was and what it must be.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..hub.kernel_loader import check_backend, load_kernel
from ..kernels.diagonal_rnn.private_names import transforms_are_active
from .headwise_linear import HeadwiseLinear

State = tuple[Tensor, ...]
METHODS = ("auto", "sequential", "multiple_shooting", "newton")
PATH = ("method", "tol", "max_iters", "backend")


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, but must be one of {', '.join(METHODS)}")


class Bound(torch.autograd.Function):
    """Clamps to [-m, m]; outside the bound only inward gradients pass.

    So a weight beyond the bound can return. It has the effect of clipping the parameters after
    every update, and does not modify them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, m: float) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.m = m
        return rows.clamp(-m, m)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        return torch.where((rows.abs() > ctx.m) & (rows * grad < 0), 0.0, grad), None


class TransformableBound(Bound):
    """Bound in the form that torch.func can transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, m: float) -> Tensor:  # type: ignore[override]
        return rows.clamp(-m, m)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        rows, ctx.m = inputs
        ctx.save_for_backward(rows)


class _FlashLayer(nn.Module):
    kernel_cell: str
    peepholes: int  # rows of p
    states: int

    def __init__(
        self, input_size: int, hidden_size: int, num_heads: int = 1, bias: bool = True,
        max_recurrent: float | None = 0.5, method: str = "auto", backend: str = "auto",
        device: Any = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if max_recurrent is not None and not max_recurrent > 0:
            raise ValueError(f"max_recurrent is {max_recurrent}, but must be None or a number > 0")
        check_method(method)
        factory = {"device": device, "dtype": dtype}
        self.input_size, self.hidden_size = input_size, hidden_size
        self.max_recurrent, self.method = max_recurrent, method
        self.backend = check_backend(backend)
        self.in_proj = HeadwiseLinear(input_size, hidden_size, 3, num_heads, bias, **factory)
        self.a = nn.Parameter(torch.empty(3, hidden_size, **factory))
        if self.peepholes:
            self.p = nn.Parameter(torch.empty(self.peepholes, hidden_size, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises all weights as published; a and p are truncated normal, see init_weights."""
        self.in_proj.reset_parameters()
        self.init_weights()

    def init_weights(self) -> None:
        """Initialises a and p: normal with deviation 1 / sqrt(hidden_size), truncated at three of
        it."""
        deviation = 1 / math.sqrt(self.hidden_size)
        for rows in self.rows:
            nn.init.trunc_normal_(rows, 0.0, deviation, -3 * deviation, 3 * deviation)

    def forward(
        self, x: Tensor, state: State | None = None, *, reset: Tensor | None = None,
        hold: Tensor | None = None, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None,
        **path: Any,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Runs the layer: x [B, T, input_size] -> h [B, T, hidden_size], state; see the module."""
        self._check(x, "[B, T, {}]", 3)
        wrong = [name for name in path if name not in PATH]
        if wrong:
            raise TypeError(f"path has {wrong[0]!r}, but must be of {', '.join(PATH)}")
        path = {"method": self.method, "backend": self.backend, **path}
        check_method(path["method"])  # unused in a step, but checked alike
        masks = {"reset": reset, "hold": hold, "lengths": lengths, "cu_seqlens": cu_seqlens}
        if x.shape[1] == 1 and all(mask is None for mask in masks.values()):
            h, state = self.step(x[:, 0], state, backend=path["backend"])
            return h[:, None], state
        cell = self._kernel(x, self.kernel_cell, path["backend"])
        u, bias = self.in_proj(x, apart=True)
        return cell(u, *self._weights(), state, bias=bias, **masks, **path)

    def step(
        self, x: Tensor, state: State | None = None, *, backend: str | None = None
    ) -> tuple[Tensor, State]:
        """Runs one time step: x [B, input_size] -> h [B, hidden_size], state."""
        self._check(x, "[B, {}]", 2)
        backend = backend or self.backend
        cell = self._kernel(x, f"{self.kernel_cell}_step", backend)
        u, bias = self.in_proj(x, apart=True)
        return cell(u, *self._weights(), state, bias=bias, backend=backend)

    def _kernel(self, x: Tensor, name: str, backend: str) -> Any:
        return getattr(load_kernel("diagonal-rnn", x.device.type, backend), name)

    @property
    def rows(self) -> tuple[nn.Parameter, ...]:
        """The recurrent weights: a, and the peepholes p of an LSTM."""
        return (self.a, self.p) if self.peepholes else (self.a,)

    def _weights(self) -> list[Tensor]:
        m = self.max_recurrent
        eager = not torch.compiler.is_compiling()
        transformed = eager and transforms_are_active()
        # A call of TransformableBound takes four times as long.
        bound = TransformableBound if transformed else Bound
        return [rows if m is None else bound.apply(rows, m) for rows in self.rows]

    def _check(self, x: Tensor, letters: str, dims: int) -> None:
        wanted = letters.format(self.input_size)
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}, but must be a tensor {wanted}")
        if x.dim() != dims or x.shape[-1] != self.input_size:
            raise ValueError(f"x has shape {list(x.shape)}, but must be {wanted}")

    def extra_repr(self) -> str:
        return f"max_recurrent={self.max_recurrent}, method={self.method!r}"


class FlashGRU(_FlashLayer):
    """Gated recurrent unit with a diagonal recurrence, parameters in_proj and a [3, hidden_size].

        u = in_proj(x)    z, r = sigmoid(a h + u)    c = tanh(a_c (h r) + u_c)
        h' = (1 - z) h + z c                         state (h,)

    FlashGRU(input_size, hidden_size, num_heads=1, bias=True, max_recurrent=0.5, method="auto",
    backend="auto", device=None, dtype=None). Arguments, shapes, dtypes, errors: see the module.
    """

    kernel_cell = "flash_gru"
    peepholes, states = 0, 1


class FlashLSTM(_FlashLayer):
    """Long short-term memory with a diagonal recurrence, one gate for input and forgetting, and
    peepholes: parameters in_proj, a [3, hidden_size] and p [2, hidden_size].

        u = in_proj(x)    f = sigmoid(a_f h + p_f c + u_f)     z = tanh(a_z h + u_z)
        c' = f c + (1 - f) z
        o = sigmoid(a_o h + p_o c' + u_o)                      h' = o tanh(c'), state (h, c)

    FlashLSTM(input_size, hidden_size, num_heads=1, bias=True, max_recurrent=0.5, method="auto",
    backend="auto", device=None, dtype=None). Arguments, shapes, dtypes, errors: see the module.
    """

    kernel_cell = "flash_lstm"
    peepholes, states = 2, 2
