"""Private softmax regression in coordinates from public rows, with the conventions of scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from halfsilver._core.averaging import AverageKind
from halfsilver._core.tensors import Batch
from halfsilver.errors import ConfigError, MissingExtra, require
from halfsilver.linear_model.callers import check_callers
from halfsilver.linear_model.full_batch import FullBatch, gaussian_mu, open_ledger, require_one_process
from halfsilver.linear_model.head_search import (
    FEWEST,
    MOST_AXES,
    USUAL_STEPS,
    Given,
    Labelled,
    Noise,
    choose,
    curvature,
    folds_of,
    log_softmax,
    solution,
    temperature,
)
from halfsilver.privacy.columns import require_same_kinds
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.gradients.softmax import SoftmaxModel
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.recognise import shares_rows
from halfsilver.study.method import registered
from halfsilver.trainer import Trainer

try:
    from scipy import sparse
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import assert_all_finite, check_array, check_consistent_length, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

    from halfsilver.linear_model.axes import PublicAxes
    from halfsilver.privacy.arrays import class_numbers, private_labelled_rows, private_length
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtra("scikit-learn", "sklearn") from error

MethodName = Literal["public", "cold", "warm", "whitened"]
Auto = Literal["auto"]
Array = np.ndarray[Any, Any]

_METHODS = ("public", "cold", "warm", "whitened")
_ROWS_AT_ONCE = 8192


class MirrorLogisticRegression(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Softmax regression on private rows, in coordinates that public rows give.

    Public features give a mean and principal axes. A row x becomes u with u_j = v_j^T (x - mean) / sqrt(e_j + damping *
    mean e), scaled so that typical rows have norm 1, cut to norm 1 where it is longer, and followed by a constant.
    With p(u) = softmax(W u), every step takes all private rows:

        W <- W - learning_rate * ( sum_i clip(w_i (p(u_i) - e_{y_i}) u_i^T, C) + N(0, (sigma C)^2 I) ) / n,

    from the regularised solution on public rows, or from zero if these have no labels. The result is an average of the
    later iterates. Settings that are "auto" are chosen on public rows alone; `summary` says how.

    Guarantee: all fitted attributes are (epsilon, delta)-DP under adding or removing one private row, weight included.
    Classes come from `classes` or from public labels. A private row with another label contributes nothing. Public rows
    are not protected.

    Every fit is a private run, and takes private rows as they are. A `Pipeline` may call it. Other estimators and
    searches of scikit-learn are refused, because no epsilon covers what they do with private rows. Several fits with
    one path as `ledger` are counted together; `epsilon_` is then the total so far.

    Args:
        epsilon: The privacy parameter of one fit, above 0. Default 1. Smaller is stronger.
        delta: The delta at which it holds, in (0, 1). Default 1e-5. Choose it well below one over the number of rows.
        classes: The labels, at least two, in the order of probabilities. Default None, which takes those of the public
            rows. Needed without public labels.
        method: "whitened" (the default); or a baseline: "warm" (DP-SGD from the public solution, features centred and
            scaled by one number), "cold" (the same from zero) and "public" (no private row is read).
        steps: The number of steps, at least 1. Default "auto", as many as the learning rate needs to be stable. More
            steps cost time, and hardly any accuracy.
        learning_rate: The step size, above 0. Default "auto".
        max_grad_norm: The clip norm C of one row's gradient, above 0. Default "auto". Gradients have norm at most
            1.42 times the largest weight.
        damping: What is added to the variance of every axis, in units of their mean, at least 0. Default "auto". Raise
            it if public rows are few or from elsewhere.
        rank: The number of principal axes, at least 1. Default "auto", at most 2,000.
        start_regularization: The ridge of the public start, per row, above 0. Default "auto", by cross-validation.
        class_weight: None (the default), "balanced" for weights inverse to the *public* frequency of classes, or a
            mapping from classes to weights, each above 0.
        max_weight: The largest sample weight, above 0. Default 1. Larger weights of private rows are cut to it. The
            clip norm bounds a row's influence in any case.
        average: Which iterate is returned: a decay in (0, 1) for an exponential mean (default 0.9), "uniform" for the
            mean of all, or None for the last one.
        calibrate: Whether to fit a temperature for `predict_proba` on public labels. Default True.
        fit_intercept: Whether to fit an intercept. Default True.
        n_private: The number of private rows, if it is public; at least 1. It only scales the mean. Default None, which
            releases a noisy count for the price of one step.
        ledger: The ledger of the private data set, or its path. Default None, which makes one in `run_dir`.
        run_dir: The folder of the run. Default None, which makes a temporary folder. Its path is in `run_dir_`. It is
            removed together with the estimator.
        unsafe_seed: A seed for reproducible noise, for tests only. Default None. With a seed nothing is private.

    Example:
        >>> from sklearn.datasets import make_classification
        >>> x, y = make_classification(4000, 10, n_informative=6, random_state=0)
        >>> model = MirrorLogisticRegression(epsilon=1.0, delta=1e-5)
        >>> model = model.fit(x[200:3000], y[200:3000], X_public=x[:200], y_public=y[:200])
        >>> bool(model.score(x[3000:], y[3000:]) > 0.75), model.epsilon_ <= 1.0
        (True, True)

    References:
        - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
        - Guo, Pleiss, Sun and Weinberger 2017, On Calibration of Modern Neural Networks, arXiv:1706.04599.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        classes: Any = None,
        method: MethodName = "whitened",
        steps: int | Auto = "auto",
        learning_rate: float | Auto = "auto",
        max_grad_norm: float | Auto = "auto",
        damping: float | Auto = "auto",
        rank: int | Auto = "auto",
        start_regularization: float | Auto = "auto",
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        max_weight: float = 1.0,
        average: AverageKind = 0.9,
        calibrate: bool = True,
        fit_intercept: bool = True,
        n_private: int | None = None,
        ledger: Ledger | str | Path | None = None,
        run_dir: str | Path | None = None,
        unsafe_seed: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.classes = classes
        self.method = method
        self.steps = steps
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.damping = damping
        self.rank = rank
        self.start_regularization = start_regularization
        self.class_weight = class_weight
        self.max_weight = max_weight
        self.average = average
        self.calibrate = calibrate
        self.fit_intercept = fit_intercept
        self.n_private = n_private
        self.ledger = ledger
        self.run_dir = run_dir
        self.unsafe_seed = unsafe_seed

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        X_public: Any = None,
        y_public: Any = None,
        sample_weight: Any = None,
        base: Any = None,
        base_public: Any = None,
    ) -> Self:
        """Fit to private rows, in coordinates from public ones.

        A private row with an unknown label, or with a value that is NaN, infinite or no number, contributes zero
        silently. Public rows must be finite.

        Args:
            X: The private features, dense or SciPy sparse, of shape (rows, features).
            y: The private labels, of shape (rows,).
            X_public: The public features, with the same columns. Required.
            y_public: The public labels, or None. Without them the weights start from zero and settings are usual ones.
            sample_weight: A weight for each private row, of shape (rows,), at least 0; cut to `max_weight`.
            base: Logits of another model for each private row, of shape (rows, classes). They are added to those of
                this one, which then starts from zero. They must depend on that row and on public data alone.
            base_public: The same for public rows. Not used yet, but must be given with `base` and `y_public`.

        Returns:
            The estimator, with `classes_`, `choice_` (the settings), `temperature_`, `epsilon_`, `plan_` and
            `run_dir_`. With ``method="public"`` the last three are not set.

        Raises:
            ConfigError: If public rows are missing, if private rows were given as public ones, or if an option is out
                of range.
            BudgetExceeded: If the ledger's budget does not allow the first step.
        """
        require_one_process(type(self).__name__)
        self._check_options()
        check_callers(self)
        counted = private_length(self, X, y)
        for name, data in (("X_public", X_public), ("y_public", y_public), ("base_public", base_public)):
            if any(data is not None and shares_rows(own, data) for own in (X, y, base, sample_weight)):
                raise ConfigError(f"Private rows were given as {name}, which must be public. Use other rows.")
        x_public, labelled = self._public(X_public, y_public)
        require_same_kinds("X", X, X_public)
        require_same_kinds("y", y, self.classes_ if y_public is None else y_public, labels=True)
        method = registered(self.method)
        starts = labelled is not None and base is None and method.start == "public"
        if not (starts or method.trains):
            raise ConfigError("Expected y_public, and no base, for method='public'.")
        run = self._run() if method.trains else None
        counts = run is not None and self.n_private is None
        sigma = run.noise_multiplier() if run and counts else None  # of the count, and so of the steps
        rows = run.rows(counted, sigma) if run else 1.0
        axes, whiten = PublicAxes.of(x_public, MOST_AXES), self.method in ("whitened", "public")
        self.choice_ = choose(
            axes,
            labelled if base is None else None,
            classes=len(self.classes_),
            given=self._given(run.steps if run and counts else None),
            noise=Noise(rows=rows, mu=gaussian_mu(self.epsilon, self.delta)),
            whiten=whiten,
            start=starts,
            constant=self.fit_intercept,
        )
        space = (
            axes.whitened(damping=self.choice_.damping, rank=self.choice_.rank, constant=self.fit_intercept)
            if whiten
            else axes.plain(x_public, constant=self.fit_intercept)
        )
        self._row_map, self._has_base = space.row_map, base is not None
        start = np.zeros((len(self.classes_), space.row_map.width))
        if starts and labelled is not None:
            start = solution(labelled.at(space.rows), self.choice_.ridge)
        weight = start
        if run is not None:
            private = private_labelled_rows(
                self,
                X,
                y,
                row_map=space.row_map,
                classes=self.classes_,
                class_weights=self._class_weights(labelled),
                sample_weight=sample_weight,
                max_weight=self.max_weight,
                base=base,
            )
            run = replace(run, steps=self.choice_.steps)
            weight = self._train(private, run, sigma or run.noise_multiplier(), rows, start)
        self.weight_ = weight
        self._check_on_public(space.rows, labelled if base is None else None, start, starts)
        return self

    def decision_function(self, X: Any, base: Any = None) -> Array:
        """The logits of new rows.

        Args:
            X: The features, dense or SciPy sparse, of shape (rows, features).
            base: Logits of the other model for these rows, if the fit had them.

        Returns:
            One column per class; for two classes, the second logit minus the first, of shape (rows,).
        """
        logits = self._logits(X, base)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any, base: Any = None) -> Array:
        """The probabilities of classes, softmax(logits / `temperature_`), in the order of `classes_`.

        Args:
            X: The features, dense or SciPy sparse, of shape (rows, features).
            base: Logits of the other model for these rows, if the fit had them.

        Returns:
            Probabilities of shape (rows, classes).
        """
        logits = self._logits(X, base)
        found: Array = np.exp(log_softmax(logits / self.temperature_))
        return found

    def predict(self, X: Any, base: Any = None) -> Array:
        """The most probable class of new rows.

        Args:
            X: The features, dense or SciPy sparse, of shape (rows, features).
            base: Logits of the other model for these rows, if the fit had them.

        Returns:
            Labels of shape (rows,).
        """
        best = self._logits(X, base).argmax(axis=1)
        found: Array = self.classes_[best]
        return found

    def summary(self) -> str:
        """What was fitted, at which price, and how settings were chosen; for print.

        Returns:
            A few lines of text.
        """
        check_is_fitted(self)
        choice, lines = (
            self.choice_,
            [f"MirrorLogisticRegression, method {self.method!r}, {len(self.classes_)} classes"],
        )
        if hasattr(self, "plan_"):
            lines.append(f"privacy     epsilon {self.epsilon_:.4g} at delta {self.delta:g}, for one row")
            rows = f"about {self.plan_.population:.6g} rows, all drawn in each of {choice.steps} steps"
            lines.append(f"private     {rows}")
            lines.append(f"steps       learning rate {choice.learning_rate:.4g}, clip norm {choice.max_grad_norm:.4g}")
        else:
            lines.append("privacy     no private row was read")
        if self.method in ("whitened", "public"):
            lines.append(f"geometry    {choice.rank} public axes, damping {choice.damping:.4g}")
        lines.append(f"start       public solution, ridge {choice.ridge:.3g}" if self._starts else "start       zero")
        lines.append(f"chosen by   {choice.reason}")
        if self.public_accuracy_ is None:
            return "\n".join([*lines, "held-out    no public labels, so nothing was checked; temperature 1"])
        lines.append(f"held-out    {self.public_accuracy_:.1%} of public rows; temperature {self.temperature_:.3g}")
        lines += [
            f"  class {label}: " + (f"{share:.1%} of {count} public rows" if count else "no public row")
            for label, (share, count) in self.public_accuracy_by_class_.items()
        ]
        return "\n".join(lines)

    def _logits(self, X: Any, base: Any) -> Array:
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, accept_sparse="csr", dtype=[np.float64, np.float32])
        if self._has_base != (base is not None):
            raise ConfigError("Expected base for new rows if, and only if, the model was fitted with it.")
        logits: Array = self._row_map(x) @ self.weight_.T
        if base is None:
            return logits
        base = check_array(base)
        if base.shape != logits.shape:
            raise ValueError(f"Expected base of shape {logits.shape}, got {base.shape}.")
        added: Array = logits + np.asarray(base)
        return added

    def _check_options(self) -> None:
        require(self.method in _METHODS, "method", self.method, f"in {_METHODS}")
        for name in ("steps", "learning_rate", "max_grad_norm", "rank", "start_regularization"):
            value = getattr(self, name)
            require(value == "auto" or value > 0, name, value, "above 0, or 'auto'")
        require(self.damping == "auto" or self.damping >= 0, "damping", self.damping, "at least 0, or 'auto'")
        require(0 < self.max_weight < math.inf, "max_weight", self.max_weight, "in (0, inf)")

    def _public(self, x: Any, y: Any) -> tuple[Array, Labelled | None]:
        """Public rows and labels; sets `classes_`. Nothing here has seen a private row but for its width."""
        if x is None:
            raise ConfigError("Expected X_public: without public rows use DP-SGD (hs.Trainer).")
        x = validate_data(self, x, reset=False, accept_sparse="csr", dtype=[np.float64, np.float32])
        x = x.toarray() if sparse.issparse(x) else x
        labels = None
        if y is not None:
            labels = column_or_1d(y)
            assert_all_finite(labels, input_name="y")
            check_classification_targets(labels)
            check_consistent_length(x, labels)
        if self.classes is None and labels is None:
            raise ConfigError("Expected classes, since y_public has no labels to take them from.")
        self.classes_ = np.asarray(self.classes if labels is None or self.classes is not None else np.unique(labels))
        distinct = self.classes_.ndim == 1 and len(set(self.classes_.tolist())) == len(self.classes_)
        require(distinct, "classes", self.classes_, "to be a list of different labels")
        if len(self.classes_) < 2:
            raise ConfigError("Expected at least 2 classes, got 1 class. Give classes=[...] if public rows lack some.")
        if labels is None:
            return x, None
        numbers = class_numbers(labels, self.classes_)
        if (numbers < 0).any():
            raise ConfigError(f"Expected each label of y_public to be in classes={self.classes_.tolist()}.")
        labelled = Labelled(x=x, labels=numbers, weights=np.ones(len(x)), classes=len(self.classes_))
        return x, replace(labelled, weights=self._class_weights(labelled)[numbers])

    def _class_weights(self, labelled: Labelled | None) -> Array:
        """The weight of each class, from options and public labels."""
        if self.class_weight is None:
            return np.ones(len(self.classes_))
        if isinstance(self.class_weight, str):
            require(self.class_weight == "balanced", "class_weight", self.class_weight, "None, 'balanced' or a mapping")
            if labelled is None:
                raise ConfigError("Expected y_public for class_weight='balanced'. Give a mapping instead.")
            counts = np.bincount(labelled.labels, minlength=labelled.classes)
            return len(labelled.labels) / (labelled.classes * np.maximum(counts, 1))
        weights = np.array([float(self.class_weight.get(label, 1.0)) for label in self.classes_.tolist()])
        require(bool((weights > 0).all() and np.isfinite(weights).all()), "class_weight", weights, "above 0 and finite")
        return weights

    def _given(self, steps: int | None) -> Given:
        values = {
            name: None if getattr(self, name) == "auto" else getattr(self, name)
            for name in ("steps", "learning_rate", "max_grad_norm", "damping", "rank")
        }
        values["steps"] = values["steps"] or steps
        return Given(**values, ridge=None if self.start_regularization == "auto" else self.start_regularization)

    def _run(self) -> FullBatch:
        self.run_dir_, ledger = open_ledger(self, self.run_dir, self.ledger)
        return FullBatch(
            epsilon=self.epsilon,
            delta=self.delta,
            steps=USUAL_STEPS if self.steps == "auto" else self.steps,
            n_private=self.n_private,
            ledger=ledger,
            unsafe_seed=self.unsafe_seed,
        )

    def _train(self, private: PrivateData, run: FullBatch, sigma: float, rows: float, start: Array) -> Array:
        plan = PrivacyPlan(
            steps=run.steps,
            sampling_rate=1.0,
            expected_batch_size=rows,
            noise_multiplier=sigma,
            max_grad_norm=self.choice_.max_grad_norm,
        )
        linear = torch.nn.Linear(start.shape[1], start.shape[0], bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(start))
        trainer = Trainer(
            linear,
            weighted_cross_entropy,
            optimizer=torch.optim.SGD(linear.parameters(), lr=self.choice_.learning_rate),
            plan=plan,
            average=self.average,
            performance=Performance(backend=SoftmaxModel(linear), micro_batch_size=_ROWS_AT_ONCE),
            unsafe_seed=self.unsafe_seed,
            checkpoint_seconds=float("inf"),
        )
        trainer.fit(private, run_dir=self.run_dir_ / "run", ledger=run.ledger, delta=self.delta, check_usable=False)
        self.plan_, self.epsilon_ = plan, run.ledger.spent(self.delta)
        return linear.weight.detach().numpy().copy()

    def _check_on_public(self, rows: Array, labelled: Labelled | None, start: Array, starts: bool) -> None:
        """Temperature and accuracy on public rows whose labels the start has not seen.

        The private run is not repeated. From another start it would have ended nearby: of the difference between two
        starts, a share e^(-s h_j) is left in coordinate j after a path s (see `forecast_gains`).
        """
        self._starts, self.temperature_ = starts, 1.0
        self.public_accuracy_, self.public_accuracy_by_class_ = None, {}
        if labelled is None or len(labelled.labels) < FEWEST:
            return
        mapped = labelled.at(rows)
        path = self.choice_.learning_rate * self.choice_.steps if hasattr(self, "plan_") else 0.0
        left = np.exp(-path * curvature(mapped, rows @ self.weight_.T))
        logits = np.zeros((len(rows), labelled.classes))
        for part in folds_of(labelled.labels):
            others = np.setdiff1d(np.arange(len(rows)), part)
            own = solution(mapped.take(others), self.choice_.ridge) if starts else start
            logits[part] = rows[part] @ (self.weight_ + left * (own - start)).T
        if self.calibrate:
            self.temperature_ = temperature(logits, mapped)
        right = logits.argmax(axis=1) == labelled.labels
        self.public_accuracy_ = float(right.mean())
        for number, label in enumerate(self.classes_.tolist()):
            own_rows = labelled.labels == number
            share = float(right[own_rows].mean()) if own_rows.any() else math.nan
            self.public_accuracy_by_class_[label] = (share, int(own_rows.sum()))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = True
        return tags


def weighted_cross_entropy(model: Any, batch: Batch) -> Tensor:
    """-w log softmax(W x + offsets)_y per row; the loss whose clipped gradients `SoftmaxModel` sums."""
    x, labels, _, weights, offsets = batch
    logits = model(x) + offsets if offsets.shape[1] else model(x)
    loss: Tensor = weights * torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return loss
