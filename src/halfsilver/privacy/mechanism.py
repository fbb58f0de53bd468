"""Releases: ledger, sample, clipped gradients, sum, noise. What `release` returns may be published."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from halfsilver._core import system
from halfsilver._core.distributed import World
from halfsilver._core.model_state import untouched, without_dropout
from halfsilver._core.random import own_randomness
from halfsilver._core.sharded import Pieces, reshard, whole_model
from halfsilver._core.tensors import Batch, LossFn, Tensors, trainable
from halfsilver._core.views import unchanged_views
from halfsilver.errors import ConfigError
from halfsilver.privacy.batches import PrivateBatches
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import Entropy, OsEntropy
from halfsilver.privacy.gradients import ClippedSum, GradientBackend, Performance, make_backend
from halfsilver.privacy.gradients.base import Adding, Traced, Tunable, row_norms
from halfsilver.privacy.gradients.probe import PROBE_ROWS, probe, refuse_mixing
from halfsilver.privacy.gradients.rows import default_rows, fastest_rows
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.passes import PrivatePasses
from halfsilver.privacy.pieces import GROUP, alike, sizes_from
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.releases import Releases
from halfsilver.privacy.strategies import Correlated

# One durable ledger record covers about a second of steps, and at most a fiftieth of the plan: a kill loses no more.
_BLOCK_SECONDS = 1.0
_BLOCK_SHARE = 50
_log = logging.getLogger("halfsilver")
_SAME_DATA = "Give each rank all records, in one order."


@final
class PrivateGradient:
    """The one object through which private rows influence anything.

    Guarantee: the sequence of all values that `release` ever returned, over crashes and resumes, is one composition of
    the plan's mechanism, and every one of them was in the ledger, on disk, before a private row was read for it.

    In a `world` of several ranks, each is given the same data and computes on its own share of it. Only rank 0 has, and
    needs, the ledger.

    A private row that is also one of `public_rows`, which come in batches, contributes nothing: see `PublicCopies`.
    `probe_rows` are some public rows on which the model is tried, besides made-up ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        private: PrivateData,
        plan: PrivacyPlan,
        *,
        ledger: Ledger | None,
        run_id: str,
        public_example: Any = None,
        public_rows: Iterable[Batch] = (),
        probe_rows: Batch | None = None,
        performance: Performance | None = None,
        entropy: Entropy | None = None,
        world: World | None = None,
        owner: str = "",
    ) -> None:
        self.plan, self._performance = plan, performance or Performance()
        self._world, self._entropy = world or World(), entropy or OsEntropy()
        self._given, self._model = model, whole_model(model)
        self._params = trainable(model)
        correlated = plan.noise if isinstance(plan.noise, Correlated) else None
        most = plan.population / plan.batches_per_pass if correlated else plan.expected_batch_size
        adding = Adding.of(most, plan.sampling_rate, self._world.size)
        with self._world.together(), untouched(self._model):
            self._pieces = Pieces(self._params, self._world)
            self._batches = PrivateBatches(
                private, plan, self._params, public_example=public_example, public_rows=public_rows, world=self._world
            )
            self.form_is_known = self._batches.form_is_known
            self._batches.learn_ranges(self._model, loss_fn, probe_rows)
            self._backend = self._checked_backend(loss_fn, probe_rows)
            sizes = self._sizes()
        precise = self._performance.precise(loss_fn)
        for rows in self._world.from_lead(lambda: sizes):  # one measurement for all: the slowest rank sets the pace
            with self._world.together(), untouched(self._model):
                unlike = not self._alike(rows, adding, precise)
            if not self._world.largest(unlike):  # on no rank, whose processors may differ
                break
        if rows < sizes[0]:
            _log.info("Pieces of %d rows, because at %d rows, how one is rounded depends on its place.", rows, sizes[0])
        with self._world.together(), untouched(self._model):
            self._batches.use(rows)
            self._passes = PrivatePasses(
                self._model, precise, self._backend, self._batches, plan.max_grad_norm, adding, self._world.size
            )
            given: dict[str, Any] = {"ledger": ledger, "run_id": run_id, "owner": owner}
            self.out = Releases(self._params, plan, **given, entropy=self._entropy, world=self._world)
            self.step_seconds = self._seconds_of_a_step()
            self.block = max(1, min(int(_BLOCK_SECONDS / self.step_seconds), plan.steps // _BLOCK_SHARE))
        self._world.require_same("the private data", self._batches.population, _SAME_DATA)
        self.out.register(self.block)
        system.give_back_freed_memory()  # larger pieces were measured than are used

    def release(self) -> Tensors:
        """One noisy mean gradient at the model's current parameters, in their dtypes and lying as they do.

        Raises `BudgetExceeded`, before any row is read, once plan or budget are used up. Nothing else that is left
        behind depends on the private rows: no ledger record, no exception, no global random state. How long it takes
        does.

        Each rank gets its own pieces of the sum without noise, and to these it alone adds noise, from its own entropy;
        what the ranks then exchange are released values. So noise is drawn once for each number, and by all ranks in
        parallel.
        """
        with self._private_step():
            share = self._clipped_sum()
        total = ClippedSum(self._pieces.sum(share.tensors), share.sensitivity)
        return self._pieces.placed(self.out.noisy(total))

    def usable_units(self) -> float:
        """How many units of one sample contribute, with the plan's noise: one more step of the plan, in the ledger.

        A unit counts if it can be read, is not public as well, is finite, and its gradient can be computed. One unit
        changes the count by at most 1, so the noise of the plan hides it as it hides a clipped gradient.
        """
        with self._private_step():
            here = self._passes.usable(self._batches.sample(self._entropy, self.out.round))
        total = self._world.total(float(here))
        noisy = self.out.noisy_number(total)  # on every rank, as each uses its step up
        return self._world.from_lead(lambda: noisy)

    @contextmanager
    def _private_step(self) -> Iterator[None]:
        """Everything that comes before a private row is read, and the generators with which it is."""
        reshard(self._given)
        if [id(p) for p in trainable(self._given)] != [id(p) for p in self._params]:
            raise ConfigError("Expected the same parameters to be trainable as at the start. Make a new Trainer.")
        self.out.intend()
        self._compare_data()
        whole_model(self._given)
        seed = int(self._entropy.words(1)) & (2**63 - 1)  # for dropout and for data sets that draw
        with self._world.together(), own_randomness(seed, [self._batches.device]):
            yield

    def _clipped_sum(self) -> ClippedSum:
        return self._passes.clipped_sum(self._batches.sample(self._entropy, self.out.round))

    def _compare_data(self) -> None:
        """Once, refuse to go on if ranks have the data in different orders: a record could be in several shares then.

        Looks at some records of each rank; nothing is kept of them, and if they agree nothing follows from them.
        """
        if self.out.count or self._world.size == 1:
            return
        with self._world.together(), own_randomness(0, [self._batches.device]):
            digest = self._batches.digest()
        self._world.require_same("the private data", digest, _SAME_DATA)

    # ---- at the start, on made-up and public rows

    def _checked_backend(self, loss_fn: LossFn, public: Batch | None) -> GradientBackend:
        performance = self._performance
        if not isinstance(performance.backend, str):
            if self._model is not self._given:
                raise ConfigError("Expected the name of a backend for sharded parameters, not an object made for them.")
            return performance.backend
        made_up = self._batches.made_up(PROBE_ROWS)
        alike = None if public is None else self._batches.in_private_form(public)
        probe(self._model, performance.precise(loss_fn), made_up, alike)
        return make_backend(performance, self._model, loss_fn, made_up)

    def _sizes(self) -> list[int]:
        """Numbers of rows to try, the best first. A user's records are not clipped one by one, and read in parts."""
        batches, wanted = self._batches, self._performance.micro_batch_size
        self._any_places = batches.of_users or not batches.fixed_shape or getattr(self._backend, "any_shape", False)
        if self._any_places:
            return [wanted or default_rows(self._model, self.plan.expected_batch_size / self._world.size)]
        if wanted is not None:
            return sizes_from(wanted)
        with own_randomness(0, [batches.device]):
            return fastest_rows(self._backend, self._model, batches.made_up, self.plan, 1 / self._world.size)

    def _alike(self, rows: int, adding: Adding, loss_fn: LossFn) -> bool:
        """Whether all rows of a piece are rounded alike. A backend that shows nothing is trusted at multiples of 64."""
        if rows == 1 or self._any_places:
            return True
        if isinstance(self._performance.backend, str):
            refuse_mixing(self._model, loss_fn, self._batches.made_up(rows))
        if not isinstance(self._backend, Traced):
            return rows % GROUP == 0
        passes = self.plan.steps * max(1.0, self.plan.expected_batch_size / self._world.size / rows)
        per_example, shapes = self._backend.per_example, [p.shape for p in self._params]

        def numbers(batch: Batch) -> Tensors:
            found = per_example(batch)
            return [*found, row_norms(found)] if [t.shape[1:] for t in found] == shapes else found

        with own_randomness(0, [self._batches.device]), without_dropout(self._model), unchanged_views():
            with torch.no_grad():
                for p in trainable(
                    self._model
                ):  # past a layer that starts at zero, gradients are zero and show nothing
                    if not p.any():
                        p.normal_(std=0.1)
            if isinstance(self._backend, Tunable):
                self._backend.tune(self._batches.made_up(rows), adding)
            return alike(numbers, self._batches.made_up, rows, passes)

    def _seconds_of_a_step(self) -> float:
        """From a rehearsal on made-up rows. Blocks and checkpoints go by it: private timing must not show in them.

        The rehearsal has the shape of every private batch, so that it also meets a lack of memory first.
        """
        with own_randomness(0, [self._batches.device]):
            self._passes.tune()
            started = time.monotonic()
            self._passes.rehearse()
        pieces = max(1.0, self.plan.expected_batch_size / self._world.size / self._batches.rows)
        return (time.monotonic() - started) * pieces + 1e-6
