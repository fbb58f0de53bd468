"""The formulas against the text of the paper, worked out by hand, and noise stability against the real step."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfsilver.errors import ConfigError
from halfsilver.mirror import Bregman, Clock, Euclidean, MirrorMap, PublicLoss, Quadratic, Step
from halfsilver.privacy.entropy import UnsafeSeed
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.noise import add_noise
from halfsilver.theory import (
    Vector,
    chi,
    dpsgd_risk_bound,
    noise_cost_after,
    noise_cost_before,
    noise_shift,
    pda_risk_bound,
)

ROOT = Path(__file__).parents[1]
NO_LOG = math.exp(-1)  # a delta whose logarithm is 1: bare powers of p
SIZES = {"n_priv": 1e7, "epsilon": 0.5, "delta": 1e-5}


def isotropic(p: int) -> Vector:
    return np.full(p, 1 / p)


def skewed(p: int) -> Vector:
    """The paper's non-isotropic setting."""
    return np.array([p**-1.5] + [1 / p] * (p - 1))


# ---- formulas


@pytest.mark.parametrize("p", [10, 300])
@pytest.mark.parametrize("c", [1.0, 1.5, 2.0, 3.0])
def test_chi_is_p_squared_where_all_eigenvalues_agree(p: int, c: float) -> None:
    assert chi(isotropic(p), p**c, NO_LOG) == pytest.approx(p**2)
    assert p**2 * (1 - 1e-9) <= chi(isotropic(p), p**c, 1e-5) <= p**2 * math.log(1e5) * (1 + 1e-9)


@pytest.mark.parametrize("c", [2.0, 2.1, 2.25, 2.4, 2.5])
def test_chi_falls_as_p_to_the_4_5_minus_c_in_the_skewed_setting(c: float) -> None:
    for p in (100, 10_000, 1_000_000):
        # p^1.5 (p^(2-c) (p-1) + 1): the one small eigenvalue adds p^1.5, a share p^(c-3) of the rest
        assert chi(skewed(p), p**c, NO_LOG) == pytest.approx(p ** (4.5 - c), rel=p ** (c - 3) + 1e-9)


def test_chi_in_the_skewed_setting_outside_that_range() -> None:
    p = 10_000
    assert chi(skewed(p), p**1.5, NO_LOG) == pytest.approx(p**2.5)  # from p^1.5 rows on: DP-SGD's
    assert chi(skewed(p), p**2.5, NO_LOG) == pytest.approx(p**2, rel=0.011)  # the isotropic one's
    assert chi(skewed(p), p**2.9, NO_LOG) > chi(skewed(p), p**2.5, NO_LOG)  # never less again


def test_the_logarithm_delays_the_fall_to_log_times_p_squared_rows() -> None:
    p, log = 1_000, math.log(1e5)
    assert chi(skewed(p), log * p**2, 1e-5) == pytest.approx(p**2.5)
    assert chi(skewed(p), 2 * log * p**2, 1e-5) == pytest.approx(p**2.5 / 2, rel=2 / p)


def test_chi_by_hand_for_two_eigenvalues() -> None:
    # max(1/0.1, 0.5 * 40) * (min(1, 2/(0.01 * 40)) + min(1, 2/(0.25 * 40))) = 20 * (1 + 0.2)
    assert chi([0.1, 0.5], 40, math.exp(-2)) == pytest.approx(24)


@pytest.mark.parametrize("spectrum", [isotropic, skewed])
def test_chi_falls_with_public_rows_up_to_the_turning_point(spectrum: object) -> None:
    assert callable(spectrum)
    values = np.asarray(spectrum(200))
    turn = 1 / (values.min() * values.max())
    before = [chi(values, n, 1e-5) for n in np.geomspace(10, turn, 30)]
    after = [chi(values, n, 1e-5) for n in np.geomspace(turn, 1e4 * turn, 30)]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(before))
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(after))
    assert before[0] == pytest.approx(len(values) / values.min())  # never above DP-SGD's factor before it turns


def test_bounds_have_the_two_terms_of_the_text() -> None:
    p, log = 400, math.log(1e5)
    privacy = log / (0.5 * 1e7) ** 2
    assert dpsgd_risk_bound(isotropic(p), **SIZES) == pytest.approx(p**2 * privacy + p / 1e7)
    assert dpsgd_risk_bound(skewed(p), **SIZES) == pytest.approx(p**2.5 * privacy + p**1.5 / 1e7)
    few, many = (pda_risk_bound(skewed(p), n_pub=p**c, **SIZES) for c in (1.5, 2.5))
    assert few == pytest.approx(dpsgd_risk_bound(skewed(p), **SIZES))
    assert many == pytest.approx(chi(skewed(p), p**2.5, 1e-5) * privacy + p**1.5 / 1e7)
    assert many < few


@pytest.mark.parametrize("more", [{"n_priv": 2e7}, {"epsilon": 1.0}, {"delta": 1e-4}])
def test_bounds_fall_with_more_rows_and_with_less_privacy(more: dict[str, float]) -> None:
    values = skewed(50)
    assert dpsgd_risk_bound(values, **{**SIZES, **more}) < dpsgd_risk_bound(values, **SIZES)
    assert pda_risk_bound(values, n_pub=1e4, **{**SIZES, **more}) < pda_risk_bound(values, n_pub=1e4, **SIZES)


def test_bad_values_are_named() -> None:
    for values in ([], [[1.0]], [0.0, 1.0], [-1.0], [math.nan], [math.inf]):
        with pytest.raises(ConfigError, match="eigenvalues"):
            chi(np.array(values), 10, 1e-5)
    with pytest.raises(ConfigError, match="n_pub=0"):
        chi([1.0], 0, 1e-5)
    with pytest.raises(ConfigError, match="delta=1"):
        dpsgd_risk_bound([1.0], n_priv=10, epsilon=1.0, delta=1)
    with pytest.raises(ConfigError, match="epsilon=0"):
        dpsgd_risk_bound([1.0], n_priv=10, epsilon=0, delta=1e-5)
    with pytest.raises(ConfigError, match="coefficients"):
        noise_shift([1.0, 2.0], [1.0], 1.0, 1.0)
    with pytest.raises(ConfigError, match="sigma=-1"):
        noise_shift([1.0], [1.0], 1.0, -1)


# ---- noise stability: n = 23,000 draws, for which 2 % is 4 standard errors; 21 comparisons, alpha 1e-3 in all

DIM, LR, SIGMA, DRAWS = 6, 0.5, 0.02, 23_000
FEATURES = torch.randn(60, DIM, generator=torch.Generator().manual_seed(2)).double() * torch.logspace(0, -1, DIM)
VALUES, VECTORS = np.linalg.eigh((FEATURES.T @ FEATURES / 60).numpy())
MIXTURE = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6708203932499369])
WEIGHTS = np.vstack([np.eye(DIM), MIXTURE])
SEEN: dict[type, np.ndarray] = {
    Bregman: VALUES,
    Quadratic: VALUES / VALUES[0],
    Euclidean: np.ones(DIM),
}


def squares(model: Any, batch: Any) -> Tensor:
    return 0.5 * torch.square(batch[1] - model(batch[0])[:, 0])


@cache
def measured(kind: type) -> np.ndarray:
    """Mean absolute shift along each eigenvector and the mixture."""
    mirror: MirrorMap = Bregman(quadratic=True) if kind is Bregman else kind()
    public = PublicLoss(nn.Linear(DIM, 1, bias=False).double(), squares, (FEATURES, FEATURES.sum(1)))
    theta, clock, entropy = [torch.linspace(-1, 1, DIM).double()[None]], Clock(step=0, total_steps=1), UnsafeSeed(0)
    state = mirror.init(params=theta, public=public)

    def after(released: Tensor) -> Tensor:
        step, _ = mirror.direction([released], state, Step(params=theta, public=public, clock=clock, lr=LR))
        return (theta[0] - LR * step[0])[0]

    total = ClippedSum([torch.full((DRAWS, DIM), 3.0).double()], 1.0)  # any gradient: the theorem fixes one
    released = add_noise(total, 60 * SIGMA, entropy, dimension=DIM)[0] / 60
    shifts = torch.stack([after(row[None]) for row in released]) - after(total.tensors[0][:1] / 60)
    return np.asarray(np.abs(shifts.numpy() @ VECTORS @ WEIGHTS.T).mean(0))


def ratios(kind: type, values: np.ndarray) -> np.ndarray:
    return measured(kind) / [noise_shift(values, weights, LR, SIGMA) for weights in WEIGHTS]


@pytest.mark.paper
@pytest.mark.parametrize("kind", SEEN)
def test_noise_moves_the_iterate_as_the_theorem_says(kind: type) -> None:
    assert np.abs(ratios(kind, SEEN[kind]) - 1).max() < 0.02


@pytest.mark.paper
@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("wrong", [0.9, 1.1])
def test_an_eigenvalue_that_is_off_by_a_tenth_is_rejected(kind: type, wrong: float) -> None:
    for i in range(DIM):
        values = SEEN[kind].copy()
        values[i] *= wrong
        assert abs(ratios(kind, values)[i] - 1) > 0.05


def test_dpsgd_moves_alike_in_all_directions_and_mirror_descent_does_not() -> None:
    flat = measured(Euclidean)
    assert flat == pytest.approx(np.full(DIM + 1, LR * SIGMA * math.sqrt(2 / math.pi)), rel=0.02)
    assert measured(Bregman).max() / measured(Bregman).min() > 20


# ---- the example


@pytest.mark.paper
def test_example_quick(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "examples" / "theory.py"), "--quick", "--json"]
    command += ["--plot", str(tmp_path / "theory.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    out = json.loads(done.stdout)
    assert max(abs(row["ratio"] - 1) for row in out["shift"]) < 0.12  # 1,000 draws: 5 standard errors
    assert all(row["truth_in_set"] == 1 for row in out["risk"])
    risk = {(row["c"], row["method"]): row["mean"] for row in out["risk"]}
    assert risk[2.5, "pda+set"] < risk[1.5, "pda+set"]
    assert risk[2.5, "pda+set"] < risk[2.5, "warm"]  # at the same safe step
    assert (tmp_path / "theory.png").stat().st_size > 10_000


def test_measured_rise_in_risk_follows_the_two_costs_of_noise() -> None:
    """One noisy Newton step, n = 40,000 draws; within six standard errors of its cost, and not of the other one."""
    rng = np.random.default_rng(0)
    values, draws = np.array([1.0, 0.3, 0.1, 0.01]), 40_000
    z = rng.standard_normal((draws, len(values)))
    clip = {"after": math.sqrt(values.sum()), "before": math.sqrt(len(values))}
    moved = {"after": z / values * clip["after"], "before": z / np.sqrt(values) * clip["before"]}
    costs = {"after": noise_cost_after(values), "before": noise_cost_before(values)}
    for name, other in (("after", "before"), ("before", "after")):
        rises = (moved[name] ** 2 * values).sum(1)  # twice the rise in risk, in units of (sigma / n)^2
        error = 6 * rises.std() / math.sqrt(draws)
        assert abs(rises.mean() - costs[name]) < error
        assert abs(rises.mean() - costs[other]) > error
    assert costs["before"] <= costs["after"]
