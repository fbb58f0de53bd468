"""Every mutant: its bug, and the smallest run in which the instruments named must find it.

Sizes follow from power at a level of 1e-7 for one test (z = 5.3) and a chance of 1e-4 to miss (z = 3.7), so about 9
standard deviations. For the variance of N noise values these are sqrt(2 / N); for the separation that A bounds they are
about 1.4 / sqrt(m) with m canaries read; for counts those of the binomial law. A record of NaN or a cancelling one must
be read once, and a padded one by both of its owners: with k of them in T steps that fails with probability
(1 - q)^(k T), or 2 (1 - q)^T. What C and the reconciliation find is no matter of chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from benchmarks.robustness.mutants import bugs
from benchmarks.robustness.mutants.bugs import Bug
from halfsilver._core.tensors import batch_rows
from halfsilver.auditing.bank import Layout
from halfsilver.auditing.instruments import Instrument
from halfsilver.auditing.loops import LOOPS, layered, plan_of, synthetic, trainer_loop
from halfsilver.auditing.run import Run
from halfsilver.mirror import FallBack, FirstOrder
from halfsilver.privacy import batches
from halfsilver.privacy.gradients import base
from halfsilver.privacy.gradients.book import backend as book
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.users import source as users

_HALF = "map/FirstOrder(0.5)"  # where half of each direction is public, throughout the run
_GUARDED = "map/FallBack(FirstOrder(0.5))"
_TOKENS = "layer/embedding by vmap"
RUNS: dict[str, Run] = {
    **LOOPS,
    _HALF: trainer_loop(_HALF, mirror=FirstOrder(0.5)),
    _GUARDED: trainer_loop(_GUARDED, mirror=FallBack(FirstOrder(0.5))),
    _TOKENS: layered(trainer_loop(_TOKENS, "vmap"), "embedding"),
}
INSTRUMENTS: tuple[Instrument, ...] = ("A", "B", "C", "reconciliation")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A loop and the size of an audited run of it."""

    loop: str
    canaries: int = 300
    steps: int = 30
    sampling_rate: float = 0.1
    replay: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(canaries=self.canaries)

    @property
    def plan(self) -> PrivacyPlan:
        """Normalised by the number of records that a batch holds on average, as most users' plans are."""
        records = batch_rows(synthetic()) + len(self.layout.places)
        plan = plan_of(steps=self.steps, sampling_rate=self.sampling_rate)
        return replace(plan, expected_batch_size=self.sampling_rate * records)


@dataclass(frozen=True)
class Mutant:
    """A bug, the run in which it is looked for, and the instruments by each of which every such run must find it."""

    bug: Bug
    setting: Setting
    by: tuple[Instrument, ...] = field(kw_only=True)


_BOOK = Setting(loop="trainer/book")
_TWO = Setting(loop="two processes")
_TURNS = Setting(loop="correlated noise")
_SMALL = replace(_BOOK, canaries=20, replay=True)

MUTANTS: dict[str, Mutant] = {
    "noise x 0.9": Mutant(
        bugs.weaker_noise(0.9), replace(_BOOK, canaries=2500, steps=40, sampling_rate=0.5), by=("A", "B")
    ),
    "noise x 0.8": Mutant(bugs.weaker_noise(0.8), replace(_BOOK, loop="trainer/vmap", canaries=1500), by=("A", "B")),
    "noise / sqrt(2)": Mutant(
        bugs.weaker_noise(1 / math.sqrt(2)), replace(_BOOK, loop="map/Bregman", canaries=600), by=("A", "B")
    ),
    "noise x 0.5": Mutant(bugs.weaker_noise(0.5), Setting(loop="federated"), by=("A", "B")),
    "clip x 2": Mutant(bugs.longer_clip(2, base, book), replace(_BOOK, replay=True), by=("A", "C")),
    "no clip": Mutant(bugs.longer_clip(math.inf, base), Setting(loop="trainer/hooks", replay=True), by=("A", "B", "C")),
    "rate x 1.5": Mutant(bugs.higher_rate(1.5, batches), _BOOK, by=("B",)),
    "rate x 2": Mutant(bugs.higher_rate(2, users), Setting(loop="federated", canaries=100), by=("B",)),
    "cyclic batches": Mutant(bugs.cyclic_batches, _BOOK, by=("B",)),
    "public gradient leaks 0.3 C": Mutant(
        bugs.public_leak(0.3), Setting(loop=_HALF, canaries=1000, replay=True), by=("A", "C")
    ),
    "public gradient leaks 0.3 C to FallBack": Mutant(
        bugs.public_leak(0.3), Setting(loop=_GUARDED, canaries=1000, replay=True), by=("A", "C")
    ),
    "noise x 0.5 before FallBack": Mutant(bugs.weaker_noise(0.5), Setting(loop=_GUARDED), by=("A", "B")),
    "one noise seed for all steps": Mutant(bugs.same_in_every_step, _BOOK, by=("B", "reconciliation")),
    "one noise seed for all tensors": Mutant(bugs.same_on_every_tensor, _BOOK, by=("B",)),
    "one noise seed for all ranks": Mutant(bugs.same_on_every_rank, _TWO, by=("B",)),
    "noise added on every rank": Mutant(bugs.added_on_every_rank, _TWO, by=("B",)),
    "one sampler seed for all ranks": Mutant(bugs.same_sample_on_every_rank, _TWO, by=("B",)),
    "padded shard": Mutant(bugs.padded_shard, replace(_TWO, canaries=20, steps=40, sampling_rate=0.5), by=("B",)),
    "ledger off by one": Mutant(bugs.ledger_off_by_one, replace(_BOOK, canaries=20), by=("reconciliation",)),
    "NaN passes": Mutant(bugs.nan_passes, Setting(loop="trainer/vmap", replay=True), by=("A", "B", "C")),
    "divided by the realised batch": Mutant(bugs.realised_batch, replace(_BOOK, replay=True), by=("C",)),
    "norm misses a use": Mutant(bugs.norm_misses_a_use, Setting(loop="trainer/hooks", replay=True), by=("A", "C")),
    "buffer written": Mutant(bugs.buffer_written, _SMALL, by=("C",)),
    "mode flipped": Mutant(bugs.mode_flipped, _SMALL, by=("C",)),
    "embedding renormalised": Mutant(bugs.embedding_renormalised, replace(_SMALL, loop=_TOKENS), by=("C",)),
    "frozen weight written by a user": Mutant(
        bugs.frozen_weight_written_by_a_user, replace(_SMALL, loop="federated"), by=("C",)
    ),
    "coefficient off by one": Mutant(bugs.coefficient_off_by_one, _TURNS, by=("B",)),
    "state of the noise used twice": Mutant(bugs.state_used_twice, _TURNS, by=("B",)),
    "chain begun in every step": Mutant(bugs.chain_begun_in_every_step, _TURNS, by=("B",)),
    "half the separation": Mutant(bugs.half_the_turns, replace(_TURNS, canaries=1000), by=("A", "B")),
    "one participation counted": Mutant(bugs.one_participation_counted, replace(_TURNS, canaries=1000), by=("A", "B")),
    "Gram norm cancels": Mutant(bugs.gram_norm_cancels, Setting(loop="layer/embedding", replay=True), by=("B", "C")),
}
