"""Private arrays in scikit-learn's forms, put behind a handle: their kind and shape are checked, never their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import validate_data

from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients.linear import SparseRecords, with_row_norms
from halfsilver.privacy.silence import silent


def private_rows(estimator: Any, x: Any, y: Any, *, intercept: bool) -> tuple[PrivateData, torch.dtype, int]:
    """A handle on the rows (x, y, |x|) for `LinearModel`, their dtype, and the number of coefficients.

    NaN and infinite entries pass, in x and in y, and what is no number becomes NaN: such a row contributes nothing, and
    an error would tell of it. Errors are about kind and shape of the whole, and quote no value.
    """
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    x = _features(estimator, x)
    y = column_or_1d(numbers(y, "y"), warn=True).astype(np.float64)
    check_consistent_length(x, y)
    x = with_ones(x) if intercept else x
    width = int(x.shape[1])
    if sparse.issparse(x):
        return PrivateData.of(SparseRecords.make(x, torch.from_numpy(y))), torch.float64, width
    features = torch.from_numpy(np.require(x, requirements="W"))
    return PrivateData(with_row_norms(features, torch.from_numpy(y).to(features.dtype))), features.dtype, width


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
    own_dtype = hasattr(values, "__array__")  # that of a list would be set by its oddest row
    array = np.asarray(values, dtype=None if own_dtype else object)
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
