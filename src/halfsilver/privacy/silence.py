"""What a private record sets off is neither seen nor remembered."""

from __future__ import annotations

import warnings
from contextlib import suppress
from types import TracebackType
from typing import Any, final

import torch

from halfsilver._core.warning_filters import warning_filter

_ALL = warning_filter("ignore")


@final
class silent:
    """A block that depends on private records: whatever fails in it ends the block, and nobody hears of it.

    All exceptions end here, `SystemExit` and others that are no `Exception` among them, because a record can raise any.
    `KeyboardInterrupt` passes: it is not a record's. So do those named by `but`, such as a lack of memory where all
    records need the same. Do not yield inside the block: it would swallow `GeneratorExit`.

    Warnings are ignored, and neither Python nor torch remembers them: later a warning about something public is shown
    as often as it would have been. What libraries print by themselves is not caught.
    """

    __slots__ = ("_always", "_filters", "_pass")

    def __init__(self, but: tuple[type[BaseException], ...] = ()) -> None:
        self._pass: tuple[type[BaseException], ...] = (KeyboardInterrupt, *but)

    def __enter__(self) -> None:
        """As `warning_filters` does it; but once for each record, so it has to be fast."""
        self._always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)  # else a warning that torch gives once would be used up here
        self._filters: list[Any] = warnings.filters  # type: ignore[assignment]
        self._filters.insert(0, _ALL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with suppress(ValueError):
            self._filters.remove(_ALL)
        torch.set_warn_always(self._always)
        return kind is not None and not issubclass(kind, self._pass)
