"""Estimators of halfsilver inside those of scikit-learn that read private rows, or fit several times."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import BaggingRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler

import halfsilver as hs
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


@pytest.mark.parametrize(
    "step",
    [
        StandardScaler(),
        FeatureUnion([("one", "passthrough"), ("two", StandardScaler())]),
        ColumnTransformer([("one", StandardScaler(), [0, 1])], remainder="passthrough"),
        make_pipeline(Normalizer(), StandardScaler()),
    ],
    ids=["scaler", "union", "columns", "nested"],
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
        PublicTransformer(StandardScaler()).fit_public(X[:100]),
        FrozenEstimator(StandardScaler().fit(X[:100])),
    ],
    ids=["passthrough", "rows", "function", "public", "frozen"],
)
def test_a_step_that_learns_nothing_of_them_is_taken(step: Any) -> None:
    pipeline = Pipeline([("scale", step), ("model", regression())])
    assert pipeline.fit(X[100:], Y[100:], **given(pipeline)).predict(X[:2]).shape == (2,)


def test_the_classifier_refuses_it_too() -> None:
    pipeline = make_pipeline(StandardScaler(), MirrorLogisticRegression(n_private=200))
    public = given(pipeline)
    with pytest.raises(ConfigError, match="standardscaler"):
        pipeline.fit(X[100:], Y[100:] > 0, **{name: v > 0 if "y_public" in name else v for name, v in public.items()})


@pytest.mark.parametrize("jobs", [1, 2])
def test_several_fits_need_a_common_ledger(jobs: int, tmp_path: Path) -> None:
    """Two jobs are processes, whose stacks begin with scikit-learn."""

    def scores(model: MirrorLinearRegression) -> Any:
        return cross_val_score(model, X[100:], Y[100:], params=PUBLIC, cv=3, n_jobs=jobs, error_score="raise")

    with pytest.raises(ConfigError, match=r"sklearn.model_selection\S* fits MirrorLinearRegression several times"):
        scores(regression())
    assert len(scores(regression(ledger=tmp_path / "ledger.jsonl"))) == 3
    assert len(hs.Ledger.open(tmp_path / "ledger.jsonl").runs) == 3


def test_an_ensemble_counts_as_several() -> None:
    with sklearn.config_context(enable_metadata_routing=True):
        bagging = BaggingRegressor(regression().set_fit_request(X_public=True, y_public=True), n_estimators=2)
        with pytest.raises(ConfigError, match="only a common ledger"):
            bagging.fit(X[100:], Y[100:], **PUBLIC)


def test_a_model_without_private_steps_needs_none() -> None:
    assert len(cross_val_score(regression(method="public"), X[100:], Y[100:], params=PUBLIC, cv=3)) == 3


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
