"""Estimates the cost of mLSTM's forward pass in its three forms, and the chunk size that costs
least.

Per head. Every scalar operation counts one (arXiv 2503.14376, appendix F, with all factors 1), and a
count is a polynomial of the chunk size L; the tests derive each by running a scalar program and
counting. `causal` is the share of the L x L products that is computed: 0.5 for none above the
diagonal, more where tiles cross it. K width of a key, V of a value.
"""

import math
from typing import Dict, NamedTuple

from .cells import Cell


class Device(NamedTuple):
    flops: float  # bf16 products on tensor cores per second, without sparsity
    bandwidth: float  # bytes per second

    @property
    def intensity(self) -> float:
        return self.flops / self.bandwidth


DEVICES: Dict[str, Device] = {
    "V100": Device(120e12, 0.9e12),
    "A100": Device(312e12, 1.935e12),
    "H100": Device(989e12, 3.35e12),
    "H200": Device(989e12, 4.8e12),
    "B200": Device(2250e12, 7.7e12),
}


class Count(NamedTuple):
    """The count for one chunk of L steps: quadratic L^2 + linear L + constant."""

    quadratic: float
    linear: float
    constant: float

    def of(self, L: float) -> float:
        return (self.quadratic * L + self.linear) * L + self.constant

    def of_sequence(self, T: float, L: float) -> float:
        """Returns the count for T steps in chunks of L."""
        return T / L * self.of(L)


def step_flops(cell: Cell, K: int, V: int) -> int:
    """Counts the operations of the recurrent form for one step."""
    gates = 8 if cell.exponential else 2
    state, output = 4 * K * V, 2 * K * V + K
    normalizer = 5 * K + V + 3 + 2 * cell.exponential if cell.normalized else 0
    return gates + state + output + normalizer


def pair_flops(cell: Cell, K: int, V: int) -> int:
    """Counts the operations for a query and a key of one chunk: two products, and the decay between
    them."""
    return 2 * (K + V) + 3 + cell.normalized


def chunk_flops(cell: Cell, K: int, V: int, causal: float = 0.5) -> Count:
    """Counts the operations of the chunkwise form for one chunk: inside it, from the state before,
    and to the state after."""
    gates = 7 if cell.exponential else 6
    inflow, outflow = 2 * K * V + 2 * V + K, 2 * K * V + K
    decays = 4 if cell.exponential else 3
    normalizer = 3 * K + V + 5 + 2 * cell.exponential if cell.normalized else 0
    linear = gates + inflow + outflow + decays + normalizer
    constant = 2 * K * V + (2 * K if cell.normalized else 0) + (3 if cell.exponential else 1)
    return Count(causal * pair_flops(cell, K, V), linear, constant)


def parallel_flops(cell: Cell, K: int, V: int, causal: float = 0.5) -> Count:
    """Counts the operations of the parallel form: one chunk of all T steps, without a state before
    or after it."""
    gates = 7 if cell.exponential else 6
    normalizer = V + 3 + 2 * cell.exponential if cell.normalized else 0
    return Count(causal * pair_flops(cell, K, V), gates + K + normalizer, 0)


def state_size(cell: Cell, K: int, V: int) -> int:
    return K * V + (K if cell.normalized else 0) + (1 if cell.exponential else 0)


def step_bytes(cell: Cell, K: int, V: int, io: int = 2, state: int = 4) -> int:
    """Counts the bytes of one step of the recurrent form, which reads and writes the state."""
    return io * (2 * K + 2 * V + 2) + 2 * state * state_size(cell, K, V)


def chunk_bytes(cell: Cell, K: int, V: int, io: int = 2, state: int = 4) -> Count:
    """Counts the bytes of one chunk if states are stored between two passes, the first of which
    reads only k and v."""
    rows = io * ((K + V + 2) + (2 * K + V + 2) + V)
    return Count(0, rows, 2 * state * state_size(cell, K, V))


def best_chunk(
    cell: Cell, K: int, V: int, intensity: float = 0.0, state: int = 4, causal: float = 0.5
) -> float:
    """Returns the L that takes least time on a device of `intensity` FLOP per byte; least FLOP at
    intensity 0.

    A step costs quadratic L + linear + constant / L, so L = sqrt(constant / quadratic), where each
    byte of a state counts as `intensity` operations (equations 111 and 121).
    """
    flops = chunk_flops(cell, K, V, causal)
    moved = chunk_bytes(cell, K, V, state=state).constant
    return math.sqrt((flops.constant + intensity * moved) / flops.quadratic)


def runtime(
    cell: Cell, K: int, V: int, T: int, L: int, device: Device, heads: int = 1, *,
    io: int = 2, state: int = 4, causal: float = 0.5, overlapped: bool = False,
) -> float:  # fmt: skip
    """Returns the seconds of one forward pass over `heads` sequences of T steps: the sum of the
    times for products and for memory or, if overlapped, the longer of the two."""
    products = heads * chunk_flops(cell, K, V, causal).of_sequence(T, L) / device.flops
    moved = heads * chunk_bytes(cell, K, V, io, state).of_sequence(T, L) / device.bandwidth
    return max(products, moved) if overlapped else products + moved
