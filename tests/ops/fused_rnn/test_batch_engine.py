"""Tests what only the batch engine has: many kinds of tiles, and outputs in the layout of the module's.
test_cuda.py compares its values with the reference's."""

from itertools import product

import pytest
import torch

from arch_cases import skip_unless_offered
from cases import DEVICE, Case
from flashcell.kernels.fused_rnn.cells import CELLS
from numerics import EPS, assert_bitwise, assert_close
from ops.fused_rnn.engine_cases import TILES
from ops.fused_rnn.test_layers import make


def test_every_kind_of_tile_is_tested(fused_rnn):
    """Each kind of tile that the batch engine takes for some size, it takes for a size in TILES."""

    def kinds(sizes):
        found = set()
        for cell, dtype in product(CELLS, ("bfloat16", "float32")):
            for B, D in sizes:
                plan = fused_rnn.explain_plan(cell, 1, D, B, dtype, "H200", precision="tf32")
                for saving in ("", "saving."):
                    keys = (f"{saving}{key}" for key in ("tile", "units", "takes_turns"))
                    if plan.engine == "batch":
                        found.add((cell, dtype, saving, *(plan.fields[key] for key in keys)))
        return found

    widths = (264, 304, 512, 656, 896, 1024, 1152, 1312, 1536)
    batches = (64, 200, 320, 512, 640, 768, 1024, 1300, 2048, 4096)
    assert kinds(TILES) == kinds(list(product(batches, widths)))


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA alone has the batch engine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 52, 50, 51])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_the_batch_engine_writes_outputs_where_they_belong(fused_rnn, monkeypatch, name, D, dtype):
    """Outputs whose rows have the order of time, or fewer units than the engine computes, are bit for bit
    those in its own layout, and have the same gradients."""
    tf32, P = dtype == torch.float32, -(-D // 8) * 8
    skip_unless_offered(fused_rnn, "batch", name, Case(140, 5, 1, P), dtype, tf32=tf32)
    monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", "batch")
    cell = fused_rnn.CELLS[name]
    call = {"I": 24, "D": D, "B": 140, "T": 5, "batch_first": True, "states": True, "dtype": dtype}
    x, state, weights, _ = make(cell.gates, cell.states, **call)
    weights = [w.to(dtype) for w in weights]
    pad = torch.nn.functional.pad

    def padded(w):  # [G D, ...] -> [G P, ...], of w_hh with P columns
        rows = pad(w.view(cell.gates, D, -1), (0, 0, 0, P - D)).flatten(0, 1)
        return rows[:, 0] if w.dim() == 1 else pad(rows, (0, P - D if w.shape[1] == D else 0))

    def outputs(x, state, weights, batch_first):
        given = [t.detach().requires_grad_() for t in (x, *state, *weights)]
        options = ((), True, False, 1, batch_first, P, 0.0, tf32)
        split = given[1 : 1 + len(state)], given[1 + len(state) :]
        with torch.no_grad():
            unsaved, _ = fused_rnn.run_layers(name, given[0], *split, options)
        y, last = fused_rnn.run_layers(name, given[0], *split, options)
        assert_bitwise("y", y.detach(), unsaved)
        loss = y[..., :D].float().square().sum() + sum(s.float().square().sum() for s in last)
        dx, *rest = torch.autograd.grad(loss, given)
        ordered = [t if batch_first else t.transpose(0, 1) for t in (y.detach(), dx)]
        return *ordered, *(s.detach() for s in last), *rest

    own = outputs(x, [pad(s, (0, P - D)) for s in state], [padded(w) for w in weights], True)
    for batch_first in (True, False):
        y, dx, *others = outputs(
            x if batch_first else x.transpose(0, 1), state, weights, batch_first
        )
        assert y.shape == (140, 5, D)
        assert_bitwise("y", y, own[0][..., :D])
        assert_close("dx", dx, own[1], 8 * EPS[dtype])
        K = cell.states
        for got, wanted in zip(others[:K], own[2 : 2 + K], strict=True):
            assert_bitwise("state", got, wanted[..., :D])
        for got, wanted in zip(others[K : 2 * K], own[2 + K : 2 + 2 * K], strict=True):
            assert_close("dstate", got, wanted[..., :D], 8 * EPS[dtype])
        for got, wanted in zip(others[2 * K :], own[2 + 2 * K :], strict=True):
            wanted = wanted.view(cell.gates, P, -1)[:, :D].flatten(0, 1)
            assert_close(
                "dweight",
                got.view(cell.gates * D, -1),
                wanted[:, : got[0].numel()],
                16 * EPS[dtype],
            )


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA alone has the batch engine")
@pytest.mark.parametrize("D", [64, 50])
def test_layers_read_what_the_batch_engine_writes(fused_rnn, monkeypatch, D):
    """Stacked layers give the same values and gradients on another engine, in either order of rows."""
    skip_unless_offered(fused_rnn, "batch", "lstm", Case(140, 5, 1, 64), torch.bfloat16)
    found = {}
    for engine, batch_first in product(("batch", "gemm"), (True, False)):
        monkeypatch.setenv("FLASHCELL_CUDA_ENGINE", engine)
        torch.manual_seed(0)
        call = {"I": 24, "D": D, "B": 140, "T": 5, "batch_first": True, "layers": 3}
        x, _, weights, options = make(4, 2, **call, dtype=torch.bfloat16, width=-(-D // 8) * 8)
        x = (x if batch_first else x.transpose(0, 1)).detach().requires_grad_()
        weights = [w.requires_grad_() for w in weights]
        options = (*options[:4], batch_first, *options[5:])
        y, _ = fused_rnn.run_layers("lstm", x, (), weights, options)
        gradients = torch.autograd.grad(y.float().square().sum(), [x, *weights])
        first = [t if batch_first else t.transpose(0, 1) for t in (y.detach(), gradients[0])]
        found[engine, batch_first] = [*first, *gradients[1:]]
    wanted = found.pop(("gemm", True))
    for got in found.values():
        for value, other in zip(got, wanted, strict=True):
            assert_close("value", value.float(), other.float(), 8 * EPS[torch.bfloat16])
