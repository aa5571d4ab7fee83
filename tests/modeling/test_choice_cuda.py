"""Tests the choice of backend="auto" on a GPU, where torch.nn's forward is cuDNN's."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import flashcell
from cases import DEVICE
from flashcell.choice import backend_choice
from torch_twins import SEQUENCES, as_file, flatten

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs FLASHCELL_TEST_DEVICE=cuda")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENGINES = ("block", "cluster", "grid", "step", "gemm", "fma", "batch", "wide")
CALLS = "", "packed ", "projected "
GROUPS = {
    "torch": [f"{call}{g}" for call in CALLS for g in ("cudnn", "cudnn-small")],
    "kernel": [f"{call}{engine}" for call in CALLS for engine in ENGINES],
}


@pytest.fixture(autouse=True)
def torch_is_predicted(use_costs):
    forms = [
        f"{f} {p}" for f in ("inference", "training") for p in ("fp32", "tf32", "fp16", "bf16")
    ]
    sides = {
        name: {f"{group} {form}": {"call": us} for group in GROUPS[name] for form in forms}
        for name, us in (("torch", 1.0), ("kernel", 2.0))
    }
    about = {"device": "cuda", "name": "GPU", "capability": 90, "units": 132, "source": "a test"}
    use_costs(as_file({**about, "margin": 1.0, **sides}))
    with_capability = backend_choice.describe(0)._replace(capability=90)
    backend_choice._devices[0] = with_capability
    yield
    backend_choice._devices.clear()


@pytest.fixture
def ours(monkeypatch):
    """Counts the runs of our kernels."""
    runs, own = [], flashcell.layers.rnn.run_sequence
    count = lambda *args: (runs.append(1), own(*args))[1]
    monkeypatch.setattr(flashcell.layers.rnn, "run_sequence", count)
    return runs


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_torch_gives_what_ours_gives(kind, dtype, packed, ours):
    for options in ({}, {"batch_first": True}, {"num_layers": 2, "bidirectional": True}):
        chosen = getattr(flashcell, kind)(24, 32, dtype=dtype, **options)
        other = getattr(flashcell, kind)(24, 32, dtype=dtype, backend="cuda", **options)
        other.load_state_dict(chosen.state_dict())
        x = torch.randn(5, 4, 24, dtype=dtype)
        results = []
        for module in (chosen, other):
            given = x.clone().requires_grad_()
            lengths = [4, 3, 2, 1, 1][: x.shape[0 if module.batch_first else 1]]
            call = pack_padded_sequence(given, lengths, module.batch_first) if packed else given
            outputs = flatten(module(call))
            for output in outputs:
                assert output.is_contiguous() or module.batch_first
                assert output.dtype == dtype
            sum(o.float().square().sum() for o in outputs).backward()
            results.append([*outputs, given.grad, *(p.grad for p in module.parameters())])
            spans = sorted((p.grad.data_ptr(), p.grad.nbytes) for p in module.parameters())
            for (start, size), (after, _) in itertools.pairwise(spans):
                assert start + size <= after
        assert len(ours) == 1  # of `other`
        ours.clear()
        bound = {torch.float32: 2e-2, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
        for got, want in zip(*results, strict=True):
            error = (got - want).float().norm() / want.float().norm().clamp_min(1e-6)
            assert error < bound, (kind, dtype, options, float(error))


def test_what_keeps_our_kernels(ours):
    module, x = flashcell.LSTM(32, 32), torch.randn(5, 4, 32)
    module(x)
    assert not ours
    assert flashcell.explain(module, x).startswith("torch: ")
    with torch.autocast("cuda", torch.bfloat16):
        module(x)
    assert len(ours) == 1
    torch.use_deterministic_algorithms(True)
    try:
        module(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(ours) == 2
    with torch.no_grad():
        module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = module(x)[0]
    assert len(ours) == 3
    graph.replay()
    torch.cuda.synchronize()
    assert output.isfinite().all()
    module.weight_hh_l0 = nn.Parameter(module.weight_hh_l0.clone())  # as replaced by an optimizer
    module(x)
    assert len(ours) == 3  # the first and the last weight are still in one storage
    module.weight_ih_l0 = nn.Parameter(module.weight_ih_l0.clone())
    assert "cuDNN would copy the weights" in flashcell.explain(module, x)
    module(x)  # which moves the weights into one storage again
    assert len(ours) == 4
    module.flatten_parameters()
    module(x)
    assert len(ours) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_stay_flat(dtype, ours):
    """Without a warning that cuDNN copies them."""
    x = torch.randn(5, 4, 32, dtype=dtype)
    moved = flashcell.LSTM(32, 32, 2, device="cpu").to("cuda", dtype)
    loaded = flashcell.LSTM(32, 32, 2, dtype=dtype)
    loaded.load_state_dict(moved.state_dict())
    replaced = nn.Sequential(nn.LSTM(32, 32, 2).to(dtype))
    flashcell.replace(replaced)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (moved, loaded, replaced[0]):
            module(x)
    assert not ours
    copies = copy.deepcopy(moved), pickle.loads(pickle.dumps(moved))
    for module in copies:
        assert torch.equal(module(x)[0], moved(x)[0]) or ours
    moved.weight_hh_l1.data.mul_(2)  # the parameters are still what runs
    assert not torch.equal(moved(x)[0], copies[0](x)[0])
