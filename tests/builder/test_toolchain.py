"""What a build needs: all that is missing is named at once, and ninja says how long it takes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tooling.builder import toolchain

ROOT = Path(__file__).resolve().parents[2]
ALL = "kernels kernel-abi-check jinja2 cmake ninja"


def test_all_that_is_missing_is_named_at_once():
    """A Python without packages, and no programs."""
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "scripts/build_kernels"],
        capture_output=True, text=True, env={"PATH": "/nothing"},
    )  # fmt: skip
    found = re.search(r"has no (.*), but builds need them: pip install -c constraints\.txt (.*)",
                      done.stderr)  # fmt: skip
    assert found, done.stderr
    named = found[1].split(", ")
    assert found[2].split() == named
    # programs beside the interpreter are found without a PATH
    assert set(ALL.split()[:3]) <= set(named) <= set(ALL.split())


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("1.13.2.git.kitware.jobserver-pipe-1", "[%f of %t, %W left] "),
        ("1.12.0", "[%f of %t, %W left] "),
        ("1.11.1", "[%f of %t] "),  # stops at %W, which it does not know
    ],
)
def test_progress_of_a_build(tmp_path, version, status):
    ninja = tmp_path / "ninja"
    ninja.write_text(f"#!/bin/sh\necho {version}\n")
    ninja.chmod(0o755)
    assert toolchain.ninja_status(ninja) == {"NINJA_STATUS": status}
