"""The linear regression study: data, exact risk, columns, search and files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from halfsilver.linear_model import MirrorLinearRegression
from halfsilver.tasks.linreg import methods as linreg
from halfsilver.tasks.linreg.data import NOISE_VARIANCE, make_problem, risk
from halfsilver.tasks.linreg.methods import METHODS, Point, Prepared, noise_multiplier, run
from halfsilver.tasks.linreg.study import SEARCHED, search, study, summarise


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return Prepared(make_problem(500, seed=0))


def test_features_are_the_papers(prepared: Prepared) -> None:
    x = prepared.problem.private[0].to_dense()
    assert x.shape == (10_000, 500)
    assert len(prepared.problem.public[1]) == 750
    assert torch.equal((x[:, :100] > 0).sum(1), torch.full((10_000,), 40))
    assert torch.equal((x[:, 100:] > 0).sum(1), torch.full((10_000,), 80))
    assert float(x.max()) == float(torch.tensor(0.05))
    assert float(prepared.hessian[:100, :100].diagonal().mean()) == pytest.approx(0.0025 * 0.4, rel=0.02)


def test_risk_is_the_population_mean(prepared: Prepared) -> None:
    """Against the mean squared error on 10,000 fresh rows: within 4 standard errors, and exact at theta."""
    theta = prepared.problem.theta
    estimate = theta + torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, y = make_problem(500, seed=99).private
    y = y + (x.double() @ (theta - make_problem(500, seed=99).theta)[:, None]).squeeze(1).float()
    errors = ((x.double() @ estimate[:, None]).squeeze(1) - y).square()
    exact = float(risk(estimate[:, None], theta))
    assert abs(float(errors.mean()) - exact) < 4 * float(errors.std()) / 100
    assert float(risk(theta[:, None], theta)) == pytest.approx(NOISE_VARIANCE)


def test_skewed_features_have_falling_variances_and_an_exact_risk() -> None:
    """The same rows with and without scales; the risk is the mean error of 20,000 rows, within 4 standard errors."""
    problem = make_problem(500, seed=0, private_rows=20_000, skew=1.0)
    plain = make_problem(500, seed=0, private_rows=20_000)
    assert float(problem.scales.square().mean()) == pytest.approx(1.0)
    assert torch.equal(plain.scales, torch.ones(500, dtype=torch.float64))
    moments = [p.private[0].to_dense().double().square().mean(0) for p in (problem, plain)]
    torch.testing.assert_close(moments[0] / moments[1], problem.scales.square(), rtol=1e-4, atol=0.0)
    estimate = problem.theta + torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, y = problem.private
    errors = ((x.double() @ estimate[:, None]).squeeze(1) - y).square()
    exact = float(problem.risk(estimate[:, None]))
    assert abs(float(errors.mean()) - exact) < 4 * float(errors.std()) / 20_000**0.5
    assert float(problem.risk(problem.theta[:, None])) == pytest.approx(NOISE_VARIANCE)


def test_noise_is_calibrated() -> None:
    """T steps of the study cost what they must: PLD of the composed plan, checked at two lengths."""
    from halfsilver.privacy.plan import PrivacyPlan

    for steps in (1, 40):
        sigma = noise_multiplier(steps)
        plan = PrivacyPlan(steps=steps, sampling_rate=1.0, expected_batch_size=1.0, noise_multiplier=sigma)
        assert 0.998 < plan.epsilon(linreg.DELTA) <= 1.0005


def test_a_column_is_the_estimators_run(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, with clipping active: the same coefficients as MirrorLinearRegression in float64."""
    monkeypatch.setattr(linreg, "noise_multiplier", lambda steps: 0.0)
    monkeypatch.setattr(
        "halfsilver.privacy.releases.noisy_mean",
        lambda clipped, *_, expected, **__: [t / expected for t in clipped.tensors],
    )
    point = Point(steps=5, reach=0.25 * 0.02, clip=0.02)
    theta = prepared.public_model[:, None].clone()
    for _ in range(5):
        linreg.update(prepared, "pda", [point], theta, torch.Generator())
    (x, y), (xp, yp) = (
        (a.to_dense().double().numpy(), b.numpy()) for a, b in (prepared.problem.private, prepared.problem.public)
    )
    model = MirrorLinearRegression(
        steps=5, learning_rate=0.25, max_grad_norm=0.02, damping=1e-3, average=None,
        fit_intercept=False, n_private=10_000,
    ).fit(x, y, X_public=xp, y_public=yp)  # fmt: skip
    a, b = (
        float(risk(torch.as_tensor(t)[:, None], prepared.problem.theta)) for t in (theta[:, 0].double(), model.coef_)
    )
    assert a == pytest.approx(b, rel=5e-3)


def test_whitening_is_a_root_of_the_damped_inverse(prepared: Prepared) -> None:
    """Against the symmetric root: the same inverse, and the same norms of rows, up to float32."""
    root, norms = prepared.whitening(0.3)
    values, vectors = torch.linalg.eigh(prepared.hessian / prepared.curvature)
    symmetric = (vectors * ((values + 0.3) / 1.3).rsqrt()) @ vectors.T
    torch.testing.assert_close((root.T @ root).double(), symmetric @ symmetric, rtol=1e-4, atol=1e-4)
    x = prepared.problem.private[0].to_dense()[:50].double()
    torch.testing.assert_close(norms[:50].double(), (x @ symmetric).norm(dim=1), rtol=1e-4, atol=0.0)


def test_columns_do_not_depend_on_each_other(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linreg, "noise_multiplier", lambda steps: 0.0)
    points = [Point(6, 1e-3, 5e-3), Point(3, 2e-3, 1e-2)]
    together = run(prepared, "warm", points, seed=0)
    for p in points:
        alone = run(prepared, "warm", [p], seed=0)
        assert together[p, "last"] == pytest.approx(alone[p, "last"], rel=1e-4)
        assert together[p, "average"] == pytest.approx(alone[p, "average"], rel=1e-4)


def test_the_search_ends_inside_its_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a smooth bowl with a known minimum, far from the start, and a gain in steps that ends at 80."""

    def bowl(trial: object, method: str, points: list[Point], seed: int) -> dict[tuple[Point, str], float]:
        def value(p: Point) -> float:
            far = np.log2(p.reach / 0.02) ** 2 + np.log2(p.clip / 0.1) ** 2
            return float(1 + 0.1 * far + {20: 0.4, 40: 0.2, 80: 0.0, 160: -0.001, 320: 0.0}[p.steps])

        return {(p, kind): value(p) + (kind == "last") for p in points for kind in ("last", "average")}

    monkeypatch.setattr("halfsilver.tasks.linreg.study.run", bowl)
    (point, iterate), _ = search([object()], "pda")  # type: ignore[list-item]
    assert (point.steps, iterate) == (80, "average")
    assert abs(np.log2(point.reach / 0.02)) <= 0.5
    assert abs(np.log2(point.clip / 0.1)) <= 0.5


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "linreg"


def test_committed_results() -> None:
    """20 trials at each of 12 dimensions: warm below cold, and pda never above warm beyond the intervals."""
    dims = range(500, 6001, 500)
    rows = {(r["dim"], r["method"]): r for r in summarise(RESULTS, list(dims), 20)}
    for dim in dims:
        pda, warm, cold = (rows[dim, m] for m in ("pda", "warm", "cold"))
        assert warm["mean"] < cold["mean"]
        assert pda["mean"] - pda["ci95"] <= warm["mean"] + warm["ci95"]
    assert rows[500, "pda"]["mean"] <= 0.0123
    for dim in (*range(500, 3001, 500), 5500, 6000):  # those that the study of the geometry has
        whitened, pda = rows[dim, "whitened"], rows[dim, "pda"]
        assert whitened["mean"] + whitened["ci95"] < pda["mean"] - pda["ci95"], dim


def test_committed_results_with_skewed_features() -> None:
    rows = {(r["dim"], r["method"]): r for r in summarise(RESULTS.parent / "linreg-skew1", [500, 1000, 2000], 20)}
    for dim in (500, 1000, 2000):
        whitened, pda, warm = (rows[dim, m] for m in ("whitened", "pda", "warm"))
        assert whitened["mean"] + whitened["ci95"] < pda["mean"] - pda["ci95"]
        assert pda["mean"] + pda["ci95"] < warm["mean"] - warm["ci95"]


def test_results_that_are_there_are_not_run_again(tmp_path: Path) -> None:
    for name in [*(f"p500-search-{m}" for m in SEARCHED), "p500-trial0"]:
        text = json.dumps({"mse": dict.fromkeys(METHODS, 0.5)})
        (tmp_path / f"{name}.json").write_text(text)
    rows = study([500], 1, tmp_path, workers=1)
    assert [r["mean"] for r in rows] == [0.5] * 5
