"""Tests the choice of backend="auto" between torch.nn's forward and our kernels: when it is made, and
that it keeps what the modules promise."""

import itertools
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import flashcell
from cases import DEVICE
from flashcell.choice import backend_choice
from torch_twins import (
    CELLS,
    SAME,
    SEQUENCES,
    as_file,
    assert_same,
    compute,
    flatten,
    make_inputs,
    make_twins,
    table,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="test_rnn_cuda.py is about the GPU")


@pytest.fixture
def torch_runs(use_costs, monkeypatch):
    """Makes torch.nn's forward the choice; returns how often our kernels ran."""
    use_costs(as_file(table(1.0, 2.0)))
    runs = []
    for name in ("run_sequence", "run_cell"):
        own = getattr(flashcell.layers.rnn, name)
        count = lambda *args, own=own: (runs.append(1), own(*args))[1]
        monkeypatch.setattr(flashcell.layers.rnn, name, count)
    return runs


def cell_inputs(module, batch):
    lead = () if batch is None else (batch,)
    dtype = module.weight_ih.dtype
    x = torch.randn(*lead, module.input_size, dtype=dtype)
    states = tuple(torch.randn(*lead, module.hidden_size, dtype=dtype) for _ in range(2))
    return x, states if isinstance(module, nn.LSTMCell) else states[0]


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("shape", ["batched", "unbatched", "packed"])
def test_torch_gives_what_ours_gives(kind, shape, torch_runs):
    for options in ({}, {"batch_first": True}, {"num_layers": 2, "bidirectional": True}):
        for states in (False, True):
            chosen = make_twins(kind, 6, 8, dtype=torch.float32, **options)[1]
            ours = getattr(flashcell, kind)(6, 8, backend="cpu", **options)
            ours.load_state_dict(chosen.state_dict())
            x, hx = make_inputs(chosen, None if shape == "unbatched" else 4, states=states)
            lengths = [2, 5, 1, 5] if shape == "packed" else None
            got = compute(chosen, x, hx, lengths)
            assert not torch_runs
            assert_same(got, compute(ours, x, hx, lengths), 2e-5, options)
            torch_runs.clear()
            for output in flatten(chosen(x, hx)):
                assert output.is_contiguous() or chosen.batch_first
                assert output.dtype == torch.float32


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_cells(kind, batch, torch_runs):
    theirs, ours = make_twins(kind, 6, 8)
    x, hx = cell_inputs(ours, batch)
    for given in (None, hx):
        assert_same(compute(ours, x, given), compute(theirs, x, given), SAME, batch)
    assert not torch_runs


@pytest.mark.parametrize("kind", SEQUENCES + CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_share_no_memory(kind, dtype, torch_runs):
    """Clipping a gradient in place would otherwise clip another one, too."""
    for batch, T in ((1, 1), (1, 3), (4, 1), (4, 3)):
        module = getattr(flashcell, kind)(8, 8, dtype=dtype)
        x = torch.randn(*((batch, 8) if kind in CELLS else (T, batch, 8)), dtype=dtype)
        sum(o.float().sum() for o in flatten(module(x))).backward()
        spans = sorted((p.grad.data_ptr(), p.grad.nbytes) for p in module.parameters())
        for (start, size), (after, _) in itertools.pairwise(spans):
            assert start + size <= after, (kind, dtype, batch, T)
    assert not torch_runs


def test_states_can_be_detached_in_place(torch_runs):
    for kind in SEQUENCES:
        module = getattr(flashcell, kind)(4, 4, num_layers=2)
        output, last = module(torch.randn(2, 3, 4))
        for state in flatten(last):
            state.detach_()
        output.detach_()
    assert not torch_runs


def test_hooks_copies_and_pickles(torch_runs):
    import copy
    import pickle

    module, seen = flashcell.LSTM(4, 4), []
    module.register_forward_hook(lambda m, i, o: seen.append(o))
    x = torch.randn(3, 2, 4)
    want = module(x)[0]
    assert len(seen) == 1
    module._forward_hooks.clear()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x)[0], want)
    model = nn.Sequential(nn.LSTM(4, 4))
    model[0].load_state_dict(module.state_dict())
    flashcell.replace(model)
    assert torch.equal(model(x)[0], want)
    assert not torch_runs


def obstacles():
    plain = flashcell.LSTM(4, 4)
    cell = flashcell.LSTMCell(4, 4)
    x = torch.randn(3, 2, 4)

    def autocast():
        with torch.autocast("cpu", torch.bfloat16):
            assert plain(x)[0].dtype == torch.bfloat16
            assert "autocast" in flashcell.explain(plain, x)

    def transformed():
        torch.func.grad(lambda x: plain(x)[0].sum())(x)

    def vmapped():
        torch.func.vmap(lambda x: plain(x)[0])(torch.randn(2, 3, 2, 4))

    def forward_mode():
        with torch.autograd.forward_ad.dual_level(), torch.no_grad():
            plain(x)

    def functional_call():
        weights = {k: v.detach() + 1 for k, v in plain.state_dict().items()}
        torch.func.functional_call(plain, weights, (x,))

    def parametrized():
        module = nn.utils.parametrizations.weight_norm(flashcell.LSTM(4, 4), "weight_ih_l0")
        module(x)

    def states_of_another_dtype():
        plain(x, (torch.zeros(1, 2, 4).half(), torch.zeros(1, 2, 4).half()))

    def subclass():
        class Marked(torch.Tensor):
            pass

        plain(x.as_subclass(Marked))

    def traced():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(plain, (x,), check_trace=False)

    def exported():
        torch.export.export(plain, (x,))

    def named():
        flashcell.LSTM(4, 4, backend="cpu")(x)

    def autocast_cell():
        with torch.autocast("cpu", torch.bfloat16):
            cell(x[0])

    return [value for value in locals().values() if callable(value) and value not in (plain, cell)]


@pytest.mark.parametrize("call", obstacles(), ids=lambda f: f.__name__)
def test_our_kernels_stay(call, torch_runs):
    call()
    assert torch_runs


def test_errors_are_those_of_torch(torch_runs):
    ours, theirs = flashcell.LSTM(4, 4), nn.LSTM(4, 4)
    for x, hx in (
        (torch.randn(3, 2, 5), None),
        (torch.randn(0, 2, 4), None),
        (torch.randn(2), None),
        (torch.randn(3, 2, 4), (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))),
    ):
        texts = []
        for module in (ours, theirs):
            with pytest.raises((RuntimeError, ValueError)) as error:
                module(x, hx)
            texts.append(str(error.value))
        assert texts[0] == texts[1]


def test_the_choice_follows_the_table(use_costs):
    module, x = flashcell.LSTM(4, 4), torch.randn(3, 2, 4)
    for torch_us, kernel_us, margin, want in (
        (10, 20, 1.0, "torch"),
        (20, 10, 1.0, "kernel"),
        (20, 10, 2.5, "torch"),
        (10, 20, 0.4, "kernel"),
    ):
        use_costs(as_file(table(torch_us, kernel_us, margin=margin)))
        text = flashcell.explain(module, x)
        assert text.startswith(f"{want}: ")
        assert f"{torch_us} us" in text
        assert f"{kernel_us} us" in text
        assert (backend_choice.choose(module, 0, x, None) is None) == (want == "torch")
    use_costs(as_file(table(10, 20)))
    assert flashcell.explain(flashcell.LSTM(4, 4, backend="cpu"), x).startswith("kernel: backend=")
    double = flashcell.LSTM(4, 4, dtype=torch.float64)
    assert "no table" in flashcell.explain(double, x.double())
    with pytest.raises(TypeError, match="module is a Linear, but must be"):
        flashcell.explain(nn.Linear(4, 4), x)


def test_a_decision_is_made_once(use_costs, monkeypatch):
    use_costs(as_file(table(10, 20)))
    asked = []
    own = backend_choice._predict
    monkeypatch.setattr(backend_choice, "_predict", lambda key: (asked.append(key), own(key))[1])
    module = flashcell.GRU(4, 4)
    for _ in range(3):
        module(torch.randn(3, 2, 4))
    assert len(asked) == 1
    with torch.no_grad():
        module(torch.randn(3, 2, 4))  # inference is another call
    assert len(asked) == 2
    monkeypatch.setattr(backend_choice, "MOST_CALLS", 5)
    for steps in range(1, 40):
        module(torch.randn(steps, 2, 4))
        assert len(backend_choice._decided) <= 5


def test_a_decision_for_the_cpu_is_none_for_meta():
    module, x = flashcell.LSTM(4, 4), torch.randn(3, 2, 4)
    assert backend_choice.choose(module, 0, x, None) is not None
    module, x = module.to("meta"), x.to("meta")
    assert backend_choice.choose(module, 0, x, None) is None
    y, _ = module(x)
    assert y.is_meta
    assert y.shape == (3, 2, 4)


def test_threads_agree(use_costs):
    use_costs(as_file(table(10, 20)))
    found, module = [], flashcell.LSTM(4, 4)
    start = threading.Barrier(8)

    def decide(number):
        start.wait()
        for steps in range(1, 200):
            x = torch.empty(steps, 2, 4)
            found.append(backend_choice.choose(module, 0, x, None) is None)

    threads = [threading.Thread(target=decide, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 * 199
    assert all(found)


def test_packed_and_plain_differ(use_costs):
    entry = table(10, 20)
    entry["kernel"]["packed inference fp32"] = {"call": 5.0}
    use_costs(as_file(entry))
    module, x = flashcell.LSTM(4, 4), torch.randn(5, 3, 4)
    packed = pack_padded_sequence(x, [5, 3, 1])
    with torch.no_grad():
        assert flashcell.explain(module, x).startswith("torch")
        assert flashcell.explain(module, packed).startswith("kernel")
        assert isinstance(module(packed)[0], PackedSequence)


def test_the_weights_are_flat_where_torch_would_have_them(monkeypatch):
    """torch.nn's own flatten_parameters runs, so that cuDNN does not copy the weights in each call."""
    called = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: called.append(self))
    module = flashcell.LSTM(4, 4)
    called.clear()
    module.flatten_parameters()
    assert called == [module]


def test_explain_says_which_module_it_takes():
    with pytest.raises(TypeError, match=r"must be flashcell's LSTM.*flashcell\.replace turns"):
        flashcell.explain(nn.LSTM(3, 4), torch.randn(2, 3, 3))
