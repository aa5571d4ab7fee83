"""Writes the notes of a release, in the form of GitHub's, from CHANGELOG.md and what was made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

BREAKING = "BREAKING"


def section(changelog: str, version: str) -> tuple[str, str]:
    """Returns what stands beside the version in its heading, a date or "unreleased", and its text."""
    heading = re.compile(rf"^## \[?{re.escape(version)}\]?(?: - (.*))?$", re.MULTILINE)
    found = heading.search(changelog)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no heading '## {version} - DATE'")
    rest = changelog[found.end() :]
    following = re.search(r"^## ", rest, re.MULTILINE)
    return (found[1] or "").strip(), rest[: following.start() if following else None].strip()


def items(text: str) -> list[str]:
    """Returns the items of a Markdown list, each on one line."""
    found = re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE)
    return [re.sub(r"\s*\n\s*", " ", item).strip() for item in found]


def notes(version: str, changelog: str, kernels: dict, files: Iterable[Path]) -> str:
    """Returns the notes; `kernels` is what the lock pins, `files` are the packages."""
    _, text = section(changelog, version)
    breaking = [item for item in items(text) if item.startswith(BREAKING)]
    lines = [f"# flashcell {version}", ""]
    if breaking:
        lines += ["## Breaking changes", ""]
        lines += [f"- {item.removeprefix(BREAKING).lstrip(': ')}" for item in breaking] + [""]
    lines += ["## What's changed", "", *_one_line_items(text).splitlines(), ""]
    lines += ["## Install", "", "```bash", f"pip install flashcell=={version}", "```", ""]
    lines += [
        "## Kernels on the Hub",
        "",
        "| kernel | version | commit | variants |",
        "|---|---|---|---|",
    ]
    for name, entry in kernels.items():
        variants = "<br>".join(f"`{variant}`" for variant in entry["variants"])
        commit = f"`{entry['revision']}`" if entry["revision"] else "not on the Hub"
        lines.append(f"| {name}, `{entry['repo']}` | {entry['version']} | {commit} | {variants} |")
    lines += ["", "## Files", "", "| file | size | sha256 |", "|---|---|---|"]
    for file in sorted(files):
        content = file.read_bytes()
        size, digest = f"{len(content) / 1e6:.2f} MB", hashlib.sha256(content).hexdigest()
        lines.append(f"| {file.name} | {size} | `{digest}` |")
    return "\n".join(lines) + "\n"


def _one_line_items(text: str) -> str:
    """Returns the text with each item on one line: GitHub shows a release's line ends as they are."""
    return re.sub(r"(?<=\S)\n {2,}(?![-*] )(?=\S)", " ", text)
