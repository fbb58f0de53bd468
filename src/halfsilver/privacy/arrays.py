"""Private arrays in scikit-learn's forms, put behind a handle: their kind and shape are checked, never their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.validation import validate_data

from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients.linear import SparseRecords, with_row_norms


def private_rows(estimator: Any, x: Any, y: Any, *, intercept: bool) -> tuple[PrivateData, torch.dtype, int]:
    """A handle on the rows (x, y, |x|) for `LinearModel`, their dtype, and the number of coefficients.

    NaN and infinite entries pass, in x and in y: such a row contributes nothing, and an error would tell of it.
    """
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    x = validate_data(estimator, x, accept_sparse="csr", dtype=[np.float64, np.float32], ensure_all_finite=False)
    y = np.array(column_or_1d(y, warn=True), dtype=np.float64)
    check_consistent_length(x, y)
    x = with_ones(x) if intercept else x
    width = int(x.shape[1])
    if sparse.issparse(x):
        return PrivateData.of(SparseRecords.make(x, torch.from_numpy(y))), torch.float64, width
    features = torch.from_numpy(np.require(x, requirements="W"))
    return PrivateData(with_row_norms(features, torch.from_numpy(y).to(features.dtype))), features.dtype, width


def with_ones(x: Any) -> Any:
    """`x` with a last column of ones, whose coefficient is the intercept."""
    ones = np.ones((x.shape[0], 1), dtype=x.dtype)
    return sparse.hstack([x, ones], format="csr") if sparse.issparse(x) else np.hstack([x, ones])
