"""Finds which code of a finished CUDA build the GPU here runs and which engines of fused-rnn it
offers, and calls every op that a build has."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diagonal_cases
import mlstm_cases
from cases import DEVICE, Case, make
from flashcell.kernels import diagonal_rnn, fused_rnn
from flashcell.kernels.fused_rnn.devices import Code

REST = (*[None] * 5, False, True)  # masks, lengths, a clip; no tf32; the weight's gradient
METHODS = ("sequential", "multiple_shooting", "newton") if DEVICE == "cuda" else ("sequential",)
Calls = Iterator[tuple[str, Callable[[], Any]]]


def built_for(module) -> tuple[str, ...]:
    """Returns the archs of a loaded variant: ('8.0+PTX',)."""
    metadata = json.loads((Path(module.__file__).parent / "metadata.json").read_text())
    return tuple(metadata["backend"]["archs"])


def code_of(module) -> Code | None:
    """Returns the code that CUDA chooses from a build: machine code of the GPU's major version, else
    the newest PTX."""
    return choose(built_for(module), torch.cuda.get_device_capability())


def choose(archs: tuple[str, ...], capability: tuple[int, int]) -> Code | None:
    machine, ptx = [], []
    for arch in archs:
        number = arch.removesuffix("+PTX")
        major, minor = (int(part) for part in number.rstrip("af").split("."))
        code = Code(10 * major + minor, number == "9.0a")
        own = (major, minor) == capability
        if own or (major == capability[0] and minor <= capability[1] and number[-1] != "a"):
            machine.append(code)
        if arch.endswith("+PTX") and (
            own or ((major, minor) < capability and number[-1].isdigit())
        ):
            ptx.append(code)
    return max(machine or ptx, default=None)


def skip_unless_offered(module, engine: str, cell: str, case: Case, dtype: torch.dtype, **given):
    """Skips the test if the loaded library's code lacks this engine, or its tiles of this size. Code
    for 9.0a on its own GPU lacks none that a test asks for."""
    if engine in engines_of(module, cell, case, dtype, **given):
        return
    code = code_of(module)
    assert not code.sm_90a, f"{engine} does not run {case} in {dtype}"
    pytest.skip(f"code for {code.arch / 10} has no {engine} engine for this head")


def engines_of(module, cell: str, case: Case, dtype: torch.dtype, tf32: bool = False) -> list[str]:
    """Returns the engines that FLASHCELL_CUDA_ENGINE may choose for the case on the GPU here."""
    gpu, code = torch.cuda.get_device_properties(), code_of(module)
    vector = 16 // dtype.itemsize  # heads run padded to whole vectors
    width = -(-case.D // vector) * vector
    sizes = (case.B, case.T, case.N, width, dtype.itemsize, tf32)
    shared_bytes = code.usable_shared_bytes(gpu.shared_memory_per_block_optin)
    about = (10 * gpu.major + gpu.minor, *code, gpu.multi_processor_count, shared_bytes)
    text = module.dispatch.ops.explain_plan(cell, *sizes, *about)
    fields = dict(line.split("\t")[:2] for line in text.splitlines())
    return fields["runs"].split(",")


class Called(TorchDispatchMode):
    """Notes the names of all ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op.name())
        return op(*args, **(kwargs or {}))


def ops_of(*modules) -> set[str]:
    """Returns the names of the loaded kernels' ops that have code for DEVICE, without the plans, which
    need no GPU, and block_step, which the CPU alone has."""
    spaces = tuple(f"{module.dispatch.ops.name}::" for module in modules)
    key, has_kernel = DEVICE.upper(), torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    own = [op for op in names if op.startswith(spaces) and has_kernel(op, key)]
    return {
        op for op in own if not op.endswith(("::explain_plan", "::plan_layers", "_block_step_"))
    }


def every_op(fused, diagonal, mlstm) -> Calls:
    """Returns a small call of every op that has CUDA code, for the three loaded kernels."""
    yield from _fused_ops(fused)
    yield from _diagonal_ops(diagonal)
    yield from _tfla_ops(mlstm)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def _fused_ops(module) -> Calls:
    ops = module.dispatch.ops
    for name, cell in fused_rnn.CELLS.items():
        given = make(cell, Case(2, 3, 1, 40, ("state",)), torch.float32)
        listed = {**given, "lengths": torch.tensor([3, 2])}
        backward, weight = getattr(ops, f"{name}_bwd"), given["weight"]
        saved, h = torch.rand(2, 3, cell.saved, 1, 40), torch.zeros(2, 3, 1, 40)
        yield name, lambda n=name, c=given: module.recurrent(n, **c)
        yield f"{name} with lengths", lambda n=name, c=listed: module.recurrent(n, **c)
        yield f"{name} backward", lambda b=backward, a=(h, None, saved, h, weight): b(*a, *REST)
        if cell.states <= 2:  # a cell of torch.nn
            yield from _layers(ops, name, cell)
    a, b = torch.zeros(1, 5, 40), torch.zeros(1, 40, 7)
    if DEVICE == "cuda":  # the CPU has no such op
        yield "tf32_matmul", lambda: ops.tf32_matmul(a, b)
    else:
        x, weight = torch.zeros(5, 40), torch.zeros(7, 40)
        yield "linear", lambda: ops.linear_fwd(x, weight, None)
        yield "linear backward", lambda: ops.linear_bwd(torch.zeros(5, 7), x, weight, True)


def _layers(ops, name: str, cell) -> Calls:
    """Two layers of a torch.nn module of 40 units, and one step of one layer."""
    forward, backward = getattr(ops, f"{name}_layers_fwd"), getattr(ops, f"{name}_layers_bwd")
    for L, T in ((2, 3), (1, 1)):
        zeros = torch.zeros(cell.gates * 40, 40), torch.zeros(cell.gates * 40)
        weights, x = [zeros[0], zeros[0], zeros[1], zeros[1]] * L, torch.zeros(2, T, 40)
        state = [torch.zeros(L, 2, 40) for _ in range(cell.states)]
        given = (), True, False, 1, True, 40, 0.0, False

        def there(x=x, state=state, weights=weights, given=given):
            return forward(x, state, weights, *given, True, 0)

        def back(x=x, state=state, weights=weights, given=given):
            _, last, kept = there(x, state, weights, given)
            return backward(x, last, x, weights, kept, *given, True, True, 0)

        yield f"{name} {L} layers", there
        yield f"{name} {L} layers backward", back
    if cell.states <= 2:
        step, train = (getattr(ops, f"{name}_cell_{way}") for way in ("fwd", "train_fwd"))
        rows, back_of_cell = [torch.zeros(2, 40)] * cell.states, getattr(ops, f"{name}_cell_bwd")

        def back_of_step():
            *_, saved, h_prev = train(*rows, rows[0], *weights[:4], False)
            given = (rows[0], *weights[:4], saved, h_prev, False)
            return back_of_cell(*rows, *given, True, True)

        yield f"{name} cell", lambda: step(rows[0], *rows, *weights[:4], False)
        yield f"{name} cell in training", lambda: train(rows[0], *rows, *weights[:4], False)
        yield f"{name} cell backward", back_of_step


def _diagonal_ops(module) -> Calls:
    zeros, ops = torch.zeros, module.dispatch.ops
    row, h = zeros(2, 40), zeros(2, 3, 40)
    for name, cell in diagonal_rnn.CELLS.items():
        function, backward = getattr(module, name), getattr(ops, f"{name}_bwd")
        call = diagonal_cases.make(cell, Case(2, 3, 1, 40, ("state",)), torch.float32)
        weight, saved = zeros(cell.weights, 40), zeros(2, 3, cell.states - 1, 40)
        given = (h, None, call["x"], weight, h, saved, *[None] * 5)
        for method in METHODS:
            yield f"{name} {method}", lambda f=function, c=call, m=method: f(**c, method=m)
            yield f"{name} {method} backward", lambda b=backward, a=given, m=method: b(*a, m)
        rows = tuple(zeros(n, 40) for n in (3, cell.weights - 3) if n)
        step = (name, row, zeros(1, cell.gates, 40, 40), None, rows)
        step += (tuple(zeros(2, 40) for _ in range(cell.states)), zeros(40), row)
        yield f"{name} mixer_step", lambda a=step: module.mixer_step(*a, bound=0.5)
    blocks = zeros(2, 3, 40, 2, 2), zeros(2, 3, 40, 2)
    scans = (("linear_scan", ops.scan_bwd, h, h), ("block_scan", ops.block_scan_bwd, *blocks))
    for name, backward, a, b in scans:
        function = getattr(module, name)
        yield name, lambda f=function, a=a, b=b: f(a, b)
        yield f"{name} backward", lambda f=backward, a=a, b=b: f(b, a, b, None, False)
    taps, x = zeros(40, 4), h.clone().requires_grad_()
    yield "causal_conv", lambda: module.causal_conv(x, taps).sum().backward()
    if DEVICE == "cuda":  # on the CPU it is torch's
        rows = zeros(5, 40)
        yield "its backward", lambda: ops.causal_conv_bwd(h, h, rows, None, None, True)
    yield "conv_step", lambda: module.conv_step(row, taps, None, zeros(2, 3, 40))


def _tfla_ops(module) -> Calls:
    ops, x, weights = module.dispatch.ops, _zeros(2, 40), [_zeros(24, 40)]
    case = mlstm_cases.Case(2, 20, 1, 16, 16, ("state", "layer"))
    call, _ = mlstm_cases.leaves(mlstm_cases.make("exp", case, torch.bfloat16))
    plain = {k: v for k, v in call.items() if k in ("q", "k", "v", "i", "f")}
    yield "mlstm", lambda: module.mlstm(**call)
    yield "mlstm backward", lambda: module.mlstm(**call)[0].sum().backward()
    one = {k: v[:, 0].detach() for k, v in plain.items()}
    state = tuple(torch.zeros(2, 1, *size) for size in ((16, 16), (16,), ()))
    yield "mlstm_step", lambda: module.mlstm_step(**one)
    yield "mlstm_step_", lambda: module.mlstm_step(**one, state=state, inplace=True)
    yield "linear_step", lambda: ops.linear_step(x, weights, [], [], 0, 0.0, None, 0.1, None, False)
    if DEVICE == "cuda":  # the CPU has no such ops
        yield "norm_step", lambda: ops.norm_step(x, x[0], 0.1, weights, [], 0.0)
        yield "gate_step", lambda: ops.gate_step(x, x)
        given = {**one, "state": state, "ring": module.mlstm_ring(state[0], torch.bfloat16)}
        yield "mlstm_replay_", lambda: module.mlstm_replay_step(**given)
    dy, h = _zeros(2, 20, 1, 16), _zeros(2, 20, 1, 16)
    yield "mlstm_epilogue", lambda: ops.mlstm_epilogue(h, h, None, False, False, 0.1)
    yield "its backward", lambda: ops.mlstm_epilogue_bwd(dy, h, h, None, False, False, 0.1)
    total, C, n = torch.ones(2, 20, 1), torch.zeros(2, 1, 16, 16), torch.zeros(2, 1, 16)
    bare = [plain[k].detach() for k in "qkv"] + [plain[k].detach().float() for k in "if"]
    bare += [None] * 7
    given = (dy, None, None, C, n, h, total, None, None, *bare, True, True, 0.0, True, 16)
    yield "mlstm_bwd", lambda: ops.mlstm_bwd(*given)
