"""Registers gradient formulas of the ops with torch, and in eager mode calls them without
torch.library.

torch.library runs a registered formula through layers of Python, which take longer than
enqueueing a short kernel. Unless a call is traced, the same formula therefore runs as an
autograd.Function, and the op runs below torch's autograd. torch.func's grad and vmap need an
autograd.Function of another form. The kernels share this file.
"""

import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch.autograd import forward_ad

from .dispatch import ops, without_autocast
from .private_names import (
    BelowAutograd,
    any_requires_grad,
    argument_names,
    forward_level,
    is_tracing,
    takes_gradients_of_gradients,
    transforms_are_active,
)

CALLS: Dict[str, Callable] = {}  # name of an op -> what runs it, here or in a trace


def register(name: str, backward: Callable, setup_context: Optional[Callable] = None) -> None:
    """Makes `backward` the gradient of the op `name`, and CALLS[name] the function that calls it.

    The formula is torch.library.register_autograd's; it may call other ops through CALLS.
    """
    op = getattr(ops, name).default
    torch.library.register_autograd(op, backward, setup_context=setup_context)

    def forward(ctx, *inputs):
        with BelowAutograd():
            output = op(*inputs)
        if setup_context is not None:
            setup_context(ctx, inputs, output)
        return output

    def keep(ctx, inputs, output):
        if setup_context is not None:
            setup_context(ctx, inputs, output)

    def jvp(ctx, *tangents):
        raise NotImplementedError(
            f"{name} has no derivatives in forward mode (jvp, jacfwd, hessian): take backward "
            "mode's (grad, vjp, jacrev), or pass backend='reference'"
        )

    functions: Dict[str, Any] = {"forward": staticmethod(forward), "jvp": staticmethod(jvp)}
    functions["backward"] = staticmethod(backward)
    formula: Any = type(name, (torch.autograd.Function,), functions)
    functions = {**functions, "forward": staticmethod(op), "setup_context": staticmethod(keep)}
    functions["generate_vmap_rule"] = True
    transformable: Any = type(name, (torch.autograd.Function,), functions)

    def call(*inputs):
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return op(*inputs)
        if is_transformed():  # by transforms that refuse the registered formula
            return transformable.apply(*inputs)
        recorded = torch.is_grad_enabled() and any_requires_grad(*inputs)
        if recorded or in_forward_mode():  # an op below autograd would not see these
            return formula.apply(*inputs)
        with BelowAutograd():
            return op(*inputs)

    CALLS[name] = call


def is_recorded(*inputs: Optional[torch.Tensor]) -> bool:
    """Whether a backward will follow, so that a forward should keep what it needs. torch.jit.trace
    must see the same calls with and without gradients, so the answer is no there, and a backward
    through its graph recomputes what was not kept."""
    if not torch.is_grad_enabled() or torch.jit.is_tracing():
        return False
    return any(t is not None and t.requires_grad for t in inputs)


def register_fake(name: str) -> Callable:
    """As torch.library.register_fake for the op `name`, but all tensors must be on one device:
    torch also calls a fake if one of them is on meta, and would return its empty results as
    values."""
    op = getattr(ops, name).default
    names = argument_names(op)

    def decorate(fake: Callable) -> None:
        def checked(*arguments, **options):
            listed = [
                (n, t if isinstance(t, (list, tuple)) else [t]) for n, t in zip(names, arguments)
            ]
            given = [(n, t) for n, ts in listed for t in ts if isinstance(t, torch.Tensor)]
            for argument, tensor in given:
                if tensor.device != given[0][1].device:
                    raise ValueError(
                        f"{argument} is on {tensor.device}, but must be on {given[0][1].device}, "
                        f"where {given[0][0]} is"
                    )
            return fake(*arguments, **options)

        torch.library.register_fake(op, checked)

    return decorate


def is_transformed() -> bool:
    """Whether torch.func's grad or vmap is active. They need an autograd.Function with
    setup_context, which takes Python four times as long to call and is therefore used only for
    them."""
    if torch.compiler.is_compiling():
        return False
    return transforms_are_active()


def is_eager() -> bool:
    """Whether nothing is active that follows tensors from op to op: a trace, or a transform."""
    return not torch.compiler.is_compiling() and not is_followed()


def is_followed() -> bool:
    """Whether torch.jit.trace or a transform follows tensors; of torch.compile it says nothing."""
    return is_tracing() or transforms_are_active() or forward_level() >= 0


def in_forward_mode() -> bool:
    """Whether some tensors may carry tangents, with or without gradients."""
    if torch.compiler.is_compiling():
        return False
    return forward_level() >= 0


def has_tangent(value: torch.Tensor) -> bool:
    return in_forward_mode() and forward_ad.unpack_dual(value).tangent is not None


def may_have_tangents(*values: Optional[torch.Tensor]) -> bool:
    """Whether a value has a tangent, or a transform that may hide one."""
    if not in_forward_mode():
        return False
    return is_transformed() or any(v is not None and has_tangent(v) for v in values)


def is_nested() -> bool:
    """Whether torch.func's gradients of gradients are taken, which no op has."""
    return is_transformed() and takes_gradients_of_gradients()


def fall_back_for_derivatives(
    chosen: str, requested: str, *inputs: Optional[torch.Tensor], stacklevel: int = 4
) -> str:
    """Returns the backend of a call: where "auto" chose the binary, and the call needs derivatives in
    forward mode or torch.func's gradients of gradients, the reference. A backend asked for by name
    stays, and refuses."""
    if chosen == "reference" or requested != "auto":
        return chosen
    if may_have_tangents(*inputs):
        reason = "the kernel has no derivatives in forward mode"
    elif is_nested():
        reason = "the kernel has no second derivatives by torch.func"
    else:
        return chosen
    return fall_back(reason, stacklevel=stacklevel + 1)


def fall_back(reason: str, stacklevel: int = 3) -> str:
    """Returns "reference", with a warning that says why."""
    if not torch.compiler.is_compiling():
        message = f"{reason}, so the reference runs, which takes longer"
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)
    return "reference"


def is_differentiated_again() -> bool:
    """Whether a backward that runs now is recorded (create_graph=True) in eager mode. Transforms
    record every backward."""
    return torch.is_grad_enabled() and is_eager()


def views_of(inputs: Sequence[Any]) -> List[Any]:
    """Returns `inputs` with a view in place of each tensor that needs a gradient.

    A gradient by views stops there. By the tensors themselves, one that another depends on, or that is
    given twice, would get the other's gradient too."""

    def view(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.requires_grad:
            return t
        v = t.view_as(t)
        # A tensor that torch.func.vjp has left says that it needs a gradient, but its view does not.
        return v if v.requires_grad else v.detach().requires_grad_()

    return list(map(view, inputs))


def gradients_by(
    reference: Callable, inputs: Sequence[Any], grads: Sequence[Optional[torch.Tensor]]
) -> Tuple[Optional[torch.Tensor], ...]:
    """Returns the gradients of `inputs`, differentiable any number of times: those of `reference`,
    which computes the op's outputs in torch. None where none is needed."""
    warnings.warn(
        "create_graph=True: the kernel has no second derivatives, so the reference computes these "
        "gradients, which takes longer",
        RuntimeWarning,
        stacklevel=2,
    )
    device = next(t for t in inputs if t is not None).device.type
    inputs = views_of(inputs)
    with without_autocast(device):
        outputs = reference(*inputs)
        pairs = [
            (o, d.to(o.dtype))
            for o, d in zip(outputs, grads)
            if d is not None and o is not None and o.requires_grad
        ]
        sources = [t for t in inputs if t is not None and t.requires_grad]
        if not pairs or not sources:
            return (None,) * len(inputs)
        ys, ds = [o for o, _ in pairs], [d for _, d in pairs]
        options: Any = {"create_graph": True, "allow_unused": True}
        found = iter(torch.autograd.grad(ys, sources, ds, **options))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)


def refuse_second_derivative(kernel: str, name: str) -> None:
    """Registers a gradient for the op `name`, itself a gradient, that raises and names the
    alternative."""

    def backward(ctx, *grads):
        raise RuntimeError(
            f"{kernel} has no second derivatives of this call: pass backend='reference', "
            "which autograd differentiates any number of times"
        )

    register(name, backward)
