"""Every private name of torch and transformers that the models use, and what happens without it.

A later release may rename any of them. They are looked up when a model family is imported. A missing
one gives one warning, which names it and says what happens instead: a fast path is off and results
stay the same. Where a result would change there is an ImportError. The kernels' Python has a module
of the same name with what it uses.
"""

from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import utils as generation_utils

from ..kernels.fused_rnn.private_names import (
    find,
    has_level,
    has_schema,
    transforms_are_known,
    uses,
    warn,
)
from ..kernels.fused_rnn.private_names import op_of as op_of  # for op_tape.py


class Path:
    """Names that one fast path needs. `reason` says which is missing, or is None if none is."""

    def __init__(self, instead: str):
        self.instead = instead
        self.reason: str | None = None

    def find(self, name: str) -> Any:
        """Returns what is at a dotted name below torch, or None."""
        found = find(name, self.instead)
        self.note(found is not None, name, torch)
        return found

    def require(self, there: bool, name: str, library: Any = torch) -> None:
        if not there:
            warn(name, self.instead, library)
        self.note(there, name, library)

    def note(self, there: bool, name: str, library: Any) -> None:
        """Does what `require` does where the kernels have given the warning."""
        if not there and self.reason is None:
            self.reason = f"{library.__name__} {library.__version__} has no {name}"


# What a recorded step relies on, on a GPU and on a CPU.
ENGINE = Path("every decoded token runs the model's forward")
ENGINE.note(transforms_are_known, "torch._C._are_functorch_transforms_active", torch)
dispatch_modes = ENGINE.find("torch._C._len_torch_dispatch_stack")
function_modes = ENGINE.find("torch._C._len_torch_function_stack")
list_function_modes = ENGINE.find("torch.overrides._get_current_function_mode_stack")
DeviceContext = ENGINE.find("torch.utils._device.DeviceContext")
ENGINE.note(has_level, "torch.autograd.forward_ad._current_level", torch)
GLOBAL_HOOKS = tuple(
    ENGINE.find(f"torch.nn.modules.module.{name}")
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
)
TABLES, HOOKS = ("_modules", "_parameters", "_buffers"), ("_forward_hooks", "_forward_pre_hooks")
for name in (*TABLES, *HOOKS):
    ENGINE.require(name in vars(nn.Module()), f"{name} in torch.nn.Module")
ENGINE.require(hasattr(nn.Module, "_compiled_call_impl"), "torch.nn.Module._compiled_call_impl")

# What records a step where there are no CUDA graphs.
TAPE = Path("every token that is decoded on a CPU runs the model's forward")
TorchDispatchMode: Any = TAPE.find("torch.utils._python_dispatch.TorchDispatchMode") or object
push_dispatch_mode = TAPE.find("torch._C._push_on_torch_dispatch_stack")
pop_dispatch_mode = TAPE.find("torch._C._pop_torch_dispatch_stack")
TAPE.note(has_schema, "OpOverload._schema", torch)

# torch.compile's guards, which compare all dicts, all tensors' layouts and all of torch's flags at once.
GUARDS = Path("a recorded step's values are compared one by one, which takes longer")
GlobalStateGuard = GUARDS.find("torch._C._dynamo.guards.GlobalStateGuard")
TensorGuards = GUARDS.find("torch._C._dynamo.guards.TensorGuards")
dict_version = GUARDS.find("torch._C._dynamo.guards.dict_version")

# What the loop that runs ahead of the GPU has in common with transformers' loop.
LOOP = Path("generate runs transformers' loop, which waits for every token")
for name in ("_sample", "_prefill"):
    LOOP.require(hasattr(GenerationMixin, name), f"GenerationMixin.{name}", transformers)
for name in ("_pad_token_tensor", "_is_user_defined"):  # attributes that generate sets for the loop
    LOOP.require(uses(GenerationMixin, name), f"{name} in GenerationMixin", transformers)
for name in ("StopCheck", "DeferredStopCheck"):
    there = hasattr(generation_utils, name)
    LOOP.require(there, f"generation.utils.{name}", transformers)
StopCheck: Any = getattr(generation_utils, "StopCheck", object)
DeferredStopCheck: Any = getattr(generation_utils, "DeferredStopCheck", None)

# What the models override or set for transformers and torch to read -> what happens if these do not.
READ = {
    (
        GenerationMixin,
        "_beam_search",
    ): "the model is compared with its recorded step at every token of a beam search",
    (GenerationMixin, "_assisted_decoding"): "assisted decoding fails when it takes tokens back",
    (GenerationMixin, "_prepare_position_ids_for_generation"): "a prompt without padding runs with "
    "positions, which takes longer",
    (GenerationMixin, "_supports_default_dynamic_cache"): "generate makes no cache for FlashXLSTM, "
    "and runs transformers' loop",
    (GenerationMixin, "_update_model_kwargs_for_generation"): "generate keeps a mask and positions "
    "that grow with every token",
    (PreTrainedModel, "_can_compile_fullgraph"): "generate does not compile for a static cache",
    (PreTrainedModel, "_can_record_outputs"): "output_hidden_states has no effect",
    (PreTrainedModel, "_get_resized_lm_head"): "resize_token_embeddings fails for a quantised head",
    (PreTrainedModel, "_no_split_modules"): "device_map may divide a block between devices",
    (PreTrainedModel, "_skip_keys_device_placement"): "device_map copies caches between devices",
    (PreTrainedModel, "_tp_plan"): "tp_plan does not shard the head",
    (nn.Module, "_apply"): "recorded steps keep their memory until the next token",
}
# transformers 5.17 does not have these yet. Without the first it shards all the same; without the second,
# assisted decoding takes input_ids for new tokens.
NEW = "_fsdp_plan", "_mask_length"
for (owner, name), instead in READ.items():
    if not hasattr(owner, name):
        library = torch if owner is nn.Module else transformers
        warn(f"{owner.__name__}.{name}", instead, library)
for name in ("_init_weights", "_tied_weights_keys"):  # without them models begin with other weights
    if not hasattr(PreTrainedModel, name):
        raise ImportError(
            f"transformers {transformers.__version__} has no PreTrainedModel.{name}, but the models "
            "need it: install an earlier version, from 5.17 on"
        )

_copy_all = find("torch._foreach_copy_", "states are copied one by one")
_zero_all = find("torch._foreach_zero_", "states are cleared one by one")


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each of `sources` into the tensor of `targets` at its place."""
    if _copy_all is not None:
        _copy_all(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def zero_all(tensors: list[torch.Tensor]) -> None:
    if _zero_all is not None:
        _zero_all(tensors)
    else:
        for tensor in tensors:
            tensor.zero_()


@cache
def _mark() -> Any:  # not before it is asked for: torch._dynamo takes a second to import
    return find("torch._dynamo.mark_static_address", "compiled decoding copies its states")


def mark_static_address(tensor: torch.Tensor) -> None:
    """Tells torch.compile that the tensor stays where it is."""
    if _mark() is not None:
        _mark()(tensor)


def is_compiled(module: nn.Module) -> bool:
    """Whether Module.compile has replaced the module's call."""
    return module._compiled_call_impl is not None


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Returns the module's own parameters; named_parameters takes three times as long."""
    return [w for w in module._parameters.values() if w is not None]


def schema_of(op: Any) -> Any:
    return op._schema


def pad_token_of(generation_config: Any) -> Any:
    """Returns the padding token as the tensor that generate has made of it, or None."""
    return generation_config._pad_token_tensor


def prefill(model: Any, *args: Any) -> Any:
    """Runs the prompt through the model, as transformers' loop does first."""
    return model._prefill(*args)


def is_callers(cache: Any) -> bool:
    """Whether a cache was passed to generate."""
    return getattr(cache, "_is_user_defined", False)


def mask_columns(generation_config: Any) -> int:
    """Returns how many columns a mask of ones had that generate has dropped; -1 if that is not
    known."""
    return getattr(generation_config, "_mask_length", -1)
