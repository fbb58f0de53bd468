"""A disk that forgets: after a power cut it holds what was fsynced, contents and names in folders alike.

The process under test works on real files. In the place of its `os.fsync` stands `Watch`, which reports what each call
makes durable. A `Disk`, in the same process or another, keeps just that, and lays it out after the cut. Linux only.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = tuple[Any, ...]
Entry = tuple[int, bool]  # inode number; whether it is a folder
Tree = dict[str, "Tree | bytes"]

_SECTOR = 512


class Watch:
    """Stands for `os.fsync`: reports what becomes durable, before the caller can rely on it."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report
        self._known: dict[int, bytes] = {}
        self._pins: list[int] = []  # a descriptor of each file: the number of a deleted one is not given out again

    def fsync(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self._report(("folder", inode, _listing(fd)))
            return
        content = Path(f"/proc/self/fd/{fd}").read_bytes()
        if inode not in self._known:
            self._pins.append(os.dup(fd))
        known = self._known.get(inode, b"")
        kept = len(known) if content.startswith(known) else 0
        self._known[inode] = content
        self._report(("file", inode, kept, content[kept:]))

    def close(self) -> None:
        while self._pins:
            os.close(self._pins.pop())


class Disk:
    """What of the folder `root` would survive a power cut now; all that lies there at the start would."""

    def __init__(self, root: Path) -> None:
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, Entry]] = {}
        self._pins: list[int] = []
        self.root = root
        self._adopt(root)

    def apply(self, event: Event) -> None:
        """Take in a report of `Watch`."""
        kind, inode, *what = event
        if kind == "folder":
            self._folders[inode] = what[0]
        else:
            self._files[inode] = self._files.get(inode, b"")[: what[0]] + what[1]

    def read(self, *names: str) -> bytes:
        """The durable content of a file under the root; empty where it is not, or not durably, there."""
        inode = os.stat(self.root).st_ino
        for name in names:
            inode = self._folders.get(inode, {}).get(name, (-1, False))[0]
        return self._files.get(inode, b"")

    def cut(self, root: Path, chance: random.Random | None = None) -> Disk:
        """The disk after a power cut, laid out in `root`.

        Without `chance` all that was not fsynced is lost. With it, each name and each sector may or may not have made
        it, in any order, as a disk is free to decide.
        """
        _lay_out(root, self._survivors(os.stat(self.root).st_ino, self.root, chance))
        self.close()
        return Disk(root)

    def close(self) -> None:
        while self._pins:
            os.close(self._pins.pop())

    def _adopt(self, folder: Path) -> None:
        entries = _listing(folder)
        self._folders[os.stat(folder).st_ino] = entries
        for name, (inode, is_folder) in entries.items():
            if is_folder:
                self._adopt(folder / name)
            else:
                self._pins.append(os.open(folder / name, os.O_RDONLY))
                self._files[inode] = (folder / name).read_bytes()

    def _survivors(self, inode: int, live: Path | None, chance: random.Random | None) -> Tree:
        synced, present = self._folders.get(inode, {}), _listing(live) if live and chance else {}
        tree: Tree = {}
        for name in sorted(synced.keys() | present.keys()):
            entry = chance.choice([synced.get(name), present.get(name)]) if chance else synced[name]
            if entry is not None:
                child, is_folder = entry
                where = live / name if live and present.get(name) == entry else None
                tree[name] = self._survivors(child, where, chance) if is_folder else self._content(child, where, chance)
        return tree

    def _content(self, inode: int, live: Path | None, chance: random.Random | None) -> bytes:
        synced = self._files.get(inode, b"")
        if live is None or chance is None:
            return synced
        written = live.read_bytes()
        return chance.choice([synced, written, _torn(synced, written, chance)])


def same_place(folder: Path) -> dict[str, str]:
    """Stands for `system.place_of`: a folder stays the same one after a cut, although it is laid out anew here."""
    return {"inode": folder.name, "device": "", "boot": ""}


def _torn(synced: bytes, written: bytes, chance: random.Random) -> bytes:
    """Some of what was written since: cut at any byte, and sectors that were not written yet read as zeros."""
    start = len(synced) if written.startswith(synced) else 0
    torn = bytearray(written[: chance.randint(start, len(written))])
    for at in range(start, len(torn), _SECTOR):
        if chance.random() < 0.5:
            torn[at : at + _SECTOR] = bytes(len(torn[at : at + _SECTOR]))
    return bytes(torn)


def _listing(folder: Path | int) -> dict[str, Entry]:
    with os.scandir(folder) as entries:
        return {entry.name: (entry.stat(follow_symlinks=False).st_ino, entry.is_dir()) for entry in entries}


def _lay_out(folder: Path, tree: Tree) -> None:
    folder.mkdir()
    for name, what in tree.items():
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        else:
            _lay_out(folder / name, what)
