"""Variants for each version of CUDA: names, archs and flags, and where their nvcc comes from."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import kernels.variants
import pytest
import torch

from tooling.builder import (
    BuildError,
    abi_check,
    build_toml,
    configure,
    default_archs,
    later_gpus,
    read_kernel,
    toolchain,
    toolkits,
)

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "kernel_builds"
AXPY = Path(__file__).resolve().parent / "axpy"
X86 = "torch-stable-abi210-{}-x86_64-linux"
NVCC = """#!/bin/sh
case $1 in
    --version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
    --list-gpu-code) echo sm_80 sm_90 ;;
    --list-gpu-arch) echo compute_80 ;;
    *) echo no >&2; exit 1 ;;
esac
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def nvcc(tmp_path, monkeypatch) -> Path:
    """The machine's nvcc, of CUDA 12.9."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return program(tmp_path / "nvcc", NVCC.format(version="12.9"))


def build(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts/build_kernels", "--here", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def test_names():
    """kernels reads them, and takes the one for 12.6 with every later 12.x."""
    for version in toolkits.VERSIONS:
        name = read_kernel(AXPY).variant("cuda", version)
        assert name == X86.format("cu" + version.replace(".", ""))
        backend = kernels.variants.parse_variant(name).arch.backend
        assert (backend.version.major, backend.version.minor) == tuple(map(int, version.split(".")))


def test_the_guides_table_of_archs():
    page = (BUILDS / "README.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d) \| `cu\d+` \| ([^|]+) \|", page, re.MULTILINE)
    assert [version for version, _ in rows] == list(toolkits.VERSIONS)
    for version, archs in rows:
        for kernel in ("fused-rnn", "diagonal-rnn", "tfla"):
            found = default_archs(read_kernel(BUILDS / kernel), version)
            assert found == tuple(archs.split(", ")), (kernel, version)


def test_default_archs():
    """Those that the version compiles for; without PTX in build.toml there is none."""
    kernel = read_kernel(AXPY)
    assert default_archs(kernel, "13.0") == ("8.0", "9.0a", "10.0+PTX")
    assert default_archs(kernel, "12.8") == ("8.0+PTX", "9.0a", "10.0")
    assert default_archs(kernel, "12.6") == ("8.0+PTX", "9.0a")


@pytest.mark.parametrize(
    ("cuda", "flag"), [("12.6", "-Xfatbin=-compress-all"), ("13.0", "--compress-mode=size")]
)
def test_flags_in_the_words_of_each_nvcc(cuda, flag):
    for kernel in ("fused-rnn", "diagonal-rnn", "tfla"):
        components = (c for c in read_kernel(BUILDS / kernel).components if c.backend == "cuda")
        assert all(configure.cuda_flags(c, cuda) == [flag] for c in components)


def test_which_nvcc(nvcc, tmp_path):
    found = toolchain.find_nvcc(tmp_path, install=False)
    assert (found.path, found.version) == (nvcc, "12.9")
    assert toolchain.find_nvcc(tmp_path, cuda="12.9", install=False) == found
    assert toolchain.cuda_version(tmp_path, "auto", None) == "12.9"
    assert toolchain.cuda_version(tmp_path, "auto", "12.8") == "12.8"
    assert toolchain.cuda_version(tmp_path, "wheels", None) == toolkits.DEFAULT
    own = toolkits.nvcc(tmp_path, "12.8")
    own.parent.mkdir(parents=True)
    shutil.copy(nvcc, own)  # fetched before; an assembled toolkit's nvcc is of another version
    assert toolchain.find_nvcc(tmp_path, "auto", "12.8", install=False).version == "12.8"
    with pytest.raises(BuildError, match=r"--cuda is '12.8', but --nvcc, .*, is of CUDA 12.9"):
        toolchain.find_nvcc(tmp_path, str(nvcc), "12.8")
    with pytest.raises(
        BuildError, match=r"--cuda is '12.1', but can be fetched for 12.6, 12.8, 13"
    ):
        toolchain.cuda_version(tmp_path, "auto", "12.1")
    with pytest.raises(BuildError, match=r"nvcc 12.6 is not on this machine .* leave --here out"):
        toolchain.find_nvcc(tmp_path, "auto", "12.6", install=False)


@pytest.mark.parametrize(
    ("own", "version"),
    [("12.9", None), ("12.8", "12.8"), ("12.7", "12.6"), ("13.0", "13.0"), ("13.2", "13.0")],
)
def test_the_cuda_of_this_machines_torch(nvcc, own, version):
    """With an nvcc of 12.9: what is built by default must be loaded by the torch that is there."""
    assert toolchain.cuda_for(own, "auto") == version
    assert toolchain.cuda_for(own, "wheels") == (version or "12.8")
    assert toolchain.cuda_for(own, "/some/nvcc") is None


def test_no_cuda_for_this_machines_torch(nvcc):
    with pytest.raises(BuildError, match=r"torch is built for CUDA 12.4, but .* --nvcc"):
        toolchain.cuda_for("12.4", "auto")


@pytest.mark.parametrize(
    ("kind", "version", "release", "fits"),
    [
        ("g++", "13.2.0", "12.4", True),
        ("g++", "14.2.0", "12.4", False),
        ("g++", "14.2.0", "12.8", True),
        ("clang++", "17.0.6", "12.4", True),
        ("clang++", "19.1.7", "12.4", False),
    ],
)
def test_the_hosts_compiler(tmp_path, kind, version, release, fits):
    nvcc = toolchain.Nvcc(program(tmp_path / "nvcc", NVCC.format(version=release)), "12.8")
    said = "Debian clang" if kind == "clang++" else "g++ (Debian)"
    text = f'#!/bin/sh\ncase $1 in --version) echo "{said}";; *) echo {version};; esac\n'
    compiler = program(tmp_path / "c++", text)
    if fits:
        return nvcc.check_host(compiler)
    with pytest.raises(BuildError, match=rf"is {re.escape(kind)} {version}, but nvcc 12.4, .* CXX"):
        nvcc.check_host(compiler)


def test_archs_that_an_nvcc_lacks(nvcc):
    found = toolchain.find_nvcc(nvcc.parent, install=False)
    found.check_archs(("8.0+PTX", "9.0a"))
    with pytest.raises(BuildError, match=r"10.0 is unknown to nvcc 12.9 .* compiles for 80, 90"):
        found.check_archs(("10.0",))
    with pytest.raises(BuildError, match=r"9.0\+PTX is unknown .* which writes PTX for 80"):
        found.check_archs(("9.0+PTX",))


def test_errors_name_the_argument(tmp_path, nvcc):
    where = ("--kernel", AXPY, "--out", tmp_path / "out", "--home", tmp_path / "home")
    done = build(*where, "--backend", "cpu", "--cuda", "12.8")
    assert (
        "--cuda is '12.8', but only the cuda backend has versions; --backend is cpu" in done.stderr
    )
    done = build(*where, "--backend", "cuda", "--cuda", "11.8")
    assert "--cuda is '11.8', but can be fetched for 12.6, 12.8, 13.0 only" in done.stderr
    done = build(*where, "--backend", "cuda", "--cuda", "12.8")
    assert "nvcc 12.8 is not on this machine" in done.stderr
    assert not list((tmp_path / "home").glob("cuda-*"))


def test_what_is_downloaded_is_verified(tmp_path):
    file = tmp_path / "package.deb"
    file.write_bytes(b"another one")
    with pytest.raises(BuildError, match=r"package.deb has sha256 .*, but must have cd5f.*do not"):
        toolkits.check_sha256(file, toolkits.NVCC_12.sha256)


@pytest.mark.parametrize("sources", [None, "http://example/ubuntu/", ""])
def test_without_a_mirror_of_debian(tmp_path, monkeypatch, sources):
    monkeypatch.setenv("PATH", str(tmp_path))
    if sources is not None:
        program(tmp_path / "apt-get", f"#!/bin/sh\necho {sources}\n")
        program(tmp_path / "dpkg-deb", "#!/bin/sh\n")
    with pytest.raises(BuildError, match=r"no mirror of Debian: name an nvcc of CUDA 12 with --nv"):
        toolkits.debian_mirror("CUDA 12's nvcc", "name an nvcc of CUDA 12 with --nvcc")


def test_code_for_later_gpus(tmp_path):
    """nvcc makes PTX for 9.0, of which fatbinary makes the code that was asked for."""
    for name in ("nvcc", "fatbinary"):
        program(tmp_path / name, Path(later_gpus.__file__).read_text())
        said = 'echo "$FLASHCELL_LATER_GPUS" "$@"'
        program(tmp_path / later_gpus.REAL[name], f"#!/bin/sh\n{said}\n")
    program(tmp_path / "ptxas", '#!/bin/sh\necho code > "$5"\n[ "$1" != -arch=sm_100 ]\n')
    run = lambda *words, **env: subprocess.run(
        [tmp_path / words[0], *words[1:]], capture_output=True, text=True, env={**os.environ, **env}
    )
    own, later = "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_{0},code=sm_{0}"
    assert run("nvcc", own, "-c").stdout == f" {own} -c\n"
    done = run("nvcc", own, later.format(100), later.format(120))
    assert done.stdout == f"100 120 {own} {later_gpus.PTX_90}\n"
    assert run("nvcc", later.format(120), later_gpus.PTX_90).returncode
    images = ["--image3=kind=ptx,sm=80,file=a", f"--image3=kind=ptx,sm=90,file={tmp_path}/b"]
    assert run("fatbinary", *images).stdout.split() == ["--compress-mode=size", *images]
    done = run("fatbinary", *images, FLASHCELL_LATER_GPUS="120")
    code = f"--image3=kind=elf,sm=120,file={tmp_path}/b.sm_120.cubin"
    assert done.stdout.split() == ["120", "--compress-mode=size", images[0], code]
    done = run("fatbinary", *images, FLASHCELL_LATER_GPUS="120 100")  # ptxas fails
    assert (done.returncode, done.stdout) == (1, "")
    assert not list(tmp_path.glob("*.cubin"))


@pytest.mark.parametrize(
    ("cuda", "runtime", "fits"),
    [
        ("12.8", "12", True),
        ("12.8", "13", False),
        ("13.0", "13", True),
        ("13.0", "12", False),
        ("", "12", False),
    ],
)
def test_the_runtime_is_that_of_the_variant(tmp_path, cuda, runtime, fits):
    needed, library = tmp_path / f"libcudart.so.{runtime}", tmp_path / "k.so"
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c"]
    name = f"-Wl,-soname,{needed.name}"
    subprocess.run([*compiler, "/dev/null", "-o", needed, name], check=True)
    source = tmp_path / "k.c"
    source.write_text("void PyInit_a(void) {}")
    subprocess.run(
        [*compiler, source, "-o", library, "-Wl,--no-as-needed", "-x", "none", needed], check=True
    )
    found = abi_check.problems(
        library,
        "2.10",
        Path(torch.__file__).parent / "include",
        build_toml.HERE,
        cuda=cuda,
        stripped=True,
    )
    said = f"CUDA {cuda}'s runtime, " if cuda else ""
    wrong = f"needs {needed.name}, which is not torch, {said}libc or libstdc++"
    assert found == ([] if fits else [wrong])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="nvcc 12.4 is fetched with apt")
def test_builds_for_cuda_12(tmp_path):
    """Fetches both toolkits, 280 MB, and builds with them."""
    project = Path(shutil.copytree(AXPY, tmp_path / "axpy"))
    command = [sys.executable, ROOT / "scripts/build_kernels", "--kernel", project]
    command += ["--backend", "cuda", "--cuda", "12.6", "12.8", "--home", tmp_path / "home"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for version in ("12.6", "12.8"):
        folder = project / "build" / read_kernel(project).variant("cuda", version)
        (library,) = folder.glob("*.so")
        assert abi_check.cuda_archs(library) == set(default_archs(read_kernel(project), version))
        needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
        assert "libcudart.so.12" in needed
