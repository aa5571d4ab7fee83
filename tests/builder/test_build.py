"""Tests scripts/build_kernels and the shared build on the smallest kernel project and on fused-rnn."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import kernels
import pytest
import torch
from kernels._rust import Digest, DigestAlgorithm, Metadata

from tooling.builder import abi_check, archs, build_toml, toolchain, variant

ROOT = Path(__file__).resolve().parents[2]
AXPY = Path(__file__).resolve().parent / "axpy"
CPU = "torch-stable-abi210-cpu-x86_64-linux"
CUDA = "torch-stable-abi210-cu130-x86_64-linux"

needs_nvcc = pytest.mark.skipif(toolchain.machine_nvcc() is None, reason="no nvcc on this machine")


@pytest.fixture
def project(tmp_path):
    return Path(shutil.copytree(AXPY, tmp_path / "axpy"))


def build(project, *arguments, script=ROOT / "scripts" / "build_kernels", env=None):
    command = [sys.executable, str(script), "--kernel", str(project), *map(str, arguments)]
    command += ["--home", str(Path(project).parent / "home"), "--jobs", "2"]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def built(project, *arguments, name=CPU, **options):
    done = build(project, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "build" / name


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_cpu_variant_is_complete_and_loads(project):
    directory = built(project, "--backend", "cpu")
    metadata = Metadata.read_from_file(directory / "metadata.json")
    files = {"__init__.py", "_ops.py", "metadata.json", f"{metadata.id}.abi3.so"}
    assert {file.name for file in directory.iterdir()} == files
    assert (str(metadata.name), metadata.version, metadata.license) == ("axpy", 1, "Apache-2.0")
    keys = {"name", "id", "version", "kernels-minver", "license", "python-depends", "backend"}
    text = (directory / "metadata.json").read_text()
    # No date, path or commit, so builds are reproducible.
    assert set(json.loads(text)) == keys | {"digest"}
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, directory))
    kernel = kernels.get_local_kernel(directory)
    assert kernel.BACKEND == "cpu"
    assert kernel._ops.add_op_namespace_prefix("axpy") == f"{metadata.id}::axpy"
    result = kernel.axpy(2.0, torch.ones(3), torch.arange(3.0))
    torch.testing.assert_close(result, torch.tensor([2.0, 3.0, 4.0]), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"csrc/ops.cpp:\d+, x has 3 elements, y 2"):
        kernel.axpy(2.0, torch.ones(3), torch.ones(2))


def test_universal_variant_has_no_binary(project):
    directory = built(project, "--backend", "universal", name="torch-universal")
    assert {file.name for file in directory.iterdir()} == {"__init__.py", "metadata.json"}
    assert kernels.get_local_kernel(directory).BACKEND is None
    assert "flashcell/axpy" in (project / "build" / "CARD.md").read_text()


def test_unchanged_sources_are_not_built_again(project):
    directory = built(project, "--backend", "cpu", "universal")
    before = directory.stat().st_ino
    again = build(project, "--backend", "cpu", "universal")
    assert again.stdout.count("up to date") == 2
    assert directory.stat().st_ino == before
    (directory / "__init__.py").write_text("tampered = True\n")
    assert built(project, "--backend", "cpu").stat().st_ino != before
    assert "tampered" not in (directory / "__init__.py").read_text()


def test_digests_are_those_of_kernels(project):
    directory = built(project, "--backend", "universal", name="torch-universal")
    (directory / "deep").mkdir()
    (directory / "deep" / "file.json").write_text("{}")
    assert (
        variant.digests(directory) == Digest.hash_variant(DigestAlgorithm.SHA256, directory).files
    )


@pytest.mark.parametrize("file", ["build.toml", "csrc/axpy.h", "torch-ext/axpy/__init__.py"])
def test_id_follows_the_sources(project, tmp_path, file):
    old = build_toml.read_kernel(project).id("cpu")
    # The same in any directory, with git or without.
    assert old == build_toml.read_kernel(AXPY).id("cpu")
    (project / "csrc" / "__pycache__").mkdir()
    (project / "csrc" / "__pycache__" / "litter.pyc").write_text("")
    (project / "build").mkdir()
    (project / "build" / "output").write_text("")
    assert build_toml.read_kernel(project).id("cpu") == old
    comment = "//" if file.endswith(".h") else "#"
    (project / file).write_text((project / file).read_text() + f"{comment} changed\n")
    assert build_toml.read_kernel(project).id("cpu") != old


def test_failed_build_keeps_the_variant(project):
    directory = built(project, "--backend", "cpu")
    before = variant.digests(directory)
    edit(project / "csrc" / "cpu.cpp", "y[i] +=", "y[i] += missing *")
    done = build(project, "--backend", "cpu")
    assert done.returncode == 1
    assert "axpy cpu: the build failed" in done.stderr
    assert "missing" in done.stdout + done.stderr
    assert variant.digests(directory) == before
    assert {file.name for file in (project / "build").iterdir()} == {CPU, "CARD.md"}


def test_forgotten_source_fails_before_publication(project):
    edit(project / "build.toml", 'src = ["csrc/cpu.cpp"]', "src = []")
    done = build(project, "--backend", "cpu")
    assert "imports axpy(float, float const*, float*, long, void*)" in done.stdout
    assert not (project / "build" / CPU).exists()


@pytest.mark.slow
def test_cpu_build_is_reproducible(tmp_path):
    """Other directories, checkouts and compiler flags in the environment give the same bytes."""
    outputs = []
    for folder in ("a", "deeper/b"):
        for part in ("builder", "common"):
            place = Path("kernel_builds", part)
            shutil.copytree(ROOT / place, tmp_path / folder / place)
        (tmp_path / folder / "scripts").mkdir()
        script = shutil.copy2(ROOT / "scripts" / "build_kernels", tmp_path / folder / "scripts")
        shutil.copytree(ROOT / "scripts/tooling", tmp_path / folder / "scripts/tooling")
        copy = Path(shutil.copytree(AXPY, tmp_path / folder / "axpy"))
        env = {"PATH": "/usr/bin:/bin", "CXXFLAGS": "-O0" if folder == "a" else "-g"}
        outputs.append(variant.digests(built(copy, "--backend", "cpu", script=script, env=env)))
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_fused_rnn_is_reproducible(tmp_path):
    """The variant of this checkout equals one from a copy of its sources."""
    fused = ROOT / "kernel_builds" / "fused-rnn"
    ours = subprocess.run(
        [sys.executable, ROOT / "scripts" / "build_kernels", "--kernel", "fused-rnn"],
        capture_output=True,
        text=True,
    )
    assert ours.returncode == 0, ours.stdout + ours.stderr
    ignore = shutil.ignore_patterns("build", "__pycache__")
    copy = Path(shutil.copytree(fused, tmp_path / "copy" / "fused-rnn", ignore=ignore))
    theirs = built(copy, "--backend", "cpu", "universal")
    for name in (CPU, "torch-universal"):
        assert variant.digests(fused / "build" / name) == variant.digests(theirs.parent / name)


@needs_nvcc
@pytest.mark.slow
def test_cuda_variant_holds_the_archs_and_is_reproducible(project):
    asked = ["8.0", "9.0a", "10.0+PTX"]
    cuda = ("--backend", "cuda", "--archs", ";".join(asked), "--here")
    directory = built(project, *cuda, name=CUDA)
    assert Metadata.read_from_file(directory / "metadata.json").backend.archs == asked
    (library,) = directory.glob("*.so")
    assert abi_check.cuda_archs(library) == set(asked)
    assert 'BACKEND = "cuda"' in (directory / "_ops.py").read_text()
    assert "up to date" in build(project, *cuda).stdout
    before = variant.digests(directory)
    shutil.rmtree(project.parent / "home/build")
    shutil.rmtree(directory)
    # Built again from the same path.
    assert variant.digests(built(project, *cuda, name=CUDA)) == before


def test_archs():
    assert archs.parse_archs("10.0+PTX, 9.0a;8.0 8.0") == ("8.0", "9.0a", "10.0+PTX")
    assert archs.gencode(("9.0a", "10.0+PTX")) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]


BAD_ARGUMENTS = {
    "kernel": (["--kernel", "none"], "is 'none', but must be one of diagonal-rnn, fused-rnn, tfla"),
    "arch": (["--backend", "cuda", "--archs", "sm_90"], "CUDA arch is 'sm_90', but must be a"),
    "no archs": (["--backend", "cuda", "--archs", ";"], "must name at least one"),
    "archs on cpu": (["--archs", "9.0a"], "only the cuda backend has archs"),
    "nvcc": (["--backend", "cuda", "--nvcc", "/no/nvcc"], "--nvcc is '/no/nvcc', but there is no"),
    "not nvcc": (["--backend", "cuda", "--nvcc", shutil.which("g++")], "is not NVIDIA's nvcc"),
    "no torch": (["--backend", "cpu", "--python", "/bin/false"], "/bin/false has no torch"),
    "no wheels": (
        ["--backend", "cuda", "--nvcc", "wheels", "--here"],
        "nvcc 13.0 is not on this machine",
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(project, name):
    arguments, message = BAD_ARGUMENTS[name]
    done = build(project, *arguments)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    assert done.stderr.startswith("error: ")


@needs_nvcc
def test_arch_unknown_to_nvcc(project):
    done = build(project, "--backend", "cuda", "--archs", "5.0", "--here")
    assert "CUDA arch 5.0 is unknown to nvcc" in done.stderr


BAD_PROJECTS = {
    "kernels' parser": ('name = "axpy"', 'name = "Axpy_"', "rejected by kernels' own parser"),
    "edition": ("edition = 5", "edition = 4", "unsupported build edition 4"),
    "no cuda": ('["cpu", "cuda"]', '["cpu"]', "backend is 'cuda', but"),
    "other backend": ('["cpu", "cuda"]', '["cpu", "xpu"]', "must be some of cpu, cuda"),
    "missing source": ("cpu.cpp", "gone.cpp", "lists 'csrc/gone.cpp', but there is no such"),
    "listed twice": ("cpu.cpp", "ops.cpp", "but torch lists it already"),
    "outside": ("csrc/cpu.cpp", "../outside.cpp", "sources must lie below"),
    "include": ("src =", 'include = ["inc"]\nsrc =', "include lists 'inc', but there is no such"),
    "depends": ('depends = ["torch"]', 'depends = ["torch", "cutlass_4_0"]', "must be ['torch']"),
    "no abi": ('stable-abi = "2.10"', "", "torch.stable-abi is None, but must be"),
    "no repo": ('repo-id = "flashcell/axpy"', "", "repo-id is None, but must be the Hub"),
    "unsupported": (
        "version = 1",
        'version = 1\npython-depends = ["einops"]',
        "has python-depends",
    ),
    "future torch": ('stable-abi = "2.10"', 'stable-abi = "9.9"', "but the build needs 9.9"),
}


@pytest.mark.parametrize("name", BAD_PROJECTS)
def test_bad_projects(project, name):
    old, new, message = BAD_PROJECTS[name]
    (project.parent / "outside.cpp").touch()
    edit(project / "build.toml", old, new)
    done = build(project, "--backend", "cuda" if name == "no cuda" else "cpu")
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    assert not (project / "build" / CPU).exists()


def test_bad_package(project):
    (project / "torch-ext" / "axpy" / "_ops.py").touch()
    assert "the build generates it" in build(project, "--backend", "universal").stderr
    (project / "CARD.md").write_text("{{ nothing }}")
    assert "'nothing' is undefined" in build(project, "--backend", "universal").stderr
    (project / "CARD.md").unlink()
    assert "CARD.md is missing" in build(project, "--backend", "universal").stderr
    shutil.rmtree(project / "torch-ext")
    assert "has no __init__.py" in build(project, "--backend", "universal").stderr


@pytest.mark.parametrize("tool", ["cmake", "ninja", "gxx"])
def test_missing_tool(tool, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(build_toml.BuildError, match="is not on this machine, but building needs"):
        getattr(toolchain, f"find_{tool}")()


INIT = (
    "void* PyModule_Create2(void*, int);\nvoid* PyInit_k(void) { return PyModule_Create2(0, 3); }\n"
)
VIOLATIONS = {
    "none": ("", [], None),
    "export": ("int leaked;", [], "exports leaked, but only PyInit_"),
    "import": ("int nowhere(void); int a(void) { return nowhere(); }", [], "imports nowhere, which"),
    "glibc": (
        "unsigned arc4random(void); unsigned a(void) { return arc4random(); }",
        [],
        "arc4random at GLIBC_2.36",
    ),
    "python": ("void* PyUnicode_New(long, int); void* a(void) { return PyUnicode_New(0, 0); }", [], "PyUnicode_New"),
    "torch": ("void _ZN3c105ErrorC1Ev(void); void a(void) { _ZN3c105ErrorC1Ev(); }", [], "imports c10::Error"),
    "newer shim": ("int torch_from_blob(void); int a(void) { return torch_from_blob(); }", [], "torch_from_blob is newer"),
    "runpath": ("", ["-Wl,-rpath,/somewhere"], "has RUNPATH"),
    "needed": ("", ["-Wl,--no-as-needed", "-lgomp"], "needs libgomp.so.1"),
    "stripped": ("", ["-s"], "stripped"),
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
def test_abi_check(tmp_path, name):
    code, flags, message = VIOLATIONS[name]
    source, library = tmp_path / "k.c", tmp_path / "k.so"
    source.write_text(INIT + code.replace(" a(void)", " PyInit_a(void)"))
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library, *flags], check=True)
    include = Path(torch.__file__).parent / "include"
    found = abi_check.problems(library, "2.10", include, build_toml.HERE)
    assert len(found) == (message is not None) or name == "glibc", found
    assert message is None or message in found[0] or message in found[-1], found
