"""Tests that scripts/check_repo passes for this tree, and finds what is planted in a copy of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = "kernel_builds/fused-rnn/csrc/cells/lstm.h"
CELLS = "kernel_builds/fused-rnn/torch-ext/fused_rnn/cells.py"
GUIDE = "kernel_builds/fused-rnn/README.md"
FUNCTIONS = "kernel_builds/fused-rnn/torch-ext/fused_rnn/functional.py"


def check(root: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", root / "scripts/check_repo", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the files that git has or would add; small enough to read in a second."""
    root = tmp_path_factory.mktemp("tree")
    listing = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        source, copy = ROOT / name, root / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
            copy.chmod(source.stat().st_mode)
    subprocess.run(["git", "-C", root, "init", "-q"], check=True)
    return root


def test_the_tree_holds(tree):
    done = check(tree, "--fast")
    assert done.returncode == 0, done.stderr


def replaced(old: str, new: str):
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def appended(new: str):
    return lambda text: text + new


def created(new: str):
    return lambda text: new


PLANTED = {
    "source that is not there": (
        "kernel_builds/fused-rnn/build.toml",
        replaced('"csrc/ops.cpp"', '"csrc/ops.cpp", "csrc/gone.cpp"'),
        "sources: kernel_builds/fused-rnn/csrc/gone.cpp: listed",
    ),
    "source that nothing reaches": (
        "kernel_builds/fused-rnn/csrc/cpu/lost.h",
        created("#pragma once\n"),
        "sources: kernel_builds/fused-rnn/csrc/cpu/lost.h: build.toml does not list it",
    ),
    "cell that no engine compiles in CI": (
        "kernel_builds/builder/subset.py",
        replaced('"cluster": ("gru", "lstm", "slstm")', '"cluster": ("gru", "slstm")'),
        "sources: kernel_builds/fused-rnn: subset.py compiles lstm with no engine",
    ),
    "version of the package": (
        "pyproject.toml",
        replaced('version = "0.1.0"', 'version = "0.1.1"'),
        "versions: CHANGELOG.md: version 0.1.0, but pyproject.toml says 0.1.1",
    ),
    "version in the citation": (
        "CITATION.cff",
        replaced("version: 0.1.0", "version: 0.2.0"),
        "versions: CITATION.cff: version 0.2.0",
    ),
    "version of a kernel": (
        "kernel_builds/fused-rnn/build.toml",
        replaced("version = 1", "version = 2"),
        "versions: modeling/hub/kernels_lock.py: fused-rnn is flashcell/fused-rnn version 1",
    ),
    "version in the index of kernels": (
        "kernel_builds/README.md",
        replaced("`flashcell/fused-rnn` | 1 |", "`flashcell/fused-rnn` | 2 |"),
        "versions: kernel_builds/README.md: has no line with `flashcell/fused-rnn` | 1 |",
    ),
    "kernel API without a changelog": (
        "CHANGELOG.md",
        replaced("Kernel API v1", "Kernel interface"),
        "versions: CHANGELOG.md: has no 'Kernel API v1'",
    ),
    "long cell": (HEADER, appended("// more\n" * 60), f"sizes: {HEADER}: "),
    "long reference": (
        CELLS,
        appended("\n\ndef lengthy():\n" + "    pass\n" * 30),
        f"sizes: {CELLS}: lengthy has 31 lines",
    ),
    "long module": (FUNCTIONS, appended("# more\n" * 200), f"sizes: {FUNCTIONS}: "),
    "long README": ("README.md", appended("more\n" * 151), "guide_pages: README.md: "),
    "long guide of the models": (
        "modeling/README.md",
        appended("more\n" * 201),
        "guide_pages: modeling/README.md: ",
    ),
    "wide README": ("README.md", appended("a" * 121), "121 columns, but a line has at most 120"),
    "wide guide of the models": (
        "modeling/README.md",
        appended("a" * 121),
        "121 columns, but a line has at most",
    ),
    "second table": ("README.md", appended("\n|a|\n|-|\n|b|\n"), "2 tables, but it has at most 1"),
    "long table": (
        "README.md",
        replaced("<!-- speedups:end -->", "|x|\n" * 3 + "<!-- speedups:end -->"),
        "guide_pages: README.md: a table of 13 rows, but it has at most 12",
    ),
    "path of a machine": (
        "CONTRIBUTING.md",
        appended("see " + "/".join(["", "home", "ada", "notes"]) + "\n"),
        "a path of somebody's machine",
    ),
    "registry host": (
        "constraints.txt",
        appended("# https://" + "pypi" + ".example.org/simple\n"),
        "a package registry's host",
    ),
    "swallowed failure": (
        "tests/repo/test_planted.py",
        created("try:\n    1 / 0\nexcept Exception:\n    " + "pass\n"),
        "banned: tests/repo/test_planted.py:3: ",
    ),
    "test that is run again": (
        "tests/repo/test_planted.py",
        created("import pytest\n\n@pytest.mark.flaky" + "(max=3)\ndef test_it(): ...\n"),
        "banned: tests/repo/test_planted.py:3: ",
    ),
    "flag that makes all functions inexact": (
        "kernel_builds/fused-rnn/build.toml",
        appended("# --use_fast" + "_math\n"),
        "accuracy is chosen per function, never by a flag",
    ),
    "large file": ("model_cards/large.bin", created("0" * 12_000_001), "sizes: model_cards/large"),
    "verb without a docstring": (
        "scripts/planted",
        created("#!/usr/bin/env python3\nprint(1)\n"),
        "docstrings: scripts/planted: has no docstring",
    ),
    "public function without a docstring": (
        FUNCTIONS,
        replaced('    """One step of `lstm`: x [B, 4, N, D] -> h [B, N, D], (h, c)."""\n', ""),
        f"docstrings: {FUNCTIONS}: lstm_step is public, but has no docstring",
    ),
    "module among the commands": (
        "scripts/planted.py",
        created("import os\n"),
        "rules: scripts/planted.py: is no command, but must lie in a folder",
    ),
    "long guide": (
        GUIDE,
        appended("more\n" * 200),
        f"guide_pages: {GUIDE}: ",
    ),
    "wide guide": (
        GUIDE,
        appended("w" * 121 + "\n"),
        "121 columns, but a guide has at most 120",
    ),
    "section that is not in the guide": (
        HEADER,
        appended('// The slopes: README.md,\n// "Slopes of nothing".\n'),
        "kernel_builds/fused-rnn/README.md has no section 'Slopes of nothing'",
    ),
    "guide without a section": (
        HEADER,
        appended("// The slopes: README, Slopes.\n"),
        'README: must be README.md, "a section"',
    ),
    "broken link": (
        "README.md",
        appended("[map](docs/nowhere.md)\n"),
        "links: README.md: links to docs/nowhere.md",
    ),
    "script that is not there": (
        "CONTRIBUTING.md",
        appended("run scripts/fly now\n"),
        "links: CONTRIBUTING.md: names scripts/fly",
    ),
    "number typed by hand": (
        "README.md",
        replaced("| 12.60 |", "| 99.60 |"),
        "tables: scripts/results: error: README.md is not what scripts/results says",
    ),
    "number drawn by hand": (
        "scripts/results/nvidia-h200-speedup.svg",
        replaced("12.60x", "99.60x"),
        "error: scripts/results/nvidia-h200-speedup.svg is not what scripts/results says",
    ),
}

# Each is in a check that ends at the first of these and another.
ALONE = ("version in the index of kernels", "number drawn by hand")


@pytest.fixture(scope="module")
def said(tree) -> dict[str, str]:
    """What check_repo says with each of PLANTED, those of different files planted at a time."""
    together, said = list[dict[str, str]](), {}
    for name, (file, *_) in PLANTED.items():
        if name not in ALONE:
            free = [r for r in together if file not in r.values()]
            together += [] if free else [{}]
            (free or together)[-1][name] = file
    for planted in [*together, *({name: PLANTED[name][0]} for name in ALONE)]:
        paths = [tree / file for file in planted.values()]
        before = [path.read_text() if path.exists() else None for path in paths]
        for name, path, text in zip(planted, paths, before, strict=True):
            path.write_text(PLANTED[name][1](text or ""))
        done = check(tree, "--fast")
        for path, text in zip(paths, before, strict=True):
            path.unlink() if text is None else path.write_text(text)
        assert done.returncode == 1
        said |= dict.fromkeys(planted, done.stderr)
    return said


@pytest.mark.parametrize("name", PLANTED)
def test_it_finds(said, name):
    assert PLANTED[name][2] in said[name]


def test_it_finds_a_command_that_cannot_be_run(tree):
    verb = tree / "scripts/train"
    before = verb.stat().st_mode
    verb.chmod(0o644)
    try:
        done = check(tree, "--fast")
    finally:
        verb.chmod(before)
    assert done.returncode == 1
    assert "docstrings: scripts/train: is not executable" in done.stderr


@pytest.mark.slow
def test_it_runs_the_pages(tree):
    """Finds a block that fails, on each page, and a command whose --help does."""
    names = ("README.md", "modeling/README.md", "kernel_builds/README.md", GUIDE)
    names += ("model_cards/families.md", "model_cards/flash-rnn-python-5m/README.md")
    pages = [tree / name for name in names]
    before, verb = [page.read_text() for page in pages], tree / "scripts/planted"
    for page, content in zip(pages, before, strict=True):
        page.write_text(f"```python\nraise SystemExit('planted')\n```\n{content}")
    verb.write_text('#!/usr/bin/env python3\n"""Fails."""\nraise SystemExit(3)\n')
    verb.chmod(0o755)
    try:
        done = check(tree)
    finally:
        for page, content in zip(pages, before, strict=True):
            page.write_text(content)
        verb.unlink()
    assert done.returncode == 1
    assert "help_texts: scripts/planted: --help exits 3" in done.stderr
    for name in names:
        assert f"programs: {name}: its Python fails: planted" in done.stderr
