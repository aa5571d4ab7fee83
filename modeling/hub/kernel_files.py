"""Returns the verified bytes of a variant's files: from huggingface_hub's cache, else from the Hub.

A file is read once, its bytes are hashed, and the caller gets those same bytes. An attacker who can
write to the cache, or can answer for the Hub, can withhold a kernel but not change it. Only names
in the lock are read, requested or written.

What came from the Hub is verified in memory, then stored for the next start below
kernels--<org>--<name>/snapshots/<revision>/, where huggingface_hub and kernels find it too; a cache
that cannot be written costs the next start a download and nothing else.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..utils.whole_file import write_file_at
from .download import FilesDiffer, FilesUnavailable, HubDown, Transfer, fetch, hub_deadline
from .lock_format import read_file

try:
    import fcntl
except ImportError:  # Windows, for which there are no variants
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


def verified_files(
    repo: str, revision: str, variant: str, files: dict[str, str]
) -> tuple[Path, dict[str, bytes]]:
    """Returns the variant's folder in the cache and the verified bytes of `files` (name ->
    sha256)."""
    try:
        from huggingface_hub import constants, hf_hub_url
    except ImportError as error:
        raise FilesUnavailable(f"huggingface_hub cannot be imported: {error}") from error
    parts = (f"kernels--{repo.replace('/', '--')}", "snapshots", revision, "build", variant)
    place = Path(constants.HF_HUB_CACHE, *parts)
    found = read_verified(place, files)
    if len(found) == len(files):  # nothing is written or locked: a warm cache may be read-only
        return place, found
    try:
        with hub_deadline() as deadline, _one_process(parts[0], variant, deadline):
            # Another process may have stored them meanwhile.
            found |= read_verified(place, {f: files[f] for f in files if f not in found})
            missing = {f: files[f] for f in files if f not in found}
            url = lambda file: hf_hub_url(
                repo, f"build/{variant}/{file}", repo_type="kernel", revision=revision
            )
            urls = {file: url(file) for file in missing}
            for file, content in fetch(urls, missing, Transfer(revision, deadline)):
                found[file] = content
                _store(parts, file, content)
    except FilesUnavailable as error:
        what = f"{repo}@{revision} is not in the cache and cannot be fetched"
        raise FilesUnavailable(f"{what} ({error})") from error
    return place, found


def read_verified(folder: Path, files: dict[str, str], again: str = "") -> dict[str, bytes]:
    """Returns the bytes of those `files` that exist in `folder`; raises if a digest is wrong.

    `again` is the command that replaces damaged files; without one, that is to delete them."""
    found, wrong = {}, []
    for file, sha256 in files.items():
        try:
            content = read_file(folder / file)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise FilesUnavailable(f"{folder / file} cannot be read: {error.strerror}") from error
        if (had := hashlib.sha256(content).hexdigest()) == sha256:
            found[file] = content
        else:
            wrong.append(f"{file} has sha256 {had}, expected {sha256}")
    if wrong:
        raise FilesDiffer(
            f"{folder} is not what the lock pins and was not imported: {'; '.join(wrong)}. If it was "
            f"damaged here, {again or 'delete that directory and try again'}; if not, ask who "
            "published it"
        )
    return found


@contextlib.contextmanager
def _folder(parts: tuple[str, ...]) -> Iterator[int]:
    """Opens a folder below the cache, creating it if needed, and yields its descriptor.

    A symbolic link on the way is an OSError, because it may lead out of the cache."""
    from huggingface_hub import constants

    os.makedirs(constants.HF_HUB_CACHE, exist_ok=True)
    at = os.open(constants.HF_HUB_CACHE, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=at)
            outer, flags = at, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            at = os.open(part, flags, dir_fd=outer)
            os.close(outer)
        yield at
    finally:
        os.close(at)


def _store(parts: tuple[str, ...], file: str, content: bytes) -> None:
    """Writes a verified file into the cache, whole or not at all."""
    *folders, name = file.split("/")
    try:
        with _folder((*parts, *folders)) as at:
            write_file_at(at, name, content, 0o644)
    except OSError as error:
        logger.warning("%s is not kept in the cache: %s", file, error)


@contextlib.contextmanager
def _one_process(repo: str, variant: str, deadline: float) -> Iterator[None]:
    """Holds a lock per variant, so that only one process of this user downloads it.

    It only saves downloads: where locks do not work, the code goes on without."""
    try:
        with _folder((".locks", repo)) as at:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(f"{variant}.lock", flags, 0o600, dir_fd=at)
    except OSError:
        yield
        return
    try:
        while not _locked(lock):
            if time.monotonic() >= deadline:
                from huggingface_hub import constants

                where = f"{constants.HF_HUB_CACHE}/.locks/{repo}/{variant}.lock"
                raise HubDown(f"another process has held {where} for all the time")
            time.sleep(0.05)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked meanwhile has the lock, too
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
