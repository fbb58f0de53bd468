"""Every loop of the library under all instruments: small here, at full size by `pytest -m nightly tests/auditing`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfsilver._core.tensors import batch_rows
from halfsilver.auditing import judge, lower_bound
from halfsilver.auditing.bank import Layout
from halfsilver.auditing.loops import LOOPS, plan_of, run_loop, trainer_loop
from halfsilver.auditing.observe import Kind
from halfsilver.auditing.run import replayed
from halfsilver.privacy import noise, releases
from halfsilver.privacy.gradients import base
from halfsilver.privacy.gradients.vmap import Vmap
from halfsilver.privacy.strategies import Buffered, Correlated

pytest.importorskip("opacus")
pytest.importorskip("sklearn")

DELTA = 1e-5
FALSE_ALARM = 1e-4  # of all loops together


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOOPS)
def test_no_audit_refutes_the_printed_epsilon(name: str, tmp_path: Path) -> None:
    """2000 canaries in and 2000 out, T = 100, q = 0.1, sigma = 1, delta = 1e-5.

    A consistency test of the code, not a certificate: no instrument alarms, at a level divided over all loops, and the
    95 % bound reaches 0.85 of the claim, without which the audit could not have seen much. With correlated noise a run
    is one release, so that a canary has one score, and 20,000 of them are needed.
    """
    canaries = 20_000 if name == "correlated noise" else 2000
    seen = run_loop(name, plan_of(steps=100), tmp_path, canaries=canaries)
    findings = judge(seen, FALSE_ALARM / len(LOOPS), delta=DELTA)
    assert [f for f in findings if f.alarm] == []
    assert lower_bound(seen, 0.05, DELTA) >= 0.85 * seen.plan.epsilon(DELTA)


@pytest.mark.parametrize(
    "name",
    [
        "trainer/book",
        pytest.param("trainer/hooks", marks=pytest.mark.nightly),
        "map/DualAveraging",
        pytest.param("geometry", marks=pytest.mark.nightly),
        "attach_mirror",
        "two processes",
        "correlated noise",
    ],
)
def test_every_loop_is_quiet_at_a_small_size(name: str, tmp_path: Path) -> None:
    replay = name in ("trainer/hooks", "geometry", "correlated noise")
    seen = run_loop(name, plan_of(steps=10), tmp_path, canaries=100, replay=replay)
    assert [f for f in judge(seen, FALSE_ALARM / 100) if f.alarm] == []
    assert seen.scores.shape == (10, 2, 102)
    assert (seen.intents, seen.noise_draws, seen.releases) == (10, 10, 10)
    assert seen.sampled[:, seen.kinds == Kind.OUT].sum() == 0 < seen.sampled.sum()


def test_a_replay_of_turns_reads_the_record_that_leaves_however_many_there_are(tmp_path: Path) -> None:
    """50 batches in a pass, more than a replay has steps."""
    turns = Correlated(separation=50, strategy=Buffered((0.9,), (0.3,)))
    many = replace(plan_of(steps=10, sampling_rate=0.02), noise=turns)
    found = replayed(trainer_loop("vmap", "vmap"), many, tmp_path, Layout(canaries=20), Kind.IN)
    assert found.read.sum() == 6
    assert float(found.reach.max()) == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize(("broken", "instrument"), [("half the noise", "B"), ("ten clip norms", "A")])
def test_a_bug_in_the_mechanism_shows(
    broken: str, instrument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patched from outside into the code that trains, in one process and in two."""
    noisy, factors = noise.noisy_mean, base.clip_factors
    if broken == "half the noise":
        monkeypatch.setattr(releases, "noisy_mean", lambda s, sigma, *a, **k: noisy(s, sigma / 2, *a, **k))
    else:
        monkeypatch.setattr(base, "clip_factors", lambda norms, clip, *a: factors(norms, 10 * clip, *a))
    for name in ("trainer/vmap", "two processes"):
        seen = run_loop(name, plan_of(steps=10), tmp_path / name, canaries=200, replay=False)
        assert instrument in {f.instrument for f in judge(seen, 1e-6) if f.alarm}


def test_a_replay_sees_a_record_that_reaches_too_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the clip norm, and a batch divided by how many were drawn."""
    honest = Vmap.clipped_sum

    def beyond(self: Vmap, batch: Any, max_grad_norm: float, *args: Any) -> Any:
        return base.ClippedSum(honest(self, batch, 2 * max_grad_norm, *args).tensors, max_grad_norm)

    def by_count(self: Vmap, batch: Any, max_grad_norm: float, counted: Any = None, *args: Any) -> Any:
        total = honest(self, batch, max_grad_norm, counted, *args)
        rows = batch_rows(batch) if counted is None else int(counted.sum())
        return base.ClippedSum([t * 20 / (rows or 1) for t in total.tensors], max_grad_norm)

    def farthest(name: str, patch: Any) -> Any:
        monkeypatch.setattr(Vmap, "clipped_sum", patch)
        found = replayed(trainer_loop("vmap", "vmap"), plan_of(), tmp_path / name, Layout(canaries=20), Kind.IN)
        return float(found.reach.max()), found.differing

    assert farthest("honest", honest) == (pytest.approx(1, abs=2e-3), ())
    assert farthest("beyond", beyond) == (pytest.approx(2, abs=5e-3), ())
    assert farthest("by count", by_count)[1] == ("rest",)
