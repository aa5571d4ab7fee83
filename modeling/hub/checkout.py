"""Finds the build of a kernel in the checkout that this file lies in."""

import os
from pathlib import Path


def build_of_checkout(name: str) -> Path | None:
    """Returns kernel_builds/<name>/build, or None if it is not there.

    An installed or exported copy of this file is in no checkout: the folders around it may be
    anybody's. Nor is a build taken where FLASHCELL_LOCK pins kernels of the Hub.
    """
    here = Path(__file__).resolve()
    root = here.parents[2]
    if here != root / "modeling/hub/checkout.py" or "FLASHCELL_LOCK" in os.environ:
        return None
    build = root / "kernel_builds" / name / "build"
    return build if build.is_dir() else None
