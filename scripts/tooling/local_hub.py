"""A Hugging Face Hub for kernels and models on 127.0.0.1, for scripts/demo, scripts/release and tests.

    python scripts tooling.local_hub --root DIRECTORY [--port 0] [--log FILE]

prints its URL (port 0: a free one) and serves until it is interrupted. What huggingface_hub and
kernels ask of a Hub to create, fill, list and download kernel and model repositories is here; the rest
is 404. There are no users and no tokens, and every file travels inside its commit (no LFS). Web pages
are kept out: a request that names another host, or an origin, is refused.
"""

import argparse
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tooling.hub_store import NotFound, Store

LARGEST_REQUEST = 2**30  # bytes
NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
REPO = rf"(?:kernels/|(?=models/))((?:models/)?{NAME})"  # matches org/name, or models/org/name


@dataclass
class Faults:
    """Faults that tests inject into downloads, by the ending of the path."""

    cut: dict[str, int] = field(default_factory=dict)  # all bytes are announced, half are sent
    clip: dict[str, int] = field(default_factory=dict)  # half a file, though HEAD announced all
    shorten: dict[str, int] = field(default_factory=dict)  # half a file is announced and sent
    tampered: dict[str, bytes] = field(default_factory=dict)  # this content is sent instead

    def apply(self, method: str, path: str, content: bytes) -> tuple[bytes, int]:
        """Applies the faults to a download; returns the content to announce and the bytes to
        send."""
        for ending, other in self.tampered.items():
            content = other if path.endswith(ending) else content
        clipped = method == "GET" and self._counts(self.clip, method, path)
        if clipped or self._counts(self.shorten, method, path):
            content = content[: len(content) // 2]
        cut = method == "GET" and self._counts(self.cut, method, path)
        return content, len(content) // (2 if cut else 1)

    def _counts(self, fault: dict[str, int], method: str, path: str) -> bool:
        ending = next((e for e, times in fault.items() if times and path.endswith(e)), None)
        if ending is not None and method == "GET":
            fault[ending] -= 1
        return ending is not None


class LocalHub:
    """Runs the server in a thread of this process."""

    def __init__(self, root: Path, port: int = 0, log: Path | None = None):
        self.store, self.faults, self.log = Store(Path(root)), Faults(), log
        self.requests: list[str] = []  # "METHOD path status"
        self.port = port
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "LocalHub":
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def stop(self) -> None:
        """Stops the server; start() brings it back at the same URL."""
        self._server.shutdown()
        self._server.server_close()

    def note(self, line: str) -> None:
        with self.lock:
            self.requests.append(line)
            if self.log:
                with open(self.log, "a") as file:
                    file.write(line + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds that a client may be silent
    hub: LocalHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self._route(
            (rf"/kernels/({NAME})/resolve/([^/]+)/(.+)", self.file),
            (
                rf"/({NAME})/resolve/([^/]+)/(.+)",
                lambda repo, *of: self.file(f"models/{repo}", *of),
            ),
            (rf"/api/{REPO}/refs", self.refs),
            (rf"/api/{REPO}(?:/revision/([^/]+))?", self.info),
            (rf"/api/{REPO}/tree/([^/]+)(?:/(.*))?", self.tree),
            (r"/api/organizations/([^/]+)/overview", self.organization),
        )

    def do_POST(self) -> None:
        self._route(
            (r"/api/repos/create", self.create_repo),
            (r"/api/validate-yaml", lambda: self.reply({"errors": [], "warnings": []})),
            (rf"/api/{REPO}/branch/([^/]+)", self.create_branch),
            (rf"/api/{REPO}/preupload/([^/]+)", self.preupload),
            (rf"/api/{REPO}/commit/([^/]+)", self.commit),
        )

    def file(self, repo: str, revision: str, path: str) -> None:
        state = self.hub.store.load(repo)
        commit = self.hub.store.resolve(state, revision)
        entry = state["commits"][commit]["files"].get(path)
        if entry is None:
            raise NotFound("EntryNotFound", f"there is no {path} at {revision}")
        content, sent = self.hub.faults.apply(self.command, path, self.hub.store.get(entry))
        self.reply(content, sent=sent, ETag=f'"{entry["oid"]}"', X_Repo_Commit=commit)

    def refs(self, repo: str) -> None:
        branches = self.hub.store.load(repo)["branches"].items()
        rows = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in branches]
        self.reply({"branches": rows, "converts": [], "tags": [], "pullRequests": []})

    def info(self, repo: str, revision: str | None) -> None:
        commit = self.hub.store.resolve(self.hub.store.load(repo), revision or "main")
        name = repo.removeprefix("models/")
        flags = {"private": False, "gated": False, "downloads": 0, "likes": 0}
        self.reply({"id": name, "author": name.split("/")[0], "sha": commit, **flags})

    def tree(self, repo: str, revision: str, folder: str | None) -> None:
        state = self.hub.store.load(repo)
        files = state["commits"][self.hub.store.resolve(state, revision)]["files"]
        prefix = folder.rstrip("/") + "/" if folder else ""
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        rows = {}
        for path, entry in sorted(files.items()):
            parts = path.removeprefix(prefix).split("/")
            if not path.startswith(prefix):
                continue
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                name = prefix + "/".join(parts[:depth])
                oid = hashlib.sha1(name.encode()).hexdigest()
                rows[name] = {"type": "directory", "path": name, "size": 0, "oid": oid}
            if recursive or len(parts) == 1:
                size_and_oid = {"size": entry["size"], "oid": entry["oid"]}
                rows[path] = {"type": "file", "path": path, **size_and_oid}
        if prefix and not rows:
            raise NotFound("EntryNotFound", f"there is no {folder} at {revision}")
        self.reply(list(rows.values()))

    def organization(self, name: str) -> None:
        trust = {"trustedKernelPublisher": True}  # kernels.get_kernel asks for it
        self.reply({"name": name, "fullname": name, "avatarUrl": "", **trust})

    def create_repo(self) -> None:
        request = json.loads(self.body)
        repo = f"{request.get('organization') or 'local'}/{request['name']}"
        kinds = {"kernel": "", "model": "models/"}
        prefix = kinds.get(request.get("type", "model"))
        if prefix is None or not re.fullmatch(NAME, repo):
            return self.fail(
                400, "BadRequest", f"neither a kernel's nor a model's repository: {repo}"
            )
        answer = {"url": self.page(prefix + repo), "name": repo, "id": repo}
        with self.hub.store.lock:
            if self.hub.store.exists(prefix + repo):
                return self.reply({"error": "it exists", **answer}, status=409)
            self.hub.store.create(prefix + repo)
        self.reply(answer)

    def page(self, repo: str) -> str:
        is_model = repo.startswith("models/")
        return f"{self.hub.url}/{repo.removeprefix('models/') if is_model else f'kernels/{repo}'}"

    def create_branch(self, repo: str, branch: str) -> None:
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        if not self.hub.store.branch(repo, branch, start):
            return self.fail(409, "RefExists", f"{branch} exists")
        self.reply({})

    def preupload(self, repo: str, revision: str) -> None:
        mode = {"uploadMode": "regular", "shouldIgnore": False}  # no file is sent by LFS
        files = [{"path": f["path"], "oid": None, **mode} for f in json.loads(self.body)["files"]]
        self.reply({"files": files})

    def commit(self, repo: str, branch: str) -> None:
        changes = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        commit = self.hub.store.commit(repo, branch, changes)
        url = f"{self.page(repo)}/commit/{commit}"
        self.reply({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def reply(
        self, content: object, status: int = 200, sent: int | None = None, **headers: str
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        # Escaped, so that a request is one line of the log.
        path = json.dumps(unquote(urlsplit(self.path).path))[1:-1]
        self.hub.note(f"{self.command} {path} {status}")
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
            self.close_connection |= sent not in (None, len(body))

    def fail(self, status: int, code: str, message: str) -> None:
        in_a_header = json.dumps(message)[1:-1]  # escapes line ends and non-ASCII characters
        self.reply({"error": message}, status, X_Error_Code=code, X_Error_Message=in_a_header)

    def log_message(self, *args: object) -> None:
        pass  # reply() notes every request

    def _route(self, *routes: tuple[str, Callable[..., None]]) -> None:
        url = urlsplit(self.path)
        own = {f"{name}:{self.hub.port}" for name in ("127.0.0.1", "localhost")}
        if "Origin" in self.headers or self.headers.get("Host") not in own:
            self.close_connection = True  # its body is not read
            return self.fail(403, "Forbidden", "web pages and other hosts' names are refused")
        try:
            self.query, self.body = parse_qs(url.query), self._read_body()
        except ValueError as error:
            self.close_connection = True  # nobody knows where the next request begins
            return self.fail(400, "BadRequest", str(error))
        for pattern, answer in routes:
            if match := re.fullmatch(pattern, url.path):
                try:
                    return answer(*(group and unquote(group) for group in match.groups()))
                except NotFound as error:
                    return self.fail(404, error.code, str(error))
                except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
                    return self.fail(400, "BadRequest", repr(error))
                except (ConnectionError, TimeoutError):  # the client has gone
                    raise
                except OSError as error:  # the disk's: it is full, or has no names of that length
                    return self.fail(500, "StorageFailed", str(error.strerror))
        self.fail(404, "NotFound", f"nothing here: {url.path}")

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self._read(self.headers.get("Content-Length") or "0", 10, LARGEST_REQUEST)
        body = bytearray()
        while chunk := self._read(self._line().split(b";")[0], 16, LARGEST_REQUEST - len(body)):
            body += chunk
            self._line()
        self._line()
        return bytes(body)

    def _line(self) -> bytes:
        return self.rfile.readline(65536).strip()

    def _read(self, size: str | bytes, base: int, most: int) -> bytes:
        """Reads as many bytes as the request announces; raises for a negative or too large
        number."""
        if not 0 <= int(size, base) <= most:
            raise ValueError(f"the size is {size!r}, but must be 0 to {most}")
        content = self.rfile.read(int(size, base))
        if len(content) != int(size, base):  # half of a commit must not become one
            raise ValueError(f"the request ends after {len(content)} of {int(size, base)} bytes")
        return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="where repositories are kept")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free one")
    parser.add_argument("--log", type=Path, help="file to append every request to")
    args = parser.parse_args()
    hub = LocalHub(args.root, args.port, args.log).start()
    print(hub.url, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        hub.stop()


if __name__ == "__main__":
    main()
