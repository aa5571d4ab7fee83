"""Fused linear layers for decoding: layers that read the same input run in one launch.

With one token per row a GPU does little but read weights, so the time between launches is lost.
tfla's `linear_step` fuses the norm before, several matrices, and the sum or the gate after them. It
reads the modules' own weights in place, those of 8 and 4 bits too (quantization/). If one module is
more than its weight (an adapter, a wrapped layer, one that another tool quantised, one with hooks),
all of them are called as modules instead. On a CPU, fusion saves the calls, and products of one row
that torch computes slowly.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from ..generation.captured_step import StepLayer
from ..generation.decode_path import ROWS, Decision, decide_linears
from ..quantization.linear import QuantizedLinear
from ..state.boundaries import Boundaries
from .mlstm import GateLinear

# Classes whose forward needs no more than their weights.
PLAIN = (nn.Linear, GateLinear, nn.RMSNorm, QuantizedLinear)
StepLinear = Callable[..., tuple[torch.Tensor, ...]]


def find_step_linear(
    x: torch.Tensor, backend: str, modules: Sequence[nn.Module], around: Sequence[nn.Module] = (),
    overwrites: bool = False,
) -> StepLinear | None:  # fmt: skip
    """Returns the fused replacement for calling `modules` on x [B, 1, H], or None: call the
    modules. What decides is decode_path.decide_linears. `overwrites`: as in `many_rows`."""
    if torch.compiler.is_compiling():  # a trace leaves the batch size open
        return None
    kernel = decide_linears(x, backend, modules, around, PLAIN).kernel
    if kernel is None:
        return None
    quantized = any(isinstance(m, QuantizedLinear) for m in modules)
    return kernel.linear_step if x.shape[0] <= ROWS or quantized else many_rows(kernel, overwrites)


class StepParts(NamedTuple):
    """What a block's fused step replaces."""

    modules: list[nn.Module]  # the modules whose weights it reads
    around: tuple[nn.Module, ...]  # the modules whose forward it skips
    backend: str


class FusedStep:
    """Mixin of a block that decodes one token per row with fused linear layers where it can."""

    @property
    def step_parts(self) -> StepParts | str:
        """Returns what the step replaces, or why the block has no fused step."""
        raise NotImplementedError

    def run_fused(self: Any, x: torch.Tensor, cache: Any, boundaries: Boundaries) -> Any:
        """Returns the block's output for x [B, T, H] by `step`, or None: call the modules."""
        T, rows = x.shape[1], few_rows(x, cache)
        if rows is None or not boundaries.none() or isinstance(parts := self.step_parts, str):
            return None
        # In a recording nothing else reads the hidden states.
        overwrites = isinstance(cache, StepLayer)
        step_linear = find_step_linear(rows, parts.backend, parts.modules, parts.around, overwrites)
        if step_linear is None:
            return None
        y = self.step(step_linear, rows[:, 0], cache, T)
        return y[:, None] if T == 1 else y.unflatten(0, (-1, T))

    def decide_step(self, x: torch.Tensor) -> Decision:
        """Decides how one token per row, x [B, 1, H], is computed: for `decoder.explain()`."""
        parts = self.step_parts
        if isinstance(parts, str):
            return Decision("modules", parts)
        return decide_linears(x, parts.backend, parts.modules, parts.around, PLAIN)


def few_rows(x: torch.Tensor, cache: Any) -> torch.Tensor | None:
    """Returns x [B, T, H] as [B T, 1, H] if fused linear layers may take it, or None.

    Several tokens are taken from a text that assisted decoding tries: torch needs two to three times as
    long for so few rows. All other texts are computed as without assistance."""
    if x.shape[1] == 1:
        return x
    few = getattr(cache, "record_past", False) and x.shape[0] * x.shape[1] <= ROWS
    return x.reshape(-1, 1, x.shape[2]) if few else None


class FusedHead:
    """Mixin of a language model whose head is fused where it can be, and may be quantised."""

    fused_head_rows: int | None = None  # most rows with a fused head; None: any number

    def logits_of_few(self: Any, x: torch.Tensor, cache: Any) -> torch.Tensor:
        """Returns compute_logits(x), [B, T, H] -> [B, T, V], by the fused head if T is small."""
        layers = getattr(cache, "layers", ())
        rows = few_rows(x, layers[0]) if layers and x.dim() == 3 else None
        if rows is None or rows is x:
            return self.compute_logits(x)
        return self.compute_logits(rows).view(*x.shape[:2], -1)

    def decide_head(self: Any, x: torch.Tensor) -> Decision:
        """Decides how the logits of one token per row, x [B, 1, H], are computed."""
        most = self.fused_head_rows
        if most is not None and x.shape[0] > most:
            return Decision("modules", f"more than {most} rows")
        return decide_linears(x, self.config.backend, [self.lm_head], (), PLAIN)

    def _get_resized_lm_head(
        self: Any, old_lm_head: nn.Module, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Resizes a head for resize_token_embeddings; of a quantised one the old rows stay as they are."""
        resize = super()._get_resized_lm_head  # type: ignore[misc]
        if not isinstance(old_lm_head, QuantizedLinear):
            return resize(old_lm_head, *args, **kwargs)
        plain = old_lm_head.floating(self.dtype)
        resized = resize(plain, *args, **kwargs)
        return old_lm_head if resized is plain else old_lm_head.resized_like(resized)


def operands(*linears: Any) -> dict[str, list[torch.Tensor]]:
    """Returns the weights of linear layers as arguments of a step linear, and the scales of those
    that are quantised, which must come first."""
    found = {"weights": [m.weight for m in linears]}
    scales = [m.scale for m in linears if isinstance(m, QuantizedLinear)]
    return found | {"scales": scales} if scales else found


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
    pair: dict[str, list[torch.Tensor]],  # `operands` of the gate and of what it gates
    down: nn.Module,
) -> torch.Tensor:  # [B, H]
    """Computes x + SwiGLU(norm(x)) in two launches, or three if the norm cannot be fused."""
    y, options = apply_norm(norm, x)
    inner = step_linear(y, **pair, gated=True, **options)[0]
    return step_linear(inner, **operands(down), residual=x)[0]


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


def many_rows(kernel: Any, overwrites: bool = False) -> StepLinear:
    """Returns a replacement for linear_step that uses cuBLAS, for batches of more than ROWS rows.

    Norms, SwiGLU and the gates' narrow projections stay with the kernel. With `overwrites` the
    residual gets the result, which saves a launch."""

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
        if residual is not None and overwrites:
            return (residual.addmm_(x, plain[0].mT),)
        if residual is not None:  # addmm would copy the residual first, and be slower
            return (linear(x, plain[0]).add_(residual),)
        matrices = packed(plain)
        outputs = [linear(x, w) for w in matrices]
        if len(matrices) < len(plain):
            outputs = list(outputs[0].split([len(w) for w in plain], -1))
        if gated:
            return (kernel.gate_step(*outputs),)
        return *outputs, *bounded

    return run
