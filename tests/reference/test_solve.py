"""Tests solve: any cell parallel in time equals the loop, in values and gradients, and reports what
it did."""

import pytest
import torch
from torch import nn

from flashcell.kernels import diagonal_rnn as kernel
from numerics import assert_bitwise, assert_close

B, T, D = 2, 37, 4
REGISTERED = "rotation"


def diagonal(h, x, w):  # S = [D]
    z = torch.sigmoid(w[0] * h + x[:, 0])
    return z * h + (1 - z) * torch.tanh(w[1] * h + x[:, 1])


def block(
    h, x, w
):  # S = [D, 2]: an LSTM without its output gate; h and c of a channel depend on each other
    f = torch.sigmoid(w[0] * h[..., 0] + x[:, 0])
    c = f * h[..., 1] + (1 - f) * torch.tanh(w[1] * h[..., 0] + x[:, 1])
    return torch.stack([torch.tanh(c), c], -1)


def dense(h, x, w):  # S = [2, D]: every number depends on all others
    mixed = 0.5 * h.flatten(1) @ torch.linspace(-1, 1, 4 * D * D).to(h).view(2 * D, 2 * D).sin()
    return torch.tanh(mixed.view_as(h) + w * x)


def rotation(h, x, w):  # S = [D, 2]: every channel is a damped rotation, J = [[a, -b], [b, a]]
    angle, decay = x[:, 0], torch.sigmoid(w[0] + x[:, 1])
    turned = torch.view_as_complex(h.contiguous()) * torch.polar(decay, angle)
    return torch.view_as_real(turned) + torch.tanh(x[:, 1] * w[1])[..., None]


SHAPES = {diagonal: (D,), block: (D, 2), dense: (2, D), rotation: (D, 2)}
CELLS = pytest.mark.parametrize("cell", SHAPES, ids=lambda cell: cell.__name__)


def problem(cell, dtype=torch.float64, length=T, batch=B):
    draw = lambda *shape: torch.randn(*shape, dtype=dtype).requires_grad_()
    return draw(batch, length, 2, D), draw(batch, *SHAPES[cell]), draw(2, D)


def run(cell, x, h0, w, **options):
    return kernel.solve(cell, x, h0, (w,), return_info=True, **options)


@CELLS
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("length", [1, 2, T])
def test_equals_the_loop(cell, chunk, length):
    """Values and every gradient, with incoming and outgoing states."""
    given = problem(cell, length=length)
    h, last, info = run(cell, *given, chunk=chunk)
    want, end, plain = run(cell, *given, mode="sequential")
    assert info.structure == ("block" if cell is rotation else cell.__name__)
    assert (info.mode, plain.mode) == ("torch", "sequential")
    assert info.converged
    assert info.finished == 0
    assert len(info.residuals) == info.iterations
    assert info.residual == info.residuals[-1]
    assert_close("h", h, want, 1e-15)
    assert torch.equal(last, h[:, -1])
    dh, dlast = torch.randn_like(h), torch.randn_like(last)
    got = torch.autograd.grad([h, last], given, [dh, dlast], retain_graph=True)
    again = torch.autograd.grad([h, last], given, [dh, dlast])
    expected = torch.autograd.grad([want, end], given, [dh, dlast])
    for name, g, a, e in zip(("x", "h0", "w"), got, again, expected, strict=True):
        assert_close(f"d {name}", g, e, 4e-15)
        assert_bitwise(f"d {name} a second time", a, g)


@CELLS
def test_gradcheck(cell):
    x, h0, w = problem(cell, length=3, batch=1)
    assert torch.autograd.gradcheck(lambda *given: run(cell, *given)[:2], (x, h0, w))


def test_no_second_derivatives_but_of_the_loop():
    x, h0, w = problem(diagonal, length=3)
    (dx,) = torch.autograd.grad(run(diagonal, x, h0, w)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives only with mode='sequential'"):
        dx.sum().backward()
    loop = lambda x: run(diagonal, x, h0, w, mode="sequential")[0]
    assert torch.autograd.gradgradcheck(loop, (x,))


def test_a_module_is_a_cell():
    """Parameters that the cell closes over get their gradients."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.GRUCell(3, 6, dtype=torch.float64)

        def forward(self, h, x):
            return self.inner(x, h)

    rnn = kernel.ParallelRNN(Cell(), (6,), structure="dense")
    x = torch.randn(2, 30, 3, dtype=torch.float64)
    h, last = rnn(x)
    want, _ = nn.GRU(3, 6, batch_first=True, dtype=torch.float64), None
    names = dict(rnn.cell.inner.named_parameters())
    want.load_state_dict({f"{name}_l0": p.detach() for name, p in names.items()})
    expected, _ = want(x)
    assert_close("h", h, expected, 1e-15)
    h.square().sum().backward()
    expected.square().sum().backward()
    for name, p in names.items():
        assert_close(f"d {name}", p.grad, want.get_parameter(f"{name}_l0").grad, 3e-15)
    assert "structure='dense'" in repr(rnn)
    assert rnn(x, last.detach(), return_info=True)[2].structure == "dense"


def test_structure_by_name():
    """A wider structure than needed is accepted, one that does not hold is refused."""
    given = problem(diagonal)
    for structure in ("diagonal", "dense"):
        h, _, info = run(diagonal, *given, structure=structure)
        assert info.structure == structure
        assert_close(structure, h, run(diagonal, *given, mode="sequential")[0], 1e-15)
    for cell, structure in ((dense, "diagonal"), (dense, "block"), (block, "diagonal")):
        with pytest.raises(
            ValueError, match=f"structure is '{structure}', but the cell's Jacobian"
        ):
            run(cell, *problem(cell), structure=structure)


def test_one_weak_coupling_is_found():
    """1e-6 from one channel to its neighbour: ignoring it would make the gradient wrong by that."""

    def coupled(h, x, w):
        return diagonal(h, x, w) + 1e-6 * h.roll(1, -1)

    SHAPES[coupled] = (D,)
    given = problem(coupled)
    del SHAPES[coupled]
    assert run(coupled, *given)[2].structure == "block"  # [4, 4] is one block


def test_jacobian_fn():
    def jacobian(h, x, w):
        z, c = torch.sigmoid(w[0] * h + x[:, 0]), torch.tanh(w[1] * h + x[:, 1])
        return z + (h - c) * z * (1 - z) * w[0] + (1 - z) * (1 - c * c) * w[1]

    given = problem(diagonal)
    h, _, info = run(diagonal, *given, structure="diagonal", jacobian_fn=jacobian)
    assert info.converged
    assert_close("h", h, run(diagonal, *given, mode="sequential")[0], 1e-15)
    with pytest.raises(ValueError, match="but the cell's Jacobian is not"):
        run(diagonal, *given, structure="diagonal", jacobian_fn=lambda *at: 2 * jacobian(*at))
    with pytest.raises(ValueError, match=r"jacobian_fn\(...\) has shape"):
        run(diagonal, *given, structure="dense", jacobian_fn=jacobian)
    with pytest.raises(ValueError, match="must be named"):
        run(diagonal, *given, jacobian_fn=jacobian)


@pytest.fixture
def complex_structure():
    """Represents [[a, -b], [b, a]] as a + ib: two numbers for each channel instead of four."""

    def read(pull, h):  # the first row of a block is (a, -b)
        first = torch.zeros_like(h)
        first[..., 0] = 1
        return torch.view_as_complex(pull(first).contiguous()).conj().resolve_conj()

    def apply(a, v):
        return torch.view_as_real(a * torch.view_as_complex(v.contiguous()))

    transpose = lambda a: a.conj().resolve_conj()
    kernel.register_structure(kernel.Structure(REGISTERED, read, apply, torch.mul, transpose))
    yield
    kernel.structures.STRUCTURES.pop(REGISTERED)


def test_a_structure_of_one_s_own(complex_structure):
    given = problem(rotation)
    h, _, info = run(rotation, *given, structure=REGISTERED)
    want, _, _ = run(rotation, *given, mode="sequential")
    assert (info.structure, info.iterations) == (
        REGISTERED,
        2,
    )  # linear in h: one iteration to solve, one to see it
    assert_close("h", h, want, 1e-15)
    got, expected = (torch.autograd.grad(v.square().sum(), given) for v in (h, want))
    for g, e in zip(got, expected, strict=True):
        assert_close("gradient", g, e, 1e-15)
    with pytest.raises(ValueError, match="that name is taken"):
        kernel.register_structure(kernel.structures.STRUCTURES[REGISTERED])
    with pytest.raises(ValueError, match="but the cell's Jacobian is not"):
        run(block, *problem(block), structure=REGISTERED)


def flip(h, x):
    """Computes parity: a 1 flips the sign of h, a 0 keeps h. h = 0, where Newton begins, is
    unstable."""
    return torch.where(x > 0, torch.tanh(-5 * h), h)


@pytest.mark.parametrize("chunk", [1, 16])
def test_what_does_not_converge_is_finished(chunk):
    bits = (torch.rand(3, 200, 1) < 0.5).float()
    h0 = torch.ones(3, 1)
    h, _, info = kernel.solve(flip, bits, h0, chunk=chunk, max_iters=4, return_info=True)
    assert not info.converged
    assert info.iterations == 4
    assert info.residual > 1e-3
    assert 0 < info.finished < 200
    loop, _ = kernel.solve(flip, bits, h0, mode="sequential")
    assert (h - loop).abs().max() < 1e-6
    assert torch.equal(h[..., 0] > 0, bits[..., 0].cumsum(1) % 2 == 0)


def test_no_iterations_is_the_loop():
    given = problem(diagonal)
    h, _, info = run(diagonal, *given, max_iters=0)
    assert (info.iterations, info.converged, info.finished) == (0, False, T)
    assert_close("h", h, run(diagonal, *given, mode="sequential")[0], 1e-15)


def test_an_iteration_that_overflows():
    """Newton's iterates grow until h^2 overflows fp32, while the true states stay below one."""
    cell = lambda h, x: 0.5 * (1 - 1.8 * h * h) + x
    x = 0.1 * torch.randn(2, 300, 3)
    for options in ({}, {"bounds": (-1.0, 1.0)}, {"guess": torch.full((2, 300, 3), 1e30)}):
        h, _ = kernel.solve(cell, x, state_shape=(3,), **options)
        want, _ = kernel.solve(cell, x.double(), state_shape=(3,), mode="sequential")
        loop, _ = kernel.solve(cell, x, state_shape=(3,), mode="sequential")
        assert (h - want).abs().max() <= 2e-6 + 2 * (loop - want).abs().max()


def test_nan_stays_where_it_belongs():
    x, h0, w = (t.detach() for t in problem(diagonal, torch.float32))
    x[1, 20:, 0, 2] = float("nan")
    h, _, info = run(diagonal, x, h0, w)
    assert info.structure == "diagonal"
    loop, _, _ = run(diagonal, x, h0, w, mode="sequential")
    assert torch.equal(h.isnan(), loop.isnan())
    assert (h - loop).nan_to_num(0).abs().max() < 1e-6
    assert not info.converged


def test_a_good_guess_needs_one_iteration():
    given = problem(diagonal)
    h, _, _ = run(diagonal, *given)
    for chunk in (1, 6):
        assert run(diagonal, *given, guess=h, chunk=chunk)[2].iterations == 1


def test_inputs_of_several_tensors():
    """Token ids beside numbers; x's dtype is that of the first floating tensor."""
    table = torch.randn(7, D, requires_grad=True)
    ids, x = torch.randint(0, 7, (B, T)), torch.randn(B, T, D, dtype=torch.bfloat16)

    def cell(h, given, table):
        ids, x = given
        return torch.tanh(0.5 * h + table[ids] + x)

    h, last = kernel.solve(cell, (ids, x), params=(table,), state_shape=(D,))
    _, end = kernel.solve(cell, (ids, x), params=(table,), state_shape=(D,), mode="sequential")
    assert (h.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert (last - end).abs().max() < 1e-6
    got, expected = (torch.autograd.grad(v.sum(), table)[0] for v in (last, end))
    assert_close("d table", got, expected, 3e-7)


def test_autocast_stays_outside():
    weight = torch.randn(D, D)
    cell = lambda h, x: torch.tanh(0.3 * h @ weight + x)
    x = torch.randn(B, T, D)
    want, _ = kernel.solve(cell, x, state_shape=(D,))
    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise("h", kernel.solve(cell, x, state_shape=(D,))[0], want)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_to_do(batch, length):
    x, h0, w = problem(diagonal, length=length, batch=batch)
    h, last = kernel.solve(diagonal, x, h0, (w,))
    assert h.shape == (batch, length, D)
    assert torch.equal(last, h0)
