"""Solves the tiling constraints of FlashRNN's paper (arXiv 2412.07752, appendices B, D and H.1).

A dimension of size S is cut S = E W B L: an elementary tile of a warp, W warps of a block, B blocks of
the grid, L turns of a loop. The product has a parallel dimension p (forward the gates, 4 D; backward
the states, D), an accumulated one a (forward D, backward 4 D) and the batch b. With bf16 operands,
fp32 sums, and C tiles of R cached in the registers of a warp:

  E_b E_p = 256, E_b, E_p in 8, 16, 32;  E_a = 16        the matrix instructions
  32 W_p W_a W_b <= 256                                  a fourth of 1024 threads, "usually faster"
  B_p B_a B_b <= SMs                                     a grid that synchronises is all there at once
  16 E_p C W_p W_a + accumulators + operands <= 65536 registers
  R - (what registers hold) + sums of all W_a B_a parts <= shared memory of all blocks
"""

from __future__ import annotations

from typing import NamedTuple

from ortools.sat.python import cp_model

from tiles.model import Builder

GATES, E_A, PADDING = 4, 16, 8
WARPS = 256 // 32
WORDS = 2 * 65536  # 16-bit values that the registers of an SM hold
FIRST, LAST, STEP = 1280, 2976, 32
BATCH = 16


class Gpu(NamedTuple):
    name: str
    sms: int
    shared_bytes: int  # most shared memory of a block, less 1 KB for the system
    published: tuple[int, ...]  # attainable head widths from 1280 on


AMPERE_86 = (1280, 1312, 1344, 1440, 1536, 1600, 1632, 1728, 1824)
GPUS = (
    Gpu("RTX 3090", 82, 100352, AMPERE_86),
    Gpu("A40", 84, 100352, AMPERE_86),
    Gpu("A100", 108, 165888, (*range(1280, 1825, 32), 1920, 2016, 2080, 2112, 2304)),
    Gpu("H100", 132, 227000,
        (*range(1280, 2113, 32), 2208, 2240, 2304, 2400, 2496, 2560, 2688)),
)  # fmt: skip


def attainable(width: int, sms: int, shared_bytes: int, forward: bool) -> bool:
    """Whether one LSTM head of `width` has a solution in one direction."""
    b = Builder()
    m = b.model
    parallel, accumulated = (GATES * width, width) if forward else (width, GATES * width)
    if accumulated % E_A:
        return False
    e_b, e_p = (b.choice(name, (8, 16, 32), None) for name in ("E_b", "E_p"))
    m.add_multiplication_equality(256, [e_b, e_p])

    def factor(most: int) -> cp_model.IntVar:
        return b.new(most, 1)

    w_p, w_a, w_b = factor(WARPS), factor(WARPS), factor(WARPS)
    b_p, b_a, b_b = factor(sms), factor(sms), factor(sms)
    l_p, l_a, l_b = factor(parallel // 8), factor(accumulated // E_A), factor(4)
    cached, turns = factor(accumulated // E_A), factor(BATCH)  # turns: runs of the time loop
    m.add_multiplication_equality(parallel, [e_p, w_p, b_p, l_p])
    m.add_multiplication_equality(accumulated // E_A, [w_a, b_a, l_a])
    m.add_multiplication_equality(BATCH, [e_b, w_b, b_b, l_b, turns])
    warps = b.product(w_p, w_a, w_b, most=WARPS)
    blocks = b.product(b_p, b_a, b_b, most=sms)
    m.add(cached <= l_a)
    held = b.product(E_A * e_p, cached, w_p, w_a)  # elements of R in one thread block
    m.add(held + b.product(2 * 256, l_b, warps) + b.product(E_A * e_b, warps) <= WORDS)
    matrix = GATES * width * width + parallel * PADDING
    rest = b.new(2 * 10**8)  # bytes of R that registers do not hold, for all blocks of a batch tile
    m.add(rest >= 2 * matrix * b_b + 64 - 2 * b.product(held, blocks, most=10**9))
    parts = b.product(w_a, b_a, most=WARPS * sms)
    batch = b.product(b_b, w_b, l_b, e_b, most=BATCH)
    sums = 4 * b.product(parts, batch, b.model.new_constant(parallel), most=10**9)
    padded = 4 * PADDING * b.product(parts, batch, b_p, most=10**9)
    m.add(rest + sums + padded <= shared_bytes * blocks)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(m)
    if status == cp_model.UNKNOWN:
        raise RuntimeError(f"no answer for a head of width {width}")
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def widths(sms: int, shared_bytes: int) -> list[int]:
    """Returns the widths, multiples of 32 from 1280 on, that have a solution in both directions."""
    limits = (sms, shared_bytes)
    candidates = range(FIRST, LAST + 1, STEP)
    return [w for w in candidates if all(attainable(w, *limits, f) for f in (True, False))]
