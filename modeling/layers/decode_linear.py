"""The linear layers of a decoded token: what reads the same input in one launch.

One token a row leaves a GPU nothing to do but read weights, so every launch between two reads is
lost. tfla's `linear_step` takes the norm before, several matrices, and the sum or the gate behind
them at once. It reads the modules' own weights where they lie; a module that is more than its
weight (an adapter, a quantised or wrapped layer, one with hooks) is called instead, and with it all.
A CPU spends a small model's step on calls and on products that read one row slowly: the same there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from ..generation.known_code import is_ours
from ..hub.kernel_loader import KernelUnavailable, load_kernel
from .mlstm import GateLinear

ROWS = 16  # which linear_step reads the weights for once; more are a product for cuBLAS
PLAIN = (nn.Linear, GateLinear, nn.RMSNorm)
StepLinear = Callable[..., tuple[torch.Tensor, ...]]


def find_step_linear(
    x: torch.Tensor, backend: str, modules: list[nn.Module], around: Sequence[nn.Module] = ()
) -> StepLinear | None:
    """linear_step's equal for x [B, 1, H] and the weights of `modules`, None where they are called; the
    forward of those `around` them is passed over too."""
    if torch.compiler.is_compiling():  # before the batch, which a trace leaves open, is compared
        return None
    kind, few = x.device.type, x.shape[0] <= ROWS
    takes = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    takes |= kind == "cpu" and few and backend != "reference" and x.is_floating_point()
    if not takes or x.shape[1] != 1 or torch.is_grad_enabled():
        return None
    if torch.is_autocast_enabled(kind):
        return None
    if not (all(map(is_untouched, around)) and all(is_plain(module, x) for module in modules)):
        return None
    kernel = load_kernel("tfla", "cuda", backend) if x.is_cuda else tfla_on_cpu()
    if kernel is None or kind != kernel.BACKEND:
        return None
    return kernel.linear_step if few else many_rows(kernel)


@functools.cache
def tfla_on_cpu() -> Any:
    """None where there is no binary: torch's products do without a warning, for who has another kernel
    asked for that one."""
    try:
        return load_kernel("tfla", "cpu", "cpu")
    except KernelUnavailable:
        return None


def is_untouched(module: nn.Module) -> bool:
    """Its class's forward, as it was written, is what a call runs."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and "forward" not in vars(module) and is_ours(type(module).forward)


def is_plain(module: nn.Module, x: torch.Tensor) -> bool:
    """Nothing but its weights, and these like x and as the kernel reads them."""
    weights = [w for w in module._parameters.values() if w is not None]
    return (
        type(module) in PLAIN
        and has_weights_like(module, x)
        and all(w.dim() < 2 or is_readable(w) for w in weights)
    )


def has_weights_like(module: nn.Module, x: torch.Tensor) -> bool:
    """A call runs its class's forward, on weights that lie beside x and in its dtype."""
    return is_untouched(module) and all(
        type(w.data) is torch.Tensor
        and (w.dtype, w.device) == (x.dtype, x.device)
        and w.is_contiguous()
        for w in module._parameters.values()
        if w is not None
    )


def is_readable(weight: torch.Tensor) -> bool:
    """Rows of 8 values, 16 bytes, at a time."""
    return weight.is_contiguous() and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0


def norm_options(norm: nn.RMSNorm) -> dict[str, Any]:
    return {"norm_weight": norm.weight, "norm_eps": norm.eps}


def apply_norm(norm: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """What a step linear reads for norm(x), and its options: an RMSNorm it takes on the way."""
    return (x, norm_options(norm)) if type(norm) is nn.RMSNorm else (norm(x), {})


def taken_along(norm: nn.Module) -> list[nn.Module]:
    """The modules that `apply_norm` does not call."""
    return [norm] if type(norm) is nn.RMSNorm else []


def step_swiglu(
    step_linear: StepLinear,
    x: torch.Tensor,  # [B, H]
    norm: nn.Module,
    pair: Sequence[torch.Tensor],  # the weights of the gate and of what it gates
    down: torch.Tensor,
) -> torch.Tensor:  # [B, H]
    """x + SwiGLU(norm(x)) in two launches, three where the norm is none that they take."""
    y, options = apply_norm(norm, x)
    inner = step_linear(y, list(pair), gated=True, **options)[0]
    return step_linear(inner, [down], residual=x)[0]


def packed(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """One matrix of all rows, where it can be had: the weights are rows of it from now on, so that
    nothing is held twice. A product of many columns reads it faster than several of few."""
    first, K = weights[0], weights[0].shape[1]
    ends = [w.data_ptr() + w.nbytes for w in weights]
    starts = [w.data_ptr() for w in weights[1:]]
    storages = {w.untyped_storage().data_ptr() for w in weights}
    if starts == ends[:-1] and len(storages) == 1 and all(w.is_contiguous() for w in weights):
        return [first.detach().as_strided((sum(map(len, weights)), K), (K, 1))]
    capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.is_inference_mode_enabled() or capturing or not all(map(is_movable, weights)):
        return weights
    together = torch.cat([w.detach() for w in weights])
    if together.is_cuda:  # the old places are given away, whatever stream they belong to
        torch.cuda.current_stream(together.device).synchronize()
    for w, part in zip(weights, together.split([len(w) for w in weights]), strict=True):
        w.data = part
    return [together]


def is_movable(weight: torch.Tensor) -> bool:
    """Nobody else knows the place: a part of a larger one is an optimizer's flat buffer, and among
    several processes FSDP gathers weights into places that it keeps."""
    several = dist.is_available() and dist.is_initialized()
    return not several and weight.untyped_storage().nbytes() == weight.nbytes


def many_rows(kernel: Any) -> StepLinear:
    """The same of cuBLAS's products, for a batch that fills their tiles, and the kernel's norms (with
    the gates, which a product of a few columns would keep waiting) and SwiGLU."""

    def run(
        x: torch.Tensor, weights: list[torch.Tensor], biases: Any = (), *, capped: int = 0,
        cap: float = 0.0, norm_weight: torch.Tensor | None = None, norm_eps: float = 1e-6,
        residual: torch.Tensor | None = None, gated: bool = False,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        plain, gates = weights[: len(weights) - capped], weights[len(weights) - capped :]
        bounded: tuple[torch.Tensor, ...] = ()
        if norm_weight is not None:
            x, *others = kernel.norm_step(x, norm_weight, norm_eps, gates, biases, cap=cap)
            bounded = tuple(others)
        elif gates:
            bounded = kernel.linear_step(x, gates, biases, capped=capped, cap=cap)
        if residual is not None:  # addmm copies it first, and picks slower products
            return (linear(x, plain[0]).add_(residual),)
        matrices = packed(plain)
        outputs = [linear(x, w) for w in matrices]
        if len(matrices) < len(plain):
            outputs = list(outputs[0].split([len(w) for w in plain], -1))
        if gated:
            return (kernel.gate_step(*outputs),)
        return *outputs, *bounded

    return run
