"""The sampler is the accountant's sampler. Each test states n and alpha, and rejects a wrong rate."""

from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats

from halfsilver.privacy.entropy import Entropy, OsEntropy, UnsafeSeed, uniform
from halfsilver.privacy.sampling import poisson_chunks

ALPHA = 1e-6


def draw(n: int, q: float, entropy: Entropy, chunk: int = 4096) -> np.ndarray:
    parts = [p for p in poisson_chunks(n, q, chunk, entropy) if isinstance(p, torch.Tensor)]
    return torch.cat(parts).numpy() if parts else np.zeros(0, dtype=np.int64)


def two_sided(k: int, n: int, q: float) -> float:
    return float(stats.binomtest(k, n, q).pvalue)


def test_rate_over_1e8_trials() -> None:
    """n = 1e8 inclusion trials (about 1e6 gaps), alpha = 1e-6: accepts q, rejects 1.01 q and 0.99 q."""
    n, q = 10**8, 0.01
    k = len(draw(n, q, OsEntropy(), chunk=1 << 16))
    assert two_sided(k, n, q) > ALPHA
    assert two_sided(k, n, 1.01 * q) < ALPHA
    assert two_sided(k, n, 0.99 * q) < ALPHA


@pytest.mark.nightly
def test_dispersion_pairs_lags_and_ends() -> None:
    """20,000 steps over 500 rows at q = 0.05, alpha = 1e-6 each.

    Dispersion of batch sizes and of row counts, joint inclusion of neighbours, lag-1 correlation between steps, and the
    rate of the first, the last and the chunk-border rows.
    """
    rows, steps, q, chunk = 500, 20_000, 0.05, 8
    entropy = OsEntropy()
    hit = np.zeros((steps, rows), dtype=bool)
    for s in range(steps):
        hit[s, draw(rows, q, entropy, chunk)] = True
    assert_binomial_dispersion(hit.sum(1), rows, q)
    assert_binomial_dispersion(hit.sum(0), steps, q)
    pairs = int((hit[:, :-1:2] & hit[:, 1::2]).sum())  # disjoint pairs, so that the count is binomial
    assert two_sided(pairs, steps * (rows // 2), q * q) > ALPHA
    lag = int((hit[:-1:2] & hit[1::2]).sum())
    assert two_sided(lag, steps // 2 * rows, q * q) > ALPHA
    for row in (0, 1, chunk - 1, chunk, rows - 2, rows - 1):
        assert two_sided(int(hit[:, row].sum()), steps, q) > ALPHA


def assert_binomial_dispersion(counts: np.ndarray, n: int, q: float) -> None:
    """Chi-square of the variance against n q (1 - q): accepts it, and would reject twice and half of it."""
    statistic = float(((counts - n * q) ** 2).sum() / (n * q * (1 - q)))
    p = [
        2 * min(stats.chi2.cdf(statistic * f, len(counts)), stats.chi2.sf(statistic * f, len(counts)))
        for f in (1, 2, 0.5)
    ]
    assert p[0] > ALPHA
    assert max(p[1:]) < ALPHA


@pytest.mark.parametrize("wrong", ["cyclic", "fixed size", "sticky"])
def test_the_dispersion_test_has_teeth(wrong: str) -> None:
    """Batches that cycle through the rows, shuffled batches of one size, and a repeated draw all fail it."""
    rng, steps, rows, q = np.random.default_rng(0), 2000, 500, 0.05
    hit = np.zeros((steps, rows), dtype=bool)
    once = rng.random(rows) < q
    for s in range(steps):
        size = int(q * rows)
        chosen = {"cyclic": np.arange(s * size, (s + 1) * size) % rows, "fixed size": rng.permutation(rows)[:size]}
        hit[s, chosen.get(wrong, np.flatnonzero(once))] = True
    with pytest.raises(AssertionError):
        assert_binomial_dispersion(hit.sum(0 if wrong == "sticky" else 1), steps if wrong == "sticky" else rows, q)


@pytest.mark.nightly
def test_two_shards_are_one_poisson_sample() -> None:
    """Independent sampling of disjoint shards (4,000 steps): the total's dispersion is that of one binomial."""
    totals = np.array([len(draw(300, 0.1, OsEntropy())) + len(draw(200, 0.1, OsEntropy())) for _ in range(4000)])
    assert_binomial_dispersion(totals, 500, 0.1)


def test_empty_batches_occur_and_yield_nothing() -> None:
    """2,000 steps at n q = 0.5: the share of empty batches is (1-q)^n, alpha = 1e-6."""
    empty = sum(len(draw(50, 0.01, OsEntropy())) == 0 for _ in range(2000))
    assert two_sided(empty, 2000, 0.99**50) > ALPHA
    assert list(poisson_chunks(0, 0.5, 8, OsEntropy())) == []


def test_indices_are_sorted_distinct_and_chunked() -> None:
    chunks = list(poisson_chunks(10_000, 0.3, 64, UnsafeSeed(0)))
    assert max(len(c) for c in chunks if isinstance(c, torch.Tensor)) <= 64
    joined = draw(10_000, 0.3, UnsafeSeed(0), 64)
    assert (np.diff(joined) > 0).all()
    assert joined[0] >= 0
    assert joined[-1] < 10_000


def test_full_batch_is_slices() -> None:
    assert list(poisson_chunks(5, 1.0, 2, OsEntropy())) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_ten_billion_rows_cost_what_the_batch_costs() -> None:
    """n = 10^10, q = 1e-7: a batch of about 1000, in under a second and a megabyte."""
    tracemalloc.start()
    started = time.perf_counter()
    batch = draw(10**10, 1e-7, OsEntropy(), chunk=512)
    seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 700 < len(batch) < 1300
    assert batch.max() > 10**9
    assert seconds < 1
    assert peak < 2**20


def test_uniforms_reach_one_and_never_zero() -> None:
    class Extreme:
        is_private = False

        def words(self, n: int) -> torch.Tensor:
            return torch.tensor([0, -1, 2**63 - 1, -(2**63)])[:n]

    u = uniform(Extreme(), 4)
    assert u.min() == 2.0**-53
    assert u.max() == 1.0
    assert math.isfinite(float(u.log().sum()))


@pytest.mark.parametrize("rate", [0.0, 1.1, -0.1, math.nan])
def test_bad_rate(rate: float) -> None:
    with pytest.raises(ValueError, match="sampling_rate"):
        list(poisson_chunks(10, rate, 1, OsEntropy()))
