"""Estimators of halfsilver inside other estimators, which read private rows or fit several times."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import (
    AdaBoostRegressor,
    BaggingClassifier,
    BaggingRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.feature_selection import RFE, SelectFromModel
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import RANSACRegressor
from sklearn.model_selection import GridSearchCV, TunedThresholdClassifierCV, cross_val_score
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier, OutputCodeClassifier
from sklearn.multioutput import ClassifierChain, MultiOutputRegressor
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler, scale
from sklearn.semi_supervised import SelfTrainingClassifier

from halfsilver.errors import ConfigError
from halfsilver.linear_model import MirrorLinearRegression, MirrorLogisticRegression, PublicTransformer

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 3))
Y = X @ [1.0, -2.0, 0.5] + 0.1 * RNG.normal(size=300)
PUBLIC = {"X_public": X[:100], "y_public": Y[:100]}


def regression(**options: Any) -> MirrorLinearRegression:
    return MirrorLinearRegression(n_private=200, steps=2, epsilon=10.0, **options)


def given(pipeline: Pipeline) -> dict[str, Any]:
    """The public rows as parameters of the last step."""
    last = pipeline.steps[-1][0]
    return {f"{last}__{name}": value for name, value in PUBLIC.items()}


class OwnFit(Pipeline):  # type: ignore[misc]
    """What imblearn's pipeline is: a subclass with a `fit` of its own, which fits its steps to private rows."""

    def fit(self, X: Any, y: Any = None, **given: Any) -> Any:
        for _, step in self.steps[:-1]:
            X = step.fit_transform(X, y)
        self.steps[-1][1].fit(X, y, **{name.split("__")[1]: rows for name, rows in given.items()})
        return self


class SaysItDoesNot(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer whose tag says that it needs no fit, though it learns means."""

    def fit(self, X: Any, y: Any = None) -> Any:
        self.mean_ = X.mean(0)
        return self

    def transform(self, X: Any) -> Any:
        return X - self.mean_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags


@pytest.mark.parametrize(
    "step",
    [
        StandardScaler(),
        FeatureUnion([("one", "passthrough"), ("two", StandardScaler())]),
        ColumnTransformer([("one", StandardScaler(), [0, 1])], remainder="passthrough"),
        ColumnTransformer([("one", "passthrough", [0])], remainder=StandardScaler()),
        make_pipeline(Normalizer(), StandardScaler()),
        OwnFit([("scale", Normalizer())]),
        FunctionTransformer(scale),
        SaysItDoesNot(),
    ],
    ids=["scaler", "union", "columns", "remainder", "nested", "subclass", "mixes", "tag"],
)
def test_a_step_that_learns_from_private_rows_is_refused(step: Any) -> None:
    pipeline = Pipeline([("scale", step), ("model", regression())])
    with pytest.raises(ConfigError, match=r"The steps \['scale'\] have been fitted to private rows"):
        pipeline.fit(X[100:], Y[100:], **given(pipeline))


@pytest.mark.parametrize(
    "step",
    [
        "passthrough",
        Normalizer(),
        FunctionTransformer(),
        FunctionTransformer(np.abs),
        PublicTransformer(FunctionTransformer(lambda x: x.clip(-1, 1))).fit_public(X[:100]),
        PublicTransformer(StandardScaler()).fit_public(X[:100]),
        FrozenEstimator(StandardScaler().fit(X[:100])),
    ],
    ids=["passthrough", "rows", "identity", "ufunc", "declared", "public", "frozen"],
)
def test_a_step_that_learns_nothing_of_them_is_taken(step: Any) -> None:
    pipeline = Pipeline([("scale", step), ("model", regression())])
    assert pipeline.fit(X[100:], Y[100:], **given(pipeline)).predict(X[:2]).shape == (2,)


def test_the_classifier_refuses_it_too() -> None:
    pipeline = make_pipeline(StandardScaler(), MirrorLogisticRegression(n_private=200))
    public = given(pipeline)
    with pytest.raises(ConfigError, match="standardscaler"):
        pipeline.fit(X[100:], Y[100:] > 0, **{name: v > 0 if "y_public" in name else v for name, v in public.items()})


class Bound(MirrorLinearRegression):
    """Most wrappers pass no public rows on, so a subclass of a few lines binds them."""

    def __init__(self, ledger: Any = None, method: Any = "pda") -> None:
        super().__init__(n_private=200, steps=2, ledger=ledger, method=method)

    def fit(self, X: Any, y: Any, **_: Any) -> Any:
        return super().fit(X, y, **PUBLIC)


class BoundClassifier(MirrorLogisticRegression):
    def __init__(self, ledger: Any = None) -> None:
        super().__init__(n_private=200, steps=2, ledger=ledger, classes=[0, 1])

    def fit(self, X: Any, y: Any, **_: Any) -> Any:
        return super().fit(X, y, X_public=X[:100], y_public=np.arange(100) % 2)


REGRESSORS: dict[str, Any] = {
    "TransformedTargetRegressor": lambda model: TransformedTargetRegressor(model, transformer=StandardScaler()),
    "RANSACRegressor": lambda model: RANSACRegressor(model, min_samples=100, max_trials=2),
    "BaggingRegressor": lambda model: BaggingRegressor(model, n_estimators=2),
    "StackingRegressor": lambda model: StackingRegressor([("one", model)]),
    "VotingRegressor": lambda model: VotingRegressor([("one", model)]),
    "MultiOutputRegressor": MultiOutputRegressor,
    "AdaBoostRegressor": AdaBoostRegressor,
    "RFE": RFE,
    "SelectFromModel": SelectFromModel,
}
CLASSIFIERS: dict[str, Any] = {
    "SelfTrainingClassifier": SelfTrainingClassifier,
    "CalibratedClassifierCV": lambda model: CalibratedClassifierCV(model, ensemble=False, cv=2),
    "BaggingClassifier": lambda model: BaggingClassifier(model, n_estimators=2),
    "StackingClassifier": lambda model: StackingClassifier([("one", model)]),
    "VotingClassifier": lambda model: VotingClassifier([("one", model)]),
    "OneVsRestClassifier": OneVsRestClassifier,
    "OneVsOneClassifier": OneVsOneClassifier,
    "OutputCodeClassifier": lambda model: OutputCodeClassifier(model, code_size=3, random_state=0),
    "ClassifierChain": lambda model: ClassifierChain(model),
    "GridSearchCV": lambda model: GridSearchCV(model, {"ledger": [None]}, cv=2, error_score="raise"),
    "TunedThresholdClassifierCV": lambda model: TunedThresholdClassifierCV(model, cv=2),
}


@pytest.mark.parametrize("shared", [False, True], ids=["no-ledger", "ledger"])
@pytest.mark.parametrize("name", [*REGRESSORS, *CLASSIFIERS])
def test_a_wrapper_is_refused_by_name_also_with_a_ledger(name: str, shared: bool, tmp_path: Path) -> None:
    """Bagging copies rows, a calibrator or a stack reads labels without noise, and so on: no ledger counts that."""
    ledger = tmp_path / "ledger.jsonl" if shared else None
    classes = name in CLASSIFIERS
    model = CLASSIFIERS[name](BoundClassifier(ledger)) if classes else REGRESSORS[name](Bound(ledger))
    labels = (Y[100:] > 0).astype(int)
    labels[0] = -1 if name == "SelfTrainingClassifier" else labels[0]  # a row without a label
    target = np.stack([labels, 1 - labels], 1) if name == "ClassifierChain" else labels if classes else Y[100:]
    target = np.stack([target, target], 1) if name == "MultiOutputRegressor" else target
    with pytest.raises(ConfigError, match=rf"not by sklearn\S*\.{name}\. .*Choose settings on public rows"):
        model.fit(X[100:], target)
    assert not list(tmp_path.iterdir())


def test_a_wrapper_around_a_pipeline_is_refused_and_so_is_one_inside() -> None:
    inside = make_pipeline("passthrough", TransformedTargetRegressor(Bound(), transformer=StandardScaler()))
    around = BaggingRegressor(make_pipeline("passthrough", Bound()), n_estimators=2)
    for model, name in ((inside, "TransformedTargetRegressor"), (around, "BaggingRegressor")):
        with pytest.raises(ConfigError, match=name):
            model.fit(X[100:], Y[100:])


def test_a_pipeline_of_a_class_of_its_own_is_refused() -> None:
    pipeline = OwnFit([("scale", StandardScaler()), ("model", regression())])
    with pytest.raises(ConfigError, match=r"not by \S*test_callers.OwnFit"):
        pipeline.fit(X[100:], Y[100:], **given(pipeline))


def test_an_estimator_of_somebody_elses_is_refused() -> None:
    class Wrapper(BaseEstimator):  # type: ignore[misc]
        def fit(self, X: Any, y: Any) -> Any:
            self.mean_ = X.mean(0)
            self.model_ = regression().fit(X - self.mean_, y, **PUBLIC)
            return self

    with pytest.raises(ConfigError, match=r"not by \S*Wrapper"):
        Wrapper().fit(X[100:], Y[100:])


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_scores_of_folds_are_refused(jobs: int, tmp_path: Path) -> None:
    """Two jobs are processes, whose stacks begin with scikit-learn."""
    for method in ("pda", "public"):  # of private rows, scores would be without noise either way
        model = Bound(tmp_path / "ledger.jsonl", method)
        with pytest.raises(ConfigError, match=r"not by (cross_val_score|_fit_and_score)"):
            cross_val_score(model, X[100:], Y[100:], cv=3, n_jobs=jobs, error_score="raise")
    assert not list(tmp_path.iterdir())


def test_public_rows_may_be_routed_to_a_pipeline() -> None:
    with sklearn.config_context(enable_metadata_routing=True):
        scaler = PublicTransformer(StandardScaler()).set_fit_request(X_public=True)
        head = regression().set_fit_request(X_public=True, y_public=True)
        pipeline = Pipeline([("scale", scaler), ("model", head)], transform_input=["X_public"])
        assert pipeline.fit(X[100:], Y[100:], **PUBLIC).predict(X[:2]).shape == (2,)


def test_temporary_folders_go_with_the_estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = regression().fit(X[100:], Y[100:], **PUBLIC)
    assert model.run_dir_.parent == tmp_path
    assert (model.run_dir_ / "ledger.jsonl").exists()
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())
    kept = regression(run_dir=tmp_path / "kept").fit(X[100:], Y[100:], **PUBLIC).run_dir_
    gc.collect()
    assert (kept / "ledger.jsonl").exists()


def test_a_second_fit_with_other_settings_is_refused(tmp_path: Path) -> None:
    regression(run_dir=tmp_path / "run", learning_rate=0.1).fit(X[100:], Y[100:], **PUBLIC)
    with pytest.raises(ConfigError, match="unchanged on resume"):
        regression(run_dir=tmp_path / "run", learning_rate=0.3).fit(X[100:], Y[100:], **PUBLIC)
