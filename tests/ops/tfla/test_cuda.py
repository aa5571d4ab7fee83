"""Tests tfla's use of memory and of the stream on CUDA."""

from dataclasses import replace

import pytest
import torch

from cases import DEVICE, to_device, upcast
from flashcell.kernels import tfla as reference
from mlstm_cases import CELLS, Case, leaves, make, names, unscaled
from mlstm_peer import Peer
from numerics import assert_bitwise, assert_close
from ops.tfla.test_sequence import DTYPES, SEQUENCE, SMALL, assert_near, run, short, upstream
from ops.tfla.test_validation import op_arguments

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=CELLS, ids=lambda cell: cell.replace(" ", "_"))
def cell(request):
    return request.param


def test_rows_at_any_address(tfla, cell):
    """Bitwise the same for rows of 16-bit elements that start at 2 bytes, or whose strides are odd."""
    call = make(cell, SMALL, torch.bfloat16)
    want, _ = tfla.mlstm(**call)
    for name in ("q", "k", "v"):
        x = call[name]
        wide = torch.zeros(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype)
        wide[..., 1:] = x
        call[name] = wide[..., 1:]
    assert_bitwise("h", tfla.mlstm(**call)[0], want)


def test_a_state_in_place_at_any_address(tfla, cell):
    call = make(cell, SMALL, torch.bfloat16)
    step = {k: call[k][:, 0] for k in SEQUENCE[:5]} | names(cell)
    want, last = tfla.mlstm_step(**step, state=call["state"])
    state = tuple(torch.zeros(s.numel() + 1)[1:].view_as(s).copy_(s) for s in call["state"])
    got, _ = tfla.mlstm_step(**step, state=state, inplace=True)
    assert_bitwise("h", got, want)
    for own, other in zip(state, last, strict=True):
        assert_bitwise("state", own, other)


@pytest.mark.skipif(DEVICE != "cuda", reason="on the CPU a task has a head")
@pytest.mark.parametrize("epilogue", [(), ("layer",)], ids=["plain", "epilogue"])
@pytest.mark.parametrize(
    ("B", "K", "V"),
    [(B, *size) for B in (1, 8, 16) for size in ((128, 256), (256, 256), (256, 512))]
    + [(256, 128, 256)],
)
def test_a_step_in_place_of_many_thread_blocks(tfla, cell, B, K, V, epilogue):
    """Each thread block reads n and m itself. There are more than run at once, so the last start
    when the first end."""
    call = make(cell, Case(B, 1, 8, K, V, ("state", *epilogue)), torch.bfloat16)
    call.pop("chunk_size")
    call |= {k: call[k][:, 0] for k in SEQUENCE if k in call}
    want, last = tfla.mlstm_step(**call)
    exact, _ = reference.mlstm_step(**upcast(call))
    assert_close("h", want.double(), exact, 3e-3)
    for _ in range(20):
        state = tuple(s.clone() for s in call["state"])
        got, _ = tfla.mlstm_step(**{**call, "state": state}, inplace=True)
        assert_bitwise("h", got, want)
        for own, other in zip(state, last, strict=True):
            assert_bitwise("state", own, other)


@pytest.mark.skipif(
    DEVICE != "cuda", reason="the CPU's is test_deterministic_and_independent_of_threads"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize(("K", "V", "chunk"), [(128, 256, 128), (64, 64, 64), (32, 32, 64)])
def test_the_same_bits_every_time(tfla, cell, K, V, chunk, dtype):
    """Two calls give the same bits, with several chunks, segments of a sequence and thread blocks
    that add to one sum."""
    call = make(cell, Case(2, 2500, 2, K, V, ("state", "reset", "rms"), chunk), dtype)
    given = upstream(call, dtype)
    first, *others = (run(tfla, call, given) for _ in range(4))
    for other in others:
        for key, value in other.items():
            assert_bitwise(key, value, first[key])


@pytest.mark.skipif(DEVICE != "cuda", reason="the CPU's op refuses them")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=short)
def test_offsets_that_decrease(tfla, dtype):
    """CUDA does not check offsets unless FLASHCELL_CHECK is set; a document whose end is before its
    start is taken as empty."""
    call = make("exp", Case(1, 700, 2, 16, 24, (), 64), torch.float32)
    tensors = [call[k] for k in SEQUENCE[:5]] + [None] * 6
    options = (True, True, 0.0, True, 64)
    results = []
    for offsets in ([0, 500, 30, 600, -9, 9999], [0, 500, 500, 600, 600, 700]):
        cu_seqlens = torch.tensor(offsets, dtype=dtype)
        results.append(tfla.dispatch.ops.mlstm_fwd(*tensors, cu_seqlens, *options))
    for number, (got, want) in enumerate(zip(*results, strict=True)):
        assert_bitwise(f"output {number}", got, want)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("options", [("state",), ("state", "reset", "hold"), ("state", "lengths")])
@pytest.mark.parametrize(("K", "V"), [(128, 256), (256, 512), (40, 136), (136, 264)])
def test_backward_by_rows(tfla, cell, K, V, options, dtype):
    """There are more rows of work than thread blocks, so that each block takes several."""
    check_case(tfla, make(cell, Case(3, 700, 16, K, V, options, 256), dtype), dtype)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("options", [("state",), ("state", "reset", "hold"), ("state", "lengths")])
@pytest.mark.parametrize(("B", "T", "H"), [(3, 130, 250), (5, 65, 9), (2, 4100, 2)])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (32, 32), (16, 40)])
def test_narrow_heads(tfla, cell, B, T, H, K, V, options, dtype):
    """More heads than thread blocks that run at once; and so few that a sequence has segments."""
    check_case(tfla, make(cell, Case(B, T, H, K, V, options, None), dtype), dtype)


def check_case(tfla, call, dtype):
    given = upstream(call, dtype)
    got, near = run(tfla, call, given, backend=DEVICE), run(reference, call, given)
    exact = run(reference, upcast(call), given)
    for key in exact:
        assert_near(key, key, got[key], exact[key], near[key], dtype, False)


KEPT = [("state", "reset"), ("state", "cu")]


@pytest.mark.skipif(DEVICE != "cuda", reason="the CPU's engine keeps none")
@pytest.mark.parametrize("masks", KEPT, ids=str)
def test_backward_from_kept_states(tfla, cell, masks):
    """Bitwise the same as without kept states; another number of chunks is refused."""
    ops, given = tfla.dispatch.ops, op_arguments(cell, masks, 150)
    given = [t.detach() if torch.is_tensor(t) else t for t in given]
    given[:3] = [t.bfloat16() for t in given[:3]]
    B, T = given[1].shape[:2]
    S = B if given[11] is None else len(given[11]) - 1
    chunks = B * -(-T // 64) if given[11] is None else B * T // 64 + S
    h, C, n, _, total, kept_C, kept_n = ops.mlstm_fwd(*given, kept=chunks)
    kept = kept_C, kept_n if kept_n.numel() else None
    given = [torch.ones_like(h), None, None, C, n, h, total], given
    got = ops.mlstm_bwd(*given[0], *kept, *given[1])
    want = ops.mlstm_bwd(*given[0], None, None, *given[1])
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(f"gradient {number}", a, b)
    with pytest.raises(ValueError, match=f"the number of chunks, {chunks}, got {chunks + 1}"):
        ops.mlstm_fwd(*given[1], kept=chunks + 1)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_graph_replays_what_ran(tfla, cell):
    """Forward, backward and a step in place in one CUDA graph: nothing waits for the device."""
    call, sources = leaves(make(cell, SMALL, torch.bfloat16))
    step = {k: call[k].detach()[:, 0] for k in SEQUENCE[:5]}
    first = tuple(s.detach().clone() for s in call["state"])
    state = tuple(s.clone() for s in first)

    def work():
        for own, given in zip(state, first, strict=True):
            own.copy_(given)
        h, _ = tfla.mlstm(**call)
        grads = torch.autograd.grad(h.float().sum(), list(sources.values()), materialize_grads=True)
        with torch.no_grad():
            one, _ = tfla.mlstm_step(**step, **names(cell), state=state, inplace=True)
        return [h.detach(), *grads, one, *state]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = [t.clone() for t in work()]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    graph.replay()
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise(f"output {number}", a, b)


MASKS = ("state", "reset", "hold")
# Widths that fill neither a tile nor a memory line, chunks of each length, documents of one step.
SEQUENCES = [
    Case(2, 1, 3, 16, 24),
    Case(3, 37, 2, 24, 40, MASKS),
    Case(1, 131, 1, 80, 96, (*MASKS, "lengths"), 64),
    Case(1, 150, 1, 40, 136, ("state", "reset", "rms"), 128),
    Case(5, 60, 1, 96, 24, ("state", "ones"), 256),
    Case(2, 33, 1, 24, 40, ("state", "strided", "layer"), 16),
]
STEPS = [
    Case(1, 1, 1, 8, 8),
    Case(3, 1, 2, 24, 40, ("state", "layer")),
    Case(2, 1, 3, 96, 80, ("state", "rms")),
    Case(2, 1, 1, 264, 520, ("state",)),
    Case(15, 1, 7, 128, 256, ("state",)),  # enough heads for most SMs, in wide thread blocks
    Case(7, 1, 8, 256, 512, ("state",)),
    Case(1, 1, 2, 128, 256, ("state",)),  # widths that have a kernel of their own
    Case(1, 1, 2, 256, 512, ("state",)),
]


def draw_tiny(cell, case, dtype):
    if "ones" not in case.options:
        return make(cell, case, dtype)
    call = make(cell, replace(case, options=("state", "cu")), dtype)
    T = case.B * case.T
    call["cu_seqlens"] = torch.tensor([0, 1, T // 2, T // 2 + 1, T - 1, T], dtype=torch.int32)
    return call


def run_states(kernel, call, _, **options):
    given = ("k", "v", "i", "f", "reset", "hold", "lengths", "cu_seqlens", "chunk_size")
    given = {k: call[k] for k in (*given, "input_gate", "normalize") if k in call}
    last = kernel.mlstm_transfer(**given, **options)
    return {f"last[{k}]": s for k, s in enumerate(unscaled([s for s in last[:3] if s is not None]))}


def run_forward(kernel, call, _, **options):
    h, last = kernel.mlstm(**call, **options)
    return {"h": h, **{f"last[{k}]": s for k, s in enumerate(unscaled(last))}}


def run_step(kernel, call, _, **options):
    call = {k: v[:, 0] if k in SEQUENCE else v for k, v in call.items() if k != "chunk_size"}
    h, last = kernel.mlstm_step(**call, **options)
    return {"h": h, **{f"last[{k}]": s for k, s in enumerate(unscaled(last))}}


ENGINES = {
    "states": (run_states, SEQUENCES),
    "forward": (run_forward, SEQUENCES),
    "backward": (run, SEQUENCES),
    "step": (run_step, STEPS),
}
TINY = [(engine, case) for engine, (_, cases) in ENGINES.items() for case in cases]


@pytest.mark.skipif(
    DEVICE != "cuda", reason="the CPU's engine is tested by ops/tfla/test_sequence.py"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("engine", "case"), TINY, ids=str)
def test_tiny(tfla, cell, engine, case, dtype):
    """Runs every kernel once, and nothing else on the GPU, for scripts/check_cuda."""
    function, _ = ENGINES[engine]
    with torch.device("cpu"):
        call = to_device(draw_tiny(cell, case, dtype), "cpu")
        given = [dy.cpu() for dy in upstream(call, dtype)]
        whole = engine == "backward"  # includes the epilogue's
        near = function(Peer if whole else reference, call, given)
        exact = function(reference, upcast(call), given)
    got = function(tfla, to_device(call), [dy.to(DEVICE) for dy in given], backend=DEVICE)
    assert got.keys() == exact.keys()
    for key in exact:
        name = f"{cell} {engine} {case} {key}"
        assert_near(name, key, got[key].cpu(), exact[key], near[key], dtype, case.T == 1)
