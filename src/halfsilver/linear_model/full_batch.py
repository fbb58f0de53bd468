"""What private linear models share: the folder of a fit, its noise, and the number of private rows."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.optimize import brentq
from scipy.stats import norm

from halfsilver._core.distributed import World
from halfsilver.errors import ConfigError, require
from halfsilver.privacy.count import noisy_count
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.ledger import Ledger

# So much more noise than the exact amount that no accountant finds a larger epsilon than was asked for.
_SLACK = 1e-6


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """A fit in which every step takes all private rows.

    Args:
        epsilon: What the fit may spend, count included.
        delta: The delta of that.
        steps: The number of steps.
        n_private: The declared number of rows, or None for a noisy count at the price of one step.
        ledger: The ledger of the private data set.
        unsafe_seed: A seed for tests.
    """

    epsilon: float
    delta: float
    steps: int
    n_private: int | None
    ledger: Ledger
    unsafe_seed: int | None

    def noise_multiplier(self) -> float:
        """The noise of each step, and of the count if there is one: sqrt(releases) / mu, for all of them together."""
        releases = self.steps + (self.n_private is None)
        return math.sqrt(releases) / gaussian_mu(self.epsilon, self.delta) * (1 + _SLACK)

    def rows(self, private: PrivateData, noise_multiplier: float | None) -> float:
        """The declared number of rows or, with the noise of a step, a noisy count of them; at least 1."""
        if self.n_private is not None or noise_multiplier is None:
            return float(self.n_private or 1)
        counted = noisy_count(
            private, noise_multiplier, self.ledger, before_steps=self.steps, unsafe_seed=self.unsafe_seed
        )
        return max(counted, 1.0)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu for which mu-Gaussian differential privacy is (epsilon, delta)-DP, exactly.

    delta = Phi(-epsilon / mu + mu / 2) - e^epsilon Phi(-epsilon / mu - mu / 2). T full-batch steps with noise
    multiplier sigma have mu = sqrt(T) / sigma.

    References:
        - Dong, Roth and Su 2022, Gaussian Differential Privacy, arXiv:1905.02383.
    """
    require(math.isfinite(epsilon) and epsilon > 0, "epsilon", epsilon, "in (0, inf)")
    require(0 < delta < 1, "delta", delta, "in (0, 1)")

    def excess(mu: float) -> float:
        second = math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
        return float(norm.cdf(-epsilon / mu + mu / 2) - second - delta)

    return float(brentq(excess, 1e-6, 10 * math.sqrt(epsilon) + 10))


def open_ledger(owner: object, run_dir: str | Path | None, ledger: Ledger | str | Path | None) -> tuple[Path, Ledger]:
    """The folder of a fit and its ledger, by default in that folder.

    By default the folder is a temporary one, and is removed with its owner.
    """
    folder = Path(run_dir or tempfile.mkdtemp(prefix="halfsilver-"))
    if run_dir is None:
        weakref.finalize(owner, _remove, folder, os.getpid())
    ledger = ledger or folder / "ledger.jsonl"
    return folder, ledger if isinstance(ledger, Ledger) else Ledger.open(ledger)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def require_one_process(name: str) -> None:
    """Refuse to fit over several processes."""
    if World.current(torch.device("cpu")).size > 1:
        raise ConfigError(f"{name} runs in one process. Fit it before torch.distributed starts.")
