"""One step of each cell as a function of what the forward keeps, with first and second derivatives.

The forward keeps activations and not the pre-activations before them, so the derivatives are written in
the former: `sigmoid_at(p, y)` is y, with the derivative of sigmoid at the p that gives y.
"""

from typing import Callable, Dict, List, Sequence, Tuple

import torch

Tensors = Sequence[torch.Tensor]


def _activation(slope: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    class Activation(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, y):
            y = y.clone()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            return dy * slope(ctx.saved_tensors[0]), None

    return Activation.apply


sigmoid_at = _activation(lambda y: y * (1 - y))
tanh_at = _activation(lambda y: 1 - y * y)
relu_at = _activation(lambda y: (y > 0).to(y.dtype))
exp_at = _activation(lambda y: y)


class _LogSigmoid(torch.autograd.Function):
    """log(sigmoid(p)) but for a constant: `y` is sigmoid(p)."""

    @staticmethod
    def forward(ctx, p, y):
        ctx.save_for_backward(y)
        return torch.zeros_like(p)

    @staticmethod
    def backward(ctx, d):
        return d * (1 - ctx.saved_tensors[0]), None


def _lstm(p: Tensors, kept: Tensors, s: Tensors) -> Tensors:
    i, f, o = sigmoid_at(p[0], kept[0]), sigmoid_at(p[1], kept[1]), sigmoid_at(p[3], kept[3])
    c = f * s[1] + i * tanh_at(p[2], kept[2])
    return o * torch.tanh(c), c


def _gru(p: Tensors, kept: Tensors, s: Tensors) -> Tensors:
    reset, z = sigmoid_at(p[0], kept[0]), sigmoid_at(p[1], kept[1])
    n = tanh_at(p[2] + reset * (kept[3] + p[3] - p[3].detach()), kept[2])
    return ((1 - z) * n + z * s[0],)


def _rnn_tanh(p: Tensors, kept: Tensors, s: Tensors) -> Tensors:
    return (tanh_at(p[0], kept[0]),)


def _rnn_relu(p: Tensors, kept: Tensors, s: Tensors) -> Tensors:
    return (relu_at(p[0], kept[0]),)


def _slstm(p: Tensors, kept: Tensors, s: Tensors) -> Tensors:
    write, z, o = exp_at(p[0], kept[1]), tanh_at(p[2], kept[2]), sigmoid_at(p[3], kept[3])
    forget = exp_at(_LogSigmoid.apply(p[1], sigmoid_at(p[1], kept[4])), kept[0])
    c, n = forget * s[1] + write * z, forget * s[2] + write
    return o * c / n, c, n


# One step: pre-activations p (any values), what the forward kept, states before it -> states after it.
STEPS: Dict[str, Callable[[Tensors, Tensors, Tensors], Tensors]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn_tanh,
    "rnn_relu": _rnn_relu,
    "slstm": _slstm,
}


def slopes_of(after: torch.Tensor, by: Tensors) -> List[Tuple[int, Tensors]]:
    """Returns the derivatives of `after` that are not zero: by which of `by`, and T times [B, N, D]."""
    ones = torch.ones_like(after)
    found = torch.autograd.grad(after, by, ones, retain_graph=True, allow_unused=True)
    return [(k, slope.unbind(1)) for k, slope in enumerate(found) if slope is not None]
