"""Tests tfla's cost model: every polynomial against a scalar program that counts, and published
optima."""

import math

import pytest
import torch

from flashcell.kernels import tfla
from flashcell.kernels.tfla import cost_model as cost

CELLS = tfla.CELLS.values()
each_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)


class Number:
    """A float that counts the operations on it. A function of one argument counts one as well."""

    count = 0

    def __init__(self, value):
        self.value = value

    def binary(function):
        def method(self, other):
            Number.count += 1
            return Number(function(self.value, other.value))

        return method

    __add__ = binary(lambda a, b: a + b)
    __sub__ = binary(lambda a, b: a - b)
    __mul__ = binary(lambda a, b: a * b)
    __truediv__ = binary(lambda a, b: a / b)
    maximum = binary(max)

    def apply(self, function):
        Number.count += 1
        return Number(function(self.value))

    def exp(self):
        return self.apply(math.exp)

    def log(self):
        return self.apply(math.log)

    def sigmoid(self):
        return self.apply(lambda x: 1 / (1 + math.exp(-x)))

    def __neg__(self):
        return self.apply(lambda x: -x)

    def __abs__(self):
        return self.apply(abs)


def number(seed):
    return Number(math.sin(12.9898 * seed + 1.0))


def dot(a, b):
    total = Number(0.0)
    for x, y in zip(a, b, strict=True):
        total = total + x * y
    return total


def inputs(L, K, V):
    row = lambda t, width, salt: [number(t * 97 + j * 7 + salt) for j in range(width)]
    q, k, v = ([row(t, w, salt) for t in range(L)] for w, salt in ((K, 0.1), (K, 0.2), (V, 0.3)))
    return q, k, v, row(0, L, 0.4), row(0, L, 0.5)


def counted(program, *arguments):
    Number.count = 0
    result = program(*arguments)
    return Number.count, result


def empty(K, V):
    return [[Number(0.0)] * V for _ in range(K)], [Number(0.0)] * K, Number(0.0)


def recurrent(cell, q, k, v, i, f, state):
    """Follows the equations literally: k v^T is formed, then scaled, then added."""
    C, n, m = state
    K, V, outputs = len(q[0]), len(v[0]), []
    scale = Number(K**-0.5)
    for t in range(len(q)):
        if cell.exponential:
            carried = f[t].sigmoid().log() + m
            m = carried.maximum(i[t])
            keep, add = (carried - m).exp(), (i[t] - m).exp()
        else:
            keep, add = f[t].sigmoid(), i[t].sigmoid()
        C = [[keep * C[x][y] + add * (k[t][x] * v[t][y]) for y in range(V)] for x in range(K)]
        s = [scale * x for x in q[t]]
        h = [dot(s, [C[x][y] for x in range(K)]) for y in range(V)]
        if cell.normalized:
            n = [keep * n[x] + add * k[t][x] for x in range(K)]
            h = divide(cell, h, dot(s, n), m)
        outputs.append(h)
    return outputs, (C, n, m)


def divide(cell, h, denominator, m):
    floor = (-m).exp() if cell.exponential else Number(1.0)
    size = abs(denominator).maximum(floor) + Number(0.0)
    return [x / size for x in h]


def gate_scan(cell, i, f, m):
    """Returns b, m, u = b - m and w = li - b of every step: the decay of a pair is e^(u_t + w_j)."""
    b, sums, maxima, u, w = Number(0.0), [], [], [], []
    for t in range(len(f)):
        log_f = f[t].sigmoid().log()
        log_i = i[t] if cell.exponential else i[t].sigmoid().log()
        b = b + log_f
        if cell.exponential:
            m = (log_f + m).maximum(log_i)
        sums.append(b)
        maxima.append(m)
        u.append(b - m if cell.exponential else b)
        w.append(log_i - b)
    return sums, maxima, u, w


def inside(cell, q, k, v, u, w):
    """Returns numerators and denominators of a chunk by itself, with nothing above the diagonal."""
    K, V, rows = len(k[0]), len(v[0]), []
    scale = Number(K**-0.5)
    for t in range(len(q)):
        s = [scale * x for x in q[t]]
        h, total = [Number(0.0)] * V, Number(0.0)
        for j in range(t + 1):
            weight = dot(s, k[j]) * (u[t] + w[j]).exp()
            h = [h[y] + weight * v[j][y] for y in range(V)]
            if cell.normalized:
                total = total + weight
        rows.append((s, h, total))
    return rows


def parallel(cell, q, k, v, i, f, state):
    _, m, u, w = gate_scan(cell, i, f, state[2])
    rows = inside(cell, q, k, v, u, w)
    normalized = lambda t, h, total: divide(cell, h, total, m[t]) if cell.normalized else h
    return [normalized(t, h, total) for t, (_, h, total) in enumerate(rows)], None


def chunk(cell, q, k, v, i, f, state):
    C, n, before = state
    L, K, V = len(q), len(k[0]), len(v[0])
    b, m, u, w = gate_scan(cell, i, f, before)
    outputs = []
    for t, (s, h, total) in enumerate(inside(cell, q, k, v, u, w)):
        inflow = (u[t] + before).exp() if cell.exponential else u[t].exp()
        h = [h[y] + inflow * dot(s, [C[x][y] for x in range(K)]) for y in range(V)]
        if cell.normalized:
            h = divide(cell, h, total + inflow * dot(s, n), m[t])
        outputs.append(h)
    end = b[-1] - m[-1] if cell.exponential else b[-1]
    keep = (end + before).exp() if cell.exponential else end.exp()
    add = [(w[j] + end).exp() for j in range(L)]
    keys = [[add[j] * k[j][x] for x in range(K)] for j in range(L)]
    column = lambda rows, x: [row[x] for row in rows]
    C = [[keep * C[x][y] + dot(column(keys, x), column(v, y)) for y in range(V)] for x in range(K)]
    if cell.normalized:
        n = [keep * n[x] + total_of(column(keys, x)) for x in range(K)]
    return outputs, (C, n, m[-1])


def total_of(values):
    total = Number(0.0)
    for x in values:
        total = total + x
    return total


def values(nested):
    return [x.value for row in nested for x in row]


@each_cell
@pytest.mark.parametrize(("L", "K", "V"), [(1, 2, 3), (4, 3, 2), (7, 2, 5)])
def test_polynomials_are_what_a_program_counts(cell, L, K, V):
    given = inputs(L, K, V)
    exact = (L + 1) / (2 * L)  # the share of pairs on and below the diagonal
    steps, (want, last) = counted(recurrent, cell, *given, empty(K, V))
    whole, (rows, _) = counted(parallel, cell, *given, empty(K, V))
    part, (also, end) = counted(chunk, cell, *given, empty(K, V))
    assert steps == L * cost.step_flops(cell, K, V)
    assert whole == round(cost.parallel_flops(cell, K, V, exact).of(L))
    assert part == round(cost.chunk_flops(cell, K, V, exact).of(L))
    assert values(rows) == pytest.approx(values(want), abs=1e-12)
    assert values(also) == pytest.approx(values(want), abs=1e-12)
    assert values(end[0]) == pytest.approx(values(last[0]), abs=1e-12)


@each_cell
def test_leading_terms_are_the_published_ones(cell):
    """Tables 14 to 17: 6 K V a step; 2 F (K + V) L + 4 K V + 2 K V / L; 2 F (K + V) T^2."""
    K, V = 2**20, 2**21
    assert cost.step_flops(cell, K, V) == pytest.approx(6 * K * V, rel=1e-5)
    chunk = cost.chunk_flops(cell, K, V)
    assert chunk.quadratic == pytest.approx(K + V, rel=1e-5)
    assert chunk.linear == pytest.approx(4 * K * V, rel=1e-5)
    assert chunk.constant == pytest.approx(2 * K * V, rel=1e-5)
    assert cost.parallel_flops(cell, K, V).quadratic == chunk.quadratic


def test_published_optima():
    """Width 512, keys half of it, sigmoid gate: 18.4 by FLOP, and by time as in the paper's
    appendix G."""
    sigmoid = tfla.CELLS["sigmoid"]
    assert cost.best_chunk(sigmoid, 256, 512) == pytest.approx(18.4, rel=5e-3)
    for device, state, want in (
        ("H100", 4, 633), ("H100", 2, 448), ("A100", 4, 468), ("A100", 2, 331),
    ):  # fmt: skip
        intensity = cost.DEVICES[device].intensity
        best = cost.best_chunk(sigmoid, 256, 512, intensity, state)
        assert best == pytest.approx(want, rel=5e-3), (device, state)


@each_cell
def test_the_default_chunk_is_the_models(cell):
    """On CUDA the nearer of the two that run there; for narrow heads, elsewhere and in fp32 the
    measured one."""
    take = tfla.functional.default_chunk
    H200 = cost.DEVICES["H200"]
    for K, V, want in (
        (128, 128, 256),
        (128, 256, 256),
        (512, 512, 256),
    ):
        time = lambda L, K=K, V=V: cost.runtime(cell, K, V, 8192, L, H200, state=2)
        assert take(cell, K, V, torch.bfloat16, "cuda") == want
        assert time(want) <= min(time(128), time(256))
    assert [take(cell, D, D, torch.bfloat16, "cuda") for D in (32, 64)] == [64, 64]
    assert take(cell, 512, 512, torch.float32, "cuda") == 128
    assert [take(cell, 8, 8, dtype, "cpu") for dtype in (torch.float32, torch.float16)] == [64, 128]


@each_cell
def test_the_optimum_is_one(cell):
    """Neighbouring chunk sizes take longer, and the best one grows with width and intensity."""
    K, V, T = 128, 256, 8192
    for device in cost.DEVICES.values():
        best = cost.best_chunk(cell, K, V, device.intensity)
        time = lambda L, device=device: cost.runtime(cell, K, V, T, L, device)
        assert time(best) < min(time(best / 1.1), time(best * 1.1))
        assert cost.best_chunk(cell, 2 * K, 2 * V, device.intensity) > best
        assert time(best) > cost.runtime(cell, K, V, T, best, device, overlapped=True)
    intensities = [cost.DEVICES[name].intensity for name in ("V100", "A100", "H100")]
    sizes = [cost.best_chunk(cell, K, V, x) for x in intensities]
    assert sizes == sorted(sizes)
