"""Linear regression by exact mirror descent, with the conventions of scikit-learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from halfsilver._core.averaging import AverageKind
from halfsilver._core.tensors import Batch
from halfsilver.errors import ConfigError, MissingExtra, require, require_numbers
from halfsilver.linear_model.callers import check_callers
from halfsilver.linear_model.full_batch import FullBatch, open_ledger, require_one_process
from halfsilver.mirror import Bregman, ConstraintSet, Euclidean, MirrorMap, Quadratic
from halfsilver.mirror.geometry import Factor
from halfsilver.privacy.columns import require_same_kinds
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.gradients.linear import LinearModel
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.recognise import shares_rows
from halfsilver.study.method import NAMES, WHITENED, registered
from halfsilver.trainer import Trainer

try:
    from scipy import sparse
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils.validation import check_is_fitted, validate_data

    from halfsilver.privacy.arrays import PrivateRows, private_rows, scaled_rows, targets, with_ones
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtra("scikit-learn", "sklearn") from error

MethodName = Literal["public", "cold", "warm", "pda", "whitened"]
_METHODS = (*NAMES, WHITENED.name)
_ROWS_AT_ONCE = 4096


class MirrorLinearRegression(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Least squares on private rows, each step preconditioned by the Hessian of public rows. It takes several outputs.

    Every step uses all private rows. With H the Hessian of the public rows and g the noisy mean gradient, it is theta
    <- theta - learning_rate * (H + damping * mean eigenvalue of H)^-1 g, starting from the public solution. A learning
    rate of 1 is a Newton step.

    Guarantee: `coef_` and `intercept_` are (epsilon, delta)-DP under adding or removing one private row. Nothing is
    centred, scaled or chosen by looking at private rows. Public rows are not protected.

    Every fit is a private run, and takes private rows as they are. A `Pipeline` may call it. Other estimators and
    searches of scikit-learn are refused, because no epsilon covers what they do with private rows. Several fits with
    one path as `ledger` are counted together; `epsilon_` is then the total so far.

    Args:
        epsilon: The privacy parameter of one fit, above 0. Default 1. Smaller is stronger.
        delta: The delta at which it holds, in (0, 1). Default 1e-5. Choose it well below one over the number of rows.
        method: "pda" (the default); "whitened", which clips and adds noise in coordinates in which H is round, and
            takes dense rows only; or a baseline: "warm" (DP-SGD from the public solution), "cold" (DP-SGD from zero)
            and "public" (no private row is read).
        steps: The number of steps, at least 1. Default 40. More steps mean more noise per step.
        learning_rate: The step size, above 0. Default 0.25. For "warm" and "cold" it is in units of the inverse mean
            curvature. Raise it towards 1 if noise is small, and lower it if noise dominates.
        max_grad_norm: The clip norm of one row's gradient, over all outputs, above 0. Default None, which takes the
            median gradient norm of public rows at the public solution for "whitened", and half of it otherwise, where
            noise costs more.
        damping: Added to H, in units of its mean eigenvalue; at least 0. Default 1e-3. Raise it if public rows are few.
        constraint: A set that keeps each iterate, such as `halfsilver.mirror.L2Ball`. Default None.
        average: Which iterate is returned: "uniform" (the default) for the mean of all, a decay in (0, 1) for an
            exponential mean, or None for the last one.
        fit_intercept: Whether to fit an intercept. Default True.
        max_weight: The largest sample weight, above 0. Default 1. Larger weights of private rows are cut to it. The
            clip norm bounds a row's influence in any case.
        n_private: The number of private rows, if it is public; at least 1. It only scales the mean. Default None, which
            releases a noisy count for the price of one step.
        ledger: The ledger of the private data set, or its path. Default None, which makes one in `run_dir`.
        run_dir: The folder of the run. Default None, which makes a temporary folder. Its path is in `run_dir_`. It is
            removed together with the estimator.
        unsafe_seed: A seed for reproducible noise, for tests only. Default None. With a seed nothing is private.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x, theta = rng.normal(size=(3000, 3)), np.array([1.0, -2.0, 0.5])
        >>> y = x @ theta
        >>> model = MirrorLinearRegression(epsilon=1.0, delta=1e-5)
        >>> model = model.fit(x[200:], y[200:], X_public=x[:200], y_public=y[:200] + 0.3 * rng.normal(size=200))
        >>> bool(np.abs(model.coef_ - theta).max() < 0.1)
        True

    References:
        - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        method: MethodName = "pda",
        steps: int = 40,
        learning_rate: float = 0.25,
        max_grad_norm: float | None = None,
        damping: float = 1e-3,
        constraint: ConstraintSet | None = None,
        average: AverageKind = "uniform",
        fit_intercept: bool = True,
        max_weight: float = 1.0,
        n_private: int | None = None,
        ledger: Ledger | str | Path | None = None,
        run_dir: str | Path | None = None,
        unsafe_seed: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.steps = steps
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.damping = damping
        self.constraint = constraint
        self.average = average
        self.fit_intercept = fit_intercept
        self.max_weight = max_weight
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
        sample_weight_public: Any = None,
    ) -> Self:
        """Fit to private rows, with public rows as the mirror map.

        A private row with NaN or infinite entries contributes zero. Public rows must be finite.

        Args:
            X: The private features, dense or SciPy sparse, of shape (rows, features).
            y: The private targets, of shape (rows,), or (rows, outputs). Outputs should be of about one size, because a
                row's gradient is clipped over all of them.
            X_public: The public features, with the same columns. Required.
            y_public: The public targets. Required.
            sample_weight: A weight for each private row, of shape (rows,), at least 0; cut to `max_weight`. The sum of
                gradients is divided by the number of rows and not by that of the weights, which would have to be
                released. Default None, all 1.
            sample_weight_public: The same for public rows, at least 0 and finite. Default None, all 1. Give both or
                none, because the size of a step follows from public weights.

        Returns:
            The estimator, with `coef_`, `intercept_`, `epsilon_`, `plan_` and `run_dir_`. With ``method="public"`` only
            the first two are set. With several outputs, they have one row or entry for each.

        Raises:
            ConfigError: If public rows are missing, if private rows were given as public ones, or if an option is out
                of range.
            BudgetExceeded: If the ledger's budget does not allow the first step.
        """
        require(self.method in _METHODS, "method", self.method, f"in {_METHODS}")
        require(0 < self.max_weight < np.inf, "max_weight", self.max_weight, "in (0, inf)")
        if self._whitens and (sparse.issparse(X) or self.constraint is not None):
            raise ConfigError("Expected dense rows and no constraint for method='whitened'. Use method='pda'.")
        require_one_process(type(self).__name__)
        check_callers(self)
        options: dict[str, Any] = {"sample_weight": sample_weight, "max_weight": self.max_weight}
        private = private_rows(self, X, y, like=X_public, intercept=self.fit_intercept, **options)
        if X_public is None or y_public is None:
            raise ConfigError("Expected X_public and y_public: without public rows use DP-SGD (hs.Trainer).")
        if (sample_weight is None) != (sample_weight_public is None):
            raise ConfigError("Expected sample_weight and sample_weight_public together, or none of them.")
        given = {"X_public": X_public, "y_public": y_public, "sample_weight_public": sample_weight_public}
        for name, data in given.items():
            if any(data is not None and own is not None and shares_rows(own, data) for own in (X, y, sample_weight)):
                raise ConfigError(f"Private rows were given as {name}, which must be public. Use other rows.")
        accept = {"accept_sparse": "csr", "y_numeric": True, "multi_output": True, "dtype": [np.float64, np.float32]}
        x_public, y_public = validate_data(self, X_public, y_public, reset=False, **accept)
        for name, own, data in (("X", X, given["X_public"]), ("y", y, given["y_public"])):
            require_same_kinds(name, own, data)
        y_public = targets(y_public)
        shape = (len(y_public), *private.outputs)
        require(y_public.shape == shape, "shape of y_public", y_public.shape, f"{shape}, with as many outputs as y")
        x_public = with_ones(x_public) if self.fit_intercept else x_public
        if sample_weight_public is not None:
            x_public, y_public = scaled_rows(x_public, y_public, _public_weights(sample_weight_public, len(y_public)))
        public = _Public(x_public, torch.tensor(y_public, dtype=torch.float64), self.damping)
        theta = public.solution
        if registered(self.method).trains:
            theta = self._train(private, public)
        self.coef_ = theta[: self.n_features_in_].numpy().T  # NumPy, because PyTorch warns of .T of a vector
        constant = theta[-1] if self.fit_intercept else torch.zeros(theta.shape[1:])
        self.intercept_: Any = constant.numpy() if constant.ndim else float(constant)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predict targets for new rows.

        Args:
            X: The features, dense or SciPy sparse, of shape (rows, features).

        Returns:
            ``X @ coef_.T + intercept_``, of shape (rows,) or (rows, outputs).
        """
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, accept_sparse="csr")
        return np.asarray(x @ self.coef_.T + self.intercept_)

    def predict_interval(
        self, X: Any, *, X_public: Any, y_public: Any, coverage: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predict intervals that contain a new row's target with probability `coverage`, by split conformal prediction.

        The intervals spend no epsilon. Their half width is an order statistic of the errors on public rows. The
        probability is over these rows and the new one, and it needs no model of the noise. It holds if both come from
        the same distribution, and only if `fit` did not see these public rows. Never give private rows: the width of
        the intervals is one of their errors.

        Args:
            X: The features, dense or SciPy sparse, of shape (rows, features).
            X_public: Features of public rows that were not given to `fit`.
            y_public: Their targets.
            coverage: The probability, in (0, 1). Default 0.9. With n public rows, at most n / (n + 1).

        Returns:
            The lower and the upper ends, each of the shape of `predict`. With several outputs, each has its own
            interval, and the probability is that of each alone.

        Raises:
            ConfigError: If the public rows are too few for `coverage`, or are not finite.

        References:
            - Lei, G'Sell, Rinaldo, Tibshirani and Wasserman 2018, Distribution-Free Predictive Inference for
              Regression, JASA 113(523), arXiv:1604.04173.
        """
        require_numbers(coverage=coverage)
        require(0 < coverage < 1, "coverage", coverage, "in (0, 1)")
        known = self.predict(X_public)
        given = targets(np.asarray(y_public, dtype=np.float64))
        require(
            given.shape == known.shape, "shape of y_public", given.shape, f"{known.shape}, that of predict(X_public)"
        )
        errors = np.sort(np.abs(given - known), axis=0)
        require(bool(np.isfinite(errors).all()), "y_public", "NaN or infinite entries", "finite")
        rank = max(1, math.ceil(round((len(errors) + 1) * coverage, 9)))  # 0.07 * 100 is 7.000000000000001
        needed = math.ceil(round(coverage / (1 - coverage), 9))
        require(rank <= len(errors), "rows of X_public", len(errors), f"at least {needed} for coverage {coverage:g}")
        predicted = self.predict(X)
        return predicted - errors[rank - 1], predicted + errors[rank - 1]

    def _train(self, private: PrivateRows, public: _Public) -> Tensor:
        self.run_dir_, ledger = open_ledger(self, self.run_dir, self.ledger)
        root = public.root() if self._whitens else None
        plan = self._plan(private.handle, public, ledger, root)
        solution = public.solution.view(private.width, -1)
        linear = torch.nn.Linear(private.width, solution.shape[1], bias=False, dtype=private.dtype)
        start = solution if registered(self.method).start == "public" else torch.zeros_like(solution)
        with torch.no_grad():
            linear.weight.copy_((start if root is None else torch.linalg.solve(root, start)).T)
        model = linear if root is None else torch.nn.Sequential(Factor(matrix=root), linear)
        backend: LinearModel | Literal["auto"] = LinearModel(linear) if root is None else "auto"
        trainer = Trainer(
            model,
            squared_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=self._lr(public)),
            plan=plan,
            mirror=self._mirror(public),
            average=self.average,
            performance=Performance(backend=backend, micro_batch_size=_ROWS_AT_ONCE),
            unsafe_seed=self.unsafe_seed,
            checkpoint_seconds=float("inf"),
        )
        rows = (public.dense.to(private.dtype), public.y.to(private.dtype)) if self.constraint else None
        run = self.run_dir_ / "run"
        trainer.fit(private.handle, rows, run_dir=run, ledger=ledger, delta=self.delta, check_usable=False)
        self.plan_, self.epsilon_ = plan, ledger.spent(self.delta)
        theta = linear.weight.detach().T.double()
        return (theta if root is None else root @ theta).view(public.solution.shape)

    def _plan(self, private: PrivateData, public: _Public, ledger: Ledger, root: Tensor | None) -> PrivacyPlan:
        run = FullBatch(
            epsilon=self.epsilon,
            delta=self.delta,
            steps=self.steps,
            n_private=self.n_private,
            ledger=ledger,
            unsafe_seed=self.unsafe_seed,
        )
        sigma = run.noise_multiplier()
        return PrivacyPlan(
            steps=self.steps,
            sampling_rate=1.0,
            expected_batch_size=run.rows(private, sigma),
            noise_multiplier=sigma,
            max_grad_norm=self.max_grad_norm or public.typical_gradient_norm(root) / (1 if self._whitens else 2),
        )

    def _mirror(self, public: _Public) -> MirrorMap:
        if not registered(self.method).has_mirror:
            return Euclidean()
        if self.constraint is not None:
            return Bregman(constraint=self.constraint, quadratic=True, damping=public.ridge)
        return Quadratic(public.hessian, damping=public.ridge, normalize=False)

    def _lr(self, public: _Public) -> float:
        """The given rate for Newton steps; for plain gradient steps, in units of the inverse mean curvature."""
        newton = registered(self.method).has_mirror or self._whitens
        return self.learning_rate if newton else self.learning_rate / public.curvature

    @property
    def _whitens(self) -> bool:
        return registered(self.method).geometry is not None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.multi_output = True
        tags.non_deterministic = True
        return tags


def _public_weights(values: Any, rows: int) -> np.ndarray:
    weights = np.asarray(values, dtype=np.float64)
    require(weights.shape == (rows,), "shape of sample_weight_public", weights.shape, f"({rows},)")
    usable = bool(np.isfinite(weights).all() and (weights >= 0).all() and weights.any())
    require(usable, "sample_weight_public", weights, "finite, at least 0, and not all 0")
    return weights


def squared_loss(model: Any, batch: Batch) -> Tensor:
    """|x theta - y|^2 / 2 per row."""
    predicted = model(batch[0])
    return 0.5 * torch.square(predicted - batch[1].view(predicted.shape)).sum(1)


class _Public:
    """What the public rows give: Hessian, ridge solution, and the size of gradients there."""

    def __init__(self, x: Any, y: Tensor, damping: float) -> None:
        self.x, self.y = x, y
        gram = x.T @ x
        gram = gram.toarray() if sparse.issparse(gram) else gram
        self.hessian = torch.as_tensor(gram, dtype=torch.float64) / len(y)
        self.curvature = float(self.hessian.trace()) / len(self.hessian)
        self.ridge = damping * self.curvature
        damped = self.hessian + self.ridge * torch.eye(len(self.hessian), dtype=torch.float64)
        moment = torch.as_tensor(x.T @ y.numpy(), dtype=torch.float64) / len(y)
        self.solution = torch.linalg.solve(damped, moment)

    @property
    def dense(self) -> Tensor:
        return torch.as_tensor(self.x.toarray() if sparse.issparse(self.x) else self.x)

    def root(self) -> Tensor:
        """(H + ridge)^-1/2: the coordinates in which the public loss is round."""
        values, vectors = torch.linalg.eigh(self.hessian)
        found: Tensor = (vectors * (values.clamp_min(0) + self.ridge).rsqrt()) @ vectors.T
        return found

    def typical_gradient_norm(self, root: Tensor | None) -> float:
        """Median of |residual| * |x|. Residuals of a fit to these rows are scaled up to those of fresh rows."""
        n, p = self.x.shape
        errors = (self.y.numpy() - self.x @ self.solution.numpy()).reshape(n, -1)
        residual = np.linalg.norm(errors, axis=1) * (n / (n - p) if n > 1.1 * p else 10.0)
        x = self.x if root is None else self.x @ root.numpy()
        norms = np.sqrt(np.asarray((x.multiply(x) if sparse.issparse(x) else x**2).sum(1)).ravel())
        return max(float(np.median(residual * norms)), 1e-12)
