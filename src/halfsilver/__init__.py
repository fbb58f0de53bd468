"""halfsilver: train on private data with differential privacy, and use public data to get more from every epsilon.

>>> import halfsilver as hs
>>> plan = hs.PrivacyPlan.calibrate(epsilon=2, delta=1e-5, population=6400, batch_size=64, epochs=1)
>>> plan.steps, plan.epsilon() <= 2
(100, True)
"""

import importlib as _importlib
import typing as _typing
import warnings as _warnings

import halfsilver.audit  # a deprecated path, imported before the function of that name so that it cannot replace it

del halfsilver.audit, halfsilver

if _typing.TYPE_CHECKING:
    from halfsilver import errors, mirror, opacus, selection, study, trainer  # noqa: F401 - that the API page names
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
    from halfsilver.privacy.strategies import Correlated
    from halfsilver.probing import FineTune, head
    from halfsilver.runs.weights import load
    from halfsilver.selection import select
    from halfsilver.study.advice import advise
    from halfsilver.study.compare import compare
    from halfsilver.study.method import Method
    from halfsilver.study.problem import Recipe
    from halfsilver.trainer import Trainer

__all__ = [
    "Bregman",
    "Budget",
    "Correlated",
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
    "load",
    "private_clip_norm",
    "select",
    "views",
]

# Where each name is. It is imported when it is first used, so a command that needs no torch does not wait for it.
_HOMES = {
    "_core.views": ("views",),
    "auditing": ("audit",),
    "errors": ("HalfsilverError",),
    "mirror": (
        "Bregman",
        "DualAveraging",
        "Euclidean",
        "FallBack",
        "Finish",
        "FirstOrder",
        "PublicLoss",
        "Quadratic",
        "Whitened",
        "chain",
        "clip_released",
        "cosine",
    ),
    "privacy.clip_norm": ("private_clip_norm",),
    "privacy.data": ("PrivateData",),
    "privacy.gradients": ("Performance",),
    "privacy.ledger": ("Budget", "Ledger"),
    "privacy.plan": ("PrivacyPlan",),
    "privacy.released_metrics": ("Release",),
    "privacy.strategies": ("Correlated",),
    "probing": ("FineTune", "head"),
    "runs.weights": ("load",),
    "selection": ("select",),
    "study.advice": ("advise",),
    "study.compare": ("compare",),
    "study.method": ("Method",),
    "study.problem": ("Recipe",),
    "trainer": ("Trainer",),
}
_MODULES = (
    "auditing",
    "errors",
    "features",
    "mirror",
    "opacus",
    "privacy",
    "probing",
    "runs",
    "selection",
    "study",
    "trainer",
)
_HOME = {name: home for home, names in _HOMES.items() for name in names}

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
        if name in _HOME:
            value = getattr(_importlib.import_module(f"halfsilver.{_HOME[name]}"), name)
        elif name in _MODULES:
            value = _importlib.import_module(f"halfsilver.{name}")
        elif name in _MOVED:
            _warnings.warn(
                f"halfsilver.{name} is halfsilver.{_MOVED[name]} now; the old name goes in version 0.3.",
                DeprecationWarning,
                stacklevel=2,
            )
            module, _, attribute = f"halfsilver.{_MOVED[name]}".rpartition(".")
            return getattr(_importlib.import_module(module), attribute)
        else:
            raise AttributeError(f"module 'halfsilver' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
