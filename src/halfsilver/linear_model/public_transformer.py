"""A transformer that learns from public rows alone, for pipelines that end in a private model."""

from __future__ import annotations

import copy
from typing import Any, Self

from halfsilver.errors import ConfigError, MissingExtra
from halfsilver.privacy.recognise import shares_rows

try:
    from sklearn.base import BaseEstimator, TransformerMixin, clone
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtra("scikit-learn", "sklearn") from error


class PublicTransformer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Wraps a transformer, which is fitted to public rows and applied to private ones.

    A scaler, an imputer or a principal component analysis that is fitted to private rows releases their means, medians
    or axes without noise. This one learns from the public rows that it is given, and from nothing else: `fit`, which a
    `Pipeline` or a `ColumnTransformer` calls with private rows, learns nothing from them.

    Guarantee: what the transformer has learnt depends on public rows only. The result for a row is private, and
    costs nothing only if the transformer maps each row by itself, as those of scikit-learn do.

    Args:
        transformer: Any transformer of scikit-learn, not fitted; also a whole `ColumnTransformer`.

    Raises:
        ConfigError: From `fit`, if it has seen no public rows, or if the public rows are the private ones.

    Example:
        >>> import numpy as np
        >>> from sklearn.preprocessing import StandardScaler
        >>> public, private = np.array([[0.0], [2.0]]), np.array([[100.0]])
        >>> scaler = PublicTransformer(StandardScaler()).fit_public(public)
        >>> scaler.fit_transform(private).tolist()
        [[99.0]]
        >>> PublicTransformer(StandardScaler()).fit(private)
        Traceback (most recent call last):
        ...
        halfsilver.errors.ConfigError: Expected public rows. Call fit_public(X_public) first, or fit(X, X_public=...).
    """

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer

    def fit_public(self, X_public: Any, y_public: Any = None) -> Self:
        """Fit the transformer to public rows.

        Args:
            X_public: The public features.
            y_public: The public labels, for transformers that use them (default: none).

        Returns:
            The transformer, with `transformer_`, which is fitted.
        """
        self.transformer_ = clone(self.transformer).fit(X_public, y_public)
        self._public_rows = X_public
        return self

    def fit(self, X: Any, y: Any = None, *, X_public: Any = None) -> Self:
        """Check that public rows were given, and learn nothing from `X` and `y`.

        Args:
            X: Private rows, which are not read.
            y: Private labels, which are not read.
            X_public: Public rows to fit to, as metadata routing passes them on (default: those of `fit_public`).

        Returns:
            The transformer.

        Raises:
            ConfigError: If there were no public rows, or if these share memory with the private ones.
        """
        if X_public is not None:
            self.fit_public(X_public)
        if not hasattr(self, "transformer_"):
            raise ConfigError("Expected public rows. Call fit_public(X_public) first, or fit(X, X_public=...).")
        if shares_rows(X, self._public_rows):
            del self.transformer_, self._public_rows
            raise ConfigError("Private rows were given as X_public, which must be public. Use other rows.")
        return self

    def transform(self, X: Any) -> Any:
        """Map rows as the public rows were mapped.

        Args:
            X: Rows with the columns of the public ones.

        Returns:
            What the transformer returns.
        """
        check_is_fitted(self)
        return self.transformer_.transform(X)

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """The names of the columns that come out.

        Args:
            input_features: The names of those that go in (default: as they were in `fit_public`).

        Returns:
            An array of names.
        """
        check_is_fitted(self)
        return self.transformer_.get_feature_names_out(input_features)

    def __sklearn_clone__(self) -> PublicTransformer:
        """A clone keeps what was learnt from public rows: `ColumnTransformer` clones all that it fits."""
        made = PublicTransformer(clone(self.transformer))
        made.__dict__ |= {name: copy.copy(value) for name, value in vars(self).items() if name != "transformer"}
        return made

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "transformer_")
