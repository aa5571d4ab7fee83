"""Tests that scripts/publish_kernels publishes what was built and reviewed, once, and locks it."""

import base64
import hashlib
import json
import subprocess
from types import SimpleNamespace

import pytest

from flashcell.hub.lock_format import read_lock

pytestmark = pytest.mark.hub


@pytest.fixture
def publish(project, hub, tmp_path, monkeypatch):
    """Publishes the project to the Hub; returns the lock's entry."""

    def run(*arguments: object) -> dict:
        lock = tmp_path / "lock.py"
        project.publish(monkeypatch, "--endpoint", hub.url, "--lock", lock, *arguments)
        return read_lock(lock)["kernels"]["fused-rnn"]

    return run


def refusal(run, *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    return str(caught.value)


def change_source(project) -> None:
    (project.root / "torch-ext/fused_rnn/cells.py").write_text("def lstm(x):\n    return 7 * x\n")


def test_publishes_and_locks(publish, project, hub):
    locked = publish()
    state = hub.store.load("flashcell/fused-rnn")
    assert state["branches"]["v1"] == locked["revision"]
    files = state["commits"][locked["revision"]]["files"]
    (name,) = locked["variants"]
    variant = locked["variants"][name]
    published = {p: f["sha256"] for p, f in files.items() if p.startswith(f"build/{name}/")}
    assert published == {f"build/{name}/{p}": sha256 for p, sha256 in variant["files"].items()}
    assert variant["id"] == project.script.read_kernel(project.root).id("cpu")
    assert any(path.startswith("build/torch-universal/") for path in files)
    assert "README.md" not in files
    main = state["commits"][state["branches"]["main"]]["files"]
    assert hub.store.get(main["README.md"]) == b"a card"


def test_same_content_again_changes_nothing(publish, project, hub):
    first = publish()
    cache = project.root / "build/torch-universal/__pycache__"
    cache.mkdir()
    (cache / "cells.cpython-311.pyc").touch()
    hub.requests.clear()
    assert publish() == first
    assert not any("/commit/" in request for request in hub.requests)


def test_unchanged_version_with_other_content(publish, project, hub):
    first = publish()
    change_source(project)
    project.build()
    message = refusal(publish)
    assert "v1 is published" in message
    assert "raise general.version" in message
    assert hub.store.load("flashcell/fused-rnn")["branches"]["v1"] == first["revision"]

    second = publish("--replace")
    state = hub.store.load("flashcell/fused-rnn")
    files = state["commits"][second["revision"]]["files"]
    assert second["revision"] != first["revision"]
    assert sum(path.endswith(".so") for path in files) == 1  # the first build's library is gone
    assert first["revision"] in state["commits"]  # but still there for whoever pinned it


def test_a_signature_travels_and_is_not_locked(publish, project, hub):
    """Each signature of a file is another one: it is uploaded once, and a new one changes nothing."""
    first = publish()
    variant = project.root / "build/torch-stable-abi210-cpu-x86_64-linux"
    for content in (b"one", b"two"):
        (variant / "metadata.json.sigstore").write_bytes(content)
        signed = publish()
        assert signed["variants"] == first["variants"]
        files = hub.store.load("flashcell/fused-rnn")["commits"][signed["revision"]]["files"]
        assert hub.store.get(files[f"build/{variant.name}/metadata.json.sigstore"]) == b"one"
    change_source(project)
    variant = project.build()
    again = publish("--replace")
    files = hub.store.load("flashcell/fused-rnn")["commits"][again["revision"]]["files"]
    assert not any(path.endswith(".sigstore") for path in files)  # it was of another file


def test_a_published_file_that_this_build_lacks_is_a_difference(publish, project):
    folder = project.root / "benchmarks"
    folder.mkdir()
    (folder / "benchmark.py").write_text("small = 1\n")
    (folder / "benchmark_large.py").write_text("large = 1\n")
    publish()
    (folder / "benchmark_large.py").unlink()
    assert "its benchmarks differs from this build" in refusal(publish)


def test_new_version(publish, project, hub):
    first = publish()
    toml = project.root / "build.toml"
    toml.write_text(toml.read_text().replace("version = 1", "version = 2"))
    assert "metadata.json has version 1, but the sources give 2" in refusal(publish)
    project.build()
    second = publish()
    branches = hub.store.load("flashcell/fused-rnn")["branches"]
    assert (branches["v1"], branches["v2"]) == (first["revision"], second["revision"])


def of_another_machine(project):
    """Makes the variant one for aarch64, as its name and its library's ELF header say. Returns what
    its folder was called, and is."""
    here = project.root / "build/torch-stable-abi210-cpu-x86_64-linux"
    there = here.with_name("torch-stable-abi210-cpu-aarch64-linux")
    here.rename(there)
    (library,) = there.glob("*.so")
    content = bytearray(library.read_bytes())
    content[18:20] = (183).to_bytes(2, "little")  # EM_AARCH64
    library.write_bytes(content)
    file = there / "metadata.json"
    metadata = json.loads(file.read_text())
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    metadata["digest"]["files"][library.name] = digest
    file.write_text(json.dumps(metadata))
    return here, there


def test_a_new_version_locks_no_variant_of_the_old_one(publish, project):
    """A variant that this machine cannot build still has the bytes of version 1: it is not locked."""
    here, there = of_another_machine(project)
    publish()
    there.rename(project.root / there.name)
    toml = project.root / "build.toml"
    toml.write_text(toml.read_text().replace("version = 1", "version = 2"))
    project.build()
    assert list(publish()["variants"]) == [here.name]


def test_a_binary_of_the_same_length_is_another_one(publish_kernels, tmp_path):
    """The Hub keeps large files by their sha256, and others by git's hash."""
    mine, content = tmp_path / "library.so", b"one"
    mine.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    for sha256, expected in ((digest, True), (hashlib.sha256(b"two").hexdigest(), False)):
        large = SimpleNamespace(size=3, sha256=sha256)
        published = SimpleNamespace(lfs=large, size=3, blob_id="of the pointer")
        assert publish_kernels.same(published, mine) == expected
    for sha1, expected in ((git_hash(b"one"), True), (git_hash(b"two"), False)):
        assert publish_kernels.same(SimpleNamespace(lfs=None, blob_id=sha1), mine) == expected


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def test_the_users_token_is_not_sent_to_a_local_hub(publish, local_hub, monkeypatch):
    sent, route = [], local_hub.Handler._route

    def spy(self, *routes):
        sent.append(self.headers.get("Authorization"))
        return route(self, *routes)

    monkeypatch.setattr(local_hub.Handler, "_route", spy)
    monkeypatch.setenv("HF_TOKEN", "hf_the_users_own")
    publish("--replace")
    assert set(sent) == {None}
    publish("--token", "hf_for_this_hub")
    assert sent[-1] == "Bearer hf_for_this_hub"


def test_variant_from_another_machine_stays(publish, project):
    here, there = of_another_machine(project)
    publish()
    there.rename(project.root / there.name)
    project.build()
    assert sorted(publish()["variants"]) == [there.name, here.name]


def test_build_of_other_sources(publish, project):
    change_source(project)
    message = refusal(publish)
    assert "metadata.json has id" in message
    assert "run scripts/build_kernels again" in message


def test_missing_build(publish, project):
    build = project.root / "build"
    build.rename(project.root / "elsewhere")
    assert "holds no binary variant: run scripts/build_kernels first" in refusal(publish)


def test_files_are_not_what_metadata_says(publish, project, hub):
    variant = project.root / "build/torch-stable-abi210-cpu-x86_64-linux"
    (variant / "cells.py").write_text("")
    (variant / "notes.txt").touch()
    assert "cells.py, notes.txt is not what metadata.json says" in refusal(publish)
    assert hub.requests == []


def test_kernel_dependencies(publish, project):
    file = project.root / "build/torch-stable-abi210-cpu-x86_64-linux/metadata.json"
    depends = {"kernel-depends": [{"repo-id": "a/b", "version": 1}]}
    file.write_text(json.dumps(json.loads(file.read_text()) | depends))
    assert "has kernel-depends, which the lock does not pin" in refusal(publish)


def test_abi_check(publish, project, hub):
    project.build(source='__attribute__((visibility("default"))) int too_much;\n')
    message = refusal(publish)
    assert "fails the ABI check" in message
    assert "exports too_much, but only PyInit_* may be" in message
    assert hub.requests == []


def test_dirty_tree(publish_kernels, project, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git = lambda *arguments: subprocess.run(["git", "-C", checkout, *arguments], check=True)
    git("init", "--quiet")
    (checkout / "change").touch()
    monkeypatch.setattr(publish_kernels, "ROOT", checkout)
    elsewhere = ["--endpoint", "https://hub.invalid", "--lock", tmp_path / "lock.py"]
    publish = lambda *arguments: project.publish(monkeypatch, *elsewhere, *arguments)
    assert "1 uncommitted changes (?? change, ...), but must be clean" in refusal(publish)
    assert "--replace is for a Hub on this machine" in refusal(publish, "--replace")
    assert not (tmp_path / "lock.py").exists()


def test_committed_lock_never_names_a_local_hub(project, hub, monkeypatch):
    monkeypatch.delenv("FLASHCELL_LOCK", raising=False)
    message = refusal(lambda: project.publish(monkeypatch, "--endpoint", hub.url))
    assert "kernels_lock.py is for everybody: name another file with --lock" in message
    assert hub.requests == []


def test_a_lock_that_cannot_be_written(publish, tmp_path):
    (tmp_path / "file").touch()
    message = refusal(publish, "--lock", tmp_path / "file/lock.py")
    assert message.startswith("error: ")
    assert str(tmp_path / "file") in message


def test_broken_lock_is_kept(publish, tmp_path):
    (tmp_path / "lock.py").write_text("LOCK = {}")
    assert "lock.py: LOCK is" in refusal(publish)
    assert (tmp_path / "lock.py").read_text() == "LOCK = {}"


LIES = {
    "refs": lambda self, repo: self.reply({"branches": []}),
    "tree": lambda self, *of: self.reply([1, {"type": "file"}]),
    "commit": lambda self, *to: self.reply({"commitOid": "no commit", "commitUrl": "x"}),
    "preupload": lambda self, *of: self.reply(b"<html>"),
}


@pytest.mark.parametrize("lie", [None, *LIES])
def test_a_hub_that_lies_or_is_not_there_leaves_the_lock(
    publish, project, local_hub, tmp_path, lie, monkeypatch
):
    publish()
    where = ["--endpoint", "http://127.0.0.1:9"] if lie is None else ["--replace"]
    if lie is not None:
        monkeypatch.setattr(local_hub.Handler, lie, LIES[lie])
    if lie in ("commit", "preupload"):
        change_source(project)
        project.build()
    before = (tmp_path / "lock.py").read_bytes()
    assert refusal(publish, *where).startswith("error: ")
    assert (tmp_path / "lock.py").read_bytes() == before


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("http://127.0.0.1:80", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("https://huggingface.co", False),
        ("http://127.0.0.1.example.com", False),
        ("http://192.168.0.1", False),
    ],
)
def test_loopback(publish_kernels, endpoint, local):
    assert publish_kernels.is_loopback(endpoint) == local
