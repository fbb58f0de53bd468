"""Warning filters for a block of code, that leave no trace in what Python remembers of warnings."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

Filter = tuple[str, re.Pattern[str] | None, type[Warning], re.Pattern[str] | None, int]


def warning_filter(action: Literal["ignore", "error"], message: str = "", category: type[Warning] = Warning) -> Filter:
    """For warnings of that kind whose text begins so."""
    return action, re.compile(message, re.IGNORECASE) if message else None, category, None, 0


@contextmanager
def warning_filters(*filters: Filter) -> Iterator[None]:
    """These filters before all others, the last one first.

    Not by `warnings.catch_warnings`: with each use of it Python forgets which warnings it has shown, and shows them
    again. Around private code, a warning about something public would then tell whether there was a private record.
    A warning that is ignored is not remembered.
    """
    present: list[Any] = warnings.filters  # type: ignore[assignment]
    for one in filters:
        present.insert(0, one)
    try:
        yield
    finally:
        for one in filters:
            with suppress(ValueError):  # whoever has reset all filters meant it
                present.remove(one)
