"""Writes a file whole or not at all, even if the disk is full or the process is killed.

    write_file("talk.safetensors", content)

On Linux the content goes to a file without a name (O_TMPFILE), which is gone with its writer, and
gets its name when it is complete. No call puts such a file in the place of another, so it is called
`.<name>.unfinished-<k>` for the moment before it is renamed; a file system without O_TMPFILE has it
under that name from the beginning. Its writer holds a lock on it (flock), which also ends with its
writer: the next write of the same file removes what nobody holds, and leaves alone what is held.
"""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SLOTS = 32  # most writers of one file at a time, processes or threads
Made = TypeVar("Made")


def write_file(path: str | os.PathLike, content: bytes, mode: int = 0o666) -> None:
    """Replaces the file at `path` by `content`, and returns when it is on the disk.

    A symbolic link there is replaced, not followed; a device, a pipe or a socket is refused with an
    OSError. `mode` is a new file's, reduced by the umask."""
    place, name = os.path.split(os.fspath(path))
    try:
        folder = os.open(place or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            write_file_at(folder, name, content, mode)
        finally:
            os.close(folder)
    except OSError as error:  # its text does not name the file
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def write_file_at(folder: int, name: str, content: bytes, mode: int = 0o666) -> None:
    """Does what write_file does, for the name `name` in the folder open as descriptor `folder`."""
    _refuse_special(folder, name)
    beside = [f".{name}.unfinished-{k}" for k in range(SLOTS)]
    for unfinished in beside:
        _remove_abandoned(folder, unfinished)
    handle, at = _open_nameless(folder, mode), None
    if handle is None:
        handle, at = _open_named(folder, beside, mode)
    with open(handle, "wb") as file:
        try:
            _lock(handle)
            file.write(content)
            file.flush()
            os.fsync(handle)
            if at is None:
                source = f"/proc/self/fd/{handle}"
                # With dst_dir_fd it is linkat that os.link calls, which follows `source`.
                link = lambda unfinished: os.link(source, unfinished, dst_dir_fd=folder)
                at, _ = _first_free([name, *beside], link)
            if at != name:
                os.replace(at, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            if at is not None and at != name and _is_at(folder, at, handle):
                os.unlink(at, dir_fd=folder)
            raise
    os.fsync(folder)  # flushes the name


def _refuse_special(folder: int, name: str) -> None:
    """Raises OSError for a name that a file must not take: that of a device, a pipe or a socket."""
    with suppress(FileNotFoundError):
        kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISDIR(kind)):
            raise OSError(errno.EINVAL, "it is no regular file, and is not replaced by one")


def _open_nameless(folder: int, mode: int) -> int | None:
    """Opens an unnamed file (O_TMPFILE); None if the system has none or cannot name one later."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        handle = os.open(".", os.O_TMPFILE | os.O_WRONLY, mode, dir_fd=folder)
    except OSError:  # and if the folder is why, a file with a name cannot be made either
        return None
    if os.path.exists(f"/proc/self/fd/{handle}"):
        return handle
    os.close(handle)
    return None


def _open_named(folder: int, names: list[str], mode: int) -> tuple[int, str]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL

    def create(name: str) -> int:
        handle = os.open(name, flags, mode, dir_fd=folder)
        _lock(handle)
        if _is_at(folder, name, handle):
            return handle
        os.close(handle)  # another process removed it before it was locked
        raise FileExistsError

    name, handle = _first_free(names, create)
    return handle, name


def _first_free(names: list[str], make: Callable[[str], Made]) -> tuple[str, Made]:
    """Calls `make` with each name until one is free; returns that name and the result."""
    for name in names:
        with suppress(FileExistsError):
            return name, make(name)
    raise OSError(errno.EBUSY, f"{SLOTS} others are writing this file")


def _remove_abandoned(folder: int, name: str) -> None:
    """Removes an unfinished file whose writer has ended."""
    try:
        handle = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:  # there is no such file, or it is another user's
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.fstat(handle).st_mode) and _is_at(folder, name, handle):
            os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # its writer still runs, or the file system has no locks
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    with suppress(OSError):  # a file system without locks, where nobody takes a file for abandoned
        fcntl.flock(handle, fcntl.LOCK_EX)


def _is_at(folder: int, name: str, handle: int) -> bool:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(handle))
