"""Checks the pages that users read first: short, narrow, and with Python that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Text = Callable[[str], "str | None"]
LINES = {"README.md": 150, "modeling/README.md": 200}
COLUMNS = 120
TABLES, ROWS = 1, 12  # README.md has at most so many
PROGRAMS = ("README.md", "modeling/README.md", "kernel_builds/README.md", "model_cards/families.md")


def violations(text: Text) -> Iterator[str]:
    for name, most in LINES.items():
        lines = (text(name) or "").splitlines()
        if len(lines) > most:
            yield f"{name}: {len(lines)} lines, but its budget is {most}"
        for number, line in enumerate(lines, 1):
            if len(line) > COLUMNS:
                yield f"{name}:{number}: {len(line)} columns, but a line has at most {COLUMNS}"
    tables = list(row_counts(text("README.md") or ""))
    if len(tables) > TABLES:
        yield f"README.md: {len(tables)} tables, but it has at most {TABLES}"
    for rows in tables:
        if rows > ROWS:
            yield f"README.md: a table of {rows} rows, but it has at most {ROWS}"


def row_counts(page: str) -> Iterator[int]:
    """Yields the number of rows of each table, without its two lines of head."""
    lines = 0
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            lines += 1
        elif lines:
            yield lines - 2
            lines = 0


def program(page: str) -> str:
    """Returns a page's Python as one program, whose errors name the page's lines."""
    lines, inside = [], False
    for line in page.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line in ("```python", "```py") or (inside and not fence)
    return "\n".join(lines)


def with_local_models(root: Path, code: str) -> str:
    """Replaces the Hub's names of the checkpoints in model_cards/ by their folders."""
    for card in root.glob("model_cards/*/config.json"):
        code = code.replace(f'"flashcell/{card.parent.name}"', repr(str(card.parent)))
    return code


def failures(root: Path, text: Text, names: Iterable[str]) -> Iterator[str]:
    """Runs each page's Python from the root, on the CPU, two pages at a time."""
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda name: failure(root, name, text(name) or ""), names):
            yield from found


def failure(root: Path, name: str, page: str) -> list[str]:
    code = with_local_models(root, program(page))
    if not code.strip():
        return [f"{name}: has no Python to run"]
    done = subprocess.run(
        (sys.executable, "-c", code),
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    return [f"{name}: its Python fails: {done.stderr.strip()[-500:]}"] if done.returncode else []
