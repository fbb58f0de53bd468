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
from halfsilver.privacy.strategies import Correlated

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
    def strategy(self) -> Array | None:
        """C, [T, T], of a run with correlated noise, and None for independent noise. C times the noise is fresh noise.

        It is made from the coefficients of the plan, and not by the code that draws the noise.
        """
        if not isinstance(self.plan.noise, Correlated):
            return None
        column = self.plan.noise.coefficients.column(len(self.scores)).numpy()
        return np.stack([np.pad(column, (t, 0))[: len(column)] for t in range(len(column))], axis=1)

    @property
    def noise(self) -> Array:
        """Fresh noise of each step, where no record should have contributed, [T, 2, width]; NaN elsewhere.

        With correlated noise, a record that was read once shows in later steps, too.
        """
        if self.strategy is not None:
            silent = np.isin(self.kinds, (Kind.OUT, Kind.BROKEN))
            return np.where(silent, np.tensordot(self.strategy, self.scores, 1), np.nan)
        touched = (self.sampled > 0) & (self.kinds != Kind.BROKEN)
        return np.where(touched, np.nan, self.scores)

    def moved(self, *kinds: Kind) -> Array:
        """One score for each release that a number of these kinds belongs to; one record should move it by at most 1.

        With independent noise these are the steps that read its record, or all steps if it is nobody's. With correlated
        noise the whole run is one release. A record that is read in steps P moves C y by v = sum_P C_t, which is
        public, so the best score is the length of C y along v, over the sensitivity. Numbers that are nobody's take the
        v of another.
        """
        chosen = np.isin(self.kinds, kinds)
        if self.strategy is None:
            nobodys = np.isin(self.kinds, (Kind.OUT, Kind.BROKEN))
            return self.scores[chosen & ((self.sampled > 0) | nobodys)]
        moves = np.tensordot(self.strategy, self.sampled, 1).reshape(len(self.scores), -1)
        known = np.flatnonzero(moves.any(0))
        moves = moves[:, known[np.arange(moves.shape[1]) % len(known)]] * (~moves.any(0)) + moves
        fresh = np.tensordot(self.strategy, self.scores, 1).reshape(moves.shape)
        sensitivity = self.plan.step_noise / self.plan.noise_multiplier
        lengths = (moves * fresh).sum(0) / np.linalg.norm(moves, axis=0)
        found: Array = lengths[chosen.ravel()] / sensitivity
        return found

    @property
    def noise_draws(self) -> int:
        """How many different noise vectors the steps show, by eight numbers of each; one that comes back counts once.

        Eight numbers never agree to a hundredth by chance, and a vector that is read twice hardly ever fails to.
        """
        silent = self.scores[:, self.kinds == Kind.OUT][:, :8]
        return len(np.unique(np.round(silent / self.plan.noise_multiplier, 2), axis=0))
