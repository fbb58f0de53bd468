"""Locks exclude, and files written atomically are never half there."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from halfsilver._core import system
from halfsilver.errors import PlatformUnsupported, RunFolderBusy, StorageError


def assert_taken(lock: Path) -> None:
    with pytest.raises(RunFolderBusy, match="another process"), system.lock_file(lock, blocking=False):
        pytest.fail("two holders")


def test_a_taken_lock_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with system.lock_file(lock, blocking=False):
        assert_taken(lock)
    with system.lock_file(lock, blocking=False):
        pass


def test_a_blocking_lock_waits_for_its_turn(tmp_path: Path) -> None:
    lock, order = tmp_path / "lock", list[str]()

    def second() -> None:
        with system.lock_file(lock, blocking=True):
            order.append("second")

    with system.lock_file(lock, blocking=True):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_lock_on_a_file_deleted_meanwhile_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, opened, real_open = tmp_path / "lock", list[int](), os.open

    def open_then_lose(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        if not opened:
            os.unlink(path)
        opened.append(fd)
        return fd

    monkeypatch.setattr(os, "open", open_then_lose)
    with system.lock_file(lock, blocking=True):
        assert_taken(lock)
    assert len(opened) == 3


def test_append_survives_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real_write = tmp_path / "file", os.write
    path.write_bytes(b"old,")
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:3]))
    system.append_durably(path, b"some longer text")
    assert path.read_bytes() == b"old,some longer text"


def test_append_does_not_create_a_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        system.append_durably(tmp_path / "absent", b"x")


def test_atomic_write_replaces_and_keeps_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    system.write_atomically(path, b"one")
    path.chmod(0o640)
    system.write_atomically(path, lambda handle: _write_two(handle))
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["file"]


def _write_two(handle: BinaryIO) -> None:
    handle.write(b"two")


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(handle: BinaryIO) -> None:
        handle.write(b"half")
        raise OSError("disk full")

    with pytest.raises(StorageError, match=r"disk full.*run again"):
        system.write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_contents_reach_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real_replace = list[str](), os.replace

    def replace(old: Path, new: Path) -> None:
        calls.append("rename")
        real_replace(old, new)

    monkeypatch.setattr(system, "fsync_file", lambda fd: calls.append("file"))
    monkeypatch.setattr(system, "fsync_folder", lambda path: calls.append(f"folder {path.name}"))
    monkeypatch.setattr(os, "replace", replace)
    folder = tmp_path / "a" / "b"
    system.make_folder(folder)
    system.write_atomically(folder / "file", b"x")
    above = f"folder {tmp_path.parent.name}"  # of a folder that was there: nobody knows whether its maker got so far
    assert calls == [above, f"folder {tmp_path.name}", "folder a", "file", "rename", "folder b"]


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(2, 5, b"01--56789"), (8, None, b"01234567--"), (0, 0, b"--0123456789")]
)
def test_splice(tmp_path: Path, start: int, stop: int | None, expected: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    system.splice_atomically(path, start, stop, b"--")
    assert path.read_bytes() == expected


def test_other_platforms_are_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "fcntl", None)
    with pytest.raises(PlatformUnsupported, match="WSL"), system.lock_file(tmp_path / "lock", blocking=True):
        pytest.fail("no lock was taken")
    with pytest.raises(PlatformUnsupported, match="WSL"):
        system.write_atomically(tmp_path / "file", b"x")
    assert os.listdir(tmp_path) == []


_FAULTS = """
import resource, sys, torch
from halfsilver._core import system
if sys.argv[1] == "keep":
    system.keep_freed_memory()
if sys.argv[1] == "block":
    block = system.freed_memory_kept()
    block.__enter__()
def faults(blocks):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(blocks):
        [torch.zeros(SIZE) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(4)
print(faults(16))
"""


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_the_memory_of_freed_tensors_is_used_again() -> None:
    def faults(size: int, *arguments: str) -> int:
        code = _FAULTS.replace("SIZE", str(size))
        return int(subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True).stdout)

    size = 1 << 24  # numbers of 4 bytes
    left = faults(size, "leave")
    assert 4 * faults(size, "keep") < left
    assert 4 * faults(size, "block") < left


_GIVEN_BACK = """
import pathlib, torch
from halfsilver._core import system
def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1])
before = resident()
with system.freed_memory_kept():
    [torch.ones(1 << 24) for _ in range(4)]
    kept = resident() - before
left = resident() - before
[torch.ones(1 << 24) for _ in range(4)]
print(kept, left, resident() - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to give memory back")
def test_memory_that_was_kept_is_given_back_after_the_block() -> None:
    """And no more is kept from then on."""
    done = subprocess.run([sys.executable, "-c", _GIVEN_BACK], check=True, capture_output=True)
    kept, left, later = (int(n) for n in done.stdout.split())  # pages, of which the tensors took 256 MB
    assert kept > 2**28 / resource.getpagesize() / 2
    assert 10 * left < kept
    assert 10 * later < kept
