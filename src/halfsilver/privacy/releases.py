"""The two ends of every private step: a durable record before it, noise after it."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Sequence
from typing import final
from weakref import WeakSet

import torch
from torch import Tensor

from halfsilver._core import system
from halfsilver._core.distributed import World
from halfsilver._core.tensors import Tensors
from halfsilver.errors import RunFolderBusy
from halfsilver.privacy.entropy import Entropy
from halfsilver.privacy.gradients.base import ClippedSum, check_clip_norm
from halfsilver.privacy.ledger import Head, Ledger
from halfsilver.privacy.ledger.ledger import taken_over, uses_of
from halfsilver.privacy.noise import add_noise, check_exactness, grid, noise_scale, noisy_mean
from halfsilver.privacy.noise_chain import NoiseChain, check_arithmetic
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import Correlated


@final
class Releases:
    """Counts, then lets out: `intend` must return before a private row is read, and allows one call of `noisy`.

    Only rank 0 of the `world` has, and needs, the ledger. A record of it covers `block` steps.

    Correlated noise goes on from step to step in one chain. A step that came to nothing, or that the ledger counts and
    nobody took, ends the chain, and the next one begins anew, as after a crash: `noise_chain` has the proof that this
    costs nothing. So the steps of a chain follow each other in the numbers of the ledger.

    Each object is an owner of the run, by a new random token. Its first step takes the run over from the owner before,
    who is refused from then on. That step comes `pause` steps later, where units are known by their place alone, which
    may be another in another process.

    Granted steps are in the memory of this process, which may get a second image: a fork, or a machine restored from a
    snapshot. A fork has no granted step. For other images, a file beside the ledger says which step was used last. It
    is compared and changed in one step, after the noise is drawn and before the release leaves this object. So of all
    images one lets a step out, or several the same numbers.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        plan: PrivacyPlan,
        *,
        ledger: Ledger | None,
        run_id: str,
        entropy: Entropy,
        world: World,
        owner: str = "",
    ) -> None:
        self._owner, self._forked, self._last_use = owner or secrets.token_hex(16), False, b""
        self.plan, self.entropy = plan, entropy
        self._ledger, self._run_id, self._world = ledger, run_id, world
        self._dtypes: list[torch.dtype] = [p.dtype for p in params]
        self._dimension = sum(p.numel() for p in params)
        check_clip_norm(plan.max_grad_norm, self._dtypes)
        self._noise = plan.step_noise
        check_exactness(self._noise, plan.max_grad_norm, self._dimension)
        if isinstance(plan.noise, Correlated):  # before anything is spent
            check_arithmetic(plan.noise.coefficients, plan.max_releases, self._scale(plan.max_grad_norm))
        self.count, self._granted, self._intended, self._block = 0, 0, False, 1
        self._end = 0  # the number of steps that the ledger counts
        self._chain: NoiseChain | None = None
        self.pause = 0
        if isinstance(plan.noise, Correlated) and not plan.noise.order_kept:
            self.pause = plan.noise.participation(plan.max_releases).separation - 1
        self._earliest: int | None = None  # the first step that may be used, once a step is granted
        _all.add(self)

    def register(self, block: int) -> None:
        """Enter the run into the ledger; all ranks take rank 0's block."""
        self._block = self._world.from_lead(lambda: self._register(block))

    def _register(self, block: int) -> int:
        assert self._ledger is not None, "rank 0 has the ledger"
        self._ledger.register_run(self._run_id, self.plan, block_max=block, whole=True)
        return block

    def intend(self) -> None:
        """Have the step on disk. Raises `BudgetExceeded` once plan or budget are used up.

        A step that was intended and came to nothing is not used again: what it read may have shown somewhere.
        """
        self._intend_next()
        if self._earliest is None:
            self._earliest = self.round + (self.pause if self.round else 0)
        while self.round < self._earliest:
            self._intend_next()

    def _intend_next(self) -> None:
        if self._intended:
            self._intended, self._granted, self._chain = False, self._granted - 1, None
        if self._granted <= 0:  # no rank goes on before rank 0 has these steps on disk
            before = self._end
            self._granted, self._end = self._world.from_lead(self._intend)
            if self.round != before:  # others counted steps of this run: an owner before, or a torn record
                self._chain = None
        self._intended = True

    def _intend(self) -> tuple[int, int]:
        assert self._ledger is not None, "rank 0 has the ledger"
        self._use("granted")
        granted = self._ledger.intend(self._run_id, self._block, owner=self._owner).count
        return granted, self._ledger.runs[self._run_id].spent

    def _use(self, what: str) -> None:
        """Write down the latest use, unless there is another than the one that this image of the process wrote last."""
        assert self._ledger is not None, "rank 0 has the ledger"
        file, use = uses_of(self._ledger.path, self._run_id), f"{self._owner} {what:20}".encode()
        if self._forked or not system.swap(file, self._last_use, use):
            raise RunFolderBusy(taken_over(self._run_id))
        self._last_use = use

    def forget(self) -> None:
        """Called in a fork of the process: what was granted, and the noise that is remembered, are its parent's."""
        self._forked, self._intended, self._granted, self._chain = True, False, 0, None

    @property
    def round(self) -> int:
        """The number of the intended step among all that the ledger counts for the run, from 0.

        It is never given twice, and never less than before, whatever was lost on the way.
        """
        return self._end - self._granted

    def noisy(self, total: ClippedSum) -> Tensors:
        """The sum with noise, divided by the expected batch size, in the dtypes of the parameters."""
        assert self._intended, "intend() comes before the data are touched"
        if isinstance(self.plan.noise, Correlated) and self._chain is None:
            self._chain = self._new_chain(self.plan.noise, total)
        released = noisy_mean(
            total,
            self._noise,
            self.entropy,
            expected=self.plan.expected_batch_size,
            dtypes=self._dtypes,
            dimension=self._dimension,
            chain=self._chain,
        )
        self._used()
        return released

    def _new_chain(self, noise: Correlated, total: ClippedSum) -> NoiseChain:
        """For this rank's share of the coordinates. What it remembers is secret, so no file ever holds it."""
        return NoiseChain(
            noise.coefficients,
            sum(t.numel() for t in total.tensors),
            rounds=self.plan.max_releases,
            scale=self._scale(total.sensitivity),
            device=total.tensors[0].device,
        )

    def _scale(self, sensitivity: float) -> float:
        """Standard deviation of fresh noise, in units of the grid."""
        return noise_scale(self._noise, sensitivity) / grid(sensitivity, self._dimension)

    def noisy_number(self, total: float) -> float:
        """A number that one unit moves by at most 1, with the plan's noise: one more release of the same mechanism."""
        assert self._intended, "intend() comes before the data are touched"
        assert not isinstance(self.plan.noise, Correlated), "a step has one release"
        sums = ClippedSum([torch.tensor([total], dtype=torch.float64)], 1.0)
        (released,) = add_noise(sums, self.plan.noise_multiplier, self.entropy)
        self._used()
        return float(released)

    def _used(self) -> None:
        self._world.from_lead(lambda: self._use(str(self.round)))
        self._intended = False
        self._granted -= 1
        self.count += 1

    @property
    def begun(self) -> bool:
        """Whether the ledger counts a step of this run, of whichever process, and it may take another."""
        return self._world.from_lead(self._begun)

    @property
    def next_round(self) -> int:
        """The number of the next step that the ledger would grant; on rank 0."""
        assert self._ledger is not None, "rank 0 has the ledger"
        return self._ledger.runs[self._run_id].spent

    def _begun(self) -> bool:
        assert self._ledger is not None, "rank 0 has the ledger"
        run = self._ledger.runs[self._run_id]
        return run.spent > 0 and run.closed is None

    @property
    def head(self) -> Head | None:
        """The ledger's record of this run's latest steps, for the checkpoint; None on a rank without the ledger."""
        return self._ledger.runs[self._run_id].last if self._ledger else None

    @property
    def between_blocks(self) -> bool:
        """Whether every step that the ledger counts has been used: the best moment for a checkpoint."""
        return self._granted == 0


_all: WeakSet[Releases] = WeakSet()


if hasattr(os, "register_at_fork"):  # not on systems that are refused later, in clear words
    os.register_at_fork(after_in_child=lambda: deque(map(Releases.forget, _all), 0))
