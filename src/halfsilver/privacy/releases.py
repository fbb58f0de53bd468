"""The two ends of every private step: a durable record before it, noise after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from halfsilver._core.distributed import World
from halfsilver._core.tensors import Tensors
from halfsilver.privacy.entropy import Entropy
from halfsilver.privacy.gradients.base import ClippedSum, check_clip_norm
from halfsilver.privacy.ledger import Head, Ledger
from halfsilver.privacy.noise import add_noise, check_exactness, noisy_mean
from halfsilver.privacy.plan import PrivacyPlan


@final
class Releases:
    """Counts, then lets out: `intend` must return before a private row is read, and allows one call of `noisy`.

    Only rank 0 of the `world` has, and needs, the ledger. A record of it covers `block` steps.
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
    ) -> None:
        self.plan, self.entropy = plan, entropy
        self._ledger, self._run_id, self._world = ledger, run_id, world
        self._dtypes: list[torch.dtype] = [p.dtype for p in params]
        self._dimension = sum(p.numel() for p in params)
        check_clip_norm(plan.max_grad_norm, self._dtypes)
        check_exactness(plan.noise_multiplier, plan.max_grad_norm, self._dimension)
        self.count, self._granted, self._intended, self._block = 0, 0, False, 1

    def register(self, block: int) -> None:
        """Enter the run into the ledger; all ranks take rank 0's block."""
        self._block = self._world.from_lead(lambda: self._register(block))

    def _register(self, block: int) -> int:
        assert self._ledger is not None, "rank 0 has the ledger"
        self._ledger.register_run(self._run_id, self.plan, block_max=block)
        return block

    def intend(self) -> None:
        """Have the step on disk. Raises `BudgetExceeded` once plan or budget are used up.

        A step that was intended and came to nothing is not used again: what it read may have shown somewhere.
        """
        if self._intended:
            self._intended, self._granted = False, self._granted - 1
        if self._granted <= 0:  # no rank goes on before rank 0 has these steps on disk
            self._granted = self._world.from_lead(self._intend)
        self._intended = True

    def _intend(self) -> int:
        assert self._ledger is not None, "rank 0 has the ledger"
        return self._ledger.intend(self._run_id, self._block).count

    def noisy(self, total: ClippedSum) -> Tensors:
        """The sum with noise, divided by the expected batch size, in the dtypes of the parameters."""
        assert self._intended, "intend() comes before the data are touched"
        released = noisy_mean(
            total,
            self.plan.noise_multiplier,
            self.entropy,
            expected=self.plan.expected_batch_size,
            dtypes=self._dtypes,
            dimension=self._dimension,
        )
        self._used()
        return released

    def noisy_number(self, total: float) -> float:
        """A number that one unit moves by at most 1, with the plan's noise: one more release of the same mechanism."""
        assert self._intended, "intend() comes before the data are touched"
        sums = ClippedSum([torch.tensor([total], dtype=torch.float64)], 1.0)
        (released,) = add_noise(sums, self.plan.noise_multiplier, self.entropy)
        self._used()
        return float(released)

    def _used(self) -> None:
        self._intended = False
        self._granted -= 1
        self.count += 1

    @property
    def head(self) -> Head | None:
        """The ledger's record of this run's latest steps, for the checkpoint; None on a rank without the ledger."""
        return self._ledger.runs[self._run_id].last if self._ledger else None

    @property
    def between_blocks(self) -> bool:
        """Whether every step that the ledger counts has been used: the best moment for a checkpoint."""
        return self._granted == 0
