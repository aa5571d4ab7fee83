"""The private names of torch that the kernels' Python uses, and what happens where torch lacks one.

A missing name costs time, never a result. It gives one warning, which names it and says what happens
instead. The kernels share this file.
"""

import warnings
from contextlib import nullcontext
from typing import Any, List, Optional

import torch

LONGER = "ops and their gradients take longer to call"
EAGER = "and every decoded token runs the model's forward"


def warn(name: str, instead: str, library: Any = torch) -> None:
    """Warns that `library` has no `name`, once for all copies of this file in the process."""
    text = f"{library.__name__} {library.__version__} has no {name}: {instead}"
    seen = vars(library).setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, RuntimeWarning, str(library.__file__), 1, registry=seen)


def find(name: str, instead: str) -> Any:
    """Returns what has a dotted name below torch; None, after a warning, if nothing has it."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    if found is None:
        warn(name, instead)
    return found


def uses(kind: type, name: str) -> bool:
    """Whether the code of a method of the class `kind` reads or sets `name`."""
    functions = [getattr(f, "__func__", f) for f in vars(kind).values()]
    codes = [getattr(getattr(f, "__wrapped__", f), "__code__", None) for f in functions]
    return any(code is not None and name in code.co_names for code in codes)


def _look_for_gradients(*inputs: Any) -> bool:
    values = [v for x in inputs for v in (x if isinstance(x, (list, tuple)) else [x])]
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


# Without it, the op that an autograd.Function calls also goes through torch.library's autograd,
# which records nothing there.
BelowAutograd: Any = find("torch._C._AutoDispatchBelowAutograd", LONGER) or nullcontext
# Without it, each call asks once more whether a transform of torch.func is active.
_Function: Any = find("torch.autograd.function._SingleLevelFunction", LONGER)
_Function = _Function or torch.autograd.Function
_key: Any = find(
    "torch.autograd.Function._compiled_autograd_key",
    "compiled autograd may not follow gradients of calls that are not compiled",
)


class EagerFunction(_Function):
    """The autograd.Function of calls that nothing transforms."""

    if _key is not None:
        _compiled_autograd_key = staticmethod(_key)


any_requires_grad: Any = find("torch._C._any_requires_grad", LONGER) or _look_for_gradients
# True is right for every call: what torch.func needs can be called without it.
transforms_are_active: Any = find("torch._C._are_functorch_transforms_active", f"{LONGER}, {EAGER}")
transforms_are_known = transforms_are_active is not None
transforms_are_active = transforms_are_active or (lambda: True)
has_level = find("torch.autograd.forward_ad._current_level", f"{LONGER}, {EAGER}") is not None
is_tracing: Any = find("torch._C._is_tracing", LONGER) or torch.jit.is_tracing
has_op = hasattr(torch.ops.aten.clone.default, "_op")
if not has_op:
    warn("OpOverload._op", f"{LONGER}, and a recorded step takes longer on a CPU")
has_schema = hasattr(torch.ops.aten.clone.default, "_schema")
if not has_schema:
    warn("OpOverload._schema", f"errors call an argument by its number, {EAGER} on a CPU")
_batched = [
    find("torch._C._functorch.is_batchedtensor", "torch.vmap over gradients raises an error"),
    find(
        "torch._C._functorch.is_legacy_batchedtensor",
        "is_grads_batched and jacobian(vectorize=True) raise an error",
    ),
]


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors under torch.vmap."""
    for test in _batched:  # noqa: SIM110 (a generator would take longer)
        if test is not None and test(tensor):
            return True
    return False


_interpreters = find(
    "torch._C._functorch.get_interpreter_stack",
    "torch.func.grad of torch.func.grad raises an error",
)


def takes_gradients_of_gradients() -> bool:
    """Whether two of torch.func's grad, vjp and jacrev are active, one in the other."""
    stack = _interpreters() if _interpreters is not None else None
    return sum(each.key().name == "Grad" for each in stack or ()) > 1


# Without it, tensors that a second derivative would need live as long as the loss.
graph_stays: Any = find(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "a loss that is kept after its backward keeps initial states alive",
)
graph_stays = graph_stays or (lambda: True)  # whether the backward that runs may run again

# What torch.compile calls with each frame before it runs, and the function that sets it and returns
# what it was. Without them torch.compile compiles pieces of modules that it has left out of its graph.
_PIECES = "torch.compile compiles pieces of an LSTM, GRU or RNN, and warns of what it cannot trace"
frame_callback: Any = find("torch._C._dynamo.eval_frame.get_eval_frame_callback", _PIECES)
set_frame_callback: Any = find("torch._C._dynamo.eval_frame.set_eval_frame", _PIECES)
if frame_callback is None or set_frame_callback is None:
    frame_callback = lambda: None

# Without it, flags of torch.backends cannot be set for a while in a process that has frozen them.
may_set_flags: Any = find(
    "torch.backends.__allow_nonbracketed_mutation",
    "create_graph=True raises an error after torch.backends.disable_global_flags()",
)
may_set_flags = may_set_flags or nullcontext
FLAT = ("_flat_weights", "_flat_weights_names", "_all_weights")
has_flat_weights = all(uses(torch.nn.RNNBase, name) for name in FLAT)
has_flat_weights = has_flat_weights and hasattr(torch.nn.RNNBase, "_update_flat_weights")
if not has_flat_weights:
    warn(
        f"{', '.join(FLAT)} or _update_flat_weights in torch.nn.RNNBase",
        "a parametrization of a weight is computed once more in each forward",
    )


def forward_level() -> int:
    """The number of forward-mode levels less one: -1 outside; 0 where torch does not say it."""
    return getattr(torch.autograd.forward_ad, "_current_level", 0) if has_level else 0


def op_of(op: Any) -> Any:
    """Returns what OpOverload.__call__ calls, or the OpOverload."""
    return op._op if has_op else op


def argument_names(op: Any) -> List[str]:
    if has_schema:
        return [argument.name for argument in op._schema.arguments]
    return [f"argument {n}" for n in range(64)]  # more than any op has


def update_weights(module: Any) -> None:
    """Lets a torch.nn recurrent module see which of its parameters were replaced."""
    if has_flat_weights:
        module._update_flat_weights()


def first_weight(module: Any) -> torch.Tensor:
    return module._flat_weights[0] if has_flat_weights else module.all_weights[0][0]


def weights_of(module: Any) -> List[torch.Tensor]:
    """The weights of all layers and directions of a torch.nn recurrent module, as `update_weights`
    found them."""
    if not has_flat_weights:
        return [weight for layer in module.all_weights for weight in layer]
    return module._flat_weights


def unchanged_weights(module: Any) -> Optional[List[torch.Tensor]]:
    """The weights that weights_of(module) returns after update_weights(module), found in a fraction of
    the time; None if a parameter is computed, or was replaced since the last update."""
    if not has_flat_weights:
        return None
    parameters, weights = module._parameters, module._flat_weights
    for name, weight in zip(module._flat_weights_names, weights):
        if parameters.get(name) is not weight:
            return None
    return weights


def autocast_is_on_anywhere() -> bool:
    kinds = ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "ipu", "maia", "privateuseone")
    return any(map(torch.is_autocast_enabled, kinds))


_fp32_precision: Any = find("torch._C._get_fp32_precision_getter", LONGER)


def recurrent_precision() -> str:
    """Returns torch.backends.cudnn.rnn.fp32_precision, whose property takes several times as long."""
    if _fp32_precision is not None:
        return _fp32_precision("cuda", "rnn")
    # Importing it by name gives the module, without the property.
    switch: Any = torch.backends.cudnn.rnn
    return switch.fp32_precision


def product_precision() -> str:
    """Returns torch.backends.cuda.matmul.fp32_precision, likewise."""
    if _fp32_precision is not None:
        return _fp32_precision("cuda", "matmul")
    switch: Any = torch.backends.cuda.matmul
    return switch.fp32_precision


def weight_of(module: Any, name: str) -> Any:
    """Returns the parameter `name` of the module itself; None for one that is computed."""
    return module._parameters.get(name)


def parameters_of_cell(module: Any) -> List[torch.Tensor]:
    """Returns weight_ih, weight_hh, and bias_ih, bias_hh of a torch.nn cell, if it has either; getattr
    takes several times as long for parameters."""
    own = module._parameters
    try:
        weights = [own["weight_ih"], own["weight_hh"]]
        b_ih, b_hh = own["bias_ih"], own["bias_hh"]
    except KeyError:  # one is computed
        weights = [module.weight_ih, module.weight_hh]
        b_ih, b_hh = module.bias_ih, module.bias_hh
    if b_ih is not None and b_hh is not None:
        return [*weights, b_ih, b_hh]
    if b_ih is None and b_hh is None:
        return weights
    zeros = torch.zeros_like(b_hh if b_ih is None else b_ih)
    return [*weights, zeros if b_ih is None else b_ih, zeros if b_hh is None else b_hh]


def weights_are_flat(module: Any) -> bool:
    """Whether the weights of a torch.nn recurrent module lie in one storage, as cuDNN reads them
    without a copy."""
    if not has_flat_weights:
        return False
    weights = module._flat_weights
    first, last = weights[0].untyped_storage(), weights[-1].untyped_storage()
    return first.data_ptr() == last.data_ptr()
