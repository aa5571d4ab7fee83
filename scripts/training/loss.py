"""Computes a language model's loss in chunks of tokens, so that the logits are never all in memory.

At 65,536 tokens and a vocabulary of 50,432 the logits, their logarithms and gradients are 40 GB. Here
the head, the loss and the gradients of both are taken together, chunk by chunk, so a step is left with
the gradients of the hidden states and of the head's weight, and no product is computed twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

PLAIN = {"flash_rnn", "flash_mlstm", "flash_xlstm", "gpt2", "llama", "mamba2"}  # logits are W x
IGNORED = -100
CHUNK = 2**28  # logits at a time, at most: 1 GiB in fp32
TILE = 128  # columns: the products of a head with 50,257 took 126 of a step's 276 ms on an H200
NOWHERE = -1e9  # logit of a column that only fills the tile: its probability is 0


class HeadLoss(torch.autograd.Function):
    """Computes the mean loss of a language model's head, with z-loss, without storing all logits.

    It is the mean of -log softmax(l)[target] + z_loss lse(l)^2 over the targets [N] that are not
    IGNORED, with l = cap tanh(W x / cap) (without cap l = W x), x [N, H], W [V, H]. The result is
    in fp32 or wider, and 0 if no target counts.

    Products are in autocast's dtype if it is on, all else in fp32 or wider. The gradient of l at a
    token is r (softmax(l) - onehot / s) with s = 1 + 2 z_loss lse(l), r = s / N. To save a pass
    over the logits, r scales the rows of x and of dx instead of the logits' gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, z_loss: float
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        exact = torch.promote_types(dtype, torch.float32)
        with torch.autocast(kind, enabled=False):
            vocabulary = len(weight)
            operand = weight.new_zeros(-(-vocabulary // TILE) * TILE, x.shape[1], dtype=dtype)
            operand[:vocabulary] = weight
            counted = targets != IGNORED
            share = counted.to(exact) / counted.sum().clamp(min=1)  # without targets the loss is 0
            dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=exact)
            loss = share.new_zeros(())
            rows = 1 << max(0, (CHUNK // vocabulary).bit_length() - 1)
            for part in (slice(at, at + rows) for at in range(0, len(x), rows)):
                own = x[part].to(dtype)
                logits = (own @ operand.mT).to(exact)
                if cap is not None:
                    logits = logits.div_(cap).tanh_().mul_(cap)
                logits[:, vocabulary:] = NOWHERE
                losses, g, r = chunk(logits, targets[part], share[part], cap, z_loss, dtype)
                loss += losses
                dx[part] = r * (g @ operand)
                dw += (g.mT @ (r * own).to(dtype))[:vocabulary]
            ctx.save_for_backward(dx, dw.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dw = ctx.saved_tensors
        return dx * grad, dw * grad, None, None, None


def chunk(
    logits: Tensor, targets: Tensor, share: Tensor, cap: float | None, z_loss: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns a chunk's share of the loss, the logits' gradient without the row factors r, and r.

    The gradient is with respect to the logits before the cap, in `dtype`."""
    targets = targets.clamp_min(0)[:, None]
    logs = logits.log_softmax(-1)
    at_target = logs.gather(-1, targets)
    lse = logits[:, :1] - logs[:, :1]
    losses = (z_loss * lse.square() - at_target)[:, 0] @ share
    s = 1 + 2 * z_loss * lse
    g = torch.exp(logs, out=torch.empty_like(logs, dtype=dtype))
    g.scatter_(-1, targets, (at_target.exp() - 1 / s).to(dtype))
    if cap is not None:
        g.mul_(1 - (logits / cap).square_())
    return losses, g, share[:, None] * s


def loss_of(logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """Computes HeadLoss's mean from logits [N, V], which are all in memory."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != IGNORED
    nats = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    squares = logits.logsumexp(-1)[counted].square().sum() if z_loss else 0.0
    return (nats + z_loss * squares) / counted.sum().clamp(min=1)


def add_loss(model: nn.Module) -> None:
    """Makes model(..., targets=[B, T], z_loss=0.0) return (the mean loss, the cache), without logits.

    It changes the model's own forward, so that wrappers (DDP, FSDP2, autocast) see an ordinary call
    and the names in checkpoints do not change. Of a model whose logits are not known to be W x, perhaps
    with our soft cap, all logits are computed, by its own forward.
    """
    plain: Callable[..., Any] = model.forward
    cap = getattr(model.config, "output_logit_soft_cap", None)
    head = model.get_output_embeddings()
    chunked = model.config.model_type in PLAIN and getattr(head, "bias", None) is None

    def forward(*arguments: Any, targets: Tensor | None = None, z_loss: float = 0.0, **rest: Any):
        if targets is None:
            return plain(*arguments, **rest)
        if not chunked:
            output = plain(*arguments, **rest)
            logits = output.logits.flatten(0, 1)
            return loss_of(logits, targets.flatten(), z_loss), output.get("past_key_values")
        output = model.base_model(*arguments, **rest)
        hidden = output.last_hidden_state.flatten(0, 1)
        weight = model.get_output_embeddings().weight
        loss = HeadLoss.apply(hidden, weight, targets.flatten(), cap, z_loss)
        return loss, output.get("past_key_values")

    model.forward = forward
