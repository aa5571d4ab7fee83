"""Downloads pinned files within one deadline, whatever the Hub does.

The Hub may hang, send a byte a second or bytes without end, answer errors, redirect in a circle or
lie. After HUB_TIMEOUT seconds, including the wait for another process that downloads the same
files, the download is given up. No file name or path is taken from a response, and bytes whose
digest is not the pinned one are refused.
"""

import contextlib
import hashlib
import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from .lock_format import LARGEST_FILE

HUB_TIMEOUT = 20.0  # seconds
REST = 60.0  # seconds in which a Hub that was down is not asked for another kernel
CONNECTIONS = 8
REDIRECTS = 20
TRANSIENT = {408, 429, 500, 502, 503, 504}
ENCODINGS = {"", "identity", "gzip", "deflate"}  # no others: some unpack to gigabytes

_down: tuple[float, str] | None = None  # when a Hub failed last in this process, and how


class FilesUnavailable(Exception):
    """The files are not in the cache and could not be fetched."""


class FilesDiffer(Exception):
    """A file's digest is not the one that the lock pins."""


class HubDown(FilesUnavailable):
    """The Hub itself failed, so other requests would fail too."""


class _HubBusy(Exception):
    """The Hub asks for a retry, after at least `wait` seconds."""

    def __init__(self, status: int, wait: float):
        super().__init__(f"the Hub answers {status}")
        self.wait = wait


@contextlib.contextmanager
def hub_deadline() -> Iterator[float]:
    """Yields the deadline of a download, and raises HubDown if the Hub failed a short time ago.

    So a model of three kernels waits for a Hub that is down only once."""
    global _down
    from huggingface_hub import constants

    started, timeout = time.monotonic(), _timeout()
    if constants.HF_HUB_OFFLINE:
        raise FilesUnavailable("HF_HUB_OFFLINE is set")
    if _down is not None and started < _down[0] + REST:
        raise FilesUnavailable(f"{_down[1]}; the Hub is asked again {REST:.0f} s after that")
    try:
        yield started + timeout
    except HubDown as error:
        if time.monotonic() - started > 1.0:  # asking again after a quick failure is cheap
            _down = time.monotonic(), str(error)
        raise


def _timeout() -> float:
    text = os.environ.get("FLASHCELL_HUB_TIMEOUT", str(HUB_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"FLASHCELL_HUB_TIMEOUT is {text!r}, but must be seconds, more than 0")
    return seconds


class Transfer:
    """The downloads of one variant, which share a deadline and a limit of bytes."""

    def __init__(self, revision: str, deadline: float):
        self.revision, self.deadline = revision, deadline
        self.allowed, self.lock = LARGEST_FILE, threading.Lock()

    def download(self, url: str, sha256: str) -> bytes:
        """Returns the file's bytes; retries once if the transfer breaks or the digest is wrong.

        While the Hub says that it is busy, retries until the deadline."""
        tries, pause = 2, 1.0
        while True:
            try:
                content = self._get(url)
            except _HubBusy as busy:
                wait, pause = max(pause, busy.wait), 2 * pause
                if time.monotonic() + wait >= self.deadline:
                    raise HubDown(str(busy)) from busy
                time.sleep(wait)
                continue
            except FilesUnavailable:
                raise
            except Exception as error:  # the class depends on the client's HTTP library
                first = (str(error).splitlines() or [""])[0]
                failure: Exception = HubDown(f"{type(error).__name__}: {first}")
            else:
                had = hashlib.sha256(content).hexdigest()
                if had == sha256:
                    return content
                failure = FilesDiffer(f"has sha256 {had}, expected {sha256}")
            tries -= 1
            if not tries:
                raise failure

    def _get(self, url: str) -> bytes:
        """Fetches a URL, following redirects itself: the client would read their bodies, however
        long."""
        from huggingface_hub.utils import get_session

        client, commits = get_session(), []
        left = max(0.1, self.deadline - time.monotonic())
        request = client.build_request("GET", url, headers=_headers(), timeout=left)
        for _ in range(1 + REDIRECTS):
            response = client.send(request, stream=True, follow_redirects=False)
            try:
                commits.append(response.headers.get("X-Repo-Commit"))
                if response.next_request is None:
                    return self._read(response, commits)
                request = response.next_request
            finally:
                response.close()
            self._count(0)
        raise HubDown(f"the Hub redirects {url} more than {REDIRECTS} times")

    def _read(self, response: Any, commits: list[str | None]) -> bytes:
        status = response.status_code
        if status in TRANSIENT:
            wait = response.headers.get("Retry-After", "")
            raise _HubBusy(status, float(wait) if wait.isdecimal() else 0.0)
        if status != 200:  # the body of an error may be endless: it is not read
            raise FilesUnavailable(f"{status} {response.headers.get('X-Error-Code', '')[:99]}")
        if self.revision not in commits:  # such as a login page of a hotel's network
            raise FilesUnavailable(f"{response.url} is not of a Hub that has that revision")
        encoding = response.headers.get("Content-Encoding", "").lower()
        if encoding not in ENCODINGS:
            raise FilesUnavailable(f"{response.url} comes in the encoding {encoding[:99]!r}")
        chunks = []
        for chunk in response.iter_bytes():
            chunks.append(chunk)
            self._count(len(chunk))
        return b"".join(chunks)

    def _count(self, size: int) -> None:
        if time.monotonic() >= self.deadline:
            raise HubDown("it did not come in time")
        with self.lock:
            self.allowed -= size
        if self.allowed < 0:
            raise FilesUnavailable(f"the Hub sends more than {LARGEST_FILE} bytes")


def _headers() -> dict[str, str]:
    """Returns the request headers: user agent and token.

    huggingface_hub's build_hf_headers would first fetch a list from the Hub, of any length."""
    from huggingface_hub import __version__, constants, get_token

    headers = {"User-Agent": f"flashcell; hf_hub/{__version__}", "Accept-Encoding": "identity"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return headers | ({"Authorization": f"Bearer {token}"} if token else {})


def fetch(
    urls: dict[str, str], files: dict[str, str], transfer: Transfer
) -> Iterator[tuple[str, bytes]]:
    """Downloads the files in several threads, and yields each when it is verified.

    At the deadline the threads are abandoned: a name look-up, or a header that comes byte by byte,
    cannot be interrupted."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, bytes | Exception]] = queue.SimpleQueue()
    for file in files:
        todo.put(file)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                file = todo.get_nowait()
                try:
                    done.put((file, transfer.download(urls[file], files[file])))
                except FilesUnavailable as error:
                    done.put((file, type(error)(f"{file}: {error}")))
                except Exception as error:
                    done.put((file, error))

    for number in range(min(CONNECTIONS, len(files))):
        try:
            threading.Thread(target=work, name="flashcell-download", daemon=True).start()
        except RuntimeError as error:  # the user's limit of threads; fewer are enough
            if number == 0:
                raise FilesUnavailable(f"no thread for downloads: {error}") from error
            break
    started = time.monotonic()
    try:
        for _ in files:
            try:
                file, outcome = done.get(timeout=max(0.0, transfer.deadline - time.monotonic()))
            except queue.Empty:
                seconds = time.monotonic() - started
                raise HubDown(
                    f"it did not come within {seconds:.0f} s; FLASHCELL_HUB_TIMEOUT=SECONDS gives a "
                    "slow connection more"
                ) from None
            if isinstance(outcome, FilesDiffer):
                raise FilesDiffer(
                    "what the Hub sends is not what the lock pins and was not imported: "
                    f"{file} {outcome}"
                )
            if isinstance(outcome, Exception):
                raise outcome
            yield file, outcome
    finally:
        with contextlib.suppress(queue.Empty):  # no thread begins another file
            while True:
                todo.get_nowait()
