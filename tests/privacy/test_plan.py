from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import dp_accounting as dpa
import pytest

from halfsilver.errors import ConfigError
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import Correlated

PLAN = {"steps": 100, "sampling_rate": 0.01, "expected_batch_size": 64, "noise_multiplier": 1.0}


def test_event_is_dp_accountings_own() -> None:
    plan = PrivacyPlan(**PLAN)  # type: ignore[arg-type]
    step = dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.0))
    assert plan.event() == dpa.SelfComposedDpEvent(step, 100)
    full = PrivacyPlan(**{**PLAN, "sampling_rate": 1.0})  # type: ignore[arg-type]
    assert full.event() == dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(1.0), 100)


@pytest.mark.parametrize(
    ("epsilon", "delta", "steps", "rate"),
    [(3.51, 1e-5, 9600, 500 / 48_000), (0.5, 1e-6, 300, 0.01), (1.0, 1e-5, 100, 1.0), (8.0, 1e-5, 50, 0.2)],
)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibrate_is_tight_and_never_above(
    epsilon: float, delta: float, steps: int, rate: float, accountant: Any
) -> None:
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon,
        delta=delta,
        steps=steps,
        population=10_000,
        batch_size=10_000 * rate,
        accountant=accountant,
    )
    assert epsilon * 0.998 < plan.epsilon(delta, accountant) <= epsilon


def test_each_number_is_said_once() -> None:
    plan = PrivacyPlan.calibrate(epsilon=1, delta=1e-5, population=2000, batch_size=100, epochs=3)
    assert (plan.steps, plan.sampling_rate, plan.expected_batch_size, plan.population) == (60, 0.05, 100, 2000)
    assert plan.delta == 1e-5
    assert 0.998 < plan.epsilon() == plan.epsilon(1e-5) <= 1
    whole = PrivacyPlan.calibrate(epsilon=1, delta=1e-5, population=2000, batch_size=2000, steps=7)
    assert (whole.sampler, whole.steps) == ("full", 7)


def test_delta_is_no_part_of_the_mechanism() -> None:
    with_delta, without = (PrivacyPlan(**PLAN, **more) for more in ({"delta": 1e-4}, {}))  # type: ignore[arg-type]
    assert with_delta == without
    assert with_delta.fingerprint() == without.fingerprint()
    assert "delta" not in with_delta.to_dict()
    with pytest.raises(ConfigError, match="since this plan has none"):
        without.epsilon()


def test_the_earlier_spelling_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="population=, batch_size="):
        plan = PrivacyPlan.calibrate(epsilon=1, delta=1e-5, steps=60, sampling_rate=0.05, expected_batch_size=100)
    assert plan == PrivacyPlan.calibrate(epsilon=1, delta=1e-5, population=2000, batch_size=100, steps=60)
    assert plan.delta == 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": None}, "either epochs or steps"),
        ({"steps": 3}, "either epochs or steps"),
        ({"epochs": 0}, "epochs=0 above 0"),
        ({"population": None}, "population=None"),
        ({"population": 50}, "batch_size=100 in .0, 50., the population"),
        ({"delta": 0.1}, "delta=0.1 at most 0.0005"),
    ],
)
def test_what_calibrate_refuses(change: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"epsilon": 1, "delta": 1e-5, "population": 2000, "batch_size": 100, "epochs": 3}
    with pytest.raises(ConfigError, match=message):
        PrivacyPlan.calibrate(**{**right, **change})


def test_spare_steps_are_paid_for() -> None:
    args: dict[str, Any] = {"epsilon": 1, "delta": 1e-5, "population": 1000, "batch_size": 10}
    plan = PrivacyPlan.calibrate(steps=90, spare_steps=10, **args)
    assert plan.max_releases == 100
    assert plan.noise_multiplier == PrivacyPlan.calibrate(steps=100, spare_steps=0, **args).noise_multiplier


@pytest.mark.nightly
def test_one_step_in_fifty_is_spare_unless_noise_is_correlated() -> None:
    args: dict[str, Any] = {"epsilon": 1, "delta": 1e-5, "population": 1000, "batch_size": 10}
    assert [PrivacyPlan.calibrate(steps=steps, **args).spare_steps for steps in (1, 49, 50, 100)] == [0, 0, 1, 2]
    assert PrivacyPlan.calibrate(steps=50, noise=Correlated(buffers=1), **args).spare_steps == 0
    plain, with_spare = (PrivacyPlan.calibrate(steps=1000, spare_steps=spare, **args) for spare in (0, None))
    assert plain.noise_multiplier < with_spare.noise_multiplier < 1.01 * plain.noise_multiplier


def test_closed_form_is_algorithm_1_line_2() -> None:
    n, clip, t, eps, delta = 10_000, 0.7, 100, 1.0, 1e-5
    plan = PrivacyPlan.closed_form(epsilon=eps, delta=delta, steps=t, expected_batch_size=n, max_grad_norm=clip)
    on_the_mean = plan.noise_multiplier * plan.max_grad_norm / n
    assert on_the_mean**2 == pytest.approx(8 * clip**2 * t * math.log(1 / delta) / (eps * n) ** 2, rel=1e-12)
    assert plan.epsilon(delta) < eps


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0), ("steps", 1.5), ("steps", True), ("sampling_rate", 0.0), ("sampling_rate", 1.3),
        ("expected_batch_size", 0), ("noise_multiplier", 0.0), ("noise_multiplier", math.nan),
        ("max_grad_norm", -1.0), ("max_grad_norm", math.inf), ("unit", "household"), ("spare_steps", -1),
    ],
)  # fmt: skip
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"Expected {name}="):
        PrivacyPlan(**{**PLAN, name: value})


def test_frozen_and_round_trip() -> None:
    plan = PrivacyPlan(**PLAN)  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        plan.steps = 3  # type: ignore[misc]
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan
    assert plan.fingerprint() == PrivacyPlan.from_dict(plan.to_dict()).fingerprint()
    with pytest.raises(ConfigError, match="plan fields"):
        PrivacyPlan.from_dict({**PLAN, "noises": 1})
    with pytest.raises(ConfigError, match="Not a privacy plan"):
        PrivacyPlan.from_dict({"steps": 1})
