"""The private side of a federated run: ledger, draw of users, their updates, clip, sum, noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from halfsilver._core.distributed import World
from halfsilver._core.tensors import Batch, LossFn, Tensors, take_rows, trainable
from halfsilver.errors import ConfigError, require
from halfsilver.privacy.entropy import Entropy
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.ranges import Ranges
from halfsilver.privacy.releases import Releases
from halfsilver.privacy.sampling import poisson_chunks, turn_chunks
from halfsilver.privacy.schema import plain
from halfsilver.privacy.strategies import Correlated
from halfsilver.privacy.users.attendance import Attendance
from halfsilver.privacy.users.engine import Engine, Round, WithCentre, WithPresence
from halfsilver.privacy.users.fold import Fold
from halfsilver.privacy.users.rehearsal import rehearse

_DRAWN_AT_ONCE = 1024


@final
class UserUpdates:
    """Releases noisy means of users' updates, as `PrivateGradient` does for gradients of examples.

    Guarantee: as there, with a user in place of an example, whichever replies are missing, malformed or made up. An
    engine that brings sums is trusted to have clipped what is in them.

    `centre` gives what is subtracted from each update before the clip, and added again after the noise. It must not
    depend on private rows other than by released values.

    With correlated noise users take turns. Where the engine knows who is present, those take part who are, and were not
    asked lately; `folder` then keeps who was. In a run `taken_over` from another folder, enough rounds pass first.

    References:
        - McMahan, Ramage, Talwar and Zhang 2018, Learning Differentially Private Recurrent Language Models,
          arXiv:1710.06963. Here users are drawn by Poisson sampling and the sum is divided by a declared constant,
          which is their fixed-denominator estimator with equal weights.
    """

    # Rounds are long, and each has a record of its own. How long they take depends on who is drawn.
    block, step_seconds = 1, None

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        engine: Engine,
        plan: PrivacyPlan,
        *,
        ledger: Ledger | None,
        run_id: str,
        entropy: Entropy,
        world: World,
        step: Callable[[], int],
        folder: Path,
        public_rows: Batch | None = None,
        centre: Callable[[int], Tensors | None] | None = None,
        owner: str = "",
        taken_over: bool = False,
    ) -> None:
        if plan.unit != "user":
            raise ConfigError(f"Expected plan.unit to be 'user' for users who train themselves, not {plan.unit!r}.")
        if world.size > 1:
            raise ConfigError(f"Expected one process to gather the updates of users, not {world.size} ranks.")
        if centre is not None and not (isinstance(engine, WithCentre) and engine.subtracts_centre):
            raise ConfigError(
                f"Expected an engine that subtracts the centre of a round, such as InProcess, not "
                f"{type(engine).__name__}. Leave out centre=."
            )
        self._model, self._loss_fn, self._engine, self._step = model, loss_fn, engine, step
        self._centre = centre
        self._params, self.plan = trainable(model), plan
        given: dict[str, Any] = {"ledger": ledger, "run_id": run_id, "owner": owner}
        self.out = Releases(self._params, plan, **given, entropy=entropy, world=world)
        if public_rows is not None:
            rehearse(model, loss_fn, public_rows)
            if self._params[0].is_cuda:
                self._loss_fn = _in_range(model, loss_fn, plain(public_rows))
        self.out.register(self.block)
        self._attendance: Attendance | None = None
        if isinstance(plan.noise, Correlated):
            apart, begun = plan.noise.participation(plan.max_releases).separation, self.out.begun
            if isinstance(engine, WithPresence):
                self.out.pause = apart - 1 if taken_over else 0  # the folder does not know who came elsewhere
                self._attendance = Attendance(folder, apart, next_round=self.out.next_round if begun else 0)
            elif begun and folder.exists():
                raise ConfigError(
                    f"Expected an engine with a method present, as at the start of this run: {folder} says who took "
                    "part lately, and users in turn could come too early."
                )

    def release(self) -> Tensors:
        """One noisy mean update. Raises `BudgetExceeded`, before any user is drawn, once plan or budget are used up."""
        if [id(p) for p in trainable(self._model)] != [id(p) for p in self._params]:
            raise ConfigError("Expected the same parameters to be trainable as at the start. Make a new Trainer.")
        centre = None if self._centre is None else self._centre(self._step())
        self.out.intend()
        seed = int(self.out.entropy.words(1)) & (2**62 - 1)  # for dropout and the like
        asked = Round(
            step=self._step(),
            model=self._model,
            loss_fn=self._loss_fn,
            users=self._drawn(),
            max_grad_norm=self.plan.max_grad_norm,
            seed=seed,
            centre=centre,
        )
        expected, drawn = 2 * self.plan.expected_batch_size, len(asked.users)
        fold = Fold(self._params, self.plan.max_grad_norm, expected=expected, users=drawn)
        for contribution in self._engine.contributions(asked):
            fold.add(contribution)
        released = self.out.noisy(fold.total)
        return released if centre is None else [r + c for r, c in zip(released, centre, strict=True)]

    def _drawn(self) -> Tensor:
        population, plan = self._engine.population, self.plan
        if self._attendance is not None:
            most = round(plan.expected_batch_size)
            return self._attendance.admit(self._present(), self.out.round, most, self.out.entropy)
        chunks: Iterator[Tensor | slice] = (
            turn_chunks(population, plan.batches_per_pass, _DRAWN_AT_ONCE, self.out.round)
            if isinstance(plan.noise, Correlated)
            else poisson_chunks(population, plan.sampling_rate, _DRAWN_AT_ONCE, self.out.entropy)
        )
        numbers = [torch.arange(c.start, c.stop) if isinstance(c, slice) else c for c in chunks]
        return torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.int64)

    def _present(self) -> Tensor:
        assert isinstance(self._engine, WithPresence)
        users, population = self._engine.present(), self._engine.population
        known = users.dtype == torch.int64 and len(users) == len(set(users.tolist()))
        inside = len(users) == 0 or (int(users.min()) >= 0 and int(users.max()) < population)
        require(known and inside, "present()", users, f"to be distinct whole numbers from 0 to {population - 1}")
        return users


def _in_range(model: nn.Module, loss_fn: LossFn, public_rows: Batch) -> LossFn:
    """The loss, which raises for rows out of range before the model sees them: on a GPU they would end the process."""
    ranges = Ranges.of(model, loss_fn, take_rows(public_rows, slice(0, 2)), shown=public_rows)

    def checked(model: nn.Module, batch: Batch) -> Tensor:
        if ranges.usable(plain(batch)) is not None:
            raise IndexError("out of range")
        return loss_fn(model, batch)

    return checked
