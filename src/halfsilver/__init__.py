"""halfsilver: train on private data with differential privacy, and use public data to get more from every epsilon.

>>> import halfsilver as hs
>>> plan = hs.PrivacyPlan.calibrate(epsilon=2, delta=1e-5, population=6400, batch_size=64, epochs=1)
>>> plan.steps, plan.epsilon() <= 2
(100, True)
"""

import importlib as _importlib
import typing as _typing
import warnings as _warnings

from halfsilver import audit as _deprecated_path  # noqa: F401 - before the function of that name
from halfsilver import errors, mirror, opacus, selection, study, trainer  # noqa: F401 - modules that the API page names
from halfsilver._core.views import views
from halfsilver.auditing import audit
from halfsilver.errors import HalfsilverError
from halfsilver.mirror import (
    Bregman,
    DualAveraging,
    Euclidean,
    FallBack,
    Finish,
    FirstOrder,
    PublicLoss,
    Quadratic,
    Whitened,
    chain,
    clip_released,
    cosine,
)
from halfsilver.privacy.clip_norm import private_clip_norm
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.released_metrics import Release
from halfsilver.probing import FineTune, head
from halfsilver.selection import select
from halfsilver.study.advice import advise
from halfsilver.study.compare import compare
from halfsilver.study.method import Method
from halfsilver.study.problem import Recipe
from halfsilver.trainer import Trainer

__all__ = [
    "Bregman",
    "Budget",
    "DualAveraging",
    "Euclidean",
    "FallBack",
    "FineTune",
    "Finish",
    "FirstOrder",
    "HalfsilverError",
    "Ledger",
    "Method",
    "Performance",
    "PrivacyPlan",
    "PrivateData",
    "PublicLoss",
    "Quadratic",
    "Recipe",
    "Release",
    "Trainer",
    "Whitened",
    "advise",
    "audit",
    "chain",
    "clip_released",
    "compare",
    "cosine",
    "head",
    "private_clip_norm",
    "select",
    "views",
]

_MOVED = {
    "BudgetExceeded": "errors.BudgetExceeded",
    "Comparison": "study.Comparison",
    "Grid": "study.Grid",
    "Pretrain": "study.Pretrain",
    "RunResult": "trainer.RunResult",
    "Speed": "Performance",
    "constant": "mirror.constant",
}

if not _typing.TYPE_CHECKING:  # a type checker then still knows which names there are

    def __getattr__(name: str) -> _typing.Any:
        if name not in _MOVED:
            raise AttributeError(f"module 'halfsilver' has no attribute {name!r}")
        _warnings.warn(
            f"halfsilver.{name} is halfsilver.{_MOVED[name]} now; the old name goes in version 0.3.",
            DeprecationWarning,
            stacklevel=2,
        )
        module, _, attribute = f"halfsilver.{_MOVED[name]}".rpartition(".")
        return getattr(_importlib.import_module(module), attribute)
