"""The verdict: intervals against SciPy and by hand, their coverage, and words that agree with the numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from halfsilver.errors import ConfigError
from halfsilver.study.method import NAMES
from halfsilver.study.paired import t_interval
from halfsilver.study.records import Result
from halfsilver.study.verdict import verdict as typed_verdict

Losses = Mapping[str, Sequence[float]]


def results(loss: Losses, **others: Losses) -> list[dict[str, Any]]:
    """One result for each method and seed; seeds count from 0."""
    return [
        {"method": m, "seed": s, "final": {"loss": value, **{k: v[m][s] for k, v in others.items()}}}
        for m, values in loss.items()
        for s, value in enumerate(values)
    ]


def verdict(runs: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """That of results as they are in files, and as it is in a file."""
    return typed_verdict([Result.from_json(run) for run in runs], **options).to_json()


def difference(found: Mapping[str, Any], name: str, metric: str = "loss") -> dict[str, Any]:
    (one,) = [d for d in found["differences"] if (d["name"], d["metric"]) == (name, metric)]
    return dict(one)


def sentence(found: Mapping[str, Any], start: str, metric: str = "loss") -> str:
    (one,) = [s for s in found["sentences"] if s.startswith(start) and f"test {metric}" in s]
    return str(one)


GOOD: Losses = {"public": (0.70, 0.71, 0.72), "cold": (0.9,), "warm": (0.60, 0.62, 0.61), "pda": (0.55, 0.58, 0.56)}


# ---- numbers


def test_interval_by_hand() -> None:
    """Paired differences -0.05, -0.04, -0.05: mean -0.14/3, s = 0.01/sqrt(3), t(2, 0.975) = 4.302653."""
    found = difference(verdict(results(GOOD)), "pda - warm")
    half = 4.302653 * (0.01 / math.sqrt(3)) / math.sqrt(3)
    assert found["mean"] == pytest.approx(-0.14 / 3)
    assert (found["low"], found["high"]) == pytest.approx((-0.14 / 3 - half, -0.14 / 3 + half), rel=1e-6)
    assert found["n"] == 3
    assert found["within_noise"] is False
    assert found["relative"] == pytest.approx(-0.14 / 1.83)


def test_seeds_that_agree_are_no_proof() -> None:
    """Accuracies move in whole rows, so two seeds can differ by the same number without any meaning."""
    accuracy = {"warm": (0.75, 0.875), "pda": (0.625, 0.75)}
    loss = {"warm": (0.5, 0.75), "pda": (0.25, 0.5)}  # 0.25 less, exactly, twice
    found = verdict(results(loss, accuracy=accuracy))
    assert difference(found, "pda - warm")["within_noise"] is True
    assert difference(found, "pda - warm")["low"] is None
    assert "2 paired seeds that happen to agree: no interval" in sentence(found, "The mirror")
    assert not any("beyond noise" in s for s in found["sentences"])


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("n", [2, 3, 20])
def test_interval_against_scipy(n: int, confidence: float) -> None:
    values = np.random.default_rng(n).normal(3.0, 2.0, n)
    expected = stats.t.interval(confidence, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert t_interval(values.tolist(), confidence) == pytest.approx(expected, rel=1e-9)


@pytest.mark.paper
def test_coverage_is_that_of_t_and_not_of_z() -> None:
    """n = 4,000 studies of 3 seeds: 95 % of the intervals hold the true difference; a z-interval's 81 % is rejected.

    alpha = 1e-4 for the binomial test, two-sided.
    """
    generator = np.random.default_rng(5)
    studies, true = 4_000, -0.03
    common = generator.normal(0.6, 0.05, (studies, 3))  # what a seed does to both methods: pairing takes it away
    gaps = generator.normal(true, 0.01, (studies, 3))
    hits = z_hits = 0
    for warm, gap in zip(common, gaps, strict=True):
        found = difference(verdict(results({"warm": warm.tolist(), "pda": (warm + gap).tolist()})), "pda - warm")
        hits += found["low"] <= true <= found["high"]
        z_hits += abs(found["mean"] - true) <= (found["high"] - found["mean"]) * 1.959964 / 4.302653
    assert stats.binomtest(hits, studies, 0.95).pvalue > 1e-4
    assert stats.binomtest(z_hits, studies, 0.95).pvalue < 1e-4


@pytest.mark.paper
def test_picking_the_better_of_two_does_not_raise_false_gains() -> None:
    """n = 4,000 studies where neither warm nor pda differs from public: at most 2.5 % show a gain (alpha = 1e-4).

    The plain interval of whichever came out better shows one more often, and is rejected.
    """
    generator = np.random.default_rng(6)
    studies, names = 4_000, ("public", "warm", "pda")
    gains = bare = 0
    for values in generator.normal(0.6, 0.05, (studies, 3, 4)):
        found = difference(verdict(results(dict(zip(names, values, strict=True)))), "private - public")
        gains += not found["within_noise"] and found["mean"] < 0
        _, high = t_interval((values[names.index(found["method"])] - values[0]).tolist()) or (0.0, 0.0)
        bare += high < 0
    assert stats.binomtest(gains, studies, 0.025, alternative="greater").pvalue > 1e-4
    assert stats.binomtest(bare, studies, 0.025, alternative="greater").pvalue < 1e-4


def test_means_have_their_own_intervals() -> None:
    means = verdict(results(GOOD))["means"]
    assert list(means) == list(NAMES)
    low, high = stats.t.interval(0.95, 2, loc=0.61, scale=stats.sem(GOOD["warm"]))
    assert means["warm"]["loss"] == pytest.approx({"mean": 0.61, "low": low, "high": high, "n": 3})
    assert means["cold"]["loss"] == {"mean": 0.9, "low": None, "high": None, "n": 1}


def test_pairs_are_by_seed_and_only_common_seeds_count() -> None:
    runs = results({"warm": (0.6, 0.7), "pda": (0.5, 0.65, 0.1)})
    found = verdict(runs[::-1])
    assert difference(found, "pda - warm")["n"] == 2
    assert difference(found, "pda - warm")["mean"] == pytest.approx(-0.075)
    assert [d["name"] for d in found["differences"]] == ["pda - warm"]


def test_the_better_of_warm_and_pda_stands_for_private_training() -> None:
    swapped = {**GOOD, "warm": GOOD["pda"], "pda": GOOD["warm"]}
    assert difference(verdict(results(GOOD)), "private - public")["method"] == "pda"
    assert difference(verdict(results(swapped)), "private - public")["method"] == "warm"


# ---- words


def test_words_of_a_gain_beyond_noise() -> None:
    accuracy = {m: [1 - v for v in values] for m, values in GOOD.items()}
    found = verdict(results(GOOD, accuracy=accuracy))
    assert sentence(found, "The mirror") == (
        "The mirror lowers test loss by 0.0467 (7.65 %) against a warm start without it, "
        "95 % interval 0.0323 to 0.061 over 3 paired seeds: beyond noise."
    )
    assert sentence(found, "The mirror", "accuracy") == (
        "The mirror raises test accuracy by 4.67 points against a warm start without it, "
        "95 % interval 3.23 to 6.1 points over 3 paired seeds: beyond noise."
    )
    assert found["headline"] == (
        "Private training lowers test loss by 0.147 (20.7 %) against public training alone, beyond noise; "
        "the mirror lowers test loss by 0.0467 (7.65 %) against a warm start without it, beyond noise."
    )
    assert "each on its own" in " ".join(found["sentences"])
    assert "do not spend" not in " ".join(found["sentences"])


def test_words_of_harm() -> None:
    swapped = {**GOOD, "warm": GOOD["pda"], "pda": GOOD["warm"]}
    found = verdict(results(swapped))
    assert sentence(found, "The mirror").startswith("The mirror raises test loss by 0.0467 (8.28 %)")
    assert sentence(found, "The mirror").endswith("beyond noise.")
    assert "the mirror raises test loss by 0.0467" in found["headline"]


def test_words_within_noise() -> None:
    found = verdict(results({"warm": (0.60, 0.62, 0.61), "pda": (0.58, 0.63, 0.60)}))
    assert "within noise only: measured change -0.00667 (-1.09 %)" in sentence(found, "The mirror")
    assert re.search(
        r"interval -0\.0446 to \+0\.0313 over 3 paired seeds, which includes 0", sentence(found, "The mirror")
    )
    assert found["headline"] == "The mirror changes test loss against a warm start without it within noise only."


def test_one_seed_states_the_difference_and_claims_nothing() -> None:
    found = verdict(results({m: values[:1] for m, values in GOOD.items()}))
    assert "lowers test loss by 0.05 (8.33 %)" in sentence(found, "The mirror")
    assert "One seed: no interval; run more seeds." in found["sentences"]
    assert "beyond noise" not in found["headline"] + " ".join(found["sentences"])
    assert found["headline"].endswith("one seed cannot tell effect from noise.")
    assert all(d["within_noise"] and d["low"] is None for d in found["differences"])


@pytest.mark.parametrize(
    ("private", "headline", "advice"),
    [
        ((0.705, 0.712, 0.722), "Private data add nothing beyond public training here", True),  # within noise, worse
        ((0.60, 0.81, 0.71), "Private data show no gain beyond noise over public training here", True),
        ((0.80, 0.81, 0.82), "Private training raises test loss by 0.1 (14.1 %) against public training alone", True),
        ((0.60, 0.61, 0.62), "Private training lowers test loss by 0.1", False),
        ((0.75,), "Private data add nothing beyond public training here: one seed cannot tell", True),
        (
            (0.65,),
            "Private training lowers test loss by 0.05 (7.14 %) against public training alone on one seed",
            False,
        ),
    ],
)
def test_advice_where_private_data_add_nothing(private: Sequence[float], headline: str, advice: bool) -> None:
    found = verdict(results({"public": GOOD["public"], "warm": private}))
    assert found["headline"].startswith(headline)
    assert any("do not spend epsilon" in s for s in found["sentences"]) is advice


def test_accuracy_that_disagrees_with_the_loss_is_in_the_headline() -> None:
    loss = {"public": (0.70, 0.71, 0.72), "warm": (0.74, 0.751, 0.76)}
    found = verdict(results(loss, accuracy={"public": (0.78, 0.78, 0.78), "warm": (0.80, 0.801, 0.80)}))
    assert "raises test loss" in found["headline"]
    assert "but raises test accuracy by 2.03 points, beyond noise" in found["headline"]
    assert not any("do not spend" in s for s in found["sentences"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_diverged_run_is_named_and_never_averaged(bad: float | None) -> None:
    runs = results({**GOOD, "pda": (0.55, 0.571, 0.56)})  # the first two pairs alone would exclude 0
    runs[-1]["final"]["loss"] = bad
    found = verdict(runs)
    assert found["headline"].startswith("1 run diverged (pda); ")
    assert "what the mirror changes against a warm start without it is not known" in found["headline"]
    assert found["diverged"] == [{"method": "pda", "seed": 2}]
    assert found["means"]["pda"]["loss"]["n"] == 2
    mirror = difference(found, "pda - warm")
    assert (mirror["n"], mirror["mean"], mirror["within_noise"]) == (2, pytest.approx(-0.0495), True)
    assert mirror["high"] < 0
    assert "Diverged and left out: pda with seed 2; so nothing is claimed." in sentence(found, "The mirror")
    assert difference(found, "private - public")["method"] == "warm"  # the one that did not diverge
    json.dumps(found, allow_nan=False)


def test_all_diverged() -> None:
    found = verdict(results({"public": (0.7,), "warm": (math.nan,), "pda": (0.6,)}))
    assert found["means"]["warm"]["loss"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert "Not known: pda - warm. No seed has a finished run of both." in found["sentences"]


@pytest.mark.parametrize("runs", [[], results({"warm": (0.6, 0.5)}), results({"nobody": (0.6,)})])
def test_nothing_to_compare(runs: list[dict[str, Any]]) -> None:
    found = verdict(runs)
    assert found["headline"] == "There are no two methods with a seed in common to compare."
    assert found["differences"] == []


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="one for each method and seed"):
        verdict(results(GOOD) + results(GOOD))
    with pytest.raises(ConfigError, match=r"confidence=1.0 in \(0, 1\)"):
        verdict([], confidence=1.0)


# ---- whatever the numbers

VALUES = st.floats(allow_nan=False, allow_infinity=False)
STUDIES = st.dictionaries(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 3)),
    st.fixed_dictionaries({"loss": VALUES}, optional={"accuracy": st.floats(0, 1)}),
)
CHANGE = re.compile(r"(lowers|raises) test (\w+) by |test (\w+) .*measured change ([-+]?)")
WHO = {"Private": "private - public", "The public": "warm - cold", "The mirror": "pda - warm"}


@given(STUDIES)
def test_never_raises_and_the_words_have_the_sign_of_the_numbers(
    finals: dict[tuple[str, int], dict[str, float]],
) -> None:
    found = verdict([{"method": m, "seed": s, "final": final} for (m, s), final in finals.items()])
    told = 0
    for line in found["sentences"]:
        match = CHANGE.search(line)
        if match is None:
            continue
        name = next(name for start, name in WHO.items() if line.startswith(start))
        mean = difference(found, name, match[2] or match[3])["mean"]
        sign = {"lowers": -1, "raises": 1, "-": -1, "+": 1, "": 0}[match[1] or match[4]]
        assert np.sign(mean) == sign
        told += 1
    assert told + sum("as it is" in line for line in found["sentences"]) == len(found["differences"])
    for d in found["differences"]:
        ends = d["low"] is not None and (d["low"] > 0 or d["high"] < 0)
        assert d["within_noise"] is not ends
    if all(d["within_noise"] for d in found["differences"]):
        assert ": beyond noise" not in " ".join(found["sentences"])
