"""A noisy count of the private rows, released by the same mechanism as a gradient."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, batch_rows
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import OsEntropy, UnsafeSeed
from halfsilver.privacy.gradients import Adding, ClippedSum, Performance
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.plan import PrivacyPlan


class _Ones:
    """Every row contributes exactly the clip norm, whatever it holds."""

    name = "count"

    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        rows = batch_rows(batch) if counted is None else int(counted.sum())
        return ClippedSum([torch.full((1, 1), rows * max_grad_norm, dtype=torch.float64)], max_grad_norm)


def noisy_count(
    private: PrivateData,
    noise_multiplier: float,
    ledger: Ledger,
    *,
    before_steps: int = 0,
    unsafe_seed: int | None = None,
) -> float:
    """The number of private rows plus Gaussian noise, at the cost of one full-batch step.

    The release is n + noise_multiplier * N(0, 1). Guarantee: one step of the Gaussian mechanism with that noise
    multiplier and sampling rate 1, entered in the ledger as a run of its own.

    Args:
        private: The private records.
        noise_multiplier: Standard deviation of the noise, in rows; above 0. Use that of the steps that follow, so that
            a budget counts one mechanism.
        ledger: The ledger of the private data set.
        before_steps: How many steps of the same kind will follow, at least 0. Default 0. A budget's rule depends on the
            plan that comes first, so that plan has to include them.
        unsafe_seed: A seed for reproducible noise, for tests only. Default None, which uses the system's entropy. With
            a seed nothing is private.

    Returns:
        The noisy count. It may be negative.

    Raises:
        BudgetExceeded: If the ledger's budget does not allow one more step.

    Example:
        >>> import tempfile
        >>> import torch
        >>> ledger = Ledger.open(tempfile.mkdtemp() + "/ledger.jsonl")
        >>> 900 < noisy_count(PrivateData(torch.zeros(1000, 2)), 5.0, ledger) < 1100
        True

    References:
        - Dwork and Roth 2014, The Algorithmic Foundations of Differential Privacy, Appendix A.
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
        performance=Performance(backend=_Ones(), micro_batch_size=4096),
        entropy=OsEntropy() if unsafe_seed is None else UnsafeSeed(unsafe_seed),
    )
    count = float(source.release()[0])
    ledger.finish(run_id, updates=1)
    return count
