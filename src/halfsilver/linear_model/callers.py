"""Who calls `fit`: pipelines whose earlier steps have read private rows, and searches that fit many models.

An estimator is not told where it stands, so the stack of calls is read. It also has the caller in the processes of a
parallel search.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from halfsilver.errors import ConfigError, MissingExtra
from halfsilver.linear_model.public_transformer import PublicTransformer
from halfsilver.privacy.ledger import Ledger

try:
    from sklearn.compose import ColumnTransformer
    from sklearn.frozen import FrozenEstimator
    from sklearn.pipeline import FeatureUnion, Pipeline
    from sklearn.utils import get_tags
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtra("scikit-learn", "sklearn") from error

# Modules of scikit-learn that fit an estimator several times.
_SEVERAL = tuple(
    f"sklearn.{name}"
    for name in ("model_selection", "ensemble", "calibration", "multioutput", "multiclass", "feature_selection")
)


def check_callers(name: str, ledger: Ledger | str | Path | None, *, spends: bool) -> None:
    """Refuse a step before this one that has learnt from private rows, and several fits that nobody adds up.

    Args:
        name: The name of the estimator.
        ledger: Its ledger.
        spends: Whether this fit spends epsilon.

    Raises:
        ConfigError: A pipeline has fitted such a step, or the caller fits several times and there is no ledger.
    """
    for frame in _frames():
        module, caller = frame.f_globals.get("__name__", ""), frame.f_locals.get("self")
        if isinstance(caller, Pipeline) and module == "sklearn.pipeline":
            learnt = [step for step, part in caller.steps[:-1] if _learns(part)]
            if learnt:
                raise ConfigError(
                    f"Expected the steps before {name} to learn from public rows. The steps {learnt} have been fitted "
                    "to private rows, whose means or axes they would publish without noise. Wrap them in "
                    "PublicTransformer, or fit them before and wrap them in sklearn.frozen.FrozenEstimator."
                )
        if spends and ledger is None and module.startswith(_SEVERAL):
            raise ConfigError(
                f"Expected a ledger: {module} fits {name} several times, each fit spends epsilon, and only a common "
                f"ledger adds them up. Give {name}(ledger='ledger.jsonl'), or choose settings on public rows."
            )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _learns(part: Any) -> bool:
    """Whether fitting this step to private rows has left something of them in it."""
    if part is None or isinstance(part, str | PublicTransformer | FrozenEstimator):
        return False
    if isinstance(part, Pipeline):
        return any(_learns(step) for _, step in part.steps)
    if isinstance(part, FeatureUnion):
        return any(_learns(one) for _, one in part.transformer_list)
    if isinstance(part, ColumnTransformer):
        return any(_learns(one) for _, one, _ in part.transformers)
    return bool(get_tags(part).requires_fit)
