"""Finds forbidden text in files: paths of machines, hosts of registries, swallowed failures."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator

Text = Callable[[str], "str | None"]
BANNED = [  # (files, pattern, why); the patterns are written so that this file does not match itself
    ("*", r"/(?:work|root|home/\w+)/", "a path of somebody's machine"),
    ("*", r"(?:pypi|pythonhosted|jfrog|artifactory|devpi|nexus)[\w.-]*\.(?:org|io|com|net|local)\b",
     "a package registry's host: pip's own settings decide where packages come from"),
    ("tests/*", r"flaky[(]|reruns *=", "a test is true or it is not: no reruns"),
    ("tests/*", r"except[^:\n]*: *\n? *pass\b", "a swallowed failure"),
    ("kernel_builds/*", r"use_fast[_]math", "accuracy is chosen per function, never by a flag"),
    ("*", r"\b(?:TODO|FIXME|XXX)[:(]", "open ends are issues, not comments"),
    ("*", r"^(?:<{7}|>{7}) ", "a merge conflict"),
]  # fmt: skip


def violations(names: Iterable[str], text: Text) -> Iterator[str]:
    """Yields every forbidden text in the files `names`; `text` returns a file's text, or None."""
    for name in names:
        for pattern, forbidden, why in BANNED:
            if fnmatch.fnmatch(name, pattern):
                for found in re.finditer(forbidden, text(name) or "", re.MULTILINE):
                    line = (text(name) or "").count("\n", 0, found.start()) + 1
                    yield f"{name}:{line}: {found.group().strip()!r}: {why}"
