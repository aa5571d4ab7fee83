"""Runs transformers' own xLSTM models on the tfla kernel: `accelerate(model)`."""

from typing import Any

import torch
from torch import nn

from ..hub.kernel_loader import check_backend, load_kernel

# Who computes the mLSTM in transformers' xLSTM: its own code, or the `xlstm` package's if installed.
THEIRS = ("xLSTMBackend", "mLSTMBackend")
NAMES = {"query": "q", "key": "k", "value": "v", "igate": "i", "fgate": "f"}
ORDER = ("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial")


class TflaBackend(nn.Module):
    """Computes the mLSTM of one layer, in place of xLSTMBackend or mLSTMBackend.

    Takes the arguments of either (query, key, ... or q, k, ...), heads first, and returns h [B, N,
    T, V] and the states (C [B, N, K, V], n [B, N, K], m [B, N, 1]).
    """

    def __init__(self, config: Any, backend: str):
        super().__init__()
        self.config, self.backend = config, backend

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple]:
        given = dict(zip(ORDER, args, strict=False))
        given.update((NAMES.get(name, name), value) for name, value in kwargs.items())
        q, k, v, i, f = (given[name].transpose(1, 2) for name in ORDER[:5])  # views [B, T, N, ...]
        state: tuple | None = None
        if given.get("c_initial") is not None:
            C, n, m = (given[name] for name in ORDER[5:])
            state = C, n, m.squeeze(-1)
            if torch.is_grad_enabled():
                state = tuple(s.clone() for s in state)  # because the model overwrites its states
        kernel = load_kernel("tfla", q.device.type, self.backend)
        options = {"eps": self.config.eps, "backend": self.backend}
        if q.shape[1] == 1:
            h, state = kernel.mlstm_step(*(x[:, 0] for x in (q, k, v, i, f)), state, **options)
            h = h[:, None]
        else:
            h, state = kernel.mlstm(q, k, v, i, f, state, **options)
        C, n, m = state
        return h.transpose(1, 2), (C, n, m[..., None])


def accelerate(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Makes every mLSTM in `model`, transformers' xLSTM, run on flashcell's kernel.

    Weights, state dict and configuration do not change, and outputs only by rounding. Training also
    works where transformers' own code does not: with the default configuration (whose cache it
    overwrites in place), in bf16, and in mode "train" over a number of tokens that is no multiple of
    chunk_size. The gradient also passes through the normaliser.

    Everything outside the mLSTM is transformers' own code (5.17 to 5.22), with its limits:

    - `attention_mask` is ignored: padding is read as text and changes the results of its row;
    - the cache is in the model's dtype: in bf16 the states are rounded after every call, so after
      every token that is decoded;
    - beam search, a cache from an earlier `generate` and `logits_to_keep` do not work;
    - head widths must be multiples of 8.

    `FlashMLSTMForCausalLM.from_pretrained` loads the same checkpoint and has none of these.

    backend: "auto", "cuda", "cpu" or "reference". Returns `model`. Raises ValueError for an unknown
    backend and for a model without an mLSTM that it knows. Calling it again changes the backend.
    """
    check_backend(backend)
    found: list[Any] = [
        layer
        for layer in (model.modules() if isinstance(model, nn.Module) else ())
        if type(getattr(layer, "mlstm_backend", None)).__name__ in (*THEIRS, TflaBackend.__name__)
    ]
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without an mLSTM, but must be transformers' xLSTM"
        )
    for layer in found:
        layer.mlstm_backend = TflaBackend(layer.mlstm_backend.config, backend)
    return model
