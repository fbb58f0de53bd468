"""Deprecated: import from `halfsilver.auditing`. `halfsilver.audit` itself is a function."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    from halfsilver import auditing  # here, because every import of the library imports this file

    if name.startswith("__") or not hasattr(auditing, name):
        raise AttributeError(f"module 'halfsilver.audit' has no attribute {name!r}")
    warnings.warn(
        f"halfsilver.audit.{name} has moved to halfsilver.auditing.{name}; the old path goes in version 0.3.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(auditing, name)
