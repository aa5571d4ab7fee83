"""Runs flash_gru and flash_lstm parallel in time in torch, for method="multiple_shooting" and
"newton" with backend="reference".

`solve` computes all points at once ("newton") or the ends of chunks ("multiple_shooting"), with
its iteration, residual check and sequential finish.
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from .cells import Cell
from .formulas import in_forward_mode
from .solve import solve

# Steps between two unknowns of "multiple_shooting"; contractive cells then need one or two
# iterations.
CHUNK = 64


def sequence(
    cell: Cell,
    x: Tensor,  # [B, T, G, D]
    weight: Tensor,  # [P, D] in the state dtype
    state: Optional[Tensor],  # [K, B, D] in the state dtype
    reset: Optional[Tensor],  # [B, T]
    hold: Optional[Tensor],  # [B, T]
    method: str,  # "newton" or "multiple_shooting"
    tol: Optional[float],  # None or negative for solve's default, and so is max_iters
    max_iters: Optional[int],
) -> Tuple[Tensor, Tensor, List[Tensor], Tensor]:
    """Does what reference.sequence does with `return_states`, and reports [3] the number of
    iterations, the largest residual and the number of steps that were finished sequentially."""
    if in_forward_mode():
        raise NotImplementedError(
            f"method is {method!r}, but must be 'auto' or 'sequential' for derivatives in forward mode"
        )
    B, T, _, D = x.shape
    nothing = torch.zeros(B, T, dtype=torch.bool, device=x.device)
    reset = nothing if reset is None else reset
    held = nothing if hold is None else hold
    if state is None:
        state = weight.new_zeros(cell.states, B, D)

    def step(s: Tensor, given: Tuple[Tensor, Tensor, Tensor], w: Tensor) -> Tensor:  # s [N, D, K]
        x, reset, held = given
        s = torch.where(reset[:, None, None], 0.0, s)
        after = torch.stack(cell.step(x.unbind(1), w.unbind(), s.unbind(-1)), -1)
        return torch.where(held[:, None, None], s, after)

    h0 = state.movedim(0, -1)
    # h' and c' lie between the old state and a tanh
    limit = h0.detach().abs().clamp(min=1).unsqueeze(1)
    states, last, info = solve(
        step, (x.to(weight.dtype), reset, held), h0, (weight,),
        structure="diagonal" if cell.states == 1 else "block",
        chunk=1 if method == "newton" else CHUNK,
        tol=None if tol is None or tol < 0 else tol,
        max_iters=None if max_iters is None or max_iters < 0 else max_iters,
        bounds=(-limit, limit), mode="torch", return_info=True,
    )  # fmt: skip
    h, *others = states.masked_fill(held[..., None, None], 0.0).unbind(-1)
    report = [float(info.iterations), info.residual, float(info.finished)]
    return h.to(x.dtype), last.movedim(-1, 0), others, torch.tensor(report, device=x.device)
