"""Private arrays in scikit-learn's forms, put behind a handle: their kind and shape are checked, never their values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.validation import validate_data

from halfsilver.privacy.columns import FLOATS, as_array, declared, numbers, require_real
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
    estimator: Any, x: Any, y: Any, *, like: Any, intercept: bool, sample_weight: Any = None, max_weight: float = 1.0
) -> PrivateRows:
    """Rows (x, y, |x|) for `LinearModel`.

    A row of weight w becomes sqrt(w) (x, y), whose squared error has that weight. The dtype is that of `like`, the
    public features: an odd record may give private ones another, which the weights would then show.

    NaN and infinite entries pass, in x and in y, and what is no number becomes NaN: such a row contributes nothing, and
    an error would tell of it. Errors are about kind and shape of the whole, and quote no value.
    """
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    x = _features(estimator, x)
    y = targets(numbers(y, "y")).astype(np.float64)
    _require_same_length(x, y, "y")
    if not sparse.issparse(x):
        with np.errstate(all="ignore"):  # too large for float32: the row contributes nothing
            x = x.astype(np.float32 if {dtype for _, dtype in declared(like)} == {np.dtype(np.float32)} else np.float64)
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
    return y if several else _column(y, "y", warn=True)


def _column(values: np.ndarray[Any, Any], name: str, warn: bool = False) -> np.ndarray[Any, Any]:
    """As one dimension. The error of scikit-learn would tell how many rows there are."""
    if values.ndim != 1 and values.shape[1:] != (1,):
        raise ValueError(f"Expected {name} to be a 1d array, or one column; got {values.ndim} dimensions.")
    column: np.ndarray[Any, Any] = column_or_1d(values, warn=warn)
    return column


def _require_same_length(x: Any, values: np.ndarray[Any, Any], name: str) -> None:
    if x.shape[0] != len(values):
        raise ValueError(f"Expected as many entries in private {name} as there are private rows, got another number.")


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
    _require_same_length(x, labels, "y")
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
    weights = _column(numbers(sample_weight, "sample_weight"), "sample_weight").astype(np.float64)
    _require_same_length(x, weights, "sample_weight")
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
    _require_same_length(x, _column(as_array(y), "y", warn=True), "y")
    return PrivateData(torch.zeros(x.shape[0], 0))


def class_numbers(y: Any, classes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The place of each label among the classes; -1 for a label that is none of them, and nobody hears of it."""
    values = _column(as_array(y), "y")
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


# Errors of scikit-learn about these would tell of a row, or how many there are.
_ANYTHING: dict[str, Any] = {"ensure_all_finite": False, "ensure_min_samples": 0, "ensure_min_features": 0}


def _features(estimator: Any, x: Any) -> Any:
    """As scikit-learn checks them, but for its conversions and messages, which quote what they cannot read."""
    if sparse.issparse(x):
        require_real(x.dtype, "X")
        return validate_data(estimator, x, accept_sparse="csr", dtype=FLOATS, **_ANYTHING)
    array = numbers(x, "X")
    if array.ndim != 2:
        raise ValueError(f"Expected a 2D array for X, got {array.ndim} dimensions. Reshape it to (rows, features).")
    check_array(array, **_ANYTHING)
    validate_data(estimator, x, skip_check_array=True)  # names and number of features
    return array


def with_ones(x: Any) -> Any:
    """`x` with a last column of ones, whose coefficient is the intercept."""
    ones = np.ones((x.shape[0], 1), dtype=x.dtype)
    return sparse.hstack([x, ones], format="csr") if sparse.issparse(x) else np.hstack([x, ones])
