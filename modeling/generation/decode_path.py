"""Decides how a decoded token is computed. Read it downwards: the loop, the token, the block.

    decide_loop    which loop of `generate` runs: "ahead", ours, which launches a step before it
                   knows whether the text has ended, or "base", transformers'
    decide_token   "graph", a recorded CUDA graph is replayed; "tape", recorded torch ops are
                   replayed; or "plain", the model's forward is called
    decide_replay  the same for a few tokens that assisted decoding tries
    decide_linears, decide_block_step
                   inside the model, also while it is recorded: "block_step", the whole block is one
                   kernel call; "linear_step", its linear layers are fused; "modules", each module
                   is called

Each returns a Decision with the reason against the faster path, and runs nothing. mixin.py,
engine.py and layers/decode_linear.py do what is decided here; `model.decoder.explain()` prints it
all. If recording a step fails (`Refused` in captured_step.py), the token is "plain".
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ..hub.kernel_loader import KernelUnavailable, load_kernel
from ..kernels.fused_rnn.private_names import forward_level, transforms_are_active
from ..quantization.linear import why_not_quantized
from ..state.cache import is_recurrent
from ..state.rollback import owed_tokens, takes_back
from ..utils.private_names import (
    ENGINE,
    LOOP,
    DeviceContext,
    dispatch_modes,
    function_modes,
    is_callers,
    list_function_modes,
)
from .known_code import (
    has_weights_like,
    is_ours,
    runs_alone,
    why_called,
    why_not,
    why_not_weights,
)

ROWS = 16  # up to which linear_step is used; cuBLAS is faster for more rows
TRIED = 32  # most tokens of a recorded call; a call with more reads a text


class Decision(NamedTuple):
    path: str
    reason: str | None = None  # why not the faster path; None if there is none
    kernel: Any = None  # the kernel that runs a block


def may_run_ahead(logits_processor: Any, stopping_criteria: Any) -> bool:
    """Whether all of these are transformers' own, so that one step past the end of the text is
    harmless."""
    steps = [*logits_processor, *stopping_criteria]
    theirs = all(type(step).__module__.startswith("transformers.") for step in steps)
    return theirs and not any(isinstance(s, PrefixConstrainedLogitsProcessor) for s in steps)


def runs_only_known_code(model: Any, processors: Any, criteria: Any, cache: Any) -> bool:
    """Whether no code of the caller's runs between two tokens of `generate`, streamers aside."""
    parts = [cache, *getattr(cache, "layers", ())]
    replaced = (callable(v) and hasattr(type(p), k) for p in parts for k, v in vars(p).items())
    return (
        may_run_ahead(processors, criteria)
        and isinstance(cache, DynamicCache)
        and all(is_ours(type(part)) for part in parts)
        and not any(replaced)
        and runs_alone(model)
    )


def decide_loop(
    model: Any, input_ids: torch.Tensor, processors: Any, criteria: Any, config: Any,
    cache: Any, use_cache: Any, synced_gpus: bool,
) -> Decision:  # fmt: skip
    """Decides whether an extra step past the end of the text is impossible to observe.

    A caller could observe it in a returned cache, in scores, in the random generator or in code of
    its own."""
    reason = LOOP.reason
    if reason is not None:
        pass
    elif not isinstance(cache, DynamicCache) or not use_cache:
        reason = "there is no DynamicCache"
    elif input_ids.device.type not in ("cuda", "cpu") or synced_gpus:
        reason = "several GPUs generate together" if synced_gpus else "the device is another one"
    elif model.decoder.mode == "eager":
        reason = 'mode is "eager"'
    elif not runs_alone(model):
        reason = "hooks, wrappers or overrides run around the model"
    elif config.return_dict_in_generate or is_callers(cache):
        reason = "the caller gets the cache or the scores"
    elif config.do_sample and {type(c) for c in criteria} - {MaxLengthCriteria}:
        reason = "an extra step would draw from the random generator"
    elif not may_run_ahead(processors, criteria):
        reason = "a logits processor or stopping criterion is the caller's"
    return Decision("ahead") if reason is None else Decision("base", reason)


def decide_token(
    model: Any, input_ids: Any, cache: Any, given: dict[str, Any], *, mode: str, owner: Any,
    why_model_refuses: Callable[[], str | None],
) -> Decision | None:  # fmt: skip
    """Decides how one call of the model is computed; None if it decodes no token.

    `given` are its other arguments, and `owner` is the engine's model. `why_model_refuses` looks at
    the whole model, so it comes last: the engine compares the model with the one that it recorded,
    and asks `why_not_recorded` about a new one.
    """
    if not decodes(input_ids, cache):
        return None
    return decide_replay(
        model, input_ids, cache, given, mode=mode, owner=owner, why_model_refuses=why_model_refuses
    )


def decide_replay(
    model: Any, input_ids: torch.Tensor, cache: Any, given: dict[str, Any], *, mode: str,
    owner: Any, why_model_refuses: Callable[[], str | None],
) -> Decision:  # fmt: skip
    """Decides whether a call that decodes, or tries, tokens is a replay; arguments as of
    decide_token."""
    reason = (
        _why_not_by_setting(model, input_ids, mode, owner)
        or _why_not_this_call(input_ids, cache, given)
        or _why_not_now(input_ids)
        or why_model_refuses()
    )
    if reason is not None:
        return Decision("plain", reason)
    return Decision("graph" if input_ids.is_cuda else "tape")


def decodes(input_ids: torch.Tensor | None, cache: Any) -> bool:
    """Whether a call has one token per row and a cache of ours that holds states."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] != 1 or cache is None:
        return False
    return _holds_states(cache)


def tries(input_ids: torch.Tensor | None, cache: Any) -> bool:
    """Whether a call has a few tokens per row that assisted decoding tries, and a cache of ours that
    holds states."""
    if input_ids is None or input_ids.dim() != 2 or not 1 < input_ids.shape[1] <= TRIED:
        return False
    if not takes_back(cache) or not _holds_states(cache):
        return False
    return len({id(layer) for layer in cache.layers}) == len(cache.layers)  # each layer once


def _holds_states(cache: Any) -> bool:
    layers = getattr(cache, "layers", ())
    held = all(is_recurrent(layer) and getattr(layer, "held", ({},))[0] for layer in layers)
    return bool(layers) and held and not owed_tokens(cache)


def _why_not_by_setting(model: Any, input_ids: torch.Tensor, mode: str, owner: Any) -> str | None:
    device = input_ids.device.type
    if mode == "eager":
        return 'mode is "eager"'
    if ENGINE.reason is not None:
        return ENGINE.reason
    if owner is not model:  # such as a replica of DataParallel
        return "the engine is another model's"
    if device not in ("cuda", "cpu") or (device == "cpu" and mode == "graph"):
        return f"{device} has no graphs"
    return None


def _why_not_this_call(input_ids: torch.Tensor, cache: Any, given: dict[str, Any]) -> str | None:
    for name, value in given.items():
        if value is not None and value is not False and name not in ("use_cache", "logits_to_keep"):
            return f"{name} is given"
    if isinstance(given.get("logits_to_keep"), torch.Tensor):
        return "logits_to_keep is a tensor"
    if not all(getattr(layer, "in_dynamic_cache", False) for layer in cache.layers):
        return "the cache is a StaticCache, which is there for torch.compile"
    if cache.layers[0].batch_size != input_ids.shape[0]:
        return "the cache has another batch"  # the model raises the clearer error
    return None


def _why_not_now(tokens: torch.Tensor) -> str | None:
    """Returns what in torch's present state forbids a replay, such as a mode that would observe or
    change the step's ops one by one."""
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if torch.is_autocast_enabled(tokens.device.type):
        return "autocast is on, whose casts of weights live only as long as its context"
    if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph"
    if type(tokens) is not torch.Tensor:
        return f"input_ids is a {type(tokens).__name__}"
    if transforms_are_active():
        return "torch.func transforms the call"
    if forward_level() >= 0:
        return "derivatives are taken in forward mode"
    if dispatch_modes():
        return "a dispatch mode is on"
    if function_modes():
        for mode in list_function_modes():
            if type(mode) is not DeviceContext:  # the mode of torch.set_default_device
                return f"{type(mode).__name__} is on"
    return None


def why_not_recorded(
    model: Any, modules: list[nn.Module], tensors: Any, names: Any, device: torch.device
) -> str | None:
    """Returns why the model's step cannot be recorded, or None if it can."""
    if model.training or model.config.output_hidden_states:
        return "the model is training" if model.training else "output_hidden_states is asked for"
    if device.type == "cpu" and model.config.backend == "reference":
        return "the torch reference is called as it is"
    return why_not(model, modules, tensors, names, device)  # foreign code, offloaded weights, ...


def decide_linears(
    x: torch.Tensor, backend: str, modules: Sequence[nn.Module], around: Sequence[nn.Module],
    kinds: Sequence[type],
) -> Decision:  # fmt: skip
    """Decides whether tfla's `linear_step` replaces the `modules` that read x [B, 1, H].

    The modules `around` them, whose forward it skips, must be unmodified as well. `kinds` are the
    classes of modules that are no more than their weights."""
    few = x.shape[0] <= ROWS
    reason = _why_not_fused(x, backend, few)
    reason = reason or next(filter(None, map(why_called, around)), None)
    reason = reason or next(filter(None, (why_not_weights(m, x, kinds) for m in modules)), None)
    reason = reason or why_not_quantized(x, modules)
    if reason is not None:
        return Decision("modules", reason)
    kernel = load_kernel("tfla", "cuda", backend) if x.is_cuda else tfla_on_cpu()
    if kernel is None or x.device.type != kernel.BACKEND:
        return Decision("modules", f"there is no tfla kernel for {x.device.type}")
    return Decision("linear_step", None, kernel)


def decide_block_step(
    x: torch.Tensor, backend: str, mixer: nn.Module, norms: Sequence[nn.Module],
    has_wide_states: Callable[[], bool],
) -> Decision:  # fmt: skip
    """Decides whether fused-rnn's `block_step` runs a whole block whose linear layers are fused.

    mixer            a RecurrentMixer
    has_wide_states  whether the cache holds the states in the dtype that a step computes in"""
    reason = None
    if any(type(norm) is not nn.RMSNorm for norm in norms):
        reason = "block_step takes RMSNorm alone"
    elif not has_weights_like(mixer, x):
        reason = f"{type(mixer).__name__} is modified, or its weights are unlike its input"
    elif not has_wide_states():
        reason = "the cache holds narrow states"
    else:
        kernel = load_kernel("fused-rnn", x.device.type, backend)
        if kernel.BACKEND == "cpu":
            return Decision("block_step", None, kernel)
        reason = "block_step is the CPU kernel's"
    return Decision("linear_step", reason)


def _why_not_fused(x: torch.Tensor, backend: str, few: bool) -> str | None:
    kind = x.device.type
    if x.shape[1] != 1:
        return "there are several tokens"
    if torch.is_grad_enabled():
        return "gradients are recorded"
    half = x.dtype in (torch.bfloat16, torch.float16)
    if not (half if kind == "cuda" else kind == "cpu" and x.is_floating_point()):
        return f"{x.dtype} on {kind} has no fused linear layers"
    if torch.is_autocast_enabled(kind):  # `kind` is cpu or cuda here
        return "autocast is on"
    if kind == "cpu" and backend == "reference":
        return 'backend is "reference"'
    return f"more than {ROWS} rows on a CPU" if kind == "cpu" and not few else None


@functools.cache
def tfla_on_cpu() -> Any:
    """Returns tfla's CPU kernel, or None, without a warning, if it is not available."""
    try:
        return load_kernel("tfla", "cpu", "cpu")
    except KernelUnavailable:
        return None
