"""What one audited run yielded: everything the instruments may look at, and nothing of how the mechanism works inside.

The canary bank is two layers of `width` numbers each, trained like any other parameter. A canary is a record whose
gradient points along one number of the bank. Scores are the updates of the bank in units of the clip norm: noise alone
where nobody contributed, noise plus one where a canary did.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from halfsilver.privacy.plan import PrivacyPlan

Array = np.ndarray


class Kind(IntEnum):
    """What a number of the bank is for."""

    OUT = 0  # nobody's: the data hold no such record
    IN = 1  # a record with a gradient of 1000 C
    CANCELLING = 2  # the same, as a difference of two large numbers
    BROKEN = 3  # a record of NaN, which must contribute nothing


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Two runs with the same random numbers on data that differ in one record, the `leaver`.

    `reach[t]` is the norm of the difference of all scores in step t, `read[t]` whether the leaver was read in it, and
    `differing` names what should be the same in both and is not.
    """

    leaver: Kind
    reach: Array
    read: Array
    differing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One audited run of T steps, with a bank of 2 layers of `width` numbers.

    `scores` is [T, 2, width]; `kinds` is [2, width]. `reads` is [world, T, R]: how often each process read each of the
    R canary records in each step, in the order in which they lie in the data; `places` is [R], the number of the bank
    (as in ``scores.reshape(T, -1)``) that belongs to each record. `intents` are the steps that the ledger counts,
    `releases` the updates that the model had. `rest` is a digest of all other trained parameters after every step, and
    `fixed` one of what is not trained: frozen parameters, buffers and modes. Either may be empty. `replays` are there
    if the loop was run again on neighbouring data. `unread` says why scores are what the map was given and
    not computed from the updates; `changed` counts directions that came out otherwise when computed again, None where
    nobody looked.
    """

    loop: str
    plan: PrivacyPlan
    scores: Array
    kinds: Array
    reads: Array
    places: Array
    intents: int
    releases: int
    rest: str = ""
    fixed: str = ""
    replays: tuple[Replay, ...] = ()
    unread: str = ""
    changed: int | None = None

    @property
    def sampled(self) -> Array:
        """How often each number's record was read in each step, [T, 2, width]; 0 for numbers that have none."""
        flat = np.zeros((len(self.scores), self.kinds.size), dtype=np.int64)
        flat[:, self.places] = self.reads.sum(0)
        return flat.reshape(self.scores.shape)

    @property
    def noise(self) -> Array:
        """Scores to which no record should have contributed, [T, 2, width]; NaN elsewhere."""
        touched = (self.sampled > 0) & (self.kinds != Kind.BROKEN)
        return np.where(touched, np.nan, self.scores)

    @property
    def noise_draws(self) -> int:
        """How many different noise vectors the steps show, by eight numbers of each; one that comes back counts once.

        Eight numbers never agree to a hundredth by chance, and a vector that is read twice hardly ever fails to.
        """
        silent = self.scores[:, self.kinds == Kind.OUT][:, :8]
        return len(np.unique(np.round(silent / self.plan.noise_multiplier, 2), axis=0))
