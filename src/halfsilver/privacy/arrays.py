"""Private arrays in scikit-learn's forms, put behind a handle: their kind and shape are checked, never their values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import validate_data

from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients.linear import SparseRecords, with_row_norms
from halfsilver.privacy.gradients.softmax import softmax_records
from halfsilver.privacy.row_map import RowMap
from halfsilver.privacy.silence import silent


class PrivateRows(NamedTuple):
    """A handle on rows, and what is public about them."""

    handle: PrivateData
    dtype: torch.dtype
    width: int  # coefficients of an output
    outputs: tuple[int, ...]  # (k,) for k of them, () for targets of shape (rows,)


def private_rows(
    estimator: Any, x: Any, y: Any, *, intercept: bool, sample_weight: Any = None, max_weight: float = 1.0
) -> PrivateRows:
    """Rows (x, y, |x|) for `LinearModel`.

    A row of weight w becomes sqrt(w) (x, y), whose squared error has that weight.

    NaN and infinite entries pass, in x and in y, and what is no number becomes NaN: such a row contributes nothing, and
    an error would tell of it. Errors are about kind and shape of the whole, and quote no value.
    """
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    x = _features(estimator, x)
    y = targets(numbers(y, "y")).astype(np.float64)
    check_consistent_length(x, y)
    x = with_ones(x) if intercept else x
    if sample_weight is not None:
        x, y = scaled_rows(x, y, _weights(sample_weight, x, max_weight))
    width, outputs = int(x.shape[1]), y.shape[1:]
    if sparse.issparse(x):
        return PrivateRows(PrivateData.of(SparseRecords.make(x, torch.from_numpy(y))), torch.float64, width, outputs)
    features = torch.from_numpy(np.require(x, requirements="W"))
    rows = with_row_norms(features, torch.from_numpy(y).to(features.dtype))
    return PrivateRows(PrivateData(rows), features.dtype, width, outputs)


def targets(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of shape (rows,), or (rows, outputs) with more than one output."""
    several = y.ndim == 2 and y.shape[1] > 1
    return y if several else column_or_1d(y, warn=True)


def private_labelled_rows(
    estimator: Any,
    x: Any,
    y: Any,
    *,
    row_map: RowMap,
    classes: np.ndarray[Any, Any],
    class_weights: np.ndarray[Any, Any],
    sample_weight: Any = None,
    max_weight: float = 1.0,
    base: Any = None,
) -> PrivateData:
    """A handle on the mapped rows for `SoftmaxModel`. The weight of a row is min(sample weight, bound) * class weight.

    What cannot be used (a label that is none of the classes, a value that is no number) contributes nothing, as in
    `private_rows`.
    """
    x = _features(estimator, x)
    labels = class_numbers(y, classes)
    check_consistent_length(x, labels)
    weights = np.ones(len(labels))
    if sample_weight is not None:
        weights = _weights(sample_weight, x, max_weight)
    offsets = np.zeros((len(labels), 0))
    if base is not None:
        offsets = numbers(base, "base").astype(np.float64)
        if offsets.shape != (len(labels), len(classes)):
            raise ValueError(f"Expected base of shape (rows, {len(classes)}), one logit per class and row.")
    weights = weights * class_weights[labels.clip(0)]
    columns = (row_map(x), labels, weights, offsets)
    return PrivateData(softmax_records(*map(torch.from_numpy, columns)))


def _weights(sample_weight: Any, x: Any, bound: float) -> np.ndarray[Any, Any]:
    weights = column_or_1d(numbers(sample_weight, "sample_weight")).astype(np.float64)
    check_consistent_length(x, weights)
    cut: np.ndarray[Any, Any] = np.minimum(weights, bound)
    return cut


def scaled_rows(x: Any, y: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> tuple[Any, np.ndarray[Any, Any]]:
    """Features and targets times the root of each row's weight. Where that is negative or NaN, the target is NaN."""
    with np.errstate(all="ignore"):  # a warning would tell of a row
        roots = np.sqrt(weights)
        if sparse.issparse(x):
            scaled = x.tocsr(copy=True)
            scaled.data *= np.repeat(roots, np.diff(scaled.indptr)).astype(x.dtype)
            return scaled, (y.T * roots).T
        return x * roots[:, None].astype(x.dtype), (y.T * roots).T


def private_length(estimator: Any, x: Any, y: Any) -> PrivateData:
    """A handle on as many empty rows as there are private ones, for `noisy_count`. Also checks kinds and shapes."""
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    x = _features(estimator, x)
    check_consistent_length(x, column_or_1d(_as_array(y), warn=True))
    return PrivateData(torch.zeros(x.shape[0], 0))


def class_numbers(y: Any, classes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The place of each label among the classes; -1 for a label that is none of them, and nobody hears of it."""
    values = column_or_1d(_as_array(y))
    if values.dtype.kind in "biuf" and classes.dtype.kind in "biuf":
        order = np.argsort(classes)
        place = order[np.searchsorted(classes, values, sorter=order).clip(max=len(classes) - 1)]
        return np.where(classes[place] == values, place, -1).astype(np.int64)
    known = {label: place for place, label in enumerate(classes.tolist())}
    found = np.full(len(values), -1, dtype=np.int64)
    for place, value in enumerate(values.tolist()):
        with silent():
            found[place] = known.get(value, -1)
    return found


def _as_array(values: Any) -> np.ndarray[Any, Any]:
    """As an array in which no row decides how another is read."""
    return np.asarray(values, dtype=None if hasattr(values, "__array__") else object)


def _features(estimator: Any, x: Any) -> Any:
    """As scikit-learn checks them, but for its conversions and messages, which quote what they cannot read."""
    if sparse.issparse(x):
        _require_real(x.dtype, "X")
        return validate_data(estimator, x, accept_sparse="csr", dtype=_FLOATS, ensure_all_finite=False)
    array = numbers(x, "X")
    if array.ndim != 2:
        raise ValueError(f"Expected a 2D array for X, got {array.ndim} dimensions. Reshape it to (rows, features).")
    check_array(array, ensure_all_finite=False)
    validate_data(estimator, x, skip_check_array=True)  # names and number of features
    return array


def numbers(values: Any, name: str) -> np.ndarray[Any, Any]:
    """An array of floats, where NaN stands for whatever is no number."""
    array = _as_array(values)  # the dtype of a list would be set by its oddest row
    if array.dtype in _FLOATS:
        return array
    _require_real(array.dtype, name)
    array = array.astype(object) if array.dtype.kind in "US" else array
    with silent():
        return array.astype(np.float64)
    floats = np.full(array.shape, np.nan)
    for place, value in enumerate(array.flat):  # one by one the same numbers: NumPy, too, asks each for its float
        with silent():
            floats.flat[place] = float(value)
    return floats


def _require_real(dtype: np.dtype[Any], name: str) -> None:
    if dtype.kind == "c":
        raise ValueError(
            f"Complex data not supported: private {name} has dtype {dtype}. Give the real and imaginary parts."
        )
    if dtype.kind not in "buifOUS":
        raise TypeError(f"Expected numbers in private {name}, got dtype {dtype}.")


_FLOATS = [np.dtype(np.float64), np.dtype(np.float32)]


def with_ones(x: Any) -> Any:
    """`x` with a last column of ones, whose coefficient is the intercept."""
    ones = np.ones((x.shape[0], 1), dtype=x.dtype)
    return sparse.hstack([x, ones], format="csr") if sparse.issparse(x) else np.hstack([x, ones])
