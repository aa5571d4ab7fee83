"""The shared build passes with other compilers, of which a machine has some."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tooling.builder import build_toml, toolchain

ROOT = Path(__file__).resolve().parents[2]
AXPY = Path(__file__).resolve().parent / "axpy"
CPU = "torch-stable-abi210-cpu-x86_64-linux"
OTHERS = ["g++-11", "g++-12", "g++-13", "g++-14", "clang++", "clang++-14", "clang++-19"]


USE = """
import sys, kernels, torch
from pathlib import Path
kernel = kernels.get_local_kernel(Path(sys.argv[1]))
assert torch.equal(kernel.axpy(2.0, torch.ones(3), torch.ones(3)), torch.full((3,), 3.0))
try:
    kernel.axpy(2.0, torch.ones(3), torch.ones(2))
except RuntimeError as error:  # thrown, caught and passed on inside the library
    assert "x has 3 elements, y 2" in str(error), error
else:
    raise AssertionError("no error")
"""


def check(tmp_path: Path, compiler: str, *flags: str) -> None:
    """Builds the smallest kernel with `compiler`, and calls it."""
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler} on this machine")
    wrapper = tmp_path / Path(compiler).name
    wrapper.write_text(f'#!/bin/sh\nexec {found} {" ".join(flags)} "$@"\n')
    wrapper.chmod(0o755)
    project = Path(shutil.copytree(AXPY, tmp_path / "axpy"))
    command = [sys.executable, ROOT / "scripts/build_kernels", "--kernel", project, "--here"]
    command += ["--backend", "cpu", "--home", tmp_path / "home", "--jobs", "2"]
    environment = {**os.environ, "CXX": str(wrapper)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout + done.stderr
    subprocess.run([sys.executable, "-c", USE, project / "build" / CPU], check=True)


def test_a_static_libstdc(tmp_path):
    """Such a library brings its own copy of what manylinux_2_28.cpp defines."""
    check(tmp_path, "g++", "-static-libstdc++")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", OTHERS)
def test_other_compilers(tmp_path, compiler):
    check(tmp_path, compiler)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("g++ (Debian) 10.2.1\n10.2.1", "is g++ 10.2.1, but must be 11 or later"),
        ("Debian clang version 13.0.1\n13.0.1", "is clang++ 13.0.1, but must be 14 or later"),
    ],
)
def test_an_old_compiler(monkeypatch, tmp_path, said, message):
    old = tmp_path / "c++"
    name, version = said.split("\n")
    old.write_text(f'#!/bin/sh\ncase $1 in --version) echo "{name}";; *) echo {version};; esac\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(build_toml.BuildError, match=message.replace("+", r"\+")):
        toolchain.find_gxx()
