"""The instruments on made-up observations: quiet on the claimed mechanism, and each alarm on the bug it is for.

n = 2 * 200 scores in each of 40 steps and alpha = 1e-6 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halfsilver.auditing import Finding, Kind, Observation, Replay, judge, lower_bound
from halfsilver.auditing.bank import Layout
from halfsilver.auditing.instruments import p_values
from halfsilver.auditing.loops import plan_of

ALPHA, STEPS = 1e-6, 40
PLAN = plan_of(steps=STEPS)
LAYOUT = Layout(canaries=200)
Rng = np.random.Generator


def clean(rng: Rng, *, world: int = 1, rate: float = 0.1, noise: float = 1.0, clip: float = 1.0) -> Observation:
    """The plan's mechanism in a few lines of numpy; processes own every `world`-th record."""
    kinds, places = LAYOUT.kinds, LAYOUT.places
    read = (rng.random((STEPS, len(places))) < rate).astype(np.int64)
    owner = np.arange(len(places)) % world
    scores = noise * rng.standard_normal((STEPS, kinds.size))
    scores[:, places] += clip * read * (kinds.ravel()[places] != Kind.BROKEN)
    return Observation(
        loop="made up",
        plan=PLAN,
        scores=scores.reshape(STEPS, *kinds.shape),
        kinds=kinds,
        reads=np.stack([read * (owner == rank) for rank in range(world)]),
        places=places,
        intents=STEPS,
        releases=STEPS,
    )


def alarms(observation: Observation) -> set[tuple[str, str]]:
    return {(f.instrument, f.test) for f in judge(observation, ALPHA) if f.alarm}


def changed(rng: Rng, change: Callable[[np.ndarray], Any], **options: Any) -> Observation:
    """A clean observation with its scores changed in place."""
    seen = clean(rng, **options)
    change(seen.scores)
    return seen


def cyclic(rng: Rng) -> Observation:
    seen = clean(rng)
    read = (np.arange(len(seen.places)) % 10 == np.arange(STEPS)[:, None] % 10).astype(np.int64)
    return replace(seen, reads=read[None])


def paired(rng: Rng) -> Observation:
    """Both processes draw with the same seed: records 2i and 2i + 1 come and go together."""
    seen = clean(rng, world=2)
    read = seen.reads.sum(0)
    read[:, 1::2] = read[:, ::2]
    return replace(seen, reads=np.stack([read * (np.arange(read.shape[1]) % 2 == rank) for rank in range(2)]))


def padded(rng: Rng) -> Observation:
    """The second process owns the first record too."""
    seen = clean(rng, world=2)
    seen.reads[1, :, 0] = rng.random(STEPS) < 0.1
    return seen


def same(to: Any, of: Any) -> Callable[[np.ndarray], None]:
    return lambda scores: scores.__setitem__(to, scores[of])


def spoilt(scores: np.ndarray) -> None:
    scores[3, LAYOUT.kinds == Kind.BROKEN] = np.nan


def unclipped(scores: np.ndarray) -> None:
    scores[:, LAYOUT.kinds == Kind.CANCELLING] *= 50


def leaking(scores: np.ndarray) -> None:
    scores[:, LAYOUT.kinds == Kind.IN] += 0.3


HALF = LAYOUT.width // 2
BUGS: dict[str, tuple[Callable[[Rng], Observation], tuple[str, str]]] = {
    "noise x0.5": (lambda rng: clean(rng, noise=0.5), ("A", "epsilon")),
    "clip x3": (lambda rng: clean(rng, clip=3.0), ("A", "epsilon")),
    "noise x0.9": (lambda rng: clean(rng, noise=0.9), ("B", "noise variance")),
    "noise x1.1": (lambda rng: clean(rng, noise=1.1), ("B", "noise variance")),
    "rate x1.5": (lambda rng: clean(rng, rate=0.15), ("B", "rate")),
    "cyclic batches": (cyclic, ("B", "steps per record")),
    "batches of one size": (cyclic, ("B", "records per step")),
    "same sampler seed on every rank": (paired, ("B", "neighbouring records")),
    "padded shard": (padded, ("B", "processes that read a record")),
    "noise of one step in the next": (
        lambda rng: changed(rng, same(slice(1, None, 2), slice(0, None, 2))),
        ("B", "noise of neighbouring steps"),
    ),
    "noise of one step in all": (lambda rng: changed(rng, same(slice(None), 0)), ("reconciliation", "noise_draws")),
    "same seed on every tensor": (
        lambda rng: changed(rng, same((slice(None), 1), (slice(None), 0))),
        ("B", "noise of the two layers"),
    ),
    "same seed on every rank": (
        lambda rng: changed(rng, same(np.s_[:, :, HALF:], np.s_[:, :, :HALF]), world=2),
        ("B", "noise of two processes"),
    ),
    "same seed on every rank, a few numbers later": (
        lambda rng: changed(rng, same(np.s_[:, :, HALF + 3 :], np.s_[:, :, : HALF - 3]), world=2),
        ("B", "noise of two processes"),
    ),
    "division by the size of the batch": (
        lambda rng: changed(rng, lambda scores: scores.__imul__(1 + 0.2 * rng.standard_normal((STEPS, 1, 1)))),
        ("B", "noise variance of each step"),
    ),
    "a leak to canaries that are not read": (lambda rng: changed(rng, leaking), ("B", "noise mean")),
    "NaN passes": (lambda rng: changed(rng, spoilt), ("B", "finite scores")),
    "Gram norm cancels": (lambda rng: changed(rng, unclipped), ("B", "cancelling canaries")),
    "one intent too few": (lambda rng: replace(clean(rng), intents=STEPS - 1), ("reconciliation", "intents")),
}


@pytest.mark.parametrize("world", [1, 2])
def test_the_claimed_mechanism_sets_off_no_alarm(world: int) -> None:
    for seed in range(3):
        assert alarms(clean(np.random.default_rng(seed), world=world)) == set()


def test_p_values_are_those_of_chance() -> None:
    """100 clean observations at 12 tests each: the share below 0.05 is 0.05, within five standard deviations."""
    values = [p for seed in range(100) for _, p in p_values(clean(np.random.default_rng(seed)))]
    assert len(values) == 100 * 12
    assert abs(np.mean(np.less(values, 0.05)) - 0.05) < 5 * np.sqrt(0.05 * 0.95 / len(values))


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_sets_off_the_alarm_that_is_for_it(bug: str) -> None:
    make, (instrument, test) = BUGS[bug]
    for seed in range(2):
        found = alarms(make(np.random.default_rng(seed)))
        assert any(i == instrument and t.startswith(test) for i, t in found), found


def test_the_bound_does_not_follow_the_claim() -> None:
    """It is one of what is seen: less noise shows whether or not the plan says so, by the same figure."""
    seen = clean(np.random.default_rng(0), noise=0.7)
    honest = replace(seen, plan=plan_of(steps=STEPS, noise_multiplier=0.7))
    assert lower_bound(seen, 0.05) == lower_bound(honest, 0.05) > PLAN.epsilon(1e-5)
    assert lower_bound(seen, 1e-9) < lower_bound(seen, 0.05)


@pytest.mark.parametrize(
    ("replay", "alarm"),
    [
        (Replay(leaver=Kind.IN, reach=np.array([1.0, 0.0]), read=np.array([True, False])), False),
        (Replay(leaver=Kind.IN, reach=np.array([1.01, 0.0]), read=np.array([True, False])), True),
        (Replay(leaver=Kind.IN, reach=np.array([0.9, 0.1]), read=np.array([True, False])), True),
        (Replay(leaver=Kind.BROKEN, reach=np.array([0.5, 0.0]), read=np.array([True, False])), True),
        (Replay(leaver=Kind.BROKEN, reach=np.array([np.nan, 0.0]), read=np.array([True, False])), True),
        (Replay(leaver=Kind.IN, reach=np.zeros(2), read=np.ones(2, bool), differing=("rest",)), True),
    ],
)
def test_a_replay_allows_one_clip_norm_where_the_record_was_read(replay: Replay, alarm: bool) -> None:
    findings = judge(replace(clean(np.random.default_rng(0)), replays=(replay,)), ALPHA)
    assert [f.instrument for f in findings if f.alarm] == ["C"] * alarm


def test_full_batches_leave_nobody_out() -> None:
    rng = np.random.default_rng(0)
    plan = plan_of(steps=STEPS, sampling_rate=1.0, noise_multiplier=20.0)
    seen = replace(clean(rng, rate=1.0, noise=20.0), plan=plan)
    assert alarms(seen) == set()
    seen.reads[0, 3, 5] = 0
    assert ("B", "records left out of a full batch") in alarms(seen)


def test_a_finding_says_what_it_is() -> None:
    first = judge(clean(np.random.default_rng(0)), ALPHA)[0]
    assert isinstance(first, Finding)
    assert (first.instrument, first.kind, first.limit) == ("A", "bound", PLAN.epsilon(1e-5))
