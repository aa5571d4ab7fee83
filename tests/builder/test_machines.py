"""Builds for another machine: names, sources, the compiler, the ABI check, and the choice of the
instruction set, which runs under qemu where that is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tooling import emulated, finished
from tooling.builder import HERE, BuildError, abi_check, read_kernel, toolchain
from wheels import contents

ROOT = Path(__file__).resolve().parents[2]
AXPY = Path(__file__).resolve().parent / "axpy"
INCLUDE = Path(torch.__file__).parent / "include"
VARIANT = "torch-stable-abi210-cpu-aarch64-linux"
GXX, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = pytest.mark.skipif(HERE != "x86_64", reason="cross-compiles from x86-64")
needs_gxx = pytest.mark.skipif(shutil.which(GXX) is None, reason=f"no {GXX} on this machine")
needs_qemu = pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"no {QEMU} on this machine")


def build(*arguments, env=None):
    command = [sys.executable, ROOT / "scripts/build_kernels", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def axpy(tmp_path_factory):
    """The smallest project, with its variant for aarch64."""
    project = Path(shutil.copytree(AXPY, tmp_path_factory.mktemp("machines") / "axpy"))
    options = ["--backend", "cpu", "--machine", "aarch64", "--home", project.parent / "home"]
    done = build("--kernel", project, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return project


@pytest.mark.parametrize(
    ("machine", "levels"),
    [("x86_64", ["avx2", "avx512", "avx512_bf16"]), ("aarch64", [])],
)
@pytest.mark.parametrize("name", ["fused-rnn", "diagonal-rnn", "tfla"])
def test_names_and_sources(name, machine, levels):
    kernel = read_kernel(ROOT / "kernel_builds" / name)
    assert kernel.variant("cpu", machine=machine) == VARIANT.replace("aarch64", machine)
    assert kernel.variant("cuda", "13.0", machine).endswith(f"-cu130-{machine}-linux")
    sources = [s for c in kernel.components_for("cpu", machine) for s in c.sources]
    found = [Path(source).stem for source in sources if "/isa/" in source]
    assert found == ["baseline", *levels, "neon_bf16"]


def test_an_unknown_machine_is_refused():
    done = build("--backend", "cpu", "--machine", "riscv64")
    assert done.returncode == 2
    assert "argument --machine: invalid choice: 'riscv64'" in done.stderr
    assert "x86_64" in done.stderr
    assert "aarch64" in done.stderr


def test_a_missing_compiler_is_named_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError) as error:
        toolchain.find_cross_gxx("aarch64")
    assert "aarch64-linux-gnu-g++ is not on this machine" in str(error.value)
    assert "package g++-aarch64-linux-gnu" in str(error.value)


def test_an_old_compiler_is_refused(tmp_path, monkeypatch):
    old = tmp_path / GXX
    old.write_text("#!/bin/sh\necho 10.2.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BuildError, match=r"is g\+\+ 10\.2\.1, but must be 11 or later"):
        toolchain.find_cross_gxx("aarch64")


def test_missing_programs_of_the_emulation_are_named(monkeypatch):
    monkeypatch.setattr(emulated.shutil, "which", lambda name: None)
    monkeypatch.setattr(emulated, "KEYRING", Path("/no/such/keyring"))
    with pytest.raises(SystemExit) as error:
        emulated.check_programs()
    for package in ("qemu-user", "g++-aarch64-linux-gnu", "debian-archive-keyring"):
        assert package in str(error.value)


@needs_gxx
def test_the_variant_is_for_the_machine(axpy):
    kernel = read_kernel(axpy)
    variant = finished.read_variant(kernel, axpy / "build" / VARIANT, INCLUDE)
    assert variant.name == VARIANT
    (library,) = (axpy / "build" / VARIANT).glob("*.so")
    assert abi_check.machine_of(library) == "aarch64"
    found = abi_check.problems(library, "2.10", INCLUDE, "x86_64", stripped=True)
    assert found == ["is for aarch64, but must be for x86_64"]
    found = {"axpy": (kernel, [variant])}
    assert contents.kernels_of(found, "cpu", "aarch64", "place")
    with pytest.raises(contents.UnfitVariant, match="no finished variant for cpu on x86_64"):
        contents.kernels_of(found, "cpu", "x86_64", "place")


@needs_gxx
def test_a_variant_under_another_machine_s_name_is_refused(axpy, tmp_path):
    renamed = tmp_path / VARIANT.replace("aarch64", "x86_64")
    shutil.copytree(axpy / "build" / VARIANT, renamed)
    with pytest.raises(finished.UnfitVariant, match="is for aarch64, but must be for x86_64"):
        finished.read_variant(read_kernel(axpy), renamed, INCLUDE)


@needs_gxx
def test_the_abi_check_reads_a_foreign_library(tmp_path):
    """A glibc that is too new, a function of libtorch's inside and a function from nowhere are found in
    code for aarch64 too."""
    (tmp_path / "a.cpp").write_text(
        'extern "C" { int pidfd_open(int, unsigned); int nowhere(); }\n'
        "namespace c10 { int inside(); }\n"
        'extern "C" int PyInit_a() { return pidfd_open(1, 0) + nowhere() + c10::inside(); }\n'
    )
    library = tmp_path / "a.so"
    command = [GXX, "-shared", "-fPIC", tmp_path / "a.cpp", "-o", library]
    subprocess.run(command, check=True)
    found = abi_check.problems(library, "2.10", INCLUDE, "aarch64")
    assert "manylinux_2_28: imports pidfd_open at GLIBC_2.36" in found
    assert "torch stable ABI: imports c10::inside()" in found
    assert any("imports nowhere, which nothing provides" in sentence for sentence in found)


PROGRAM = """
#include <cstdio>
#include "common/torch/isa.h"
int main() try {
  std::puts(flashcell::levels()[flashcell::select_level()].name.c_str());
} catch (const std::exception& error) {
  std::puts(error.what());
}
"""
REFUSED = "FLASHCELL_CPU_ISA={}: this CPU lacks BF16 instructions"
UNKNOWN = "FLASHCELL_CPU_ISA=avx2: must be baseline or neon_bf16"


@pytest.fixture(scope="module")
def choice(tmp_path_factory):
    """A program for aarch64 that prints the level that a library would choose."""
    folder = tmp_path_factory.mktemp("choice")
    (folder / "choice.cpp").write_text(PROGRAM)
    paths = ["-I", ROOT / "kernel_builds", "-isystem", INCLUDE]
    command = [GXX, "-std=c++20", "-static", *paths, folder / "choice.cpp", "-o", folder / "choice"]
    subprocess.run(command, check=True)
    return folder / "choice"


@needs_gxx
@needs_qemu
@pytest.mark.parametrize(
    ("cpu", "wanted", "said"),
    [
        ("cortex-a72", "", "baseline"),
        (emulated.CPUS["baseline"], "", "baseline"),
        (emulated.CPUS["baseline"], "neon_bf16", REFUSED.format("neon_bf16")),
        (emulated.CPUS["neon_bf16"], "", "neon_bf16"),
        (emulated.CPUS["neon_bf16"], "baseline", "baseline"),
        (emulated.CPUS["neon_bf16"], "avx2", UNKNOWN),
    ],
)
def test_the_level_follows_the_cpu(choice, cpu, wanted, said):
    env = {**os.environ, "FLASHCELL_CPU_ISA": wanted}
    done = subprocess.run([QEMU, "-cpu", cpu, choice], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert len(done.stdout.splitlines()) == 1 or said.startswith("FLASHCELL")
