"""Problems for tfla, with the options of cases.py."""

from dataclasses import dataclass, field, replace

import torch

from cases import DEVICE, draw_masks, draw_rows, draw_x, generator, to_device

CELLS = ("exp", "sigmoid", "sigmoid floor")
INPUTS = ("q", "k", "v", "i", "f", "out_gate", "norm_weight")


@dataclass(frozen=True)
class Case:
    """One call. `options`: state reset hold lengths cu strided, layer or rms, eps, published.

    `chunk` is the chunk size; `i` and `f` are the biases of the gates.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    options: tuple = field(default=())
    chunk: int | None = 16
    i: float = 0.0
    f: float = 3.0

    def __str__(self) -> str:
        name = f"B{self.B}T{self.T}H{self.H}K{self.K}V{self.V}L{self.chunk}i{self.i:g}f{self.f:g}"
        return "-".join([name, *self.options])


SHAPES = [
    Case(1, 1, 1, 8, 8),
    Case(2, 1, 3, 16, 24, ("state",)),
    Case(3, 37, 2, 24, 40, ("state",)),
    Case(1, 65, 1, 80, 96, ("state",), 64),
    Case(2, 131, 1, 40, 136, ("state",), 64),
    Case(1, 300, 2, 64, 64, (), 128),
    Case(1, 300, 1, 16, 8, ("state",), 256),
    Case(1, 90, 1, 256, 128, ("state",), None),
    Case(1, 20, 1, 8, 1024, ("state",), 16),
    Case(2, 33, 1, 1024, 16, (), 64),
]
OPTIONS = [
    ("state", "reset"),
    ("state", "hold"),
    ("state", "reset", "hold"),
    ("state", "lengths"),
    ("state", "lengths", "reset", "hold"),
    ("state", "cu"),
    ("state", "cu", "reset", "hold"),
    ("state", "strided"),
    ("state", "eps"),
    ("state", "published"),
    ("state", "layer"),
    ("hold", "rms"),
]
GATES = [
    Case(1, 200, 2, 32, 32, ("state",), 64, i, f)
    for i, f in ((-10.0, 3.0), (10.0, 3.0), (0.0, 12.0), (-10.0, 12.0), (10.0, -2.0))
]
EMPTY = [
    Case(0, 4, 2, 8, 8),
    Case(2, 0, 2, 8, 8, ("state",)),
    Case(2, 3, 0, 8, 8),
    Case(1, 0, 1, 8, 8, ("cu0",)),
]
CASES = [*SHAPES, *GATES, *(replace(Case(5, 45, 2, 24, 16), options=o) for o in OPTIONS)]


def names(cell: str) -> dict:
    """Returns the arguments that choose a cell."""
    floor = {"normalize": "floor"} if cell == "sigmoid floor" else {}
    return {"input_gate": cell.split()[0], **floor}


def make(cell: str, case: Case, dtype: torch.dtype) -> dict:
    """Returns arguments of `mlstm`: values drawn in float64, then rounded."""
    call, g, has = names(cell), generator(case), case.options
    H, K, V = case.H, case.K, case.V
    with torch.device("cpu"):
        B, T, S = draw_rows(call, case, g)
        for name, width in (("q", K), ("k", K), ("v", V)):
            call[name] = draw_x(case, g, (B, T, H, width), dtype)
        draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
        call["i"] = (case.i + draw(B, T, H)).to(dtype)
        call["f"] = (case.f + draw(B, T, H)).to(dtype)
        if "state" in has:
            state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            C, n, m = draw(S, H, K, V), draw(S, H, K), draw(S, H)
            state = {"exp": (C, n, m), "sigmoid": (C,), "sigmoid floor": (C, n)}[cell]
            call["state"] = tuple(s.to(state_dtype) for s in state)
        draw_masks(call, case, g, B, T)
        if "layer" in has or "rms" in has:
            call["norm"] = "layer" if "layer" in has else "rms"
            call["norm_weight"] = (1 + 0.3 * draw(H, V)).to(dtype)
            call["out_gate"] = draw(B, T, H, V).to(dtype)
    if "eps" in has:
        call["eps"] = 0.1
    if "published" in has:
        call["normalizer_grad"] = False
    call["chunk_size"] = case.chunk
    return to_device(call)


def normal(shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draws normal values that are the same on every device: which divisors cancel depends on them."""
    return torch.randn(shape, device="cpu").to(DEVICE, dtype)


def nearby(call: dict, distance: float) -> dict:
    """Returns the call with every value changed by `distance`, relatively, to see how much the
    answer changes."""
    move = lambda x: x * (1 + distance * normal(x.shape, x.dtype))
    names = [name for name in INPUTS if name in call]
    state = tuple(move(s) for s in call.get("state", ()))
    return {**call, **{k: move(call[k]) for k in names}, **({"state": state} if state else {})}


def leaves(call: dict) -> tuple[dict, dict]:
    """Returns the call with fresh differentiable tensors, and these by name; m takes no gradient."""
    leaf = lambda t: t.detach().requires_grad_()
    fresh = {k: leaf(call[k]) for k in INPUTS if k in call}
    state = tuple(s if k == 2 else leaf(s) for k, s in enumerate(call.get("state", ())))
    named = fresh | {f"state[{k}]": s for k, s in enumerate(state[:2])}
    return {**call, **fresh, **({"state": state} if state else {})}, named


def unscaled(state: tuple) -> tuple:
    """Returns C and n without the scale m, which rounding may change."""
    if len(state) < 3:
        return state
    C, n, m = state
    scale = torch.exp(m.double()).to(C.dtype)
    return C * scale[..., None, None], n * scale[..., None]
