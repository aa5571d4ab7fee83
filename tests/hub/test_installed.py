"""Kernels that pip installed: found, verified against the lock that came with them, and nothing else run."""

import importlib.util
import os
import py_compile
import shutil
from pathlib import Path

import pytest
import torch

from flashcell.hub import installed
from flashcell.hub.lock_format import INSTALLED, lock_source, read_lock

pytestmark = pytest.mark.hub
ROOT = Path(__file__).resolve().parents[2]
AUTO = {"package": "flashcell", "backend": "auto"}
CPU = AUTO | {"backend": "cpu"}


class Wheel:
    """An installed flashcell with one kernel, and processes that load it without a Hub's lock."""

    def __init__(self, chain, site: Path):
        self.chain, self.site = chain, site
        self.variant = site / "flashcell/installed/fused-rnn" / chain.variant
        self.lock = site / "flashcell/installed/lock.py"

    def start(self, *steps: dict, **environment: object):
        steps = tuple(step | {"path": str(self.site)} for step in steps or (AUTO,))
        return self.chain.start(*steps, **{"FLASHCELL_LOCK": None, **environment})

    def load(self, *steps: dict, **environment: object) -> list[dict]:
        return self.start(*steps, **environment).finish()

    def edit(self, **fields: object) -> None:
        """Changes the entry of the variant in the lock."""
        lock = read_lock(self.lock)
        lock["kernels"]["fused-rnn"]["variants"][self.chain.variant].update(fields)
        self.lock.write_bytes(lock_source(lock, "lock.py", INSTALLED))

    def publish(self) -> None:
        """Lets the Hub's lock in the package pin what the chain's Hub has."""
        shutil.copyfile(self.chain.folder / "lock.py", self.site / "flashcell/hub/kernels_lock.py")


@pytest.fixture
def wheel(chain, built, tmp_path) -> Wheel:
    site = tmp_path / "site"
    for name in ("hub", "utils", "kernels"):
        (site / "flashcell" / name).mkdir(parents=True)
    for file in (*ROOT.glob("modeling/hub/*.py"), ROOT / "modeling/utils/whole_file.py"):
        shutil.copyfile(file, site / "flashcell" / file.relative_to(ROOT / "modeling"))
    (site / "flashcell/kernels/fused_rnn").symlink_to(
        ROOT / "kernel_builds/fused-rnn/torch-ext/fused_rnn"
    )
    place = site / "flashcell/installed/fused-rnn"
    shutil.copytree(built.root / "build" / chain.variant, place / chain.variant)
    lock = read_lock(chain.folder / "lock.py")
    lock["kernels"]["fused-rnn"]["revision"] = None
    (place.parent / "lock.py").write_bytes(lock_source(lock, "lock.py", INSTALLED))
    yield Wheel(chain, site)
    assert not (tmp_path / "imported").exists()


def spy(wheel) -> str:
    return f"open({str(wheel.site.parent / 'imported')!r}, 'w')\n"


def test_it_runs_without_hub_cache_or_warning(wheel, tmp_path):
    (tmp_path / "file").touch()  # so that no cache can be made below it
    auto, cpu = wheel.load(AUTO, CPU, HF_HOME=tmp_path / "file/cache")
    assert (auto["source"], auto["value"], auto["warnings"]) == ("installed", 2.0, [])
    assert cpu["source"] == "installed"
    assert auto["file"] == str(wheel.variant / "__init__.py")
    assert "from the wheel flashcell, " in auto["info"]
    assert wheel.chain.hub.requests == []


def test_eight_processes_at_once(wheel):
    running = [wheel.start(CPU) for _ in range(8)]
    outcomes = [process.finish()[0] for process in running]
    assert [outcome.get("source") for outcome in outcomes] == ["installed"] * 8, outcomes


@pytest.mark.parametrize("file", ["cells.py", "metadata.json", "library"])
def test_a_changed_file_is_refused(wheel, file):
    path = next(wheel.variant.glob("*.so")) if file == "library" else wheel.variant / file
    content = path.read_bytes()
    path.write_bytes(spy(wheel).encode() + content if file == "cells.py" else content + b" ")
    wheel.publish()  # the Hub's does not take its place
    for outcome in wheel.load(AUTO, CPU):
        assert outcome.get("error") == "KernelCorrupt", outcome
        assert f"{path.name} has sha256" in outcome["message"]
        assert "pip install --force-reinstall --no-deps flashcell" in outcome["message"]
    assert wheel.chain.hub.requests == []


def test_bytecode_and_files_beside_it_are_not_read(wheel, tmp_path):
    evil = tmp_path / "evil.py"
    evil.write_text(spy(wheel) + "def lstm(x):\n    return 3 * x\n")
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    file = importlib.util.cache_from_source(str(wheel.variant / "cells.py"))
    py_compile.compile(str(evil), file, doraise=True, invalidation_mode=mode)
    (wheel.variant / "cells").mkdir()  # Python would prefer the package to the module
    shutil.copyfile(evil, wheel.variant / "cells/__init__.py")
    assert wheel.load()[0]["value"] == 2.0


@pytest.mark.parametrize("published", [False, True])
def test_a_kernel_of_another_release_gives_way(wheel, published):
    wheel.edit(id="_fused_rnn_cpu_other")
    if published:
        wheel.publish()
    auto, cpu = wheel.load(AUTO, CPU)
    if published:
        assert (auto["source"], cpu["source"]) == ("hub", "hub")
        return
    assert auto["source"] == "reference"
    (warning,) = auto["warnings"]
    for text in (warning, cpu["message"]):
        assert "but this flashcell was released with _fused_rnn_cpu_other" in text
        assert "(pip install --force-reinstall" not in text
        assert "unpublished" in text
    assert cpu["error"] == "KernelUnavailable"


def test_a_file_that_is_missing_or_unreadable(wheel):
    (wheel.variant / "cells.py").unlink()
    auto, cpu = wheel.load(AUTO, CPU)
    assert (auto["source"], cpu["error"]) == ("reference", "KernelUnavailable")
    assert "has no cells.py (pip install --force-reinstall --no-deps flashcell)" in cpu["message"]
    os.mkfifo(wheel.variant / "cells.py")
    assert "cells.py cannot be read: not a regular file" in wheel.load(CPU)[0]["message"]


def test_a_lock_that_is_broken_is_an_error(wheel):
    wheel.lock.write_text("LOCK = {")
    (outcome,) = wheel.load(AUTO)
    assert outcome["error"] == "LockError"
    assert f"kernel lock {wheel.lock} is not LOCK" in outcome["message"]


def test_a_machine_that_the_wheel_is_not_for(wheel):
    run = "import platform\nplatform.machine = lambda: 'aarch64'\n"
    auto, cpu = wheel.load(AUTO | {"run": run}, CPU)
    assert auto["source"] == "reference"
    assert "no installed fused-rnn fits: this machine needs cpu on linux aarch64" in cpu["message"]
    assert f"{wheel.chain.variant} (for linux x86_64)" in cpu["message"]


def test_local_kernels_and_a_lock_of_the_users_win(wheel, project):
    cells = project.root / "build" / wheel.chain.variant / "cells.py"
    cells.write_text("def lstm(x):\n    return 5 * x\n")
    (local,) = wheel.load(LOCAL_KERNELS=f"flashcell/fused-rnn={project.root}")
    assert (local["source"], local["value"]) == ("local", 5.0)
    assert wheel.load(LOCAL_KERNELS="")[0]["source"] == "installed"
    (pinned,) = wheel.load(FLASHCELL_LOCK=wheel.chain.folder / "lock.py")
    assert pinned["source"] == "hub"


@pytest.fixture
def cuda(wheel, monkeypatch) -> Path:
    """The lock pins a variant for CUDA 13.0, which a torch for CUDA 13.2 wants; returns its place."""
    name, entry = wheel.chain.variant.replace("cpu", "cu130"), {"archs": ["9.0a"]}
    lock = read_lock(wheel.lock)
    variants = lock["kernels"]["fused-rnn"]["variants"]
    variants[name] = variants[wheel.chain.variant] | entry
    wheel.lock.write_bytes(lock_source(lock, "lock.py", INSTALLED))
    monkeypatch.setattr(installed, "lock_of_wheel", lambda: wheel.lock)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.syspath_prepend(wheel.site)
    return wheel.site / "flashcell_cu13/fused-rnn" / name


def test_cuda_kernels_come_with_a_wheel_of_their_own(wheel, cuda):
    with pytest.raises(installed.NotInstalled, match="another wheel: pip install flashcell-cu13"):
        installed.find_installed("fused-rnn", "cuda")
    shutil.copytree(wheel.variant, cuda)
    (cuda.parents[1] / "__init__.py").write_text(spy(wheel))  # found, and not imported
    importlib.invalidate_caches()
    found = installed.find_installed("fused-rnn", "cuda")
    assert (found.path, found.distribution) == (cuda, "flashcell-cu13")
    assert found.contents.keys() == found.digests.keys()
    (cuda / "cells.py").write_text(spy(wheel))
    with pytest.raises(installed.FilesDiffer, match="--no-deps flashcell-cu13"):
        installed.find_installed("fused-rnn", "cuda")
    (cuda / "metadata.json").write_text('{"id": "_older"}')
    with pytest.raises(installed.NotInstalled, match="install flashcell-cu13 and flashcell of one"):
        installed.find_installed("fused-rnn", "cuda")
    assert installed.find_installed("fused-rnn", "cpu").distribution == "flashcell"


def test_the_wheel_of_torchs_cuda(wheel, cuda, monkeypatch):
    """flashcell-cu12 has the variant for 12.6, which serves 12.8; the lock pins the Hub's, too."""
    lock = read_lock(wheel.lock)
    variants = lock["kernels"]["fused-rnn"]["variants"]
    variants |= {cuda.name.replace("cu130", tag): variants[cuda.name] for tag in ("cu126", "cu128")}
    wheel.lock.write_bytes(lock_source(lock, "lock.py", INSTALLED))
    shutil.copytree(wheel.variant, cuda)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(installed.NotInstalled, match="another wheel: pip install flashcell-cu12"):
        installed.find_installed("fused-rnn", "cuda")
    older = wheel.site / "flashcell_cu12/fused-rnn" / cuda.name.replace("cu130", "cu126")
    shutil.copytree(wheel.variant, older)
    importlib.invalidate_caches()
    found = installed.find_installed("fused-rnn", "cuda")
    assert (found.path, found.distribution) == (older, "flashcell-cu12")
    shutil.rmtree(cuda.parents[1])
    importlib.invalidate_caches()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(installed.NotInstalled, match="another wheel: pip install flashcell-cu13"):
        installed.find_installed("fused-rnn", "cuda")


@pytest.mark.parametrize(
    ("place", "is_installed"),
    [
        ("site-packages/flashcell/hub/installed.py", True),
        ("checkout/modeling/hub/installed.py", False),
        ("a/repository/hub_installed.py", False),
        ("flashcell/hub_installed.py", False),
    ],
)
def test_only_an_installed_package_has_a_lock(monkeypatch, tmp_path, place, is_installed):
    file = tmp_path / place
    for folder in (file.parent, file.parents[1]):
        (folder / "installed").mkdir(parents=True)
        (folder / "installed/lock.py").touch()
    monkeypatch.setattr(installed, "__file__", str(file))
    lock = tmp_path / "site-packages/flashcell/installed/lock.py"
    assert installed.lock_of_wheel() == (lock if is_installed else None)
