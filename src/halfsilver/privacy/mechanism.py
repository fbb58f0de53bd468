"""Left of the bar: ledger, sample, per-example gradient, clip, sum, noise. What `release` returns may be published."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from halfsilver._random import own_randomness
from halfsilver._tensors import Batch, LossFn, Tensors, batch_leaves, batch_rows, map_batch, take_rows, trainable
from halfsilver.errors import ConfigError
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import Entropy, OsEntropy
from halfsilver.privacy.gradients import ClippedSum, GradientBackend, Speed, make_backend, rows_at_once
from halfsilver.privacy.gradients.probe import PROBE_ROWS, probe
from halfsilver.privacy.gradients.users import clipped_user_gradient
from halfsilver.privacy.ledger import Head, Ledger
from halfsilver.privacy.noise import add_noise, check_exactness
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.sampling import poisson_chunks

# One durable ledger record covers about a second of steps, and at most a fiftieth of the plan: a kill loses no more.
_BLOCK_SECONDS = 1.0
_BLOCK_SHARE = 50


@final
class PrivateGradient:
    """The one object through which private rows influence anything.

    Guarantee: the sequence of all values that `release` ever returned, over crashes and resumes, is one composition of
    the plan's mechanism, and every one of them was in the ledger, on disk, before a private row was read for it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        private: PrivateData,
        plan: PrivacyPlan,
        *,
        ledger: Ledger,
        run_id: str,
        public_example: Any = None,
        speed: Speed | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        speed = speed or Speed()
        self._model, self._loss_fn, self.plan = model, loss_fn, plan
        self._records, self._users = private._open()
        if (plan.unit == "user") != (self._users is not None):
            raise ConfigError(
                f"Expected plan.unit={plan.unit!r} to go with the private data: unit='user' needs "
                "PrivateData(..., users=keys), and keys need unit='user'."
            )
        self._entropy = entropy or OsEntropy()
        self._schema = private._schema(public_example)
        self._device = trainable(model)[0].device
        self._rows = rows_at_once(speed, model, plan.expected_batch_size)
        self._padding = self._to_device(self._schema.synthetic(self._rows if self._records.fixed_shape else 1))
        self._backend = self._checked_backend(speed)
        check_exactness(plan.noise_multiplier, plan.max_grad_norm, sum(p.numel() for p in trainable(model)))
        self._block = self._steps_per_block()
        self._ledger, self._run_id = ledger, run_id
        ledger.register_run(run_id, plan, block_max=self._block)
        self.releases, self._granted = 0, 0

    def _checked_backend(self, speed: Speed) -> GradientBackend:
        if not isinstance(speed.backend, str):
            return speed.backend
        made_up = self._to_device(self._schema.synthetic(PROBE_ROWS))
        probe(self._model, self._loss_fn, made_up)
        return make_backend(speed, self._model, self._loss_fn, made_up)

    def _steps_per_block(self) -> int:
        """How many steps a ledger record covers, from a rehearsal on made-up rows: private timing must not show in it.

        The rehearsal has the shape of every private batch, so that it also meets a lack of memory first.
        """
        started = time.monotonic()
        with own_randomness(0, [self._device]):
            if self._users is None:
                self._backend.clipped_sum(self._padding, self.plan.max_grad_norm)
            else:
                clipped_user_gradient(self._model, self._loss_fn, [self._padding], self.plan.max_grad_norm)
        pieces = max(1.0, self.plan.expected_batch_size / self._rows)
        wanted = int(_BLOCK_SECONDS / ((time.monotonic() - started) * pieces + 1e-6))
        return max(1, min(wanted, self.plan.steps // _BLOCK_SHARE))

    @property
    def head(self) -> Head | None:
        """The ledger's record of this run's latest steps, for the checkpoint."""
        return self._ledger.runs[self._run_id].last

    @property
    def between_blocks(self) -> bool:
        """Whether every step that the ledger counts has been used: the best moment for a checkpoint."""
        return self._granted == 0

    def release(self) -> Tensors:
        """One noisy mean gradient at the model's current parameters, in their dtypes.

        Raises `BudgetExceeded`, before any row is read, once plan or budget are used up. Nothing else that is left
        behind depends on the private rows: no ledger record, no exception, no global random state. How long it takes
        does.
        """
        if self._granted == 0:
            self._granted = self._ledger.intend(self._run_id, self._block).count
        seed = int(self._entropy.words(1)) & (2**63 - 1)  # for dropout and for data sets that draw
        with own_randomness(seed, [self._device]):
            total = self._clipped_sum()
        noisy = add_noise(total, self.plan.noise_multiplier, self._entropy)
        self._granted -= 1
        self.releases += 1
        expected = self.plan.expected_batch_size
        return [(t / expected).to(p.dtype) for t, p in zip(noisy, trainable(self._model), strict=True)]

    def _clipped_sum(self) -> ClippedSum:
        total = ClippedSum.zeros(trainable(self._model), self.plan.max_grad_norm)
        for part in self._parts():
            total.add_(part)
        return total

    def _parts(self) -> Iterator[ClippedSum]:
        plan, users = self.plan, self._users
        population = users.size() if users else self._records.size()
        for chosen in poisson_chunks(population, plan.sampling_rate, self._rows, self._entropy):
            if users is None:
                yield from self._sum_of_examples(self._fetch(chosen))
            else:
                members = range(chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen.tolist()
                yield from (part for user in members for part in self._sum_of_user(user))

    def _sum_of_examples(self, batch: Batch) -> Iterator[ClippedSum]:
        """The clipped sum of a batch; where that fails, of the examples for which it does not.

        A label out of range, say, raises inside the loss. The model itself has passed the probe, so the cause is a
        record: it contributes nothing, and no error tells of it.
        """
        rows = batch_rows(batch)
        part = self._attempt(batch, rows) if rows else None
        if part is not None:
            yield part
        elif rows > 1:
            yield from self._sum_of_examples(take_rows(batch, slice(0, rows // 2)))
            yield from self._sum_of_examples(take_rows(batch, slice(rows // 2, rows)))

    def _attempt(self, batch: Batch, rows: int) -> ClippedSum | None:
        try:
            part = self._backend.clipped_sum(self._padded(batch, rows), self.plan.max_grad_norm, rows)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            return None
        return part if all(torch.isfinite(t).all() for t in part.tensors) else None

    def _padded(self, batch: Batch, rows: int) -> Batch:
        """Made-up rows up to the one shape of all batches."""
        if rows == self._rows or not self._records.fixed_shape:
            return batch
        columns = zip(batch_leaves(batch), batch_leaves(self._padding), strict=True)
        filled = [torch.cat([t, made_up[rows:]]) for t, made_up in columns]
        return pytree.tree_unflatten(filled, pytree.tree_structure(batch))

    def _sum_of_user(self, user: int) -> Iterator[ClippedSum]:
        assert self._users is not None
        batches = (self._fetch(rows) for rows in self._users.rows(user, self._rows))
        try:
            yield clipped_user_gradient(self._model, self._loss_fn, batches, self.plan.max_grad_norm)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            return  # as above: nothing from this user, and no word about it

    def _fetch(self, chosen: torch.Tensor | slice) -> Batch:
        return self._to_device(self._records.fetch(chosen, self._schema))

    def _to_device(self, batch: Batch) -> Batch:
        return map_batch(lambda t: t.to(self._device, non_blocking=True), batch)
