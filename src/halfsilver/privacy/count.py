"""A noisy count of the private rows, by the same mechanism as a gradient."""

from __future__ import annotations

import secrets

import torch

from halfsilver._core.tensors import Batch, batch_rows
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import OsEntropy, UnsafeSeed
from halfsilver.privacy.gradients import Adding, ClippedSum, Speed
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.plan import PrivacyPlan


class _Ones:
    """Every row contributes exactly the clip norm, whatever it holds."""

    name = "count"

    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, rows: int | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        counted = batch_rows(batch) if rows is None else rows
        return ClippedSum([torch.full((1, 1), counted * max_grad_norm, dtype=torch.float64)], max_grad_norm)


def noisy_count(
    private: PrivateData,
    noise_multiplier: float,
    ledger: Ledger,
    *,
    before_steps: int = 0,
    unsafe_seed: int | None = None,
) -> float:
    """The number of private rows plus Gaussian noise: one full-batch step, in the ledger as a run of its own.

    `before_steps` is how many steps of the same kind are to follow. A budget goes by the plan that comes first, so that
    plan has to tell of them.
    """
    plan = PrivacyPlan(
        steps=1,
        spare_steps=before_steps,
        sampling_rate=1.0,
        expected_batch_size=1.0,
        noise_multiplier=noise_multiplier,
    )
    run_id = f"{'unsafe-' if unsafe_seed is not None else ''}count-{secrets.token_hex(8)}"
    source = PrivateGradient(
        torch.nn.Linear(1, 1, bias=False, dtype=torch.float64),
        lambda model, batch: torch.zeros(batch_rows(batch)),
        private,
        plan,
        ledger=ledger,
        run_id=run_id,
        speed=Speed(backend=_Ones(), micro_batch_size=4096),
        entropy=OsEntropy() if unsafe_seed is None else UnsafeSeed(unsafe_seed),
    )
    count = float(source.release()[0])
    ledger.finish(run_id, updates=1)
    return count
