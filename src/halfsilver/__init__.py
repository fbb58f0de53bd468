"""halfsilver: private training with public data as the mirror.

>>> import halfsilver as hs
>>> plan = hs.PrivacyPlan(steps=100, sampling_rate=0.01, expected_batch_size=64, noise_multiplier=1.0)
>>> 0 < plan.epsilon(delta=1e-5) < 2
True
"""

from halfsilver import audit as _deprecated_path  # noqa: F401 - before the function of that name
from halfsilver import opacus
from halfsilver.auditing import audit
from halfsilver.errors import BudgetExceeded, HalfsilverError
from halfsilver.mirror import (
    Bregman,
    Euclidean,
    FallBack,
    FirstOrder,
    PublicLoss,
    Quadratic,
    chain,
    clip_released,
    constant,
    cosine,
)
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import Speed
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.study.compare import Comparison, compare
from halfsilver.study.method import Method
from halfsilver.study.problem import Grid, Pretrain, Recipe
from halfsilver.trainer import RunResult, Trainer

__all__ = [
    "Bregman",
    "Budget",
    "BudgetExceeded",
    "Comparison",
    "Euclidean",
    "FallBack",
    "FirstOrder",
    "Grid",
    "HalfsilverError",
    "Ledger",
    "Method",
    "Pretrain",
    "PrivacyPlan",
    "PrivateData",
    "PublicLoss",
    "Quadratic",
    "Recipe",
    "RunResult",
    "Speed",
    "Trainer",
    "audit",
    "chain",
    "clip_released",
    "compare",
    "constant",
    "cosine",
    "opacus",
]
