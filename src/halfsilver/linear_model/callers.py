"""Who calls `fit`: pipelines whose earlier steps have read private rows, and wrappers that read them by themselves.

An estimator is not told where it stands, so the stack of calls is read. It also has the caller in the processes of a
parallel search.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np

from halfsilver.errors import ConfigError, MissingExtra
from halfsilver.linear_model.public_transformer import PublicTransformer

try:
    from sklearn.base import BaseEstimator
    from sklearn.compose import ColumnTransformer
    from sklearn.frozen import FrozenEstimator
    from sklearn.pipeline import FeatureUnion, Pipeline
    from sklearn.preprocessing import FunctionTransformer
    from sklearn.utils import get_tags
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtra("scikit-learn", "sklearn") from error

# Modules of scikit-learn that call `fit` once, and read no row themselves.
_PLAIN = ("sklearn.pipeline", "sklearn.base", "sklearn.utils")


def check_callers(estimator: Any) -> None:
    """Refuse a step before this one that has learnt from private rows, and any other estimator around this one.

    A wrapper may copy, leave out, score or transform private rows, or fit several times. Nothing that it keeps of them
    has noise, and no ledger counts it.

    Args:
        estimator: The estimator that is fitted.

    Raises:
        ConfigError: A pipeline has fitted such a step, or something else than a pipeline of scikit-learn calls.
    """
    name, wrapper = type(estimator).__name__, ""
    for frame in _frames():
        module: str = frame.f_globals.get("__name__", "")
        caller: Any = frame.f_locals.get("self")
        if isinstance(caller, BaseEstimator) and caller is not estimator and type(caller) is not Pipeline:
            wrapper = f"{type(caller).__module__}.{type(caller).__name__}"
        elif module.startswith("sklearn.") and not module.startswith(_PLAIN):
            wrapper = frame.f_code.co_name
        elif type(caller) is Pipeline:
            learnt = [step for step, part in caller.steps[:-1] if _learns(part)]
            if learnt:
                raise ConfigError(
                    f"Expected the steps before {name} to learn from public rows. The steps {learnt} have been fitted "
                    "to private rows, whose means or axes they would publish without noise, or may map one row by "
                    "the others. Wrap them in PublicTransformer, or fit them before and wrap them in "
                    "sklearn.frozen.FrozenEstimator."
                )
    if wrapper:  # the outermost, which is the one that people know by name
        raise ConfigError(
            f"Expected {name} to be fitted by itself, or as the last step of sklearn.pipeline.Pipeline, not by "
            f"{wrapper}. Whatever such a wrapper learns from private rows has no noise, and no ledger counts it. "
            "Choose settings on public rows. Several classes or outputs need no wrapper."
        )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _learns(part: Any) -> bool:
    """Whether this step may have been fitted to private rows, or may map one of them by the others."""
    if part is None or isinstance(part, str | PublicTransformer | FrozenEstimator):
        return False
    if type(part) is Pipeline:
        return any(_learns(step) for _, step in part.steps)
    if type(part) is FeatureUnion:
        return any(_learns(one) for _, one in part.transformer_list)
    if type(part) is ColumnTransformer:
        return any(map(_learns, [part.remainder, *(one for _, one, _ in part.transformers)]))
    if type(part) is FunctionTransformer:  # of functions, ufuncs alone are known to see one number at a time
        return part.func is not None and not isinstance(part.func, np.ufunc)
    return bool(not type(part).__module__.startswith("sklearn.") or get_tags(part).requires_fit)
