"""The loss distribution of a step, against dp-accounting's own, one epsilon at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
    from_privacy_parameters,
)
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from hypothesis import given
from hypothesis import strategies as st

from halfsilver.privacy.loss_distribution import deltas, epsilon_at, gaussian_loss

WAYS = pytest.mark.parametrize("way", [AdjacencyType.REMOVE, AdjacencyType.ADD], ids=["remove", "add"])
RATES = st.floats(1e-6, 1.0) | st.sampled_from([1e-8, 1 - 1e-9, 1.0])


def theirs(epsilons: np.ndarray, sigma: float, rate: float, way: AdjacencyType) -> np.ndarray:
    loss = GaussianPrivacyLoss(sigma, sampling_prob=rate, adjacency_type=way)
    return np.array([loss.get_delta_for_epsilon(float(epsilon)) for epsilon in epsilons])


def range_of_losses(sigma: float, rate: float, way: AdjacencyType) -> tuple[float, float]:
    bounds = GaussianPrivacyLoss(sigma, sampling_prob=rate, adjacency_type=way).connect_dots_bounds()
    return bounds.epsilon_lower, bounds.epsilon_upper


@WAYS
@given(sigma=st.floats(0.1, 1000.0), rate=RATES, share=st.floats(0.0, 1.0))
def test_deltas_are_those_of_dp_accounting(way: AdjacencyType, sigma: float, rate: float, share: float) -> None:
    low, high = range_of_losses(sigma, rate, way)
    edge = math.log1p(-rate) if rate < 1 else -1.0
    epsilons = np.array([low + share * (high - low), 0.0, edge, -edge, low, high])
    np.testing.assert_allclose(
        deltas(epsilons, sigma, rate, way), theirs(epsilons, sigma, rate, way), rtol=1e-9, atol=1e-14
    )


@WAYS
def test_losses_whose_exponential_is_no_float(way: AdjacencyType) -> None:
    """Little noise and a small rate: losses go to 870, and warnings are errors."""
    epsilons = np.linspace(*range_of_losses(0.03, 1e-8, way), 50)
    np.testing.assert_allclose(
        deltas(epsilons, 0.03, 1e-8, way), theirs(epsilons, 0.03, 1e-8, way), rtol=1e-9, atol=1e-14
    )


@WAYS
def test_a_wrong_rate_or_scale_is_noticed(way: AdjacencyType) -> None:
    epsilons = np.linspace(*range_of_losses(1.5, 0.02, way), 50)
    right = theirs(epsilons, 1.5, 0.02, way)
    for sigma, rate in ((1.5, 0.0202), (1.515, 0.02)):
        assert np.abs(deltas(epsilons, sigma, rate, way) - right).max() > 1e-5


STEPS = pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(1.51, 500 / 48_000, 9600), (20.0, 0.01, 9600), (1.0, 0.3, 30), (2.0, 1.0, 5)]
)


@STEPS
@pytest.mark.parametrize("interval", [1e-2, 1e-3])
def test_the_discretised_distribution_is_that_of_dp_accounting(
    sigma: float, rate: float, steps: int, interval: float
) -> None:
    ours, other = gaussian_loss(sigma, rate, interval), dp_accountings(sigma, rate, interval)
    for one, two in ((ours, other), (ours.self_compose(steps), other.self_compose(steps))):
        epsilons = np.linspace(-1.0, 5.0, 101)
        np.testing.assert_allclose(
            one.get_delta_for_epsilon(epsilons), two.get_delta_for_epsilon(epsilons), rtol=1e-8, atol=1e-12
        )


@STEPS
@pytest.mark.parametrize(("delta", "digits"), [(1e-10, 1e-4), (1e-6, 1e-6), (0.1, 1e-6)])
def test_epsilon_after_many_steps(sigma: float, rate: float, steps: int, delta: float, digits: float) -> None:
    """dp-accounting's Fourier transform is exact to about 1e-13, which shows where delta is 1e-10."""
    composed = dp_accountings(sigma, rate, 1e-3).self_compose(steps)
    found = epsilon_at(gaussian_loss(sigma, rate, 1e-3).self_compose(steps), delta)
    assert found == pytest.approx(composed.get_epsilon_for_delta(delta), rel=digits, abs=1e-9)


@pytest.mark.parametrize("delta", [1e-10, 1e-6, 0.1])
def test_epsilon_is_the_least_one_from_above(delta: float) -> None:
    composed = gaussian_loss(1.5, 0.02, 1e-3).self_compose(500)
    found = epsilon_at(composed, delta)
    assert composed.get_delta_for_epsilon(found) <= delta
    assert found == 0 or composed.get_delta_for_epsilon(found * (1 - 1e-8)) > delta


def test_an_infinite_loss_and_a_large_delta() -> None:
    both = from_privacy_parameters(DifferentialPrivacyParameters(1.0, 1e-3), value_discretization_interval=1e-3)
    assert epsilon_at(both, 1e-4) == math.inf == both.get_epsilon_for_delta(1e-4)
    assert epsilon_at(both, 2e-3) == pytest.approx(both.get_epsilon_for_delta(2e-3), rel=1e-9)
    assert epsilon_at(both, 0.9) == 0.0


def dp_accountings(sigma: float, rate: float, interval: float) -> PrivacyLossDistribution:
    return from_gaussian_mechanism(sigma, sampling_prob=rate, value_discretization_interval=interval)
