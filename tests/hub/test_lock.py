"""Tests that an invalid lock is refused with the name of its field, and what a valid one allows to
run."""

import copy
import os
import re
import resource

import pytest

from flashcell.hub import kernel_variants, kernels_lock
from flashcell.hub.kernel_variants import choose_variant, runs_on
from flashcell.hub.lock_format import LockError, check_lock, lock_source, read_lock
from flashcell.utils.whole_file import write_file

VARIANT = "torch-stable-abi210-cpu-x86_64-linux"
FILES = {"__init__.py": "0" * 64, "metadata.json": "1" * 64}
KERNEL = {
    "repo": "flashcell/fused-rnn",
    "version": 1,
    "revision": "a" * 40,
    "variants": {VARIANT: {"id": "_fused_rnn_cpu_1", "archs": [], "files": FILES}},
}
LOCK = {"format": 1, "kernels": {"fused-rnn": KERNEL}}


def lock_with(*path: object, value: object) -> dict:
    lock = copy.deepcopy(LOCK)
    at = lock
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return lock


def test_committed_lock():
    check_lock(kernels_lock.LOCK, "kernels_lock.py")


def test_round_trip(tmp_path):
    cuda = VARIANT.replace("cpu", "cu130"), {"id": "_x", "archs": ["9.0a"], "files": FILES}
    lock = lock_with("kernels", "fused-rnn", "variants", cuda[0], value=cuda[1])
    lock["kernels"]["tfla"] = KERNEL | {"revision": None, "variants": {}}
    lock["kernels"]["diagonal-rnn"] = KERNEL | {"revision": None}  # what wheels bring
    (tmp_path / "lock.py").write_bytes(lock_source(lock, "lock.py"))
    assert read_lock(tmp_path / "lock.py") == lock


def test_a_full_disk_leaves_the_lock(tmp_path):
    lock, limits = tmp_path / "lock.py", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_file(lock, lock_source(LOCK, "lock.py"))
    changed = lock_source(lock_with("kernels", "fused-rnn", "version", value=2), "lock.py")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_file(lock, changed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_lock(lock) == LOCK
    assert os.listdir(tmp_path) == ["lock.py"]


K, V = ("kernels", "fused-rnn"), ("kernels", "fused-rnn", "variants", VARIANT)
WRONG = [
    (("format",), 2, "format is 2, but must be 1"),
    (("format",), 1.0, "format is 1.0, but must be 1"),
    (("format",), True, "format is True, but must be 1"),
    (("kernels",), [], "kernels is [], but must be a dict"),
    (("more",), 1, "LOCK is a dict of format, kernels, more, but must be of format, kernels"),
    (("kernels", "Fused_RNN"), KERNEL, "kernels['Fused_RNN']: the name is Fused_RNN"),
    (K, {"repo": "a/b"}, "is a dict of repo, but must be of repo, version, revision, variants"),
    ((*K, "repo"), "fused-rnn", ".repo is fused-rnn, but must be 'org/name'"),
    ((*K, "repo"), "../../etc", ".repo is ../../etc"),
    ((*K, "version"), "1", ".version is 1, but must be an int >= 0"),
    ((*K, "version"), True, ".version is True"),
    ((*K, "revision"), "v1", ".revision is v1, but must be a commit, 40 hex digits, or None"),
    ((*K, "revision"), "A" * 40, ".revision is AAAA"),
    ((*K, "variants"), {}, ".variants is [], but must be those of the revision, at least one"),
    ((*K, "variants", "../up"), {}, "the name is ../up, but must be a directory below build/"),
    ((*V, "id"), "os.system", ".id is os.system"),
    ((*V, "archs"), "9.0a", ".archs is 9.0a, but must be a list"),
    ((*V, "archs"), ["sm_90"], ".archs is sm_90, but must be CUDA archs such as '9.0a'"),
    ((*V, "files"), {}, ".files is without __init__.py, metadata.json"),
    ((*V, "files", "../x.py"), "0" * 64, "a name is ../x.py, but must be a relative path"),
    ((*V, "files", "/x.py"), "0" * 64, "a name is /x.py"),
    ((*V, "files", "a/../x.py"), "0" * 64, "a name is a/../x.py"),
    ((*V, "files", "__pycache__/x.pyc"), "0" * 64, "a name is __pycache__/x.pyc"),
    ((*V, "files", "a/__pycache__/x.pyc"), "0" * 64, "a name is a/__pycache__/x.pyc"),
    ((*V, "files", "x.py"), "0" * 40, ".files['x.py'] is 0000"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_field(path, value, message):
    with pytest.raises(LockError, match=re.escape(message)):
        check_lock(lock_with(*path, value=value), "a lock")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "assigns LOCK 0 times"),
        ("LOCK = {}\nLOCK = {}", "assigns LOCK 2 times"),
        ("LOCK = {", "is not LOCK = {a literal}"),
        ("LOCK = open('/etc/passwd').read()", "is not LOCK = {a literal}"),
        ("LOCK = {[]: 1}", "is not LOCK = {a literal}"),
        ("\0", "is not LOCK = {a literal}"),
        ("LOCK = {'format': 1, 'kernels': {}, 'format': 1}", "has the key 'format' twice"),
        ("LOCK = {'format': 1, 'kernels': {'a': 1, \"a\": 2}}", "has the key 'a' twice"),
        ("LOCK = {'format': 1, 'kernels': {'a': 1, u'a': 2}}", "has the key 'a' twice"),
        (
            "LOCK = {'format': 0x" + "f" * 5000 + ", 'kernels': {}}",
            "format is an int of too many digits, but must be 1",
        ),
        ("LOCK = {'format': 1}", "LOCK is a dict of format, but must be of format, kernels"),
    ],
)
def test_wrong_file(tmp_path, text, message):
    (tmp_path / "lock.py").write_text(text)
    with pytest.raises(LockError, match=re.escape(message)):
        read_lock(tmp_path / "lock.py")


def test_a_lock_for_which_memory_is_short(tmp_path, monkeypatch):
    (tmp_path / "lock.py").write_text(f"LOCK = {LOCK!r}")
    refused = pytest.raises(LockError, match=r"is not LOCK = .*: MemoryError")
    with refused, monkeypatch.context() as patch:
        patch.setattr("ast.parse", lambda text: exec("raise MemoryError"))
        read_lock(tmp_path / "lock.py")


def test_lock_is_not_executed(tmp_path):
    text = f"open({str(tmp_path / 'executed')!r}, 'w')\nLOCK = {LOCK!r}"
    (tmp_path / "lock.py").write_text(text)
    assert read_lock(tmp_path / "lock.py") == LOCK
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def h200(monkeypatch):
    """The description of a machine with CUDA 13.1 and a device of capability 9.0."""
    monkeypatch.setattr(kernel_variants.torch.version, "cuda", "13.1")
    monkeypatch.setattr(kernel_variants.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel_variants.torch.cuda, "get_device_capability", lambda: (9, 0))


def test_choice(h200):
    cuda = lambda tag: f"torch-stable-abi{tag}-x86_64-linux"
    archs = {cuda("210-cu126"): ["9.0a"], cuda("210-cu130"): ["9.0a"], cuda("210-cu132"): ["9.0a"]}
    archs |= {VARIANT: [], "torch-universal": [], "torch213-cxx11-cu130-x86_64-linux": ["9.0"]}
    # Not CUDA 12, and not newer than torch's CUDA.
    assert choose_variant(archs, "cuda") == cuda("210-cu130")
    assert choose_variant(archs, "cpu") == VARIANT  # with any build of torch
    assert choose_variant(archs | {cuda("211-cu130"): ["9.0"]}, "cuda") == cuda("211-cu130")
    assert choose_variant(archs | {cuda("211-cu130"): ["8.0"]}, "cuda") == cuda("210-cu130")
    assert choose_variant({cuda("210-cu130"): ["10.0"]}, "cuda") is None
    message = kernel_variants.explain({cuda("210-cu130"): ["10.0"]}, "cuda")
    assert "on a device of capability 9.0" in message
    assert "(for CUDA archs 10.0)" in message


@pytest.mark.parametrize(
    ("own", "chosen"),
    [
        *[("12.6", "cu126"), ("12.8", "cu128"), ("12.9", "cu128")],
        *[("13.0", "cu130"), ("13.2", "cu130")],
        *[("12.4", None), ("14.0", None), (None, None)],
    ],
)
def test_the_variant_of_torchs_cuda(h200, monkeypatch, own, chosen):
    archs = {VARIANT.replace("cpu", tag): ["9.0a"] for tag in ("cu126", "cu128", "cu130")}
    monkeypatch.setattr(kernel_variants.torch.version, "cuda", own)
    expected = chosen and VARIANT.replace("cpu", chosen)
    assert choose_variant(archs, "cuda") == expected
    if chosen is None:
        has = f"CUDA {own}" if own else "the CPU alone"
        remedy = f"take a torch for CUDA 12, or a variant for {has}"
        said = f"for CUDA 12.8 or a later 12.x, but torch is built for {has}: {remedy}"
        assert said in kernel_variants.explain(archs, "cuda")


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (9, 0), True),
        ("9.0a", (9, 0), True),
        ("9.0a", (10, 0), False),
        ("9.0a+PTX", (10, 0), False),
        ("10.0f", (10, 3), True),
        ("10.0f+PTX", (12, 0), False),
    ],
)
def test_archs(arch, capability, runs):
    assert runs_on(arch, capability) == runs
