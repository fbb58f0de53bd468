"""All that depends on the operating system: locks, writes that survive a crash, workers that do not, their memory.

Callers reach these functions through the module (`system.append_durably(...)`), so that a test can put a
faulty disk in their place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from halfsilver.errors import HalfsilverError, PlatformUnsupported, RunFolderBusy, StorageError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows; every use refuses through _require_posix
    fcntl = None  # type: ignore[assignment]

Writer = Callable[[BinaryIO], None]

_PARENT_ASKED_EVERY = 0.2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's <malloc.h>
_MMAP_MAX, _MMAP_THRESHOLD = 65_536, 2**25  # as glibc has them in a process that has freed large blocks
_keeps_all = False


def _require_posix() -> None:
    if fcntl is None:
        raise PlatformUnsupported(
            "The ledger and the checkpoints need POSIX file locks and fsync of folders, which this operating "
            "system lacks. Run on Linux or macOS, or on Windows inside WSL 2."
        )


@contextlib.contextmanager
def confirmed(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses in the body into a `StorageError` with the way out."""
    try:
        yield
    except HalfsilverError:
        raise
    except OSError as error:
        raise StorageError(
            error.errno,
            f"{path} could not be written ({error}), so nothing was done that it was to record. Make room, or repair "
            "the disk, and run again: a run goes on from its checkpoint.",
        ) from error


@contextlib.contextmanager
def lock_file(path: Path, *, blocking: bool) -> Iterator[None]:
    """Hold the exclusive lock of `path` (created when absent); the kernel frees it if the process dies.

    Raises `RunFolderBusy` when another holder has it and `blocking` is false. The lock is advisory, and it
    also excludes other threads, since every call opens the file anew.
    """
    _require_posix()
    with confirmed(path):
        fd = _locked_descriptor(path, blocking)
    owner = os.getpid()
    try:
        yield
    finally:
        # Unlock by name: a forked worker may still hold a copy of the descriptor. A fork leaves its parent's alone.
        if os.getpid() == owner:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _locked_descriptor(path: Path, blocking: bool) -> int:
    flags = fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, flags)
            if _is_still(path, fd):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise RunFolderBusy(
                f"{path} is locked by another process. Wait for that run to end, or choose another folder."
            ) from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_still(path: Path, fd: int) -> bool:
    """Whether `path` names the open file: a lock on a file deleted meanwhile would exclude nobody."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def fsync_file(fd: int) -> None:
    """Return once the contents of the open file are on the disk itself."""
    _require_posix()
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: a plain fsync stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def fsync_folder(path: Path) -> None:
    """Return once the names in the folder (files created, renamed, deleted) are on the disk."""
    _require_posix()
    with confirmed(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# From file systems that have no names of ours to lose: read-only, or made up by the kernel, as automounters are.
_NOTHING_TO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents so that they survive a crash.

    One that is there may have been made by a process that died before it could sync the name.
    """
    if not path.is_dir():
        make_folder(path.parent)
        with confirmed(path):
            path.mkdir(exist_ok=True)
        fsync_folder(path.parent)
    elif os.access(path.parent, os.R_OK):  # else the folder was made for us by somebody else
        try:
            fsync_folder(path.parent)
        except StorageError as error:
            if error.errno not in _NOTHING_TO_SYNC:
                raise


def append_durably(path: Path, data: bytes) -> None:
    """Append `data` to an existing file; when this returns, a crash cannot undo it."""
    with confirmed(path):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            fsync_file(fd)
        finally:
            os.close(fd)


def write_atomically(path: Path, content: bytes | Writer, *, sync_name: bool = True) -> None:
    """Replace `path` so that after a crash it is either the old file or the whole new one.

    `content` is bytes, or a function that writes to the open file. Permissions of an existing file stay. Without
    `sync_name` a crash of the machine may bring back the old file even after this has returned.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with confirmed(path):
        try:
            with open(temporary, "xb") as handle:
                _copy_mode(path, handle.fileno())
                handle.write(content) if isinstance(content, bytes) else content(handle)
                handle.flush()
                fsync_file(handle.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if sync_name:
        fsync_folder(path.parent)


def swap(path: Path, old: bytes, new: bytes) -> bool:
    """Put `new` into a small file if it holds `old` (empty: whatever it holds), and say whether it did.

    Of several processes that give the same `old`, one succeeds. Nothing is synced: this is about processes that live.
    All texts must be of one length, since to shorten a file takes milliseconds.
    """
    with confirmed(path), open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if free := not old or file.read() == old:
            file.seek(0)
            file.write(new)
    return free


def place_of(folder: Path) -> dict[str, Any]:
    """Which folder this is. A copy has another inode, and the number of a device holds until the next `boot`."""
    found, boot = folder.stat(), Path("/proc/sys/kernel/random/boot_id")
    start = hashlib.sha256(boot.read_bytes()).hexdigest()[:16] if boot.exists() else ""
    return {"inode": f"{found.st_ino:016x}", "device": f"{found.st_dev if start else 0:016x}", "boot": start}


def splice_atomically(path: Path, start: int, stop: int | None, new: bytes) -> None:
    """Put `new` in the place of the bytes from `start` to `stop` (None: the end) by `write_atomically`."""

    def write(handle: BinaryIO) -> None:
        with open(path, "rb") as old:
            rest = start
            while rest and (chunk := old.read(min(rest, 1 << 20))):
                handle.write(chunk)
                rest -= len(chunk)
            handle.write(new)
            if stop is not None:
                old.seek(stop)
                shutil.copyfileobj(old, handle)

    write_atomically(path, write)


def _copy_mode(path: Path, fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(fd, path.stat().st_mode & 0o7777)


def end_with_parent(parent: int) -> None:
    """End this worker process when the one that started it is gone, killed or not.

    It would else go on beside the next start, with a copy of the run folder's lock. The parent is asked for far more
    often than a new worker needs to import torch, so that the next start never meets a worker of a killed one.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_ASKED_EVERY)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def own_file_offsets() -> None:
    """Give this fork its own place in every file that it has inherited for reading.

    Else two forks that seek and read would each move the other's place, and read other bytes than they meant. Linux
    alone offers that. Other systems are left as they are.
    """
    folder = Path("/proc/self/fd")
    for fd in [int(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []:
        with contextlib.suppress(OSError):  # what is no file, or closed by now
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if fd > 2 and stat.S_ISREG(os.fstat(fd).st_mode) and flags & os.O_ACCMODE != os.O_WRONLY:
                place = os.lseek(fd, 0, os.SEEK_CUR)
                again = os.open(folder / str(fd), flags | os.O_CLOEXEC)
                os.lseek(again, place, os.SEEK_SET)
                os.dup2(again, fd, inheritable=os.get_inheritable(fd))
                os.close(again)


def keep_freed_memory() -> None:
    """Let this process hold on to its peak: the memory of tensors that are gone is for those of the next step.

    glibc gives large blocks back to the kernel, and each 4 KB of a new one costs a page fault. Other C libraries are
    left as they are.
    """
    global _keeps_all
    library = _glibc()
    if library is not None:
        _keeps_all = True
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """The same for a block of code in a process of a user, which gets its memory back at the end.

    Of what is free at the end of the heap, 1 GB is held on to.
    """
    library = _glibc()
    if library is None or _keeps_all:
        yield
        return
    try:
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**30)
        yield
    finally:
        library.mallopt(_M_MMAP_MAX, _MMAP_MAX)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD)
        give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Return to the kernel what this process holds and does not use, after work that took more than what follows.

    glibc alone offers that.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
