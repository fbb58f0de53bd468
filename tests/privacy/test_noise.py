"""The noise has the stated scale, shape and independence, and leaves no trace of the sum in its bits."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from scipy import stats

from halfsilver.errors import ConfigError
from halfsilver.privacy.entropy import BLOCK, MAX_NORMAL, Entropy, OsEntropy, UnsafeSeed, normal_blocks
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.noise import add_noise, grid, noise_scale, noisy_mean, on_grid

N = 200_000
ALPHA = 1e-6


def normal(entropy: Entropy, n: int) -> torch.Tensor:
    return torch.cat([torch.empty(0).double(), *(block.clone() for _, block in normal_blocks(entropy, n, 1.0))])


def release(total: list[torch.Tensor], sigma: float, sensitivity: float) -> list[torch.Tensor]:
    return add_noise(ClippedSum([t.double() for t in total], sensitivity), sigma, OsEntropy())


def variance_p(sample: np.ndarray, sigma: float) -> float:
    """Two-sided p-value of the chi-square test that the standard deviation is `sigma` (mean known to be 0)."""
    statistic = float((sample**2).sum()) / sigma**2
    return 2 * float(min(stats.chi2.cdf(statistic, len(sample)), stats.chi2.sf(statistic, len(sample))))


@pytest.mark.parametrize(("sigma", "clip"), [(1.0, 1.0), (0.41, 0.3), (20.0, 5.0)])
def test_scale_shape_and_mean(sigma: float, clip: float) -> None:
    """n = 200,000, alpha = 1e-6: chi-square accepts sigma and rejects 0.98 and 1.02 sigma; KS accepts the shape."""
    sample = release([torch.zeros(N)], sigma, clip)[0].numpy()
    scale = sigma * clip
    assert variance_p(sample, scale) > ALPHA
    assert variance_p(sample, 0.98 * scale) < ALPHA
    assert variance_p(sample, 1.02 * scale) < ALPHA
    assert stats.kstest(sample / scale, "norm").pvalue > ALPHA
    assert abs(sample.mean()) < 4.9 * scale / math.sqrt(N)


def test_shape_test_has_teeth() -> None:
    """A uniform and a Laplace sample of the same variance are rejected by the same KS test."""
    rng = np.random.default_rng(0)
    for wrong in (rng.uniform(-(3**0.5), 3**0.5, N), rng.laplace(scale=0.5**0.5, size=N)):
        assert stats.kstest(wrong, "norm").pvalue < ALPHA


def test_independence_of_steps_tensors_and_halves() -> None:
    """Correlations between steps, between tensors of one release, and at lag 1: |r| < 4.9 / sqrt(n), n = 200,000."""
    a, b = (t.numpy() for t in release([torch.zeros(N), torch.zeros(N)], 1.0, 1.0))
    c = release([torch.zeros(N)], 1.0, 1.0)[0].numpy()
    half = N // 2
    for x, y in ((a, b), (a, c), (a[:-1], a[1:]), (a[:half], a[half:]), (a**2, b**2)):
        assert abs(np.corrcoef(x, y)[0, 1]) < 4.9 / math.sqrt(len(x))
    assert abs(np.corrcoef(a, a)[0, 1]) > 4.9 / math.sqrt(N)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sum_over_shards_keeps_the_scale(ranks: int) -> None:
    """World sizes 1, 2 and 4: each rank draws for its own shard; the whole has scale sigma and no shared draws."""
    shards = [
        add_noise(ClippedSum([torch.zeros(N // ranks, dtype=torch.float64)], 1.0), 1.0, OsEntropy(), dimension=N)[0]
        for _ in range(ranks)
    ]
    whole = torch.cat(shards).numpy()
    assert variance_p(whole, 1.0) > ALPHA
    assert variance_p(whole, 0.98) < ALPHA
    for i in range(1, ranks):
        assert abs(np.corrcoef(shards[0], shards[i])[0, 1]) < 4.9 / math.sqrt(N // ranks)


def test_output_grid_does_not_depend_on_the_data() -> None:
    """1e6 releases: minus the rounded sum of *either* neighbour, always a multiple of the grid. 0 exceptions."""
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(10**6, generator=generator, dtype=torch.float64) * 3
    neighbour = total + torch.randn(10**6, generator=generator, dtype=torch.float64) / 1000
    g = grid(1.0, 10**6)
    out = release([total], 1.0, 1.0)[0]
    for base in (total, neighbour):
        difference = out / g - on_grid(base, g)
        assert int((difference != difference.round()).sum()) == 0


def test_plain_float32_noise_would_fail_the_same_test() -> None:
    """The test above has teeth: float32 noise on float32 sums leaves the grid of a neighbour in most cases."""
    total = torch.rand(10**5) / 3
    out = (total + torch.randn(10**5)).double()
    neighbour = (total * 1.001).double()
    g = 2.0**-24
    difference = (out - neighbour) / g
    assert (difference != difference.round()).double().mean() > 0.3


def test_addition_is_exact_up_to_the_limit() -> None:
    """Huge and infinite sums are clamped into the exact range: no NaN, no rounding, whatever arrives."""
    g = grid(1.0, 4)
    out = release([torch.tensor([1e300, -math.inf, math.nan, 2.0**51 * g])], 1.0, 1.0)[0]
    assert torch.isfinite(out).all()
    assert (out / g == (out / g).round()).all()
    assert out.abs().max() <= 2.0**53 * g


def test_grid_is_the_largest_power_of_two_below_the_bound() -> None:
    for clip, d in ((1.0, 1), (0.3, 10**7), (5.0, 10**9)):
        g = grid(clip, d)
        assert math.frexp(g)[0] == 0.5
        assert g <= 1e-6 * clip / math.sqrt(d) < 2 * g


def test_margin_pays_for_rounding() -> None:
    """Sensitivity after rounding is at most C (1 + 1e-6), and the noise is scaled by 1 + 2e-6."""
    d, clip = 10_000, 0.7
    g = grid(clip, d)
    assert clip + g * math.sqrt(d) <= clip * (1 + 1e-6)
    assert noise_scale(1.3, clip) >= 1.3 * (clip + g * math.sqrt(d))


def test_noise_too_large_for_exact_addition_is_refused() -> None:
    with pytest.raises(ConfigError, match="noise_multiplier"):
        release([torch.zeros(4)], 1e12, 1.0)


def test_released_mean_is_the_noisy_sum_divided_and_cast() -> None:
    """One pass over blocks gives what the steps of the definition give one after the other, whatever the dtype."""
    total = [torch.randn(3, 5), torch.randn(2 * BLOCK + 7)]
    for dtype in (torch.float32, torch.float64):
        sums = [t.to(dtype) for t in total]
        noisy = add_noise(ClippedSum(sums, 0.7), 1.3, UnsafeSeed(5))
        mean = noisy_mean(
            ClippedSum([t.clone() for t in sums], 0.7), 1.3, UnsafeSeed(5), expected=37.0, dtypes=[torch.float32] * 2
        )
        for a, b in zip(noisy, mean, strict=True):
            assert b.dtype == torch.float32
            torch.testing.assert_close((a / 37.0).float(), b, rtol=2e-7, atol=0.0)


def test_normals_use_both_halves_of_odd_blocks() -> None:
    for n in (0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1):
        x = normal(UnsafeSeed(1), n)
        assert len(x) == n
        assert torch.isfinite(x).all()
        assert n == 0 or x.abs().max() <= MAX_NORMAL
        assert len(set(x.tolist())) == n


def test_ten_million_normals_cost_at_most_four_randn() -> None:
    """Interleaved, 5 repetitions, the smallest of each; process time, because the machine may be shared."""

    def seconds(call: object) -> float:
        started = time.process_time()
        call()  # type: ignore[operator]
        return time.process_time() - started

    n = 10**7
    pairs = [(seconds(lambda: torch.randn(n)), seconds(lambda: normal(OsEntropy(), n))) for _ in range(5)]
    plain, ours = (min(x) for x in zip(*pairs, strict=True))
    assert ours < 4 * plain, f"{ours:.3f} s against {plain:.3f} s for torch.randn"


def test_every_draw_mixes_in_new_bytes_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfsilver.privacy.entropy.os.urandom", bytes)
    mixed: list[bytes] = []
    monkeypatch.setattr("halfsilver.privacy.entropy.RAND_add", lambda fresh, _: mixed.append(fresh))
    add_noise(ClippedSum([torch.zeros(3), torch.zeros(2 * BLOCK + 1)], 1.0), 1.0, OsEntropy())
    assert mixed == [bytes(32)] * 4
