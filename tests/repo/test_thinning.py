"""Tests that the fast part of a large family of tests has every value, or every pair of values."""

import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from tooling.thinning import cover

ROOT = Path(__file__).resolve().parents[2]
FAMILY = """
import pytest

@pytest.fixture(params=["exp", "sigmoid"])
def cell(request):
    return request.param

@pytest.mark.thin
@pytest.mark.parametrize("dtype", ["a", "b", "c"])
@pytest.mark.parametrize(("size", "gate"), [(1, [7]), (2, [7]), (2, [8])])
def test_each(cell, size, gate, dtype):
    pass

@pytest.mark.thin(pairs=True)
@pytest.mark.parametrize("dtype", ["a", "b", pytest.param("c", marks=pytest.mark.slow)])
def test_pairs(cell, dtype):
    pass

@pytest.mark.parametrize("x", range(4))
def test_whole(x):
    pass
"""


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(5, 22, 4), (3, 27, 3), (2, 2, 2, 3), (4,)], ids=str)
def test_every_combination_of_values_stays(sizes, strength):
    values = product(*([(k,) for k in range(size)] for size in sizes))
    rows = [dict(zip("abcd", row, strict=False)) for row in values]
    found = lambda some: {
        group for row in some for group in combinations(row.items(), min(strength, len(sizes)))
    }
    kept = cover(rows, strength)
    assert found(rows[k] for k in kept) == found(rows)
    largest = sorted(sizes)[-strength:]
    least = 1
    for size in largest:
        least *= size
    assert least <= len(kept) <= 1.34 * least


def test_values_that_do_not_occur_together_are_not_wanted():
    rows = [{"a": (0,), "b": (0,)}, {"a": (1,), "b": (1,)}, {"a": (0,), "b": (0,)}]
    assert cover(rows, 2) == {0, 1}


def fast_tests(folder: Path, one_of_each: bool) -> list[str]:
    (folder / "test_family.py").write_text(FAMILY)
    (folder / "conftest.py").write_text(
        "import pytest\n"
        "from tooling import thinning\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        f"    thinning.mark_rest_slow(items, {one_of_each})\n"
    )
    options = ["-o", "pythonpath=", "-c", "/dev/null", "--rootdir", folder, "--co", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", "not slow", folder],
        capture_output=True, text=True, cwd=ROOT / "scripts",
    )  # fmt: skip
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert names, done.stdout
    return names


def test_one_of_each_family(tmp_path):
    names = [name.partition("[")[0] for name in fast_tests(tmp_path, True)]
    assert names == ["test_each", "test_pairs", "test_whole"]


def test_the_rest_is_slow(tmp_path):
    names = fast_tests(tmp_path, False)
    assert sum(name.startswith("test_each") for name in names) == 3, names
    for values in ("exp", "sigmoid", "1-gate0", "2-gate1", "2-gate2", "-a]", "-b]", "-c]"):
        assert any("test_each" in name and values in name for name in names), values
    pairs = {name for name in names if name.startswith("test_pairs")}
    assert pairs == {f"test_pairs[{c}-{d}]" for c in ("exp", "sigmoid") for d in "ab"}
    assert sum(name.startswith("test_whole") for name in names) == 4
