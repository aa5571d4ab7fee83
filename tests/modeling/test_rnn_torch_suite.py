"""Runs torch's own tests on flashcell's modules and cells: those of its module database, and the
examples of its documentation."""

import doctest
import sys
import types
import unittest
from functools import partial

import pytest
import torch
from torch import nn

import flashcell
from cases import DEVICE
from numerics import EPS, assert_as_accurate
from torch_twins import CELLS, EXACT, SAME, SEQUENCES, assert_same, flatten, make_twins

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="test_rnn_cuda.py is about the GPU")

# The database's inputs reach 9, where 1 - tanh^2 has few digits. Observed in float64 over 6 seeds:
# median 4.5 units, worst 210; changing torch's own parameters by a rounding has the same effect.
SATURATED = 512 * EPS[EXACT]


@pytest.fixture(scope="module")
def module_db():
    if "expecttest" not in sys.modules:  # common_utils needs only its TestCase, as a base class
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_modules import module_db

    # The import forbids setting any flag.
    names = torch.backends.disable_global_flags.__globals__
    names["__allow_nonbracketed_mutation_flag"] = True
    return {info.name.removeprefix("nn."): info for info in module_db}


def samples(info, kind: str, training: bool, with_packed: bool):
    make = info.module_inputs_func
    if with_packed:
        make = partial(make, with_packed_sequence=True)
    yield from make(info, device=DEVICE, dtype=EXACT, requires_grad=True, training=training)


def differentiate(module, args, kwargs) -> dict[str, torch.Tensor]:
    outputs = flatten(module(*args, **kwargs))
    leaves = [t for a in (*args, *kwargs.values()) for t in flatten(a)] + list(module.parameters())
    grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), leaves)
    return {f"output[{k}]": o.detach() for k, o in enumerate(outputs)} | {
        f"gradient[{k}]": g for k, g in enumerate(grads)
    }


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_module_database(module_db, kind, training):
    """Every input: against torch's module, against the database's reference, and the gradients."""
    count = 0
    for sample in samples(module_db[kind], kind, training, kind in ("GRU", "RNN")):
        construct, forward = sample.constructor_input, sample.forward_input
        placed = {"dtype": EXACT, "device": DEVICE}
        theirs, ours = make_twins(kind, *construct.args, **construct.kwargs, **placed, gain=1.0)
        theirs.train(training), ours.train(training)
        got, want = (differentiate(m, forward.args, forward.kwargs) for m in (ours, theirs))
        assert_same(got, want, SATURATED, construct)
        packed = isinstance(forward.args[0], nn.utils.rnn.PackedSequence)
        if sample.reference_fn is not None and not packed:
            found = flatten(ours(*forward.args, **forward.kwargs))
            wanted = flatten(sample.reference_fn(ours, *forward.args, **forward.kwargs))
            pairs = [dict(enumerate(t.detach() for t in ts)) for ts in (found, wanted)]
            assert_same(*pairs, SATURATED, construct)
        count += 1
    assert count >= 2


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_gradients_by_finite_differences(module_db, kind, fast):
    """First derivatives by the inputs, and the reference's second ones, as the database requires."""
    for number, sample in enumerate(samples(module_db[kind], kind, True, False)):
        construct, forward = sample.constructor_input, sample.forward_input
        placed = {"dtype": torch.float64, "device": "cpu"}
        args = [a for arg in forward.args for a in flatten(arg)]
        args = [a.detach().to(**placed).requires_grad_() for a in args]
        for backend in ["reference"] + ["auto"] * (DEVICE == "cpu"):
            ours = getattr(flashcell, kind)(
                *construct.args, **construct.kwargs, **placed, backend=backend
            )

            def call(x, *hx, ours=ours):
                hx = None if not hx else hx[0] if len(hx) == 1 else hx
                return tuple(flatten(ours(x, hx)))

            assert torch.autograd.gradcheck(call, args, fast_mode=fast)
            if backend == "reference" and number < 2:
                # As torch's own suite, along random directions.
                assert torch.autograd.gradgradcheck(call, args, fast_mode=True)


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_error_inputs(module_db, kind):
    from torch.testing._internal.common_modules import ModuleErrorEnum

    info = module_db[kind]
    make = partial(info.module_error_inputs_func, info, device=DEVICE, dtype=torch.float32)
    for error in make(requires_grad=False, training=True):
        construct = error.module_error_input.constructor_input
        build = partial(getattr(flashcell, kind), *construct.args, **construct.kwargs)
        if error.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(error.error_type, match=error.error_regex):
                build()
            continue
        forward, module = error.module_error_input.forward_input, build()
        with pytest.raises(error.error_type, match=error.error_regex):
            module(*forward.args, **forward.kwargs)


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_documentation_examples(kind):
    """Runs the examples of torch's docstring with torch's module and with ours."""
    lines = doctest.DocTestParser().get_examples(getattr(nn, kind).__doc__)
    assert lines
    found = []
    for library in (flashcell, nn):
        torch.manual_seed(0)
        names = {"torch": torch, "nn": types.SimpleNamespace(**{kind: getattr(library, kind)})}
        for line in lines:
            exec(line.source, names)
        assert isinstance(names["rnn"], getattr(library, kind))
        names = {k: v for k, v in names.items() if isinstance(v, torch.Tensor)}
        found.append({k: v.detach().double() for k, v in names.items()})
    assert_same(*found, 1e-6)  # fp32; observed: at most 1e-7


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_cells_are_torch(kind, backend):
    for shape in ((3,), (), (0,)):
        for states in (False, True):
            for bias in (False, True):
                theirs, ours = make_twins(kind, 5, 8, bias, dtype=EXACT, backend=backend)
                x = torch.randn(*shape, 5, dtype=EXACT, requires_grad=True)
                hx = torch.randn(2, *shape, 8, dtype=EXACT, requires_grad=True).unbind()
                args = (x, tuple(hx) if kind == "LSTMCell" else hx[0]) if states else (x,)
                assert_same(*(differentiate(m, args, {}) for m in (ours, theirs)), SAME)


@pytest.mark.parametrize("kind", CELLS)
def test_cells_without_units(kind):
    """torch.nn's cells, unlike its layers, may have none."""
    theirs, ours = getattr(nn, kind)(3, 0), getattr(flashcell, kind)(3, 0, backend=DEVICE)
    x, state = torch.randn(2, 3), torch.randn(2, 0)
    for hx in (None, (state, state) if kind == "LSTMCell" else state):
        found, wanted = flatten(ours(x, hx)), flatten(theirs(x, hx))
        assert [t.shape for t in found] == [t.shape for t in wanted] != []


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cells_as_accurate_as_torch(kind, dtype):
    theirs, ours = make_twins(kind, 24, 32, dtype=dtype)
    x, h, c = torch.randn(3, 16, 32, dtype=dtype).unbind()
    x, hx = x[:, :24], (h, c) if kind == "LSTMCell" else h
    got, peer = flatten(ours(x, hx)), flatten(theirs(x, hx))
    wide = tuple(s.double() for s in hx) if kind == "LSTMCell" else hx.double()
    for k, want in enumerate(flatten(theirs.double()(x.double(), wide))):
        assert got[k].dtype == dtype
        assert_as_accurate(f"{kind}[{k}]", got[k], want, peer[k], terms=32)


@pytest.mark.parametrize("kind", CELLS)
def test_cells_under_autocast(kind):
    ours = getattr(flashcell, kind)(5, 8)
    with torch.autocast(DEVICE, torch.bfloat16):
        outputs = flatten(ours(torch.randn(3, 5)))
    assert all(o.dtype == torch.bfloat16 for o in outputs)
    sum(o.float().sum() for o in outputs).backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


@pytest.mark.parametrize("kind", CELLS)
def test_cell_errors_are_torch_s(kind):
    twins = make_twins(kind, 4, 8)
    for x, h in [((3, 5), (3, 8)), ((3, 4), (3, 7)), ((3, 4), (2, 8)), ((3, 4), (8,)), ((4,), (1, 8)),
                 ((1, 3, 4), (3, 8)), ((3, 4), (1, 3, 8))]:  # fmt: skip
        hx = (torch.randn(h),) * 2 if kind == "LSTMCell" else torch.randn(h)
        raised = []
        for module in twins:
            with pytest.raises((RuntimeError, ValueError)) as error:
                module(torch.randn(x), hx)
            raised.append((error.type, str(error.value)))
        if raised[1][1].startswith("Expected 2D hidden0") and torch.__version__ < "2.15":
            # which looks at sizes only
            assert len(h) != len(x)
            assert raised[0][0] is raised[1][0] is RuntimeError
        else:
            assert raised[0] == raised[1]
    with pytest.raises(RuntimeError, match="input has dtype"):
        twins[1](torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.complex64, torch.float64], ids=str
)
def test_what_autocast_does_not_cast_is_refused(kind, dtype):
    """An int64 input would be read as bf16 values; torch's products refuse it."""
    twins, cell = make_twins(kind, 4, 8), kind in CELLS
    x, shape = torch.ones(3, 4) if cell else torch.ones(5, 3, 4), (3, 8) if cell else (1, 3, 8)
    packed = [] if cell else [nn.utils.rnn.pack_sequence([torch.ones(2, 4, dtype=dtype)])]
    for module in twins:
        with torch.autocast(DEVICE, torch.bfloat16):
            for given in (x.to(dtype), *packed):
                with pytest.raises(RuntimeError, match=r"dtype"):
                    module(given)
    if dtype == torch.float64:
        return  # a state may have another floating dtype than the input
    h = torch.ones(shape, dtype=dtype)
    for enabled in (False, True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            for module in twins:
                with pytest.raises(RuntimeError):
                    module(x, (h, h) if kind.startswith("LSTM") else h)


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
def test_flashcell_s_class_under_torch_s_name(kind, monkeypatch):
    """Somebody sets torch.nn.LSTM = flashcell.LSTM, as scripts/torch_tests does."""
    monkeypatch.setattr(nn, kind, getattr(flashcell, kind))
    module = getattr(nn, kind)(3, 4)
    shape = (2, 3) if kind in CELLS else (5, 2, 3)
    out = flatten(module(torch.randn(shape)))
    assert out[0].shape == (*shape[:-1], 4)
    with pytest.raises((RuntimeError, ValueError)):
        module(torch.randn(*shape[:-1], 7))
