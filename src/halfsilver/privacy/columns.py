"""What columns are declared to hold, compared between private and public data without reading a private value."""

from __future__ import annotations

from typing import Any

import numpy as np

from halfsilver.errors import ConfigError
from halfsilver.privacy.silence import silent

FLOATS = [np.dtype(np.float64), np.dtype(np.float32)]
_KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}
_KINDS |= {"U": "text", "S": "text", "T": "text", "M": "date", "m": "date"}


def require_same_kinds(name: str, private: Any, public: Any, *, labels: bool = False) -> None:
    """Refuse a private column of another kind than the public one, before epsilon is spent: no row could be used.

    Kinds of arrays are bool, integer, float and complex. In frames these are one kind, because a missing value turns
    one into another, and so they are for labels, which are compared by value. Further kinds are text, date and
    category. A private column of Python objects has no kind: a single record may have made it one.
    """
    ours, theirs = declared(private), declared(public, read=True)
    ours, theirs = ours * (len(theirs) if len(ours) == 1 else 1), theirs * (len(ours) if len(theirs) == 1 else 1)
    coarse = labels or hasattr(private, "iloc") or hasattr(public, "iloc")
    for (place, own), (_, other) in zip(ours, theirs, strict=False):
        found, wanted = (kind_of(dtype, coarse=coarse, labels=labels) for dtype in (own, other))
        if found and wanted and found != wanted:
            raise ConfigError(
                f"Expected private {name}{place} to hold the kind {wanted!r}, as the public rows do, not {found!r} "
                f"(dtype {own}): its rows could not be used. Bring both to one kind."
            )


def declared(data: Any, *, read: bool = False) -> list[tuple[str, Any]]:
    """Places and dtypes of the columns of a frame or an array; `read` looks into public columns of Python objects."""
    columns = [("", data if hasattr(data, "dtype") else np.asarray(data) if read else np.empty(0, object))]
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        columns = [(f", column {name!r},", data.iloc[:, place]) for place, name in enumerate(data.columns)]
    return [(place, np.asarray(c.tolist()).dtype if read and c.dtype == object else c.dtype) for place, c in columns]


def kind_of(dtype: Any, *, coarse: bool, labels: bool = False) -> str:
    """The kind of a dtype of NumPy or pandas; "" for one that tells nothing."""
    if hasattr(dtype, "categories"):
        return kind_of(dtype.categories.dtype, coarse=coarse) if labels else "category"
    kind = "text" if str(dtype).startswith(("str", "string")) else _KINDS.get(getattr(dtype, "kind", ""), "")
    return "number" if coarse and kind in ("bool", "integer", "float") else kind


def numbers(values: Any, name: str) -> np.ndarray[Any, Any]:
    """An array of floats, where NaN stands for whatever is no number."""
    array = as_array(values)  # the dtype of a list would be set by its oddest row
    if array.dtype in FLOATS:
        return array
    require_real(array.dtype, name)
    array = array.astype(object) if array.dtype.kind in "US" else array
    with silent():
        return array.astype(np.float64)
    floats = np.full(array.shape, np.nan)
    for place, value in enumerate(array.flat):  # one by one the same numbers: NumPy, too, asks each for its float
        with silent():
            floats.flat[place] = float(value)
    return floats


def as_array(values: Any) -> np.ndarray[Any, Any]:
    """As an array in which no row decides how another is read."""
    return np.asarray(values, dtype=None if hasattr(values, "__array__") else object)


def require_real(dtype: np.dtype[Any], name: str) -> None:
    """Refuse arrays of what is no real number, text and Python objects apart."""
    if dtype.kind == "c":
        raise ValueError(
            f"Complex data not supported: private {name} has dtype {dtype}. Give the real and imaginary parts."
        )
    if dtype.kind not in "buifOUS":
        raise TypeError(f"Expected numbers in private {name}, got dtype {dtype}.")
