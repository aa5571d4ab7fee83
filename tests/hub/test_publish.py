"""scripts/publish_kernels publishes what was built and reviewed, once, and locks it."""

import base64
import json
import resource
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from flashcell.lock_format import read_lock

pytestmark = pytest.mark.hub


@pytest.fixture
def hub(local_hub, tmp_path):
    hub = local_hub.LocalHub(tmp_path / "store").start()
    yield hub
    hub.stop()


@pytest.fixture
def publish(project, hub, tmp_path, monkeypatch):
    """Publishes the project to the Hub; gives the lock's entry."""

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
    assert sum(path.endswith(".so") for path in files) == 1  # the first build's is gone
    assert first["revision"] in state["commits"]  # but whoever pinned it still has it


def test_new_version(publish, project, hub):
    first = publish()
    toml = project.root / "build.toml"
    toml.write_text(toml.read_text().replace("version = 1", "version = 2"))
    assert "metadata.json has version 1, but the sources give 2" in refusal(publish)
    project.build()
    second = publish()
    branches = hub.store.load("flashcell/fused-rnn")["branches"]
    assert (branches["v1"], branches["v2"]) == (first["revision"], second["revision"])


def test_variant_from_another_machine_stays(publish, project):
    here = project.root / "build/torch-stable-abi210-cpu-x86_64-linux"
    there = here.with_name("torch-stable-abi210-cpu-aarch64-linux")
    here.rename(there)
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


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ("Content-Length: -1", "", 400),
        ("Content-Length: many", "", 400),
        (f"Content-Length: {2**40}", "", 400),
        ("Transfer-Encoding: chunked", "-5\r\n", 400),
        ("Transfer-Encoding: chunked", "x\r\n", 400),
        ("Content-Length: 2\r\nOrigin: http://example.com", "{}", 403),
        ("Content-Length: 2\r\nOrigin: null", "{}", 403),
    ],
)
def test_local_hub_refuses(hub, headers, body, status):
    """Also what would make it wait for ever, and every request of a web page."""
    answer = ask(hub, f"Host: 127.0.0.1:{hub.port}\r\n{headers}", body)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


@pytest.mark.parametrize("chunked", [False, True])
def test_local_hub_takes_no_half_of_a_commit(hub, chunked):
    """Of a client that was ended between two files."""
    hub.store.create("org/name")
    line = json.dumps({"key": "file", "value": {"path": "a", "content": ""}}) + "\n"
    size = f"Transfer-Encoding: chunked\r\n\r\n{2 * len(line):x}" if chunked else ""
    size = size or f"Content-Length: {2 * len(line)}\r\n"
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as connection:
        head = "POST /api/kernels/org/name/commit/main HTTP/1.1\r\n"
        connection.sendall(f"{head}Host: localhost:{hub.port}\r\n{size}\r\n{line}".encode())
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(9999).startswith(b"HTTP/1.1 400 ")
    state = hub.store.load("org/name")
    assert not state["commits"][state["branches"]["main"]]["files"]


@pytest.mark.parametrize("body", ["1", "[]", '{"type": []}', "[" * 100_000])
def test_local_hub_answers_any_body(hub, body):
    size = f"Content-Length: {len(body)}"
    answer = ask(hub, f"Host: 127.0.0.1:{hub.port}\r\n{size}", body)
    assert answer.startswith(b"HTTP/1.1 400 "), answer


def test_local_hub_says_that_its_disk_is_full(hub):
    hub.store.create("org/name")
    before, limits = hub.store.load("org/name"), resource.getrlimit(resource.RLIMIT_FSIZE)
    value = {"path": "a", "content": base64.b64encode(bytes(20_000)).decode()}
    body = json.dumps({"key": "file", "value": value})
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        answer = ask(hub, to_itself(hub, body), body, "/api/kernels/org/name/commit/main")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert answer.startswith(b"HTTP/1.1 500 "), answer
    assert hub.store.load("org/name") == before
    assert list((hub.store.root / "blobs").iterdir()) == []


def test_local_hub_says_that_a_name_is_too_long(hub):
    body = json.dumps({"type": "kernel", "organization": "org", "name": "n" * 300})
    assert ask(hub, to_itself(hub, body), body).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("name", ["%E2%82%AC", "a%0d%0aX-Evil:%201"])
def test_local_hub_keeps_a_name_in_its_header(hub, name):
    hub.store.create("org/name")
    with pytest.raises(urllib.error.HTTPError, match="404") as error:
        urllib.request.urlopen(f"{hub.url}/kernels/org/name/resolve/main/{name}")
    assert "X-Evil" not in error.value.headers


def test_local_hub_has_its_own_names_only(hub):
    """A web page may have its own name point to this machine."""
    for host, status in (("127.0.0.1", 400), ("localhost", 400), ("example.com", 403)):
        answer = ask(hub, f"Host: {host}:{hub.port}\r\nContent-Length: 2", "{}")
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


def to_itself(hub, body: str) -> str:
    return f"Host: 127.0.0.1:{hub.port}\r\nContent-Length: {len(body)}"


def ask(hub, headers: str, body: str, path: str = "/api/repos/create") -> bytes:
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n"
        connection.sendall((head + body).encode())
        return connection.recv(9999)


def test_local_hub_command(tmp_path):
    script = Path(__file__).resolve().parents[2] / "scripts/local_hub.py"
    command = [sys.executable, script, "--root", tmp_path / "store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        process.terminate()
    assert url.startswith("http://127.0.0.1:")
