"""Chooses the part of a large family of tests that runs in the fast tier; the rest becomes `slow`.

    pytestmark = pytest.mark.thin          every value of every parameter at least once
    @pytest.mark.thin(pairs=True)          every pair of values of two parameters at least once

With pytest's option --one-of-each one test of every family runs, marked or not.

The mark is for tests whose parameters are independent of each other: a fault shows for one value, or
for two together, whatever the others are. The choice depends on nothing but the parameters.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

import pytest

Values = dict[str, tuple]  # parameter, or several that one mark gives -> which value it has


def mark_rest_slow(items: Iterable[pytest.Item], one_of_each: bool = False) -> None:
    families = defaultdict(list)
    for item in items:
        thin = one_of_each or item.get_closest_marker("thin")
        if thin and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            families[item.nodeid.split("[")[0]].append(item)
    for family in families.values():
        if one_of_each:
            kept = {0}
        else:
            pairs = family[0].get_closest_marker("thin").kwargs.get("pairs", False)
            kept = cover([values_of(item) for item in family], 2 if pairs else 1)
        for k, item in enumerate(family):
            if k not in kept:
                item.add_marker(pytest.mark.slow)


def values_of(item: pytest.Item) -> Values:
    values = {name: id(value) for name, value in item.callspec.params.items()}
    found = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names = [name.strip() for name in names]
        found[",".join(names)] = tuple(values.pop(name) for name in names)
    return found | {name: (value,) for name, value in values.items()}  # of fixtures


def cover(rows: list[Values], strength: int) -> set[int]:
    """Returns the places of some rows that have, together, every combination of `strength` values
    that occurs in all of them: each in turn the one that adds the most."""
    wanted = [set(combinations(sorted(row.items()), min(strength, len(row)))) for row in rows]
    missing, kept = set[tuple]().union(*wanted), set[int]()
    # Among equals, the one whose values were taken least often, so that all values get their turn.
    taken: dict[tuple, int] = defaultdict(int)
    while missing:
        best = max(
            range(len(rows)),
            key=lambda k: (len(wanted[k] & missing), -sum(taken[v] for v in rows[k].items()), -k),
        )
        kept.add(best)
        missing -= wanted[best]
        for value in rows[best].items():
            taken[value] += 1
    return kept
