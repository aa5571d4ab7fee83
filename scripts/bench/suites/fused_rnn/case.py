"""The description of one benchmark case of fused_rnn, for any device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

TORCH_DTYPES = {"tf32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One case: the op and its shape, the peers, and the targets."""

    name: str
    cell: str
    batch: int
    steps: int
    heads: int
    width: int
    # "op": x comes projected; "linear": F.linear before the op; "module": flashcell's modules;
    # "step": one decoding step, x projected; "linear-step": the projection inside
    form: str = "op"
    dtype: str = "bfloat16"  # or float16, float32, float64, tf32: fp32 with tf32 products
    # CUDA: of peers.PEERS. CPU: "torch", torch.nn with one module per head; "reference", our loop
    peers: tuple[str, ...] = ()
    limits: tuple[float | None, float | None] = (None, None)  # ms: forward or step, train
    required: float | None = None  # least speed, in units of the peer's
    save: str = "gates"
    layers: int = 1
    directions: int = 1
    packed: bool = False  # lengths from T/2 to T

    def limit(self, which: str) -> float | None:
        if which == "inference":
            return None
        return self.limits[which == "train"]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES.get(self.dtype) or getattr(torch, self.dtype)

    @property
    def inputs(self) -> int:  # I: width of x, where x is not projected
        return self.heads * self.width

    @property
    def is_step(self) -> bool:
        return self.form.endswith("step")

    def short(self, steps: int, batch: int | None = None) -> Case:
        return replace(
            self, steps=min(steps, self.steps), batch=min(batch or self.batch, self.batch)
        )
