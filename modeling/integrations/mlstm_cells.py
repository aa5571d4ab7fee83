"""mLSTM cells of other packages, on the tfla kernel.

They call an object or a function for the cell alone, and one of ours takes its place: projections,
gates and norms stay theirs. Shapes: B batch, N heads, T time, K and V widths of keys and values.
"""

import functools
from typing import Any

import torch
from torch import nn

from ..hub.kernel_loader import load_kernel

# Modules that compute the cell, of the package mlstm_kernels and of transformers' xLSTM.
THEIRS = ("xLSTMBackend", "mLSTMBackend")
NAMES = {"query": "q", "key": "k", "value": "v", "igate": "i", "fgate": "f"}
ORDER = ("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial")


class TflaBackend(nn.Module):
    """Computes the mLSTM of one layer, in place of xLSTMBackend or mLSTMBackend.

    Takes the arguments of either (query, key, ... or q, k, ...), heads first, and returns h [B, N,
    T, V] and the states (C [B, N, K, V], n [B, N, K], m [B, N, 1]); h alone where mLSTMBackend does:
    in its training modes without return_last_states.
    """

    def __init__(self, config: Any, backend: str, may_return_h: bool = False):
        super().__init__()
        self.config, self.backend, self.may_return_h = config, backend, may_return_h

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        wants, mode = kwargs.pop("return_last_states", None), kwargs.pop("mode", None)
        given = dict(zip(ORDER, args, strict=False))
        given.update((NAMES.get(name, name), value) for name, value in kwargs.items())
        q, k, v, i, f = (given[name].transpose(1, 2) for name in ORDER[:5])  # views [B, T, N, ...]
        state: tuple | None = None
        if given.get("c_initial") is not None:
            C, n, m = (given[name] for name in ORDER[5:])
            state = C, n, m.squeeze(-1)
            if torch.is_grad_enabled():
                state = tuple(s.clone() for s in state)  # because the model overwrites its states
        options = {"eps": self.config.eps, "backend": self.backend}
        h, (C, n, m) = run_mlstm(q, k, v, i, f, state, **options)
        h = h.transpose(1, 2)
        wants = self.config.return_last_states if wants is None else wants
        if self.may_return_h and "train" in (mode or self.config.mode) and not wants:
            return h
        return h, (C, n, m[..., None])


def run_mlstm(
    q: torch.Tensor,  # [B, T, N, K], as k
    k: torch.Tensor,
    v: torch.Tensor,  # [B, T, N, V]
    i: torch.Tensor,  # [B, T, N], as f
    f: torch.Tensor,
    state: tuple | None,
    **options: Any,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Runs a sequence, or the step that a sequence of one is: h [B, T, N, V] and the states."""
    kernel = load_kernel("tfla", q.device.type, options["backend"])
    if q.shape[1] == 1:
        h, state = kernel.mlstm_step(*(x[:, 0] for x in (q, k, v, i, f)), state, **options)
        return h[:, None], state
    return kernel.mlstm(q, k, v, i, f, state, **options)


def parallel(
    queries: torch.Tensor,  # [B, N, T, K], as keys and values
    keys: torch.Tensor,
    values: torch.Tensor,
    igate_preact: torch.Tensor,  # [B, N, T, 1], as fgate_preact
    fgate_preact: torch.Tensor,
    lower_triangular_matrix: torch.Tensor | None = None,
    stabilize_rowwise: bool = True,
    eps: float = 1e-6,
    backend: str = "auto",
) -> torch.Tensor:  # [B, N, T, K]
    """The mLSTM of a whole sequence, as xlstm's parallel_stabilized_simple."""
    q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
    i, f = (x.squeeze(-1).transpose(1, 2) for x in (igate_preact, fgate_preact))
    h, _ = run_mlstm(q, k, v, i, f, None, eps=eps, backend=backend)
    return h.transpose(1, 2)


def step(
    c_state: torch.Tensor,  # [B, N, K, K], of keys scaled by K^-1/2
    n_state: torch.Tensor,  # [B, N, K, 1], likewise
    m_state: torch.Tensor,  # [B, N, 1, 1]
    q: torch.Tensor,  # [B, N, 1, K], as k and v
    k: torch.Tensor,
    v: torch.Tensor,
    igate_preact: torch.Tensor,  # [B, N, 1, 1], as fgate_preact
    fgate_preact: torch.Tensor,
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One step of the mLSTM, as xlstm's recurrent_step_stabilized_simple.

    Its keys are scaled and its queries are not; the kernel scales the queries."""
    scale = q.shape[-1] ** 0.5
    q, k, v = (x.transpose(1, 2) for x in (q * scale, k / scale, v))
    i, f = (x.squeeze(-1).transpose(1, 2) for x in (igate_preact, fgate_preact))
    state = c_state, n_state.squeeze(-1), m_state[..., 0, 0]
    h, (C, n, m) = run_mlstm(q, k, v, i, f, state, eps=eps, backend=backend)
    dtype = c_state.dtype
    return h.transpose(1, 2), (C.to(dtype), n[..., None].to(dtype), m[..., None, None].to(dtype))


def stand_ins(layer: Any, _own: type, backend: str) -> dict[str, Any] | str:
    """Returns the attributes of `layer` that change, or the reason why it stays as it is."""
    cell = getattr(layer, "mlstm_backend", None)
    if cell is None:  # xlstm's mLSTMCell
        width = layer.config.embedding_dim // layer.config.num_heads
        if width % 8:
            return f"its heads are {width} wide, which is no multiple of 8"
        return {
            "backend_fn": functools.partial(parallel, backend=backend),
            "backend_fn_step": functools.partial(step, backend=backend),
        }
    config = cell.config
    if "siging" in getattr(config, "chunkwise_kernel", ""):
        return f"its input gate is a sigmoid ({config.chunkwise_kernel})"
    may_return_h = getattr(cell, "may_return_h", type(cell).__name__ == "mLSTMBackend")
    return {"mlstm_backend": TflaBackend(config, backend, may_return_h)}
