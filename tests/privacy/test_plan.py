from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import dp_accounting as dpa
import pytest

from halfsilver.errors import ConfigError
from halfsilver.privacy.plan import PrivacyPlan

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
        sampling_rate=rate,
        expected_batch_size=10,
        accountant=accountant,
    )
    assert epsilon * 0.998 < plan.epsilon(delta, accountant) <= epsilon


def test_spare_steps_are_paid_for() -> None:
    args: dict[str, Any] = {"epsilon": 1, "delta": 1e-5, "sampling_rate": 0.01, "expected_batch_size": 10}
    plan = PrivacyPlan.calibrate(steps=90, spare_steps=10, **args)
    assert plan.max_releases == 100
    assert plan.noise_multiplier == PrivacyPlan.calibrate(steps=100, **args).noise_multiplier


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
        PrivacyPlan.from_dict({**PLAN, "noise": 1})
    with pytest.raises(ConfigError, match="Not a privacy plan"):
        PrivacyPlan.from_dict({"steps": 1})
