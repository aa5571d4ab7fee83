"""Tests tfla's reference: the equations written out again, the three forms, and gradcheck."""

import itertools
import math

import pytest
import torch

from flashcell.kernels import tfla
from flashcell.kernels.tfla import reference
from mlstm_cases import CELLS, Case, leaves, make, names, unscaled
from numerics import assert_close

EXACT = 1e-14  # float64, sums of a few hundred terms; observed 2e-15
MASKS = [
    (),
    ("state", "reset", "hold"),
    ("state", "lengths", "reset"),
    ("state", "cu", "reset"),
]
short = lambda o: "-".join(o) or "plain"


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def options_of(cell, call):
    eps, exact = call.get("eps", 0.0), call.get("normalizer_grad", True)
    return reference.Options(tfla.CELLS[cell], eps, exact)


def form(which, cell, call, size=None):
    """Runs one form of the reference on a call without lengths and cu_seqlens."""
    given = [call[k] for k in ("q", "k", "v", "i", "f")] + [call.get("reset"), call.get("hold")]
    options = options_of(cell, call)
    C, *others = call.get("state") or reference.empty_state(options.cell, call["k"], call["v"])[:1]
    if "state" in call:
        n = others[0] if options.cell.normalized else None
        state = reference.State(C, n, others[-1] if options.cell.exponential else None)
    else:
        state = reference.empty_state(options.cell, call["k"], call["v"])
    rest = () if size is None else (size,)
    h, last = getattr(reference, which)(*given, state, options, *rest)
    return h, unscaled(tuple(s for s in last if s is not None))


@pytest.mark.parametrize("bias", [-3.0, 0.0, 3.0])
def test_equations(cell, bias):
    """One head, in plain Python and without the stabiliser: h = C q / max(|n q|, 1)."""
    call = make(cell, Case(2, 9, 1, 8, 8, i=bias), torch.float64)
    h, last = tfla.mlstm(**call)
    last = unscaled(last)
    q, k, v, i, f = (call[x].tolist() for x in ("q", "k", "v", "i", "f"))
    sigmoid = lambda x: 1 / (1 + math.exp(-x))
    for b in range(2):
        C, n = [[0.0] * 8 for _ in range(8)], [0.0] * 8
        for t in range(9):
            add = math.exp(i[b][t][0]) if cell == "exp" else sigmoid(i[b][t][0])
            keep = sigmoid(f[b][t][0])
            key, value, query = k[b][t][0], v[b][t][0], q[b][t][0]
            n = [keep * n[x] + add * key[x] for x in range(8)]
            C = [[keep * C[x][y] + add * key[x] * value[y] for y in range(8)] for x in range(8)]
            s = 8**-0.5
            size = max(abs(s * math.fsum(n[x] * query[x] for x in range(8))), 1.0)
            for y in range(8):
                want = s * math.fsum(C[x][y] * query[x] for x in range(8))
                want /= 1.0 if cell == "sigmoid" else size
                assert abs(h[b, t, 0, y].item() - want) < 1e-12
        assert_close("C", last[0][b, 0], torch.tensor(C, dtype=torch.float64), 5e-15)
        if cell != "sigmoid":
            assert_close("n", last[1][b, 0], torch.tensor(n, dtype=torch.float64), 6e-15)


@pytest.mark.parametrize("options", [(), ("state",), ("state", "reset", "hold", "eps")], ids=short)
@pytest.mark.parametrize("i", [-10.0, 0.0, 10.0])
def test_three_forms_agree(cell, options, i):
    call = make(cell, Case(2, 50, 2, 16, 24, options, i=i), torch.float64)
    want = form("recurrent", cell, call)
    for size in (1, 16, 50):  # the last one is the parallel form
        h, last = form("chunkwise", cell, call, size)
        assert_close(f"h {size}", h, want[0], 1e-12)
        for s, (got, exact) in enumerate(zip(last, want[1], strict=True)):
            assert_close(f"state[{s}] {size}", got, exact, EXACT)


@pytest.mark.parametrize("f", [-1e4, -100.0, 40.0])
def test_large_gates_cancel_exactly(cell, f):
    """A forget gate that shuts, or rounds to 1, in fp32: no worse than at ordinary values."""
    call = make(cell, Case(1, 80, 1, 16, 16, (), 64), torch.float32)
    call["f"] = torch.where(torch.rand(1, 80, 1) < 0.3, f, call["f"])
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    h, _ = tfla.mlstm(**call)
    assert_close("h", h.double(), form("recurrent", cell, wide)[0], 1e-6)


@pytest.mark.parametrize("options", [*MASKS, ("state", "layer"), ("rms",)], ids=short)
def test_gradcheck(cell, options):
    """Every gradient agrees with finite differences; those of the last state without its scale m."""
    call, named = leaves(make(cell, Case(2, 4, 1, 8, 8, options, chunk=3, f=1.0), torch.float64))

    def outputs(*_):
        h, last = tfla.mlstm(**call)
        return (h, *unscaled(last))

    assert torch.autograd.gradcheck(outputs, tuple(named.values()), fast_mode=True)


def test_published_gradient_leaves_the_divisor_out(cell):
    """With normalizer_grad=False the divisor is a constant; before a norm that makes no difference."""
    case = Case(1, 12, 1, 8, 8, ("published",), i=2.0)

    def gradients(exact, norm, eps=0.0):
        call, named = leaves({**make(cell, case, torch.float64), "normalizer_grad": exact})
        h, _ = tfla.mlstm(**call, norm=norm, norm_eps=eps)
        g = torch.randn(h.shape, generator=torch.Generator().manual_seed(0), dtype=h.dtype)
        return dict(zip(named, torch.autograd.grad(h, list(named.values()), g), strict=True))

    exact, published = gradients(True, None), gradients(False, None)
    for name in exact:
        same = torch.allclose(exact[name], published[name], rtol=1e-3)
        assert same == (cell == "sigmoid" or name == "v"), name
    exact, published = gradients(True, "rms"), gradients(False, "rms")
    for name in exact:
        # At norm_eps = 0 the norm does not see a scale of h; the gradient through it is 0.
        assert_close(name, published[name], exact[name], 5e-15)


def test_documents_equal_separate_sequences(cell):
    """cu_seqlens and reset, with and without a state, against one call for each document."""
    call = make(cell, Case(4, 11, 2, 8, 16, ("state", "cu")), torch.float64)
    offsets = call.pop("cu_seqlens").tolist()
    h, last = tfla.mlstm(**call, cu_seqlens=torch.tensor(offsets))
    sequence = ("q", "k", "v", "i", "f")
    cleared = torch.zeros(1, offsets[-1], dtype=torch.bool)
    cleared[0, [a for a in offsets if a < offsets[-1]]] = True
    fresh = {**call, "state": None}
    packed, _ = tfla.mlstm(**fresh, reset=cleared)
    for s, (a, b) in enumerate(itertools.pairwise(offsets)):
        part = {k: call[k][:, a:b] for k in sequence}
        state = tuple(x[s : s + 1] for x in call["state"])
        alone, end = tfla.mlstm(**{**call, **part, "state": state})
        assert_close(f"h {s}", h[:, a:b], alone, EXACT)
        for got, want in zip(last, end, strict=True):
            assert_close(f"state {s}", got[s : s + 1], want, EXACT)
        empty, _ = tfla.mlstm(**{**fresh, **part})
        assert_close(f"reset {s}", packed[:, a:b], empty, EXACT)


def test_every_reset_position(cell):
    """After a reset nothing from before remains, whatever the chunks."""
    call = make(cell, Case(1, 20, 1, 8, 8, ("state",), 8), torch.float64)
    for t in range(20):
        reset = torch.zeros(1, 20, dtype=torch.bool)
        reset[0, t] = True
        h, last = tfla.mlstm(**call, reset=reset)
        part = {k: call[k][:, t:] for k in ("q", "k", "v", "i", "f")}
        want, end = tfla.mlstm(**{**call, **part, "state": None})
        assert_close("h", h[:, t:], want, EXACT)
        for got, exact in zip(unscaled(last), unscaled(end), strict=True):
            assert_close("state", got, exact, EXACT)


def test_forget_gradient_through_the_last_state(cell):
    """A loss on the last state alone still trains the forget gates (truncated BPTT)."""
    call, named = leaves(make(cell, Case(1, 9, 1, 8, 8, ("state",), 4, f=1.0), torch.float64))
    _, last = tfla.mlstm(**call)
    C = unscaled(last)[0]
    (df,) = torch.autograd.grad(C.sum(), named["f"])
    for t in range(9):
        step = torch.zeros_like(df)
        step[0, t, 0] = 1e-6
        up, down = (
            unscaled(tfla.mlstm(**{**call, "f": call["f"] + s * step})[1])[0].sum() for s in (1, -1)
        )
        assert abs(float((up - down) / 2e-6 - df[0, t, 0])) < 1e-6 * max(1.0, float(df.abs().max()))


@pytest.mark.parametrize("options", [(), ("reset", "hold")], ids=short)
def test_context_parallel_shards_compose_exactly(cell, options):
    """One sequence in three shards: outputs, last state and all gradients equal the whole call's."""
    call, named = leaves(make(cell, Case(2, 30, 2, 8, 16, ("state", *options)), torch.float64))
    gate = names(cell)

    def shards():
        cuts, state, outputs = [(0, 7), (7, 7), (7, 18), (18, 30)], call["state"], []
        transfers = []
        for a, b in cuts:
            part = {k: v[:, a:b] for k, v in call.items() if k in ("q", "k", "v", "i", "f")}
            masks = {k: call[k][:, a:b] for k in options}
            h, _ = tfla.mlstm(**part, **masks, state=state, **gate)
            del part["q"]
            transfers.append(tfla.mlstm_transfer(**part, **masks, **gate, chunk_size=5))
            state = tfla.mlstm_carry(state, transfers[-1])
            outputs.append(h)
        left = tfla.mlstm_compose(*transfers[:2])
        both = tfla.mlstm_compose(left, tfla.mlstm_compose(*transfers[2:]))
        return torch.cat(outputs, 1), state, tfla.mlstm_carry(call["state"], both)

    h, last = tfla.mlstm(**call)
    got_h, got_last, composed = shards()
    upstream = [torch.randn_like(x) for x in (h, *unscaled(last))]
    want = torch.autograd.grad((h, *unscaled(last)), list(named.values()), upstream)
    assert_close("h", got_h, h, EXACT)
    for state in (composed, got_last):
        got_h, _, _ = shards()
        for got, exact in zip(unscaled(state), unscaled(last), strict=True):
            assert_close("last", got, exact, EXACT)
        outputs = (got_h, *unscaled(state))
        grads = torch.autograd.grad(outputs, list(named.values()), upstream, retain_graph=True)
        for name, got, exact in zip(named, grads, want, strict=True):
            assert_close(f"d{name}", got, exact, 2e-14)


def test_step_is_one_step(cell):
    call = make(cell, Case(3, 5, 2, 8, 16, ("state", "layer")), torch.float64)
    h, last = tfla.mlstm(**call)
    call.pop("chunk_size")
    state = call.pop("state")
    inplace = tuple(s.clone() for s in state)
    for t in range(5):
        step = {
            k: v[:, t] if k in ("q", "k", "v", "i", "f", "out_gate") else v for k, v in call.items()
        }
        one, state = tfla.mlstm_step(**step, state=state)
        same, returned = tfla.mlstm_step(**step, state=inplace, inplace=True)
        assert all(a is b for a, b in zip(returned, inplace, strict=True))
        assert_close(f"h {t}", one, h[:, t], EXACT)
        assert torch.equal(one, same)
    for s, (got, want) in enumerate(zip(state, last, strict=True)):
        assert_close(f"state[{s}]", got, want, EXACT)
        assert torch.equal(inplace[s], got)
