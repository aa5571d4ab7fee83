"""The repositories of local_hub.py on disk.

ROOT/blobs/<sha256>            contents
ROOT/repos/<org>/<name>.json   {"branches": {name: commit},
                                     "commits": {commit: {"files": {path: {sha256, size, oid}}}}}
"""

import base64
import hashlib
import json
import threading
from pathlib import Path

from flashcell.utils.whole_file import write_file

ROOT = Path(__file__).resolve().parents[2]

EMPTY = hashlib.sha1(b"the commit before the first").hexdigest()


class NotFound(Exception):
    """Something does not exist; `code` is the Hub's X-Error-Code, which clients read."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Store:
    """Repositories on disk; every change replaces one file."""

    def __init__(self, root: Path):
        self.root = root
        self.lock = threading.RLock()
        (root / "blobs").mkdir(parents=True, exist_ok=True)

    def put(self, content: bytes) -> dict:
        sha256 = hashlib.sha256(content).hexdigest()
        write_file(self.root / "blobs" / sha256, content)
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # as in git
        return {"sha256": sha256, "size": len(content), "oid": oid}

    def get(self, file: dict) -> bytes:
        return (self.root / "blobs" / file["sha256"]).read_bytes()

    def exists(self, repo: str) -> bool:
        return self._path(repo).is_file()

    def load(self, repo: str) -> dict:
        if not self.exists(repo):
            raise NotFound("RepoNotFound", f"there is no repository {repo}")
        return json.loads(self._path(repo).read_text())

    def create(self, repo: str) -> None:
        self._save(repo, {"branches": {"main": EMPTY}, "commits": {EMPTY: {"files": {}}}})

    def branch(self, repo: str, name: str, start: str) -> bool:
        with self.lock:
            state = self.load(repo)
            if name in state["branches"]:
                return False
            state["branches"][name] = self.resolve(state, start)
            self._save(repo, state)
            return True

    def resolve(self, state: dict, revision: str) -> str:
        """Returns the commit of a commit, a branch or refs/heads/<branch>."""
        if revision in state["commits"]:
            return revision
        commit = state["branches"].get(revision.removeprefix("refs/heads/"))
        if commit is None:
            raise NotFound("RevisionNotFound", f"there is no revision {revision}")
        return commit

    def commit(self, repo: str, branch: str, changes: list[dict]) -> str:
        """Applies the lines of a commit request: header, file, deletedFile, deletedFolder."""
        with self.lock:
            state = self.load(repo)
            parent = self.resolve(state, branch)
            files = dict(state["commits"][parent]["files"])
            for change in changes:
                value, path = change["value"], change["value"].get("path", "")
                if change["key"] == "file":
                    files[path] = self.put(base64.b64decode(value["content"]))
                elif change["key"] == "deletedFile":
                    files.pop(path, None)
                elif change["key"] == "deletedFolder":
                    folder = path.rstrip("/") + "/"
                    files = {p: f for p, f in files.items() if not p.startswith(folder)}
                elif change["key"] != "header":
                    raise ValueError(f"a commit cannot hold {change['key']!r} here")
            named = json.dumps([parent, sorted((p, f["sha256"]) for p, f in files.items())])
            commit = hashlib.sha1(named.encode()).hexdigest()
            state["commits"][commit] = {"files": files}
            state["branches"][branch] = commit
            self._save(repo, state)
            return commit

    def _path(self, repo: str) -> Path:
        return self.root / "repos" / f"{repo}.json"

    def _save(self, repo: str, state: dict) -> None:
        self._path(repo).parent.mkdir(parents=True, exist_ok=True)
        write_file(self._path(repo), json.dumps(state).encode())
