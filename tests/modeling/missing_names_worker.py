"""Runs the models without one private name of torch or transformers, for each name in turn.

Each name is taken away in a fork of this process, before flashcell is imported there: as in a release
of torch or transformers that has renamed it. It is put back when flashcell is imported, because torch
and transformers need it themselves. Prints one line of JSON for each name.
"""

import contextlib
import functools
import importlib
import json
import os
import re
import sys
import traceback
import warnings

import torch
import torch._dynamo
from torch import nn
from torch.autograd import forward_ad
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import utils as generation_utils

KERNELS = ("fused-rnn", "diagonal-rnn", "tfla")


@contextlib.contextmanager
def attribute(owner: object, name: str):
    """Takes an attribute of a module, a class or an object away."""
    holders = owner.__mro__ if isinstance(owner, type) else [owner]
    holder = next(h for h in holders if name in vars(h))
    value = vars(holder)[name]
    delattr(holder, name)
    yield
    setattr(holder, name, value)


@contextlib.contextmanager
def in_instances(name: str):
    """Takes an attribute away that torch.nn.Module sets on each module."""
    init = nn.Module.__init__

    def without(self, *args, **kwargs):
        init(self, *args, **kwargs)
        del vars(self)[name]

    nn.Module.__init__ = without
    yield
    nn.Module.__init__ = init


@contextlib.contextmanager
def in_code(kind: type, name: str):
    """Renames `name` in all code of a class, so that it is not found."""
    functions = [getattr(f, "__func__", f) for f in vars(kind).values()]
    functions = [f for f in map(innermost, functions) if hasattr(f, "__code__")]
    codes = [f.__code__ for f in functions]
    assert any(name in code.co_names for code in codes), f"{kind.__name__} does not use {name}"
    for f, code in zip(functions, codes, strict=True):
        names = tuple(n + "_renamed" if n == name else n for n in code.co_names)
        f.__code__ = code.replace(co_names=names)
    yield
    for f, code in zip(functions, codes, strict=True):
        f.__code__ = code


def innermost(function: object) -> object:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def dotted(name: str):
    owner, _, last = name.rpartition(".")
    return attribute(functools.reduce(getattr, owner.split(".")[1:], sys.modules["torch"]), last)


def of_transformers(name: str):
    module, _, last = name.rpartition(".")
    return attribute(importlib.import_module(f"transformers.{module}"), last)


def cases() -> dict:
    """Returns name -> the context manager that takes it away."""
    found = {
        f"torch.{name}": functools.partial(dotted, f"torch.{name}")
        for name in (
            "_C._AutoDispatchBelowAutograd",
            "_C._any_requires_grad",
            "_C._autograd._get_current_graph_task_keep_graph",
            "_C._are_functorch_transforms_active",
            "_C._get_fp32_precision_getter",
            "_C._is_tracing",
            "_C._len_torch_dispatch_stack",
            "_C._len_torch_function_stack",
            "_C._push_on_torch_dispatch_stack",
            "_C._pop_torch_dispatch_stack",
            "_C._functorch.get_interpreter_stack",
            "_C._functorch.is_batchedtensor",
            "_C._functorch.is_legacy_batchedtensor",
            "_C._dynamo.guards.GlobalStateGuard",
            "_C._dynamo.guards.TensorGuards",
            "_C._dynamo.guards.dict_version",
            "_dynamo.mark_static_address",
            "_foreach_copy_",
            "_foreach_zero_",
            "autograd.Function._compiled_autograd_key",
            "autograd.forward_ad._current_level",
            "autograd.function._SingleLevelFunction",
            "nn.Module._apply",
            "nn.Module._compiled_call_impl",
            "nn.RNNBase._update_flat_weights",
            "nn.modules.module._global_forward_hooks",
            "nn.modules.module._global_forward_pre_hooks",
            "overrides._get_current_function_mode_stack",
            "utils._device.DeviceContext",
            "utils._python_dispatch.TorchDispatchMode",
        )
    }
    flags = "__allow_nonbracketed_mutation"
    found[f"torch.backends.{flags}"] = functools.partial(attribute, torch.backends.m, flags)
    for name in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        found[name] = functools.partial(in_instances, name)
    for name in ("_flat_weights", "_flat_weights_names", "_all_weights"):
        found[name] = functools.partial(in_code, nn.RNNBase, name)
    for name in ("_schema", "_op"):
        found[name] = functools.partial(attribute, torch.ops.aten.clone.default, name)
    for name in ("_pad_token_tensor", "_is_user_defined"):
        found[name] = functools.partial(in_code, GenerationMixin, name)
    for name in (
        "_sample",
        "_prefill",
        "_beam_search",
        "_assisted_decoding",
        "_supports_default_dynamic_cache",
    ):
        found[name] = functools.partial(attribute, GenerationMixin, name)
    for name in ("_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation"):
        found[name] = functools.partial(attribute, GenerationMixin, name)
    for name in ("StopCheck", "DeferredStopCheck"):
        found[name] = functools.partial(attribute, generation_utils, name)
    for name in (
        "_can_compile_fullgraph",
        "_can_record_outputs",
        "_get_resized_lm_head",
        "_init_weights",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "_tied_weights_keys",
        "_tp_plan",
    ):
        found[name] = functools.partial(attribute, PreTrainedModel, name)
    for name in (
        "cache_utils.DYNAMIC_LAYER_TYPE_MAPPING",
        "cache_utils.STATIC_LAYER_TYPE_MAPPING",
        "utils.generic.maybe_autocast",
        "utils.generic.merge_with_config_defaults",
        "utils.output_capturing.capture_outputs",
    ):
        found[name] = functools.partial(of_transformers, name)
    return found


def import_all() -> None:
    """Imports the models, and loads the kernels, which look for names as well."""
    import flashcell
    from flashcell.utils import private_names

    for name in dir(flashcell):
        getattr(flashcell, name)
    for name in KERNELS:
        flashcell.load_kernel(name, "cpu", "cpu")
    private_names.mark_static_address(torch.zeros(1))


def behave() -> dict:
    """Returns what the models do: results, and the paths that they took."""
    import flashcell
    from flashcell.generation import mixin, slots
    from flashcell.state.cache import copy_rows

    loops, found = [], {}

    class Text(mixin.Text):
        def __init__(self, *args):
            loops.append(1)
            super().__init__(*args)

    mixin.Text = Text  # used by the loop that runs ahead
    for family in ("RNN", "XLSTM"):
        config = getattr(flashcell, f"Flash{family}Config")(
            vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_heads=2
        )  # fmt: skip
        torch.manual_seed(0)
        model = getattr(flashcell, f"Flash{family}ForCausalLM")(config).eval()
        ids = torch.arange(2, 8).view(2, 3)
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found[f"{family} tokens"] = model.generate(ids, **options).tolist()
        found[f"{family} path"], found[f"{family} reason"] = (
            model.decoder.path,
            model.decoder.reason,
        )
        cache = model(ids, use_cache=True).past_key_values
        other = model(ids.flip(1), use_cache=True).past_key_values
        copy_rows(cache, other, [(0, 1)])
        found[f"{family} copied"] = model(ids[:, :1], past_key_values=cache).logits.tolist()
        model.train()
        loss = model(ids, labels=ids).loss
        loss.backward()
        found[f"{family} loss"] = loss.tolist()
        found[f"{family} norm"] = sum(p.grad.double().norm().item() for p in model.parameters())
    found["own loop"] = len(loops)
    tensors = [torch.ones(2), torch.ones(3)]
    slots.zero_all(tensors)
    found["zeros"] = [t.tolist() for t in tensors]
    torch.manual_seed(0)
    layer, x = flashcell.LSTM(4, 8, backend="cpu"), torch.randn(3, 2, 4)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return layer(x)[0].square().sum()

    found["transform"] = torch.func.grad(loss_of)(x).tolist()
    wanted = x.clone().requires_grad_()
    loss_of(wanted).backward()
    found["gradient"] = wanted.grad.tolist()
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the kernel has no derivatives in forward mode")
        out = layer(forward_ad.make_dual(x, torch.ones_like(x)))[0]
        found["forward mode"] = forward_ad.unpack_dual(out).tangent.tolist()
    try:
        kernel = flashcell.load_kernel("fused-rnn", "cpu", "cpu")
        kernel.lstm(x.to("meta"), *(p.detach() for p in layer.parameters()))
        found["two devices"] = "no error"
    except (ValueError, TypeError, RuntimeError) as error:
        found["two devices"] = type(error).__name__
    return found


def try_without(name: str, take_away) -> dict:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        error = None
        with take_away():
            try:
                import_all()
            except ImportError as failure:
                error = str(failure)
        found = {} if error else behave()
        said = [
            str(w.message)
            for w in caught
            if re.match(r"(torch|transformers) \S+ has no ", str(w.message))
        ]
    return {"name": name, "error": error, "warnings": said, "found": found}


def import_once() -> None:
    """Imports what takes longest, so that no fork has to: it is not flashcell's."""
    import transformers.modeling_layers
    import transformers.models.auto.modeling_auto  # noqa: F401

    with forward_ad.dual_level():  # compiles functions when it is first used
        forward_ad.make_dual(torch.ones(1), torch.ones(1))


def main() -> None:
    torch.set_num_threads(1)
    import_once()
    everything = {"": contextlib.nullcontext, **cases()}
    for name in sys.argv[1:] or everything:
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(try_without(name, everything[name])), flush=True)
            except BaseException:
                print(json.dumps({"name": name, "failed": traceback.format_exc()}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
