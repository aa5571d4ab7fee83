"""Tests that scripts/tooling/local_hub.py refuses requests that no Hub client sends, and says what
it lacks."""

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

from commands import SCRIPTS

pytestmark = pytest.mark.hub


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
    """Includes requests that would make it wait for ever, and every request of a web page."""
    answer = ask(hub, f"Host: 127.0.0.1:{hub.port}\r\n{headers}", body)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


@pytest.mark.parametrize("chunked", [False, True])
def test_local_hub_takes_no_half_of_a_commit(hub, chunked):
    """A client may be killed between two files of a commit."""
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


def test_local_hub_keeps_models_and_kernels_apart(hub, tmp_path):
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api, folder = HfApi(endpoint=hub.url, token=False), tmp_path / "folder"
    folder.mkdir()
    for kind, content in (("model", b"a model"), ("kernel", b"a kernel")):
        for _ in range(2):
            api.create_repo("org/name", repo_type=kind, exist_ok=True)
        (folder / "README.md").write_bytes(content)
        commit = api.upload_folder(
            repo_id="org/name", repo_type=kind, folder_path=folder, delete_patterns="*"
        )
        assert commit.commit_url.startswith(f"{hub.url}/{'kernels/' * (kind == 'kernel')}org/name/")
    for kind, content in (("model", b"a model"), ("kernel", b"a kernel")):
        where = {"repo_id": "org/name", "repo_type": kind, "cache_dir": tmp_path / "cache"}
        file = api.hf_hub_download(filename="README.md", **where)
        assert Path(file).read_bytes() == content
        assert api.repo_info("org/name", repo_type=kind).id == "org/name"
        assert list(Path(api.snapshot_download(**where)).iterdir()) == [Path(file)]
    with pytest.raises(HfHubHTTPError, match="neither a kernel's nor a model's repository"):
        api.create_repo("org/data", repo_type="dataset")


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
    """A web page may have its own host name point to this machine."""
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
    command = [sys.executable, SCRIPTS, "tooling.local_hub", "--root", tmp_path / "store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        process.terminate()
    assert url.startswith("http://127.0.0.1:")
