"""Wheels with kernels: what is in them, and that they run where nothing but pip's packages are."""

import ast
import base64
import hashlib
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from wheels import archive, backend, contents, cuda

ROOT = Path(__file__).resolve().parents[2]
VERSION = contents.project()["version"]
TAG = contents.wheel_tag("x86_64")
NAME = f"flashcell-{VERSION}-{TAG}.whl"
# What a new user does first, in twelve lines; a warning is an error.
TWELVE = """
import flashcell, torch
from transformers import AutoModelForCausalLM
sizes = {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 99}
configs = [flashcell.FlashRNNConfig(cell=cell, **sizes) for cell in ("lstm", "flash_gru")]
for config in (*configs, flashcell.FlashMLSTMConfig(**sizes)):
    model, prompt = AutoModelForCausalLM.from_config(config), torch.ones(1, 3, dtype=torch.long)
    assert model.generate(prompt, max_new_tokens=5, min_new_tokens=5).shape == (1, 8)
model, x = torch.nn.Sequential(torch.nn.LSTM(8, 16, batch_first=True)), torch.randn(2, 5, 8)
before, report = model(x)[0], flashcell.replace(model)
torch.testing.assert_close(model(x)[0], before)
names = ("fused-rnn", "diagonal-rnn", "tfla")
print(report, *(flashcell.kernel_info(name) for name in names), sep="\\n")
"""


def test_a_wheel_has_a_true_record_and_always_the_same_bytes(tmp_path):
    files = {"k/b.so": b"\0" * 99, "k/__init__.py": b"", "k-1.dist-info/METADATA": b"Name: k\n"}
    names = []
    for order in (files, dict(reversed(files.items()))):
        folder = tmp_path / f"{len(names)}"
        folder.mkdir()
        names.append(folder / archive.write_wheel(folder, order, TAG))
    assert names[0].name == f"k-1-{TAG}.whl"
    assert names[0].read_bytes() == names[1].read_bytes()
    assert (
        zipfile.ZipFile(names[0]).namelist()[-1].startswith("k-1.dist-info/")
    )  # as zip readers want
    found = archive.read_wheel(names[0])
    record = found.pop("k-1.dist-info/RECORD").decode().splitlines()
    lines = dict(line.split(",", 1) for line in record)
    assert lines.pop("k-1.dist-info/RECORD") == ","
    assert lines.keys() == found.keys()
    for name, content in found.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        assert lines[name] == f"sha256={digest},{len(content)}"
    assert b"Root-Is-Purelib: false\n" in found["k-1.dist-info/WHEEL"]


def test_the_commands_come_with_all_that_they_import():
    """Modules of scripts/ which the commands import, by name, are in the wheel as well."""
    files = {name.removeprefix("flashcell/scripts/") for name in contents.commands()}
    scripts = [name for name in files if not name.startswith("flashcell/")]
    assert {"train", "evaluate", "export_model", "training/loop.py"} <= files
    own = {folder.name for folder in (ROOT / "scripts").iterdir() if folder.is_dir()}
    for name in scripts:
        if not name.endswith(".py") and "." in name:
            continue
        for node in ast.walk(ast.parse((ROOT / "scripts" / name).read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            top, *rest = node.module.split(".")
            for part in [rest[0]] if rest else [alias.name for alias in node.names]:
                assert top not in own or f"{top}/{part}.py" in files, (name, top, part)


def test_the_page_of_an_index_has_no_links_into_the_repository():
    page = b"Name: k\n\n[a](b.md#c), ![p](d.svg) and [e](https://e.org), [f](#f) ![g](http://g/h.png)\n"
    shown = b"Name: k\n\na,  and [e](https://e.org), [f](#f) ![g](http://g/h.png)\n"
    assert contents.for_an_index(page) == shown


def test_what_kernels_a_wheel_gets(monkeypatch, tmp_path):
    assert backend._wanted(None) == "build"
    assert backend._wanted({"kernels": "none"}) is None
    assert backend._wanted({"kernels": str(tmp_path)}) == str(tmp_path)
    for wrong in ("cpu", ["none", "build"]):  # pip makes a list of repeated settings
        with pytest.raises(SystemExit, match=r"kernels is .*, but must be 'build', 'none' or a"):
            backend._wanted({"kernels": wrong})
    assert "ninja" in backend.get_requires_for_build_wheel()
    assert backend.get_requires_for_build_wheel({"kernels": "none"}) == []
    monkeypatch.setattr(backend.platform, "machine", lambda: "arm64")
    assert backend._wanted({}) is None
    with pytest.raises(SystemExit, match="must be 'none' on Linux arm64"):
        backend._wanted({"kernels": "build"})


def test_cuda_kernels_are_a_wheel_for_each_cuda(tmp_path):
    kernel, names = object(), ["cpu", "cu126", "cu128", "cu130"]
    (tmp_path / "file").write_text("content")
    variants = [
        contents.Variant(f"torch-stable-abi210-{name}-x86_64-linux", {"f": tmp_path / "file"}, "_k",
                         ["10.0", "9.0a"]) for name in names
    ]  # fmt: skip
    made = cuda.write(tmp_path, "1.2", {"tfla": (kernel, variants)}, "x86_64", needed=True)
    assert made == [f"flashcell_cu{n}-1.2-{TAG}.whl" for n in (12, 13)]
    files = archive.read_wheel(tmp_path / made[0])
    assert "flashcell_cu12/tfla/torch-stable-abi210-cu126-x86_64-linux/f" in files
    # With one of cu128 too it would be too large; that of cu126 serves every CUDA 12 from then on.
    assert not any(tag in name for name in files for tag in ("cu128", "cu130", "cpu"))
    metadata = files["flashcell_cu12-1.2.dist-info/METADATA"].decode()
    assert "\nRequires-Dist: flashcell==1.2\n" in metadata
    assert "compute capabilities 9.0a, 10.0." in metadata
    assert "torch\nfor CUDA 12.6 or a later 12.x: " in metadata
    some = {"tfla": (kernel, variants), "diagonal-rnn": (kernel, variants[:2])}
    with pytest.raises(
        contents.UnfitVariant, match="diagonal-rnn has no finished variant for cu130 on x86_64"
    ):
        cuda.write(tmp_path, "1.2", some, "x86_64", needed=True)
    assert cuda.write(tmp_path, "1.2", some, "x86_64", needed=False) == made[:1]


@pytest.fixture(scope="module")
def dist(fused_rnn, diagonal_rnn, tfla, tmp_path_factory) -> Path:
    """The folder with what scripts/build_wheels has made of this checkout's kernels."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, ROOT / "scripts/build_wheels", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Installed:
    """A virtual environment outside the checkout, with wheels and this environment's packages."""

    def __init__(self, folder: Path):
        self.folder = folder
        command = [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
        subprocess.run(command, check=True)
        (self.packages,) = (folder / "venv").glob("lib/python3*/site-packages")
        # Packages that .pth files of this environment would add, flashcell too, are not there.
        others = [path for path in sys.path if Path(path).name == "site-packages"]
        (self.packages / "others.pth").write_text("".join(f"{path}\n" for path in others))

    def install(self, *wheels: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.folder / "venv/bin/python", "install"]
        subprocess.run([*pip, "--no-deps", "--no-index", "--quiet", *wheels], check=True)

    def run(self, *command: object, **variables: str) -> subprocess.CompletedProcess:
        """Runs a program of the environment, without network."""
        program, *rest = command
        dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON", "LOCAL_"))
        }
        return subprocess.run(
            [self.folder / "venv/bin" / str(program), *map(str, rest)],
            cwd=self.folder,
            env={**kept, **dead, "HF_HUB_OFFLINE": "1", **variables},
            capture_output=True,
            text=True,
        )


@pytest.fixture(scope="module")
def user(dist, tmp_path_factory) -> Installed:
    made = Installed(tmp_path_factory.mktemp("user"))
    made.install(dist / NAME)
    return made


def test_twelve_lines_run_on_native_kernels(user):
    started = time.monotonic()
    done = user.run("python", "-W", "error::RuntimeWarning", "-c", TWELVE)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    report, *kernels = done.stdout.splitlines()
    assert report == "1 of 1 recurrent modules became flashcell's"
    assert [line.partition(":")[0] for line in kernels] == ["fused-rnn", "diagonal-rnn", "tfla"]
    assert all(f" from the wheel flashcell, {user.packages}" in line for line in kernels)
    assert seconds < 60  # 10 on an idle machine; tests share theirs


def test_the_wheel_is_small_and_the_source_whole(dist):
    assert (dist / NAME).stat().st_size < 8e6
    with tarfile.open(dist / f"flashcell-{VERSION}.tar.gz") as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"kernel_builds/tfla/csrc/ops.cpp", "kernel_builds/builder/exports.map"} <= names
    assert {"scripts/build_kernels", "scripts/wheels/backend.py", contents.PINS} <= names
    assert not any(name.endswith((".so", ".safetensors", ".pyc")) for name in names)
    assert not any("/build/" in name or ".flashcell" in name for name in names)


@pytest.mark.slow
def test_the_command(user, tmp_path):
    assert user.run("flashcell", "--version").stdout == f"flashcell {VERSION}\n"
    assert "evaluate" in user.run("flashcell", "--help").stdout
    wrong = user.run("flashcell", "serve")
    assert (wrong.returncode, "is 'serve', but must be one of train," in wrong.stderr) == (1, True)
    card = ROOT / "model_cards/flash-gru-python-5m"
    done = user.run("flashcell", "export", card, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/hub_kernel_loader.py").is_file()
    assert (tmp_path / "out/diagonal_rnn_cells.py").is_file()
    nothing = user.run("flashcell", "train", "nothing.yaml")
    assert "nothing.yaml does not exist, but must be a file" in nothing.stderr


@pytest.mark.slow
def test_a_damaged_library_is_refused(dist, tmp_path):
    user = Installed(tmp_path)
    user.install(dist / NAME)
    (library,) = (user.packages / "flashcell/installed/tfla").glob("*/*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ask = "import flashcell; print(flashcell.kernel_info('tfla').source)"
    done = user.run("python", "-c", ask)
    assert "KernelCorrupt" in done.stderr
    user.install("--force-reinstall", dist / NAME)  # as the message says
    assert user.run("python", "-c", ask).stdout == "installed\n"


@pytest.mark.slow
def test_equal_kernels_give_equal_wheels(dist, tmp_path):
    command = [sys.executable, ROOT / "scripts/build_wheels", "--out", tmp_path]
    subprocess.run(command, check=True)
    for file in dist.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


@pytest.mark.slow
def test_the_commands_train_and_evaluate(user):
    """A run on text of the user's own writes below the current folder, and what it wrote is evaluated."""
    text = user.folder / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text("\n\n".join(f"line {n} of {number}" for n in range(99)))
    small = ["name=mine", "vocab_size=300", "steps=4", "warmup=1", "batch=2", "length=32"]
    small += ["model.hidden_size=32", "model.num_hidden_layers=1", "model.intermediate_size=64"]
    small += ["log_every=2", "evaluate_every=4", "checkpoint_every=4"]
    options = [word for value in small for word in ("--set", value)]
    done = user.run("flashcell", "train", "flash-rnn-python-5m", "--text", text, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    model = user.folder / ".flashcell/runs/mine/model"
    done = user.run("flashcell", "evaluate", "perplexity", model, "--text", text)
    assert "bits per byte" in done.stdout, done.stderr
    assert not (user.packages / "flashcell/.flashcell").exists()


@pytest.mark.slow
def test_pip_builds_the_source(dist, tmp_path):
    """pip makes of the source archive what it gets as a wheel, given the same finished kernels."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--config-settings", f"kernels={ROOT / 'kernel_builds'}", "--wheel-dir", tmp_path]
    subprocess.run([*command, dist / f"flashcell-{VERSION}.tar.gz"], check=True)
    assert (tmp_path / NAME).read_bytes() == (dist / NAME).read_bytes()
    subprocess.run(
        [*command[:6], "--config-settings", "kernels=none", "--wheel-dir", tmp_path, dist / f"flashcell-{VERSION}.tar.gz"],
        check=True,
    )  # fmt: skip
    user = Installed(tmp_path)
    user.install(tmp_path / f"flashcell-{VERSION}-py3-none-any.whl")
    replace = "import flashcell, torch; print(flashcell.replace(torch.nn.LSTM(2, 3)))"
    done = user.run("python", "-c", replace)
    assert "0 of 1 recurrent modules became flashcell's; left as they are" in done.stdout
    assert "no kernel here" in done.stdout
