"""Tests the raw ops with tensors that they cannot run: each is refused by its name, and none is
read or written outside of its storage. autograd knows what an op changes in place."""

import re

import pytest
import torch

from cases import DEVICE

B, T, N, D, H = 2, 5, 2, 8, 16


def r(*shape):
    return torch.randn(*shape)


def masks():
    return [torch.zeros(B, T, dtype=torch.bool), None, torch.full((B,), T), None]


def bits(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def fused(ops):
    x, weight, bias, state = r(B, T, 4, N, D), r(4, N, D, D), r(4, N, D), r(2, B, N, D)
    calls = {"lstm_fwd": [x, weight, bias, state, *masks(), None, False, True, None]}
    _, _, saved, h_prev = ops.lstm_fwd(*calls["lstm_fwd"])
    given = [r(B, T, N, D), state, saved, h_prev, weight]
    calls["lstm_bwd"] = [*given, *masks(), None, False, True, None]
    x, state = r(B, T, H), [r(2, B, D), r(2, B, D)]
    weights = [w for width in (H, D) for w in (r(4 * D, width), r(4 * D, D), r(4 * D), r(4 * D))]
    options = (), True, False, 1, True, D, 0.0, False
    calls["lstm_layers_fwd"] = [x, state, weights, *options, True, 0]
    _, last, kept = ops.lstm_layers_fwd(*calls["lstm_layers_fwd"])
    calls["lstm_layers_bwd"] = [r(B, T, D), last, x, weights, kept, *options, True, True, 0]
    states = r(B, D), r(B, D)
    calls["lstm_cell_fwd"] = [r(B, H), *states, *weights[:4], False]
    calls["gru_cell_fwd"] = [r(B, H), states[0], *(w[: 3 * D].clone() for w in weights[:4]), False]
    if DEVICE == "cpu":
        calls["linear_fwd"] = [r(B, T, H), r(24, H), r(24)]
        calls["linear_bwd"] = [r(B, T, 24), r(B, T, H), r(24, H), True]
        state = [r(B, N, D), r(B, N, D)]
        calls["lstm_block_step_"] = [
            r(B, H), r(H), 1e-6, bits(4 * H, H), weight, bias, state, r(H), 1e-6, bits(24, H), bits(24, H),
            bits(H, 24), [r(4 * H), r(24), r(24), r(H)],
        ]  # fmt: skip
    return calls


def diagonal(ops):
    x, weight, state = r(N, B, T, 3, D), r(5, H), r(2, B, H)
    calls = {"flash_lstm_fwd": [x, weight, state, *masks(), "sequential", -1.0, -1, True]}
    h, _, saved, _ = ops.flash_lstm_fwd(*calls["flash_lstm_fwd"])
    given = [r(B, T, H), state, x, weight, h, saved, state]
    calls["flash_lstm_bwd"] = [*given, *masks(), "sequential"]
    calls["scan_fwd"] = [r(B, T, H), r(B, T, H), r(B, H), False]
    calls["scan_bwd"] = [r(B, T, H), r(B, T, H), r(B, T, H), r(B, H), False]
    calls["block_scan_fwd"] = [r(B, T, H, 2, 2), r(B, T, H, 2), r(B, H, 2), False]
    calls["conv_step_"] = [r(B, H), r(H, 4), r(H), r(B, 3, H)]
    rest = [r(3, H), r(2, H), r(3, H), r(B, H), r(B, H), r(B, H), r(H), r(B, H), 1.0]
    calls["flash_lstm_mix_step_"] = [r(N, B, 3, D), *rest]
    return calls


def mlstm(ops):
    state = [r(B, N, D, D), r(B, N, D), r(B, N)]
    given = lambda *t: [
        *(r(B, *t, N, D) for _ in range(3)),
        *(r(B, *t, N) for _ in range(2)),
        *state,
    ]
    calls = {"mlstm_fwd": [*given(T), *masks(), True, True, 0.0, True, 4, 0]}
    h, C, n, _, total, _, _ = ops.mlstm_fwd(*calls["mlstm_fwd"])
    first = [r(B, T, N, D), state[0], state[1], C, n, h, total, None, None]
    calls["mlstm_bwd"] = [*first, *given(T), *masks(), True, True, 0.0, True, 4]
    step = [*given(), r(B, N, D), r(N, D), True, True, 0.0, True, False, 1e-6]
    calls["mlstm_step"] = calls["mlstm_step_"] = step
    epilogue = [r(B, T, N, D), r(B, T, N, D), r(N, D), True, False, 1e-6]
    calls["mlstm_epilogue"] = epilogue
    calls["mlstm_epilogue_bwd"] = [r(B, T, N, D), *epilogue]
    if DEVICE == "cpu":
        given = [
            r(B, H),
            [bits(24, H), r(24, H)],
            [r(24)],
            [r(24)],
            1,
            0.0,
            r(H),
            1e-6,
            None,
            False,
        ]
        calls["linear_step"] = given
    return calls


KERNELS = {"fused_rnn": fused, "diagonal_rnn": diagonal, "tfla": mlstm}


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Returns the ops of a kernel, with arguments that each of them accepts."""
    ops = request.getfixturevalue(request.param).dispatch.ops
    return ops, KERNELS[request.param](ops)


def tensors(op, arguments):
    """Returns (name, where, tensor) of all tensors; where is (index, index in a list or None)."""
    for i, (value, argument) in enumerate(
        zip(arguments, op.default._schema.arguments, strict=True)
    ):
        if isinstance(value, torch.Tensor):
            yield argument.name, (i, None), value
        elif isinstance(value, list):
            for j, one in enumerate(value):
                yield argument.name, (i, j), one


def replaced(arguments, where, value):
    i, j = where
    changed = list(arguments)
    changed[i] = value if j is None else [*changed[i][:j], value, *changed[i][j + 1 :]]
    return changed


def resized(tensor, size):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(size)
    return tensor


def matrix(tensor):
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor


def rows(tensor):
    return list(tensor) if tensor.dim() > 1 else [tensor]


BAD = {
    "freed": (lambda t: resized(t, 0), "within its storage"),
    "cut off": (lambda t: resized(t, t.untyped_storage().nbytes() - 1), "within its storage"),
    "sparse": (lambda t: t.to_sparse(), "strided"),
    "csr": (lambda t: matrix(t).to_sparse_csr(), "strided"),
    "mkldnn": (lambda t: t.float().to_mkldnn(), "strided"),
    "nested": (lambda t: torch.nested.nested_tensor(rows(t)), "strided"),
    "jagged": (lambda t: torch.nested.nested_tensor(rows(t), layout=torch.jagged), "strided"),
    "quantized": (lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8), "strided"),
    "meta": (lambda t: t.to("meta"), "must be on"),
    "long": (lambda t: t.flatten()[:1].as_strided([2**31, *t.shape[1:]], [0] * t.dim()), "2\\^31"),
    "large": (lambda t: t.flatten()[:1].as_strided([2**30] * 2, [0, 0]), "fewer elements"),
}
if DEVICE != "cpu":  # torch has neither there
    del BAD["mkldnn"], BAD["quantized"]


ODD = [kind for kind, (_, says) in BAD.items() if says in ("strided", "must be on")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_tensor_is_refused_by_its_name(kernel, kind):
    ops, calls = kernel
    make, says = BAD[kind]
    for name, arguments in calls.items():
        op = getattr(ops, name)
        op(*(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments))
        for argument, where, tensor in tensors(op, arguments):
            given = replaced(arguments, where, make(tensor))
            first = where[0] == 0 and kind == "meta"  # the error may then name another argument
            with pytest.raises((RuntimeError, ValueError), match=says) as error:
                op(*given)
            assert argument in str(error.value) or first, (name, argument, error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("other", ODD)
def test_two_bad_tensors_are_refused_by_a_name(kernel, kind, other):
    """The dispatcher takes another path for every mixture of devices and layouts."""
    ops, calls = kernel
    for name, arguments in calls.items():
        op = getattr(ops, name)
        given = list(tensors(op, arguments))
        bad = [(where, BAD[kind][0](tensor)) for _, where, tensor in given[:1]]
        bad += [(where, BAD[other][0](tensor)) for _, where, tensor in given[1:]]
        for (first, one), (second, two) in [(bad[0], x) for x in bad[1:]]:
            for pair in ((one, two), (two, one)):
                spoilt = replaced(replaced(arguments, first, pair[0]), second, pair[1])
                with pytest.raises((RuntimeError, ValueError)) as error:
                    op(*spoilt)
                text = str(error.value)
                assert re.search(rf"\b({names_of(op)})(\[\d\])? (must|is|on)\b", text), (name, text)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no other device with tensors to read")
def test_tensors_of_another_device_are_refused(kernel):
    ops, calls = kernel
    for name, arguments in calls.items():
        op = getattr(ops, name)
        given = arguments
        for _, where, tensor in tensors(op, arguments):
            given = replaced(given, where, tensor.cpu())
        with pytest.raises(RuntimeError, match="must be on a CUDA device"):
            op(*given)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_of_inference_mode_are_refused(kernel):
    """They reach the dispatcher without autograd's keys, also beside a tensor on meta."""
    ops, calls = kernel
    for name, arguments in calls.items():
        op = getattr(ops, name)
        for _argument, where, tensor in tensors(op, arguments):
            with torch.inference_mode():
                nested = torch.nested.nested_tensor(rows(tensor))
            given = replaced(arguments, where, nested)
            for spoilt in (
                given,
                [t.to("meta") if torch.is_tensor(t) and t is not nested else t for t in given],
            ):
                with pytest.raises((RuntimeError, ValueError)) as error:
                    op(*spoilt)
                assert re.search(
                    rf"\b({names_of(op)})(\[\d\])? (must|is|on)\b", str(error.value)
                ), name


def names_of(op):
    return "|".join(argument.name for argument in op.default._schema.arguments)


def state_of(op, arguments):
    return [
        (argument.name, tensor)
        for argument, value in zip(op.default._schema.arguments, arguments, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in (value if isinstance(value, list) else [value])
    ]


def in_place(kernel):
    ops, calls = kernel
    return [(getattr(ops, name), calls[name]) for name in calls if name.endswith("_")]


def test_autograd_knows_what_is_changed_in_place(kernel):
    for op, arguments in in_place(kernel):
        for name, state in state_of(op, arguments):
            weight = torch.ones_like(state, requires_grad=True)
            product = weight * state  # keeps the state for its backward
            op(*arguments)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
            with torch.inference_mode():
                version = state._version
                op(*arguments)
            assert state._version == version + 1, (op, name)


def test_a_state_that_requires_a_gradient_is_refused(kernel):
    for op, arguments in in_place(kernel):
        for argument, where, tensor in tensors(op, arguments):
            if not any(tensor is state for _, state in state_of(op, arguments)):
                continue
            for wants in (tensor.clone().requires_grad_(), tensor.clone().requires_grad_() * 1):
                before = wants.detach().clone()
                with pytest.raises(RuntimeError, match=f"{argument}.* is changed in place"):
                    op(*replaced(arguments, where, wants))
                assert torch.equal(wants.detach(), before)
                with torch.no_grad():
                    op(*replaced(arguments, where, wants))


def copied(arguments):
    copy = {list: copied, torch.Tensor: torch.clone}
    return [copy.get(type(a), lambda a: a)(a) for a in arguments]


def test_steps_run_in_inference_mode_and_compiled(kernel):
    for op, arguments in in_place(kernel):
        want, inference, compiled = (copied(arguments) for _ in range(3))
        y = op(*want)
        with torch.inference_mode():
            assert torch.equal(op(*inference), y)
        torch._dynamo.reset()
        with torch.no_grad():
            step = torch.compile(op, backend="aot_eager", fullgraph=True)
            assert torch.equal(step(*compiled), y)
        for given in (inference, compiled):
            for (_, state), (_, expected) in zip(
                state_of(op, given), state_of(op, want), strict=True
            ):
                assert torch.equal(state, expected)
