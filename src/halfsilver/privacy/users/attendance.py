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


@final
class Attendance:
    """The users of the last rounds, in one small file for each round, on disk before anybody is asked.

    Guarantee: `admit` returns no user twice within `separation` rounds, whatever crashes come between. Nothing is kept
    of rounds that no longer matter. Rounds have the numbers of the ledger, which are never given twice.

    The files are checked for damage, and a folder that is gone is noticed. One that somebody put back from a copy is
    not.

    Args:
        folder: Where the files are. One process at a time may use it.
        separation: The least distance of two rounds of one user, at least 1.
        next_round: How many rounds of this run the ledger counts. If there are some, the folder must be there.

    Raises:
        LedgerCorrupt: The folder is gone, a file in it is damaged, or it knows a round that the ledger does not.
    """

    def __init__(self, folder: Path, separation: int, *, next_round: int) -> None:
        if next_round and not folder.is_dir():
            raise LedgerCorrupt(
                f"{folder} is gone, so nobody knows who took part in the last {separation - 1} rounds. Restore it, or "
                "begin a new run, which is paid for anew."
            )
        system.make_folder(folder.resolve())
        self._folder, self._separation = folder, separation
        self._recent = {int(path.stem): _read(path) for path in sorted(folder.glob(f"*{_SUFFIX}"))}
        self._require_past(next_round)

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

    def _enter(self, users: Tensor, number: int) -> None:
        if self._separation == 1:
            return  # nobody can come too early
        content = users.numpy().astype("<i8").tobytes()
        system.write_atomically(self._file(number), hashlib.sha256(content).digest() + content)
        self._recent[number] = users.numpy()
        for past in [at for at in self._recent if number + 1 - at >= self._separation]:
            del self._recent[past]
            self._file(past).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}{_SUFFIX}"


def _read(path: Path) -> np.ndarray:
    data = path.read_bytes()
    content = data[_DIGEST:]
    if len(content) % 8 or hashlib.sha256(content).digest() != data[:_DIGEST]:
        raise LedgerCorrupt(f"{path} is damaged, so nobody knows who took part in that round. Restore it.")
    return np.frombuffer(content, dtype="<i8").astype(np.int64)
