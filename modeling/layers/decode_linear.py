"""Fused linear layers for decoding: layers that read the same input run in one launch.

With one token per row a GPU does little but read weights, so the time between launches is lost.
tfla's `linear_step` fuses the norm before, several matrices, and the sum or the gate after them. It
reads the modules' own weights in place. If one module is more than its weight (an adapter, a
quantised or wrapped layer, one with hooks), all of them are called as modules instead. On a CPU,
fusion saves the calls, and products of one row that torch computes slowly.
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
from ..utils.private_names import ENGINE, HOOKS, parameters_of
from .mlstm import GateLinear

ROWS = 16  # up to which linear_step is used; cuBLAS is faster for more rows
PLAIN = (nn.Linear, GateLinear, nn.RMSNorm)
StepLinear = Callable[..., tuple[torch.Tensor, ...]]


def find_step_linear(
    x: torch.Tensor, backend: str, modules: list[nn.Module], around: Sequence[nn.Module] = ()
) -> StepLinear | None:
    """Returns the fused replacement for calling `modules` on x [B, 1, H], or None: call the
    modules.

    The modules `around` them, whose forward the fused path skips, must be unmodified as well."""
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
    """Returns tfla's CPU kernel, or None, without a warning, if it is not available."""
    try:
        return load_kernel("tfla", "cpu", "cpu")
    except KernelUnavailable:
        return None


def is_untouched(module: nn.Module) -> bool:
    """Whether calling the module runs its class's original forward, without hooks."""
    if ENGINE.reason is not None or any(vars(module)[name] for name in HOOKS):
        return False
    return "forward" not in vars(module) and is_ours(type(module).forward)


def is_plain(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether the module is no more than weights of x's dtype and device that the kernel can
    read."""
    weights = parameters_of(module)
    return (
        type(module) in PLAIN
        and has_weights_like(module, x)
        and all(w.dim() < 2 or is_readable(w) for w in weights)
    )


def has_weights_like(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether the module is untouched and its weights are plain tensors of x's dtype and device."""
    return is_untouched(module) and all(
        type(w.data) is torch.Tensor
        and (w.dtype, w.device) == (x.dtype, x.device)
        and w.is_contiguous()
        for w in parameters_of(module)
    )


def is_readable(weight: torch.Tensor) -> bool:
    """Whether the kernel can read the weight's rows as 16-byte vectors of 8 values."""
    return weight.is_contiguous() and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0


def norm_options(norm: nn.RMSNorm) -> dict[str, Any]:
    return {"norm_weight": norm.weight, "norm_eps": norm.eps}


def apply_norm(norm: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the input and the options of a step linear for norm(x); it fuses an RMSNorm
    itself."""
    return (x, norm_options(norm)) if type(norm) is nn.RMSNorm else (norm(x), {})


def taken_along(norm: nn.Module) -> list[nn.Module]:
    """Returns the norm in a list if `apply_norm` fuses it instead of calling it."""
    return [norm] if type(norm) is nn.RMSNorm else []


def step_swiglu(
    step_linear: StepLinear,
    x: torch.Tensor,  # [B, H]
    norm: nn.Module,
    pair: Sequence[torch.Tensor],  # the weights of the gate and of what it gates
    down: torch.Tensor,
) -> torch.Tensor:  # [B, H]
    """Computes x + SwiGLU(norm(x)) in two launches, or three if the norm cannot be fused."""
    y, options = apply_norm(norm, x)
    inner = step_linear(y, list(pair), gated=True, **options)[0]
    return step_linear(inner, [down], residual=x)[0]


def packed(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Repoints each parameter's .data into one buffer, and returns that as one matrix, if possible.

    One product with the joined matrix is faster than several with its parts, and no weight is
    stored twice. Where the weights may not be moved, returns them unchanged."""
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
    if together.is_cuda:  # the old memory is freed: another stream may still read it
        torch.cuda.current_stream(together.device).synchronize()
    for w, part in zip(weights, together.split([len(w) for w in weights]), strict=True):
        w.data = part
    return [together]


def is_movable(weight: torch.Tensor) -> bool:
    """Whether no optimizer or FSDP buffer aliases the weight's memory.

    A part of a larger storage may be an optimizer's flat buffer, and with several processes FSDP
    gathers weights into buffers that it keeps."""
    several = dist.is_available() and dist.is_initialized()
    return not several and weight.untyped_storage().nbytes() == weight.nbytes


def many_rows(kernel: Any) -> StepLinear:
    """Returns a replacement for linear_step that uses cuBLAS, for batches of more than ROWS rows.

    Norms, SwiGLU and the gates' narrow projections stay with the kernel."""

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
