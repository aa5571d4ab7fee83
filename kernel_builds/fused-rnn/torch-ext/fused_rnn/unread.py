"""Says which operands of the op for all layers its backward does not read."""

from functools import lru_cache
from typing import Tuple


@lru_cache(maxsize=1024)
def unread_places(
    needs: Tuple[bool, ...],
    K: int,
    has_bias: bool,
    projects: bool,
    directions: int,
    has_steps: bool,
) -> Tuple[int, ...]:
    """Returns which of x and the weights the backward does not read, by their places: the gradient
    of an operand depends on its weight. torch.nn's own code does not save these operands either:
    like there, they may be changed in place."""
    x, state, weights = needs[3], needs[4 : 4 + K], needs[4 + K :]
    h = K > 0 and state[0]
    each = (4 if has_bias else 2) + projects
    found = [False] * len(weights)
    upstream = x  # whether the input of a layer needs a gradient
    for layer in range(0, len(weights), each * directions):
        heads = range(layer, layer + each * directions, each)
        moves = [upstream or any(state) or any(weights[at : at + each]) for at in heads]
        for at, moved in zip(heads, moves):
            found[at], found[at + 1] = upstream, h or (has_steps and moved)
            if projects:
                found[at + each - 1] = moved
        upstream = any(moves)
    reads = any(weights[: each * directions : each]), *found
    return tuple(place for place, read in enumerate(reads) if not read)
