"""A release: the checkout that it is made of, its folder, and where it goes.

A rehearsal goes to a Hub and a package index on this machine, which start when a step first asks for
them and end with this process. It is made of a clone, where the lock can be committed.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

from releasing.progress import Step, Stop
from tooling import environment, processes

ROOT = environment.ROOT
LOCK = "modeling/hub/kernels_lock.py"
NOBODY = {  # a user's own tokens are not for servers on this machine
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "TWINE_USERNAME": "nobody",
    "TWINE_PASSWORD": "none",
}
PATIENCE = 60.0  # seconds for the index to start


@dataclass
class Release:
    """What every step works with; the methods differ between a release and its rehearsal."""

    version: str
    home: Path  # the state folder
    backends: list[str]
    machines: list[str]  # whose CPUs have variants; CUDA's are for this machine
    archs: str | None  # CUDA's, or None: those of build.toml
    here: bool  # of the command line: make no environment for the tests
    handle: IO[str] = field(init=False)  # the lock on this release, which its programs hold too
    rehearsal = False

    def __post_init__(self) -> None:
        self._stack = contextlib.ExitStack()

    @property
    def endpoint(self) -> str | None:
        """The Hub's URL, or None: huggingface_hub knows it."""
        return None

    @property
    def index_options(self) -> tuple[str, ...]:
        """The options with which pip finds the index."""
        return ()

    @property
    def folder(self) -> Path:
        return self.home / "release" / self.version

    @property
    def tree(self) -> Path:
        return ROOT

    @property
    def lock(self) -> Path:
        """The lock of what was published, before it is committed."""
        return self.folder / "kernels_lock.py"

    @cached_property
    def sources(self) -> str:
        """Names the committed files, all but the lock, which this release writes."""
        lines = git(ROOT, "ls-tree", "-r", "HEAD").splitlines()
        kept = "\n".join(line for line in lines if not line.endswith(f"\t{LOCK}"))
        return hashlib.sha256(kept.encode()).hexdigest()[:16]

    def what(self) -> dict[str, str]:
        """Names what is released; steps that were done for something else are not done."""
        names = {"backends": " ".join(self.backends), "machines": " ".join(self.machines)}
        return {
            "version": self.version, "sources": self.sources, **names, "archs": self.archs or ""
        }  # fmt: skip

    def key(self, step: Step) -> str:
        if step.of == "sources" or not self.tree.exists():
            return self.sources
        return git(self.tree, "rev-parse", "HEAD^{tree}")

    def script(self, name: str, *arguments: object, failure: str, **variables: str) -> None:
        """Runs a command of the release's own checkout."""
        command = [sys.executable, self.tree / "scripts" / name, *arguments]
        self.program(*command, failure=failure, **variables)

    def program(self, *command: object, failure: str, **variables: str) -> None:
        """Runs a program, which ends with this process; raises Stop unless it succeeds."""
        words = [str(word) for word in command]
        everything = {**os.environ, **self.variables(), **variables}
        status, _ = processes.run(words, everything, self.handle)
        if status:
            raise Stop(f"{failure} (see above)")

    def variables(self) -> dict[str, str]:
        return {}

    def tools(self) -> Path:
        """Returns the folder with twine, and for a rehearsal the index server."""
        return environment.make_tools(self.home, "publishing", ["twine"])

    def upload_options(self) -> list[str]:
        return ["--skip-existing"]  # the rest of what a killed upload has begun

    def commit_lock(self) -> None:
        """Puts the lock in its place; a person reviews and commits it."""
        (ROOT / LOCK).write_bytes(self.lock.read_bytes())
        raise Stop(
            f"{LOCK} now pins what is published, and users run what it pins: review it, commit it, "
            "and run scripts/release again\n"
            f"  git diff {LOCK}\n"
            f"  git commit -m 'hub: pin the kernels of {self.version}' {LOCK}"
        )

    def close(self) -> None:
        """Ends what this release has started."""
        self._stack.close()


class Rehearsal(Release):
    """A release to a Hub and an index on this machine, from a clone in the state folder."""

    rehearsal = True

    @property
    def folder(self) -> Path:
        return self.home / "rehearsal"

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @cached_property
    def endpoint(self) -> str:
        from tooling.local_hub import LocalHub

        hub = LocalHub(self.folder / "hub").start()
        self._stack.callback(hub.stop)
        print(f"a Hub on this machine: {hub.url}", flush=True)
        return hub.url

    @cached_property
    def index(self) -> str:
        """The URL of the package index, which is started."""
        packages = self.folder / "index"
        packages.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [self.tools() / "pypi-server", "run", "-i", "127.0.0.1", "-p", str(port)]
        command += ["-a", ".", "-P", ".", "--disable-fallback", "--overwrite", packages]
        server = subprocess.Popen(
            command, preexec_fn=processes.end_with(os.getpid()), stderr=subprocess.DEVNULL
        )
        self._stack.callback(server.wait)
        self._stack.callback(server.kill)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise Stop(
                    f"the package index {command[0]} does not start: run it by hand to see why"
                )
            time.sleep(0.1)
        print(f"a package index on this machine: {url}", flush=True)
        return url

    @property
    def index_options(self) -> tuple[str, ...]:
        return ("--extra-index-url", f"{self.index}/simple/")

    def variables(self) -> dict[str, str]:
        others = filter(None, [os.environ.get("NO_PROXY")])
        return {"NO_PROXY": ",".join([*others, "127.0.0.1"]), **NOBODY}

    def tools(self) -> Path:
        return environment.make_tools(self.home, "rehearsing", ["twine", "pypiserver"])

    def upload_options(self) -> list[str]:
        return ["--repository-url", self.index]

    def commit_lock(self) -> None:
        """Commits the lock in the clone, as a person does in the checkout."""
        (self.tree / LOCK).write_bytes(self.lock.read_bytes())
        if git(self.tree, "status", "--porcelain"):
            nobody = ("-c", "user.name=rehearsal", "-c", "user.email=rehearsal@localhost")
            git(self.tree, *nobody, "commit", "--quiet", "-m", "hub: pin the kernels", LOCK)


def git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", tree, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Stop(f"git {' '.join(arguments)} fails in {tree}: {done.stderr.strip()}")
    return done.stdout.strip()


def check_clean() -> None:
    """Raises unless all of the checkout is committed."""
    changed = git(ROOT, "status", "--porcelain").splitlines()
    if [line.split()[-1] for line in changed] == [LOCK]:
        raise Stop(f"{LOCK} is not committed: review it, and\n  git commit {LOCK}")
    if changed:
        raise Stop(
            f"the git tree has {len(changed)} uncommitted changes ({changed[0].strip()}, ...), but a "
            "release is of a commit: commit them, or put them away with git stash"
        )


def package_version() -> str:
    """Returns __version__, which scripts/check_repo compares with every other place."""
    for node in ast.parse((ROOT / "modeling/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise Stop("modeling/__init__.py has no __version__")


@contextlib.contextmanager
def opened(release: Release) -> Iterator[Release]:
    try:
        yield release
    finally:
        release.close()


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5):
            return True
    except OSError:
        return False
