from __future__ import annotations

import math
from typing import Any

import pytest

from halfsilver.errors import ConfigError
from halfsilver.mirror import Clock, constant, cosine
from halfsilver.mirror.schedules import weight_at


@pytest.mark.parametrize(
    ("epochs", "K", "expected"),
    [(100, 2000, 0.997), (50, 500, 0.988), (20, 100, 0.951), (20, 50, 0.809)],
    ids=["cifar10", "emnist", "wikitext2-K100", "wikitext2-K50"],
)
def test_paper_readings_with_k_in_epochs(epochs: int, K: float, expected: float) -> None:
    steps_per_epoch = 96.0
    end = Clock(step=int(epochs * steps_per_epoch), total_steps=9600, steps_per_epoch=steps_per_epoch)
    assert cosine(K=K, unit="epoch")(end) == pytest.approx(expected, abs=5e-4)


def test_k_in_steps_is_the_cosine_of_the_step() -> None:
    clock = Clock(step=30, total_steps=100, steps_per_epoch=7.0)
    assert cosine(K=90, unit="step")(clock) == pytest.approx(math.cos(math.pi * 30 / 180), abs=1e-15)


@pytest.mark.parametrize("end", [0.0, 0.5, 0.95, 1.0])
def test_end_value_is_reached_from_one(end: float) -> None:
    alpha = cosine(end=end)
    values = [alpha(Clock(step=t, total_steps=50)) for t in range(51)]
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(end, abs=1e-15)
    assert values == sorted(values, reverse=True)


def test_end_equals_the_k_that_leads_there() -> None:
    by_k, by_end = cosine(K=2.5 * 40, unit="step"), cosine(end=math.cos(math.pi / 5))
    for t in range(41):
        clock = Clock(step=t, total_steps=40)
        assert by_k(clock) == pytest.approx(by_end(clock), abs=1e-14)


@pytest.mark.parametrize("step", [10, 15, 25, 35, 40, 1000])
def test_past_k_the_weight_stays_zero(step: int) -> None:
    assert cosine(K=10, unit="step")(Clock(step=step, total_steps=1000)) == 0.0


@pytest.mark.parametrize(("value", "expected"), [(-0.2, 0.0), (0.4, 0.4), (1.7, 1.0)])
def test_a_users_own_schedule_is_clamped(value: float, expected: float) -> None:
    assert weight_at(lambda _: value, Clock(step=0, total_steps=1)) == expected


def test_schedules_are_values_that_print_and_compare() -> None:
    assert cosine(end=0.9) == cosine(end=0.9) != cosine(end=0.8)
    assert "end=0.9" in repr(cosine(end=0.9))
    assert constant(0.5)(Clock(step=8, total_steps=9)) == 0.5


@pytest.mark.parametrize(
    "options", [{}, {"end": 0.5, "K": 3}, {"end": 1.2}, {"end": -0.1}, {"K": 0}, {"K": 3, "unit": "day"}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        cosine(**options)


def test_nan_and_bad_constants_are_refused() -> None:
    with pytest.raises(ConfigError, match="NaN"):
        weight_at(lambda _: math.nan, Clock(step=0, total_steps=1))
    with pytest.raises(ConfigError, match=r"alpha=1\.5"):
        constant(1.5)
