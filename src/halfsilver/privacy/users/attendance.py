"""Who took part lately, so that nobody takes part again too early."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from halfsilver._core import system
from halfsilver.errors import LedgerCorrupt
from halfsilver.privacy.entropy import Entropy

_DIGEST = 32
_SUFFIX = ".users"
_NONE = -1  # in place of the round before the first


@final
class Attendance:
    """The users of the last rounds, in one small file for each round, on disk before anybody is asked.

    Guarantee: `admit` returns no user twice within `separation` rounds, whatever crashes come between. Nothing is kept
    of rounds that no longer matter. Rounds have the numbers of the ledger, which are never given twice.

    The files are checked for damage, and each names the round before it. So a folder or a file that is gone is noticed,
    but for the newest file: a process that was killed just before it wrote one leaves the same. A folder that somebody
    put back from a copy is not noticed.

    Args:
        folder: Where the files are. One process at a time may use it.
        separation: The least distance of two rounds of one user, at least 1.
        next_round: How many rounds of this run the ledger counts. If there are some, the folder must be there.

    Raises:
        LedgerCorrupt: The folder or a file in it is gone, a file is damaged, or the folder knows a round that the
            ledger does not.
    """

    def __init__(self, folder: Path, separation: int, *, next_round: int) -> None:
        if next_round and not folder.is_dir():
            raise LedgerCorrupt(
                f"{folder} is gone, so nobody knows who took part in the last {separation - 1} rounds. Restore it, or "
                "begin a new run, which is paid for anew."
            )
        system.make_folder(folder.resolve())
        self._folder, self._separation = folder, separation
        files = {int(path.stem): _read(path) for path in folder.glob(f"*{_SUFFIX}")}
        self._recent = {number: files[number][1] for number in sorted(files)}
        self._require_past(next_round)
        self._require_complete({before for before, _ in files.values()})

    def admit(self, users: Tensor, number: int, most: int, entropy: Entropy) -> Tensor:
        """Those of `users` who may take part in round `number`, at most `most` of them by chance, and write them down.

        Args:
            users: Distinct user numbers.
            number: The number of the round, above that of each round before.
            most: The largest number of users to return.
            entropy: The source of random bits.

        Returns:
            User numbers in rising order.
        """
        self._require_past(number)
        lately = [torch.from_numpy(seen) for at, seen in self._recent.items() if number - at < self._separation]
        free = users[~torch.isin(users, torch.cat(lately))] if lately else users
        if len(free) > most:
            seed = int(entropy.words(1)) & (2**63 - 1)
            free = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))[:most]]
        chosen: Tensor = free.to(torch.int64).sort().values
        self._enter(chosen, number)
        return chosen

    def _require_past(self, number: int) -> None:
        if self._recent and max(self._recent) >= number:
            raise LedgerCorrupt(f"{self._folder} knows round {max(self._recent)}, but the ledger is at {number} only.")

    def _require_complete(self, named: set[int]) -> None:
        missing = {number for number in named - self._recent.keys() if self._matters(number, max(self._recent))}
        if missing:
            raise LedgerCorrupt(
                f"{self._file(max(missing))} is gone, so nobody knows who took part in that round. Restore it, or "
                "begin a new run, which is paid for anew."
            )

    def _matters(self, number: int, last: int) -> bool:
        """Whether users of this round must still wait after round `last`."""
        return number >= 0 and last + 1 - number < self._separation

    def _enter(self, users: Tensor, number: int) -> None:
        if self._separation == 1:
            return  # nobody can come too early
        before = max(self._recent, default=_NONE)
        content = np.concatenate([[before], users.numpy()]).astype("<i8").tobytes()
        system.write_atomically(self._file(number), hashlib.sha256(content).digest() + content)
        self._recent[number] = users.numpy()
        for past in [at for at in self._recent if not self._matters(at, number)]:
            del self._recent[past]
            self._file(past).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}{_SUFFIX}"


def _read(path: Path) -> tuple[int, np.ndarray]:
    """The round before, and the users of this one."""
    data = path.read_bytes()
    content = data[_DIGEST:]
    if not content or len(content) % 8 or hashlib.sha256(content).digest() != data[:_DIGEST]:
        raise LedgerCorrupt(f"{path} is damaged, so nobody knows who took part in that round. Restore it.")
    numbers = np.frombuffer(content, dtype="<i8").astype(np.int64)
    return int(numbers[0]), numbers[1:]
