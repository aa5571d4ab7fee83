"""Draws the data of the synthetic tasks, tokens and targets, from a seed.

A generator takes (rng, count, lengths) and gives tokens and targets, int64 [count, T] with T the
longest length. A target is the correct token at that position, or IGNORED where there is none; what
stands after the last target of a row is 0 and cannot matter to a causal model.

Sources: keep-nth, parity, MQAR and k-hop are those of arXiv 2510.21450, appendix C.2 (ParaRNN); parity
with extrapolation is that of arXiv 2412.07752, appendix K (FlashRNN). Comments say what they leave open.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

IGNORED = -100
SPLITS = ("train", "validation", "test")
Rows = tuple[np.ndarray, np.ndarray]  # tokens, targets [count, T]
Kept = dict[tuple[int, int], np.ndarray]  # the order of rows in (seed, epoch)
Lengths = tuple[int, int]  # the shortest and the longest row
Generator = Callable[[np.random.Generator, int, Lengths], Rows]


def keep_nth(rng: np.random.Generator, count: int, lengths: Lengths, V: int, n: int) -> Rows:
    """Draws keep-nth: x uniform in [0, V); the target at the last position is x_n (n from 1)."""
    x, last = _uniform(rng, count, lengths, V)
    if lengths[0] < n:
        raise ValueError(f"the shortest length is {lengths[0]}, but must be at least n = {n}")
    return x, _at(last, x.shape, x[:, n - 1])


def parity(rng: np.random.Generator, count: int, lengths: Lengths) -> Rows:
    """Draws parity: x uniform bits; the target at the last position is sum(x) mod 2."""
    x, last = _uniform(rng, count, lengths, 2)
    return x, _at(last, x.shape, x.sum(1) % 2)


def mqar(
    rng: np.random.Generator, count: int, lengths: Lengths, V: int, pairs: int, noise_from: int
) -> Rows:
    """Draws MQAR: key-value pairs, then noise with each key once more, whose target is its value.

    ParaRNN has "key-value pairs, then noise interwoven with the keys" and kappa = 2, read as the number
    of pairs; the rest is Zoology's (arXiv 2312.04927): keys in [1, V/2) and values in [V/2, V), each
    once; position 2 pairs + 2 g holds a query, the gaps g drawn without replacement with
    P(g) ~ (g + 1)^(a - 1), a = 0.01. Noise is uniform in [noise_from, V): from V/2 on no key is
    left without an answer, which is how ParaRNN's "for each key its value" is read; Zoology's is from 0.
    """
    T, head, half = lengths[1], 2 * pairs, V // 2
    if lengths[0] != T or 2 * head > T:
        raise ValueError(f"lengths are {lengths}, but must be one length of at least {2 * head}")
    x = rng.integers(noise_from, V, (count, T))
    keys = 1 + _distinct(rng, count, pairs, np.zeros(half - 1))
    values = half + _distinct(rng, count, pairs, np.zeros(V - half))
    gaps = np.arange((T - head) // 2)
    at = head + 2 * _distinct(rng, count, pairs, (0.01 - 1) * np.log(gaps + 1))
    x[:, 0:head:2], x[:, 1:head:2] = keys, values
    np.put_along_axis(x, at, keys, 1)
    y = np.full((count, T), IGNORED)
    np.put_along_axis(y, at, values, 1)
    return x, y


def k_hop(rng: np.random.Generator, count: int, lengths: Lengths, V: int, k: int) -> Rows:
    """Draws k-hop: the target at i is the token after the k-th last occurrence of x_i before i.

    x is uniform in [0, V).

    ParaRNN: "hop back and report the value following its previous occurrence; keep on hopping back k
    times". Where there is no such occurrence nothing is scored: the published parameter counts leave
    no room for a token that says so.
    """
    x, last = _uniform(rng, count, lengths, V)
    first, columns = V * np.arange(count), np.ascontiguousarray(x.T)
    after = np.full(
        (k, count * V), IGNORED
    )  # the tokens after the last k occurrences of a token, latest first
    y = np.empty_like(columns)
    for i in range(len(columns)):
        if i:
            before = first + columns[i - 1]
            for n in range(k - 1, 0, -1):
                after[n, before] = after[n - 1, before]
            after[0, before] = columns[i]
        y[i] = after[k - 1, first + columns[i]]
    return x, np.where(np.arange(x.shape[1]) <= last[:, None], y.T, IGNORED)


def find_k(rng: np.random.Generator, count: int, lengths: Lengths, V: int, k: int) -> Rows:
    """Draws k-hop as in arXiv 2402.09268, the other reading of ParaRNN: a hop goes from position i to
    the one right after the last occurrence of x_i before i, and on from there; the answer is the
    token where k hops lead. With k = 1 both are one."""
    x, last = _uniform(rng, count, lengths, V)
    rows, T = np.arange(count), x.shape[1]
    seen, hop = np.full((count, V), -1), np.empty_like(x)
    for i in range(T):
        before = seen[rows, x[:, i]]
        hop[:, i] = np.where(before >= 0, before + 1, -1)
        seen[rows, x[:, i]] = i
    at = np.broadcast_to(np.arange(T), x.shape)
    for _ in range(k):
        at = np.where(at >= 0, np.take_along_axis(hop, at.clip(0), 1), -1)
    at = np.where(np.arange(T) <= last[:, None], at, -1)
    return x, np.where(at >= 0, np.take_along_axis(x, at.clip(0), 1), IGNORED)


def _uniform(
    rng: np.random.Generator, count: int, lengths: Lengths, V: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws tokens [count, T], 0 after each row's end, and each row's last position [count]."""
    last = rng.integers(lengths[0], lengths[1] + 1, count) - 1
    x = rng.integers(0, V, (count, lengths[1]))
    return np.where(np.arange(lengths[1]) <= last[:, None], x, 0), last


def _at(last: np.ndarray, shape: tuple[int, ...], answer: np.ndarray) -> np.ndarray:
    y = np.full(shape, IGNORED)
    y[np.arange(len(last)), last] = answer
    return y


def _distinct(
    rng: np.random.Generator, count: int, amount: int, log_weight: np.ndarray
) -> np.ndarray:
    """Draws [count, amount] different indices per row, one by one in proportion to exp(log_weight).

    They are the largest of log_weight + Gumbel noise."""
    noisy = log_weight + rng.gumbel(size=(count, len(log_weight)))
    return np.argpartition(-noisy, range(amount), 1)[:, :amount]


@dataclass(frozen=True)
class Task:
    """A task, the model that ParaRNN tests on it, and its training settings; one optimiser step per
    batch."""

    generate: Generator
    vocabulary: int
    lengths: Lengths = (100, 100)
    test_lengths: Lengths = (100, 100)
    training_rows: int | None = 10_000  # drawn once; None for new rows at every step
    test_rows: int = 100_000
    scored: int | None = None  # positions of every row; None where rows differ
    full_block: bool = True  # ParaRNN's whole mixer, or its recurrent cell alone
    norms: bool = True  # around the mixer
    positions: bool = False  # sinusoids are added to the embeddings
    memory: int | None = (
        None  # steps that FlashGRU's and FlashLSTM's gates hold at the start, at most
    )
    max_recurrent: float | None = 0.9  # bound of FlashGRU's and FlashLSTM's a and p
    steps: int = 1_875_000  # 3000 epochs of 625 batches
    batch: int = 16
    learning_rates: tuple[float, ...] = (5e-4,)
    warmup: float = 0.0  # share of all steps; linear
    last_rate: float = 0.0  # share of the learning rate at which half a cosine ends
    weight_decay: float = 1e-6

    def rows(self, split: str, seed: int, part: int, count: int) -> Rows:
        """Draws the rows of (split, seed, part); they depend on nothing else."""
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, but must be one of {', '.join(SPLITS)}")
        rng = np.random.default_rng([SPLITS.index(split), seed, part])
        return self.generate(rng, count, self.lengths if split == "train" else self.test_lengths)

    def training_batch(self, seed: int, step: int, kept: Kept) -> Rows:
        """Returns the batch of step number `step`. `kept` caches the row order of a seed's epoch.

        Without a training set, every step draws new rows."""
        if self.training_rows is None:
            return self.rows("train", seed, step, self.batch)
        chosen = self.training_order(seed, step, kept)
        tokens, targets = (part[chosen] for part in self.training_set(seed))
        return tokens, targets

    def training_order(self, seed: int, step: int, kept: Kept) -> np.ndarray:
        """Returns the row indices, in the seed's training set, of step number `step`."""
        assert self.training_rows is not None
        epoch, index = divmod(step, self.training_rows // self.batch)
        if (seed, epoch) not in kept:
            order = np.random.default_rng([seed, epoch]).permutation(self.training_rows)
            kept.pop((seed, epoch - 1), None)
            kept[seed, epoch] = order
        return kept[seed, epoch][index * self.batch : (index + 1) * self.batch]

    def training_set(self, seed: int) -> Rows:
        """Returns a seed's training set: int16 tokens and targets [training_rows, T]."""
        assert self.training_rows is not None
        return _training_set(self.generate, self.lengths, self.training_rows, seed)


@lru_cache(maxsize=6)
def _training_set(generate: Generator, lengths: Lengths, count: int, seed: int) -> Rows:
    """Draws a training set in parallel, in parts of MANY rows, each from its own generator."""

    def draw(part: int) -> Rows:
        rng = np.random.default_rng([SPLITS.index("train"), seed, part])
        tokens, targets = generate(rng, min(MANY, count - part * MANY), lengths)
        return tokens.astype(np.int16), targets.astype(np.int16)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(draw, range(-(-count // MANY))))
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


MANY = 200_000

TASKS = {
    # FlashRNN trains on lengths up to 40 and tests on 40 to 256, each uniform. Its model is not
    # published: here it is ParaRNN's single layer. It names neither weight decay nor clipping of
    # gradients: there is none.
    "parity-extrapolation": Task(
        parity, 2, (1, 40), (40, 256), None, 8192, 1, full_block=False, max_recurrent=None,
        steps=100_000, batch=256, learning_rates=(1e-2, 1e-3, 1e-4), warmup=0.1, last_rate=0.1,
        weight_decay=0.0,
    ),
    # ParaRNN's parameter counts have no norms for keep-nth, and have them for parity. Three things are
    # ours: gates that hold from the start, without which a gradient does not come back over 95 steps; rows of parity that
    # are shorter than 100, at which learning begins; and MANY rows, where 10,000 were learnt by heart.
    "keep-5th": Task(
        partial(keep_nth, V=128, n=5), 128, training_rows=MANY, scored=1, full_block=False,
        norms=False, positions=True, memory=100,
    ),
    "parity": Task(parity, 2, (1, 100), scored=1, full_block=False, max_recurrent=None),
    "mqar": Task(
        partial(mqar, V=128, pairs=2, noise_from=64), 128, training_rows=5 * MANY, scored=2
    ),
    "mqar-zoology": Task(
        partial(mqar, V=128, pairs=2, noise_from=0), 128, training_rows=MANY, scored=2
    ),
    "1-hop": Task(partial(k_hop, V=10, k=1), 10),
    "2-hop": Task(partial(k_hop, V=5, k=2), 5, training_rows=MANY),
    "2-find": Task(partial(find_k, V=5, k=2), 5, training_rows=MANY),
}  # fmt: skip
