"""GPU benchmark cases of diagonal_rnn (bench_ops --suite pararnn): shapes, providers, bytes
moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashcell import FlashGRU, FlashLSTM
from flashcell.kernels import diagonal_rnn as reference
from flashcell.kernels.diagonal_rnn.functional import select_method

CELLS = reference.CELLS
LAYERS = {"flash_gru": FlashGRU, "flash_lstm": FlashLSTM}
NO_MASKS = (None,) * 4


class Unavailable(Exception):
    """A provider cannot run this case here."""


@dataclass(frozen=True)
class Case:
    """One case: an op, or with form "layer" the projection and the cell, with the limit in ms."""

    op: str
    which: str  # "forward" keeps what the backward needs; "backward"; "train" is both
    batch: int
    steps: int
    width: int
    dtype: str
    limit: float | None = None
    form: str = "op"
    providers: tuple[str, ...] = ("auto",)

    @property
    def name(self) -> str:
        short = {"float32": "fp32", "bfloat16": "bf16"}[self.dtype]
        kind = "methods" if "multiple_shooting" in self.providers else self.form
        return f"{self.op}-{kind}-{self.batch}x{self.steps}x{self.width}-{short}"

    @property
    def is_scan(self) -> bool:
        return self.op == "linear_scan"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


PEER, SCAN_PEER = ("auto", "plain", "pararnn-torch"), ("auto", "plain", "accelerated-scan")
METHODS = ("auto", "sequential", "multiple_shooting", "newton", "pararnn-torch")
MUST = [
    Case(
        f"flash_{cell}",
        which,
        *shape,
        dtype,
        limit,
        providers=PEER if shape[0] == 8 else ("auto", "plain"),
    )
    for shape in ((8, 2048, 4096), (32, 2048, 1024))
    for cell, which, limits in (
        ("gru", "forward", (0.31, 0.17)),
        ("gru", "backward", (0.50, 0.34)),
        ("lstm", "forward", (0.38, 0.22)),
        ("lstm", "backward", (0.64, 0.40)),
    )
    for dtype, limit in zip(("float32", "bfloat16"), limits, strict=True)
]
MUST += [
    Case(f"flash_{cell}", "train", 8, 2048, 4096, "bfloat16", limit, "layer")
    for cell, limit in (("gru", 3.2), ("lstm", 3.6))
]
MUST += [
    Case("flash_gru", "forward", 1, 131072, 1024, "float32", 1.6, providers=PEER),
    Case("flash_gru", "forward", 1, 131072, 1024, "bfloat16", 1.4),
    Case("flash_gru", "backward", 1, 131072, 1024, "float32", 1.4),
    Case("flash_lstm", "forward", 1, 131072, 1024, "float32", 4.5),
    Case("flash_lstm", "backward", 1, 131072, 1024, "float32"),
]
SCANS = [
    Case("linear_scan", which, *shape, dtype, providers=SCAN_PEER)
    for shape in ((8, 2048, 4096), (32, 2048, 1024), (1, 65536, 1024), (1, 4096, 512))
    for dtype in ("float32", "bfloat16")
    for which in ("forward", "backward")
]
SWEEP = [
    Case("flash_gru", "forward", 1, 4096, D, "float32", providers=METHODS)
    for D in (32, 128, 512, 2048, 8192, 32768)
]
CROSSOVER = [
    Case(cell, "forward", 1, T, D, "float32", providers=METHODS)
    for cell, lengths in (("flash_gru", (512, 2048, 16384, 131072)), ("flash_lstm", (2048, 16384)))
    for T in lengths
    for D in (128, 1024, 4096, 16384, 65536)
    if T * D <= 2**27
]


def words_moved(case: Case) -> tuple[int, int]:
    """Returns the values read and written per channel and step, without a layer's projection."""
    if case.is_scan:
        return (2, 1) if case.which == "forward" else (3, 2)
    spec = CELLS[case.op]
    kept, gates = spec.states - 1, spec.gates
    forward, backward = (gates, 1 + kept), (gates + 2 + kept, gates)
    both = forward[0] + backward[0], forward[1] + backward[1]
    return {"forward": forward, "backward": backward, "train": both}[case.which]


def bytes_moved(case: Case) -> int:
    """Returns the bytes read and written once, which give the floor at the speed of a copy."""
    elements = case.batch * case.steps * case.width
    return sum(words_moved(case)) * elements * case.torch_dtype.itemsize


def draw(case: Case, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Draws x [B, T, 3, D] and weight [P, D] within the published bound 0.5, or a scan's a and b;
    dh."""
    g = torch.Generator(device).manual_seed(0)
    B, T, D = case.batch, case.steps, case.width
    normal = lambda *s: torch.randn(s, generator=g, device=device, dtype=case.torch_dtype)
    if case.form == "layer":
        return {"x": normal(B, T, D), "dh": normal(B, T, D)}
    if case.is_scan:
        a = torch.rand(B, T, D, generator=g, device=device, dtype=case.torch_dtype)
        return {"a": a, "b": normal(B, T, D), "dh": normal(B, T, D)}
    spec = CELLS[case.op]
    weight = torch.rand(spec.weights, D, generator=g, device=device) - 0.5
    return {"x": normal(B, T, spec.gates, D), "weight": weight, "dh": normal(B, T, D)}


def ours(case: Case, p: dict, kernel, method: str) -> Callable[[], tuple]:
    """Returns a call of our op as autograd makes it, which gives (h, saved) or (dx, dweight)."""
    ops = kernel.dispatch.ops
    if case.form == "layer":
        return layer(case, p)
    if case.is_scan:
        if case.which == "forward":
            return lambda: (ops.scan_fwd(p["a"], p["b"], None, False),)
        h = ops.scan_fwd(p["a"], p["b"], None, False)
        return lambda: ops.scan_bwd(p["dh"], p["a"], h, None, False)[1::-1]
    words = case.batch * case.width * case.torch_dtype.itemsize // 4
    method = select_method(method, "cuda", words, case.steps)
    fwd, bwd = (getattr(ops, f"{case.op}_{end}") for end in ("fwd", "bwd"))
    forward = lambda: fwd(p["x"], p["weight"], None, *NO_MASKS, method, -1.0, -1, True)
    if case.which == "forward":
        return lambda: forward()[0:3:2]
    h, _, saved, _ = forward()
    p["h"], p["saved"] = h, saved
    given = p["dh"], None, p["x"], p["weight"], h, saved, None, *NO_MASKS, "sequential"
    return lambda: bwd(*given)[:2]


def layer(case: Case, p: dict) -> Callable[[], tuple]:
    """Returns a call of ParaRNN's whole layer, projection of four heads and cell, with its
    gradients."""
    module = LAYERS[case.op](case.width, case.width, num_heads=4, backend="cuda")
    p["layer"] = module = module.to("cuda", case.torch_dtype)
    x = p["x"].requires_grad_()
    leaves = [x, *module.parameters()]

    def call():
        with torch.enable_grad():
            h, _ = module(x)
            return torch.autograd.grad(h, leaves, p["dh"])

    return call


def plain(case: Case, p: dict) -> Callable[[], tuple]:
    """Returns an elementwise torch call that moves as many values, as a bound by memory alone.

    It has no recurrence and reads its tensors from end to end."""
    reads, writes = words_moved(case)
    arguments = [f"T a{k}" for k in range(reads)] + [f"T& y{k}" for k in range(writes)]
    total = " + ".join(f"a{k}" for k in range(reads))
    body = " ".join(f"y{k} = {total} + T({k});" for k in range(writes))
    code = f"template <typename T> void plain({', '.join(arguments)}) {{ {body} }}"
    kernel = torch.cuda.jiterator._create_multi_output_jit_fn(code, writes)
    size = case.batch * case.steps * case.width
    tensors = [torch.ones(size, device="cuda", dtype=case.torch_dtype) for _ in range(reads)]
    return lambda: (kernel(*tensors),)


def pararnn_torch(case: Case, p: dict) -> Callable[[], tuple]:
    """Returns pararnn-torch's call (PyPI, `import pararnn`): fused Newton, 3 iterations, no
    projection.

    Its gradient is never without the projection's, so there is no backward to compare.
    """
    if case.which != "forward":
        raise Unavailable("its gradient includes a projection")
    try:
        from pararnn import ParaGRU, ParaLSTM
        from pararnn.solvers.newton import compile_safe_config, newton_apply
    except ImportError as error:
        raise Unavailable(f"pararnn cannot be imported: {error}") from None
    gru = case.op == "flash_gru"
    cell = (ParaGRU if gru else ParaLSTM)(1, case.width, dtype=case.torch_dtype).cuda()
    cell.W_x = torch.nn.Identity()
    names = ("a_z", "a_r", "a_n") if gru else ("a_f", "a_o", "a_z", "c_f", "c_o")
    order = [0, 1, 2] if gru else [0, 2, 1]  # of pararnn's gates in x: f, z, o
    with torch.no_grad():
        for k, name in enumerate(names):
            getattr(cell, name).copy_(p["weight"][k])
    x = p["x"][:, :, order].flatten(2).contiguous()
    config = compile_safe_config(scan_backend="fused")

    def forward():
        h = newton_apply(cell, x, config)
        return (h if h.dim() == 3 else h[..., -1, :],)

    return forward


def accelerated_scan(case: Case, p: dict) -> Callable[[], tuple]:
    """Returns accelerated-scan's call (PyPI): its Triton kernel in its own layout, time
    innermost."""
    try:
        from accelerated_scan.scalar import scan
    except ImportError as error:
        raise Unavailable(f"accelerated_scan cannot be imported: {error}") from None
    a, b, dh = (p[k].transpose(1, 2).contiguous() for k in ("a", "b", "dh"))
    if case.which == "forward":
        return lambda: (scan(a, b),)
    leaves = [a.requires_grad_(), b.requires_grad_()]
    with torch.enable_grad():
        h = scan(*leaves)

    def backward():
        with torch.enable_grad():
            da, db = torch.autograd.grad(h, leaves, dh, retain_graph=True)
        return db, da

    return backward


PEERS = {"pararnn-torch": pararnn_torch, "accelerated-scan": accelerated_scan}
OTHERS = PEERS | {"plain": plain}


def make(case: Case, provider: str, p: dict, kernel) -> Callable[[], tuple]:
    return OTHERS[provider](case, p) if provider in OTHERS else ours(case, p, kernel, provider)
