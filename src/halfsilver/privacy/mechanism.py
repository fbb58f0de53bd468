"""Left of the bar: ledger, sample, per-example gradient, clip, sum, noise. What `release` returns may be published."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, final

import torch

from halfsilver._tensors import Batch, LossFn, Tensors, batch_rows, map_batch, take_rows, trainable
from halfsilver.errors import ConfigError
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import Entropy, OsEntropy
from halfsilver.privacy.gradients import ClippedSum, Speed, make_backend, rows_at_once
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
        self._schema = private._schema(public_example)
        self._device = trainable(model)[0].device
        made_up = self._to_device(self._schema.synthetic(PROBE_ROWS))
        if isinstance(speed.backend, str):
            probe(model, loss_fn, made_up)
        self._backend = make_backend(speed, model, loss_fn, made_up)
        self._rows = rows_at_once(speed, model)
        check_exactness(plan.noise_multiplier, plan.max_grad_norm, sum(p.numel() for p in trainable(model)))
        self._entropy = entropy or OsEntropy()
        self._ledger, self._run_id = ledger, run_id
        self._block_max = max(1, plan.steps // _BLOCK_SHARE)
        ledger.register_run(run_id, plan, block_max=self._block_max)
        self.releases = 0
        self.backend_name = self._backend.name if self._users is None else "per-user autograd"
        self._granted, self._seconds = 0, _BLOCK_SECONDS

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

        Raises `BudgetExceeded`, before any row is read, once plan or budget are used up. Nothing else depends on the
        private rows: not the time of the ledger's records, not an exception, not the global random state.
        """
        self._intend()
        started = time.monotonic()
        with torch.random.fork_rng(devices=_cuda(self._device)):
            torch.manual_seed(int(self._entropy.words(1)) & (2**63 - 1))  # dropout masks of the private pass
            total = self._clipped_sum()
        noisy = add_noise(total, self.plan.noise_multiplier, self._entropy)
        self._granted -= 1
        self.releases += 1
        self._seconds = 0.5 * (self._seconds + time.monotonic() - started)
        expected = self.plan.expected_batch_size
        return [(t / expected).to(p.dtype) for t, p in zip(noisy, trainable(self._model), strict=True)]

    def _intend(self) -> None:
        if self._granted == 0:
            wanted = 1 if self.releases == 0 else int(_BLOCK_SECONDS / max(self._seconds, 1e-9))
            self._granted = self._ledger.intend(self._run_id, max(1, min(wanted, self._block_max))).count

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
        """The clipped sum of a batch; where that raises, of the examples for which it does not.

        A label out of range, say, raises inside the loss. The model itself has passed the probe, so the cause is a
        record: it contributes nothing, and no error tells of it.
        """
        rows = batch_rows(batch)
        if rows == 0:
            return
        try:
            yield self._backend.clipped_sum(batch, self.plan.max_grad_norm)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            if rows > 1:
                for i in range(rows):
                    yield from self._sum_of_examples(take_rows(batch, slice(i, i + 1)))

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


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
