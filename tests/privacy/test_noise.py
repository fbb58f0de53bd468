"""The noise has the stated scale, shape and independence, and leaves no trace of the sum in its bits."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from halfsilver.errors import ConfigError
from halfsilver.privacy.entropy import BLOCK, MAX_NORMAL, MAX_SCALE, Entropy, OsEntropy, UnsafeSeed, normal_blocks
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.noise import _together, add_noise, grid, noise_scale, noisy_mean, on_grid

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
    g = grid(1.0, 4)
    release([torch.zeros(4)], 0.999 * MAX_SCALE * g, 1.0)
    with pytest.raises(ConfigError, match="float64"):
        release([torch.zeros(4)], 1.001 * MAX_SCALE * g, 1.0)


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


class Words:
    """Entropy that gives these words, for radii and for angles; then further ones, where a radius needs more bits."""

    is_private = False

    def __init__(self, radii: list[int], angles: list[int], further: int) -> None:
        self.first, self.further = torch.tensor(radii + angles, dtype=torch.int64), further

    def words(self, n: int) -> torch.Tensor:
        return self.first if n == len(self.first) else torch.tensor([self.further] * n)


TOP = 2**63
CLOSE = 2**43  # this close to 0 or 1, in units of 2^-63, a radius needs more bits


def further_for(place: int) -> int:
    """The further word that places a radius by `place` * 2^-53 from the middle of the share of its own word."""
    return (place - 1) * 2048 - TOP if place > 0 else (place - 1) * 2048 + TOP


def drawn(radii: list[int], angles: list[int], scale: float = 1.0, further: int = 0) -> np.ndarray:
    """The pairs of normals that these words give, [n, 2]."""
    ((_, block),) = normal_blocks(Words(radii, angles, further), 2 * len(radii), scale)
    return block.clone().view(2, -1).T.numpy()


def exact(word: int, angle: int, further: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    """The same pair in 60 digits."""
    place = mpmath.mpf((further >> 11) % 2**53 + 1) / 2**53 - mpmath.mpf(1) / 2  # within the share of its word
    below, above = abs(word), TOP - abs(word)
    share = mpmath.mpf(below) / TOP
    if below < CLOSE:
        share = max(abs(below + place) / TOP, mpmath.mpf(2) ** -117)
    elif above < CLOSE:
        share = 1 - abs(above + place) / TOP
    radius, turn = mpmath.sqrt(-2 * mpmath.log(share)), mpmath.pi * angle / TOP
    return radius * mpmath.cos(turn), radius * mpmath.sin(turn)


def errors(radii: list[int], angles: list[int], further: int = 0) -> np.ndarray:
    """How far the numbers drawn are from exact ones, in standard deviations."""
    with mpmath.workdps(60):
        pairs = zip(drawn(radii, angles, 1.0, further).tolist(), radii, angles, strict=True)
        found = [
            [abs(mpmath.mpf(a) - b) for a, b in zip(pair, exact(r, w, further), strict=True)] for pair, r, w in pairs
        ]
        return np.array(found, dtype=np.float64)


@pytest.mark.nightly
def test_the_ends_are_those_of_exact_arithmetic() -> None:
    """All words next to 0 and 1, and some at each distance: next to 1 a float64 would give 1,024 words one radius."""
    next_to_one = [TOP - c for c in range(1, 1500)] + [-TOP + c for c in range(1500)]
    next_to_zero = list(range(-500, 500))
    far = [sign * (TOP - 2**k + j) for k in range(13, 50) for j in (-1, 0, 1) for sign in (-1, 1)]
    far += [sign * (2**k + j) for k in range(13, 63) for j in (-1, 0, 1) for sign in (-1, 1)]
    words = next_to_one + next_to_zero + far
    angles = [(12345678901234567 * i) % 2**64 - TOP for i in range(len(words))]
    for further in (0, -1, 2**62 + 12345, TOP - 2048):
        assert errors(words, angles, further).max() < 2.0**-44
        radii = np.hypot(*drawn(words, angles, 1.0, further).T)
        with mpmath.workdps(60):
            pairs = list(zip(words, angles, strict=True))[: len(next_to_one) + len(next_to_zero)]
            wanted = np.array([mpmath.hypot(*exact(*pair, further)) for pair in pairs], dtype=np.float64)
        assert (np.abs(radii[: len(wanted)] - wanted) <= 2.0**-50 * wanted).all(), "relative, however small"


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [2.0**30, 2.0**37, MAX_SCALE])
def test_no_two_circles_are_a_grid_step_apart(steps: float) -> None:
    """Exact enumeration of neighbouring radii: at both ends, at the borders of their treatment, and between.

    2^30 grid steps to a standard deviation are a million parameters at noise multiplier 1.
    """

    def largest_gap(words: list[int], *further: int) -> float:
        radii = [np.hypot(*drawn(words, [0] * len(words), steps, f).T) for f in further or (0,)]
        return float(np.diff(np.sort(np.concatenate(radii))).max())

    assert largest_gap([TOP - CLOSE + 512 * j for j in range(-500, 500)], *range(-TOP, TOP, TOP // 8)) < 1
    assert largest_gap([CLOSE + j for j in range(-500, 500)], *range(-TOP, TOP, TOP // 8)) < 1
    for u in (0.001, 0.25, 0.5, 0.75, 0.999):
        assert largest_gap([int(TOP * u) + 512 * j for j in range(-500, 500)]) < 1
    for word in (1, 2, 1000, -TOP, TOP - 1, TOP - 2, TOP - 1000):
        assert largest_gap([word], *(further_for(j) for j in range(-1000, 1000))) < 1
    tail = int(steps)  # beyond it there are gaps, and an exact sampler goes there with probability steps * 2^-116
    assert largest_gap([0], *(further_for(tail + j) for j in range(1000))) < 1


def test_how_far_the_sampler_is_from_exact_arithmetic() -> None:
    """The chance that a number goes to another grid point is twice the mean distance in grid steps: 2^-48 * steps."""
    generator = torch.Generator().manual_seed(0)
    words = torch.empty(2, 20_000, dtype=torch.int64).random_(-TOP, None, generator=generator).tolist()
    words[0] += [0, 1, -1, 2, TOP - 1, -TOP, TOP // 2, 3]
    words[1] += [0, -TOP, TOP - 1, TOP // 2, 1, -1, -TOP // 2, TOP // 4]
    found = errors(*words)
    assert found.max() < 2.0**-44
    assert 2 * found.mean() < 2.0**-48


def test_the_tail_ends_where_it_is_said_to() -> None:
    """An exact sampler has a larger radius with probability 2^-117."""
    assert math.hypot(*drawn([0], [0], 1.0, further_for(0))[0]) == pytest.approx(MAX_NORMAL, rel=1e-15)
    for j in (-(2**52) + 1, -1, 1, 2**52):
        assert math.hypot(*drawn([0], [0], 1.0, further_for(j))[0]) < MAX_NORMAL
    assert math.exp(-(MAX_NORMAL**2) / 2) == pytest.approx(2.0**-117)


def test_ten_million_normals_cost_at_most_three_randn() -> None:
    """The median ratio of 12 interleaved pairs; it is about 1.1. Process time, because the machine may be shared.

    The blocks are dropped as they come, as the mechanism does. Keeping them would measure the pages of a new array.
    """

    def seconds(call: Callable[[], object]) -> float:
        started = time.process_time()
        call()
        return time.process_time() - started

    n = 10**7
    ratios = []
    for _ in range(12):
        plain = seconds(lambda: torch.randn(n))
        ratios.append(seconds(lambda: deque(normal_blocks(OsEntropy(), n, 1.0), maxlen=0)) / plain)
    assert statistics.median(ratios) < 3, ratios


def test_several_threads_draw_larger_blocks_but_a_seed_gives_what_it_gives() -> None:
    total = ClippedSum([torch.zeros(5 * BLOCK // 2, dtype=torch.float64)], 1.0)
    sizes: list[int] = []

    class Counted:
        is_private = True

        def words(self, n: int) -> torch.Tensor:
            sizes.append(n)
            return OsEntropy().words(n)

    threads = torch.get_num_threads()
    try:
        released = []
        for count in (1, 2):
            torch.set_num_threads(count)
            released.append(add_noise(total, 1.0, UnsafeSeed(3)).pop())
            add_noise(total, 1.0, Counted())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*released)
    assert [n for n in sizes if n >= BLOCK // 2] == [BLOCK, BLOCK, BLOCK // 2, 2 * BLOCK, BLOCK // 2]


def test_every_draw_mixes_in_new_bytes_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfsilver.privacy.entropy.os.urandom", bytes)
    mixed: list[bytes] = []
    monkeypatch.setattr("halfsilver.privacy.entropy.RAND_add", lambda fresh, _: mixed.append(fresh))
    add_noise(ClippedSum([torch.zeros(3), torch.zeros(2 * BLOCK + 1)], 1.0), 1.0, OsEntropy())
    assert set(mixed) == {bytes(32)}
    assert len(mixed) >= 4  # and one more for each block with a radius that needs more bits


def test_small_tensors_are_released_together_as_they_are_alone() -> None:
    """The same words, whether neighbours that fit into one block are one tensor or several."""
    shapes = [(3,), (2, 5), (BLOCK,), (), (7,), (BLOCK - 8,)]
    whole = torch.randn(sum(math.prod(shape) for shape in shapes), dtype=torch.float64)
    parts = [
        t.view(shape)
        for t, shape in zip(torch.split_with_sizes(whole, [math.prod(s) for s in shapes]), shapes, strict=True)
    ]
    assert [*_together(parts)] == [[0, 1], [2], [3, 4, 5]]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32, torch.float64]
    found = noisy_mean(ClippedSum([t.clone() for t in parts], 1.0), 1.0, UnsafeSeed(0), expected=2.0, dtypes=dtypes)
    entropy = UnsafeSeed(0)
    expected: list[torch.Tensor] = []
    for places in ([0, 1], [2], [3, 4, 5]):
        flat = torch.cat([parts[i].reshape(-1) for i in places])
        one = ClippedSum([flat], 1.0)
        (noisy,) = noisy_mean(one, 1.0, entropy, expected=2.0, dtypes=[torch.float64], dimension=len(whole))
        expected += torch.split_with_sizes(noisy, [parts[i].numel() for i in places])
    for released, right, dtype in zip(found, expected, dtypes, strict=True):
        assert released.dtype == dtype
        assert torch.equal(released.reshape(-1), right.to(dtype))
