"""Correlated noise step by step: the same as the inverse of the strategy's matrix, on whole numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfsilver.errors import ConfigError
from halfsilver.privacy.correlated import banded, buffered, sensitivity
from halfsilver.privacy.noise_chain import NoiseChain, arithmetic, rounding
from halfsilver.privacy.strategies import Banded, Buffered, Participation, Strategy

STRATEGIES = [
    Buffered((0.9, 0.3), (0.4, 0.2)),
    Buffered((0.999,), (0.1,)),
    Banded((1.0, 0.6, 0.6, 0.1)),
    Banded((1.0,)),
    buffered(Participation(rounds=50, separation=10), buffers=3),
    banded(Participation(rounds=50, separation=10), bands=10),
]


def solved(strategy: Strategy, noise: Tensor) -> Tensor:
    """C^-1 z by dense matrices."""
    n = len(noise)
    rows, cols = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    column = strategy.column(n)
    matrix = torch.where(rows >= cols, column[(rows - cols).clamp(min=0)], 0.0)
    found: Tensor = torch.linalg.solve(matrix, noise)
    return found


def chained(strategy: Strategy, noise: Tensor, parts: int = 1) -> Tensor:
    """The noise of all steps, [rounds, dimension], in several parts per step."""
    chain = NoiseChain(strategy, noise.shape[1], rounds=len(noise), scale=1e9)
    size = math.ceil(noise.shape[1] / parts)
    out = noise.clone()
    for step in out:
        for start in range(0, len(step), size):
            chain.follow(step[start : start + size], start)
        chain.advance()
    return out


@settings(max_examples=30, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES), rounds=st.integers(1, 50), parts=st.integers(1, 3), seed=st.integers(0, 99)
)
def test_steps_solve_the_triangular_system_up_to_rounding(
    strategy: Strategy, rounds: int, parts: int, seed: int
) -> None:
    """Whole numbers come out, and C w is z up to half a unit per step, which is what the noise pays for."""
    torch.manual_seed(seed)
    z = (1e9 * torch.randn(rounds, 5, dtype=torch.float64)).round()
    w = chained(strategy, z, parts)
    assert torch.equal(w, w.round())
    column = strategy.column(rounds)
    back = torch.stack([sum((column[t - s] * w[s] for s in range(t + 1)), torch.zeros(5)) for t in range(rounds)])
    assert float((back - z).abs().max()) <= 0.5 + 1e-3
    assert float((w - solved(strategy, z)).abs().max()) <= rounds


def test_covariance_is_that_of_the_strategy() -> None:
    """n = 200,000 coordinates, 6 steps: entries of the covariance within 5 standard errors (alpha = 2e-5 in all).

    Independent noise, and a strategy whose coefficient is off by a tenth, are told from it.
    """
    torch.manual_seed(0)
    n, rounds, strategy = 200_000, 6, Buffered((0.8, 0.2), (0.3, 0.3))
    w = chained(strategy, (1e6 * torch.randn(rounds, n, dtype=torch.float64)).round()) / 1e6

    def distance(other: Strategy) -> float:
        inverse = solved(other, torch.eye(rounds, dtype=torch.float64))
        expected = inverse @ inverse.T
        variances = expected.diagonal()
        errors = ((variances[:, None] * variances[None, :] + expected.square()) / n).sqrt()
        return float(((w @ w.T / n - expected) / errors).abs().max())

    assert distance(strategy) < 5
    assert distance(Buffered((0.8, 0.2), (0.3, 0.27))) > 5
    assert distance(Banded((1.0,))) > 5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_new_chain_costs_nothing(strategy: Strategy, cut: int) -> None:
    """The sensitivity of a run in two chains, from its whole matrix, is no larger than that of one chain."""
    rounds, separation = 24, 5
    participation = Participation(rounds=rounds, separation=separation)
    column = strategy.column(rounds)
    matrix = torch.zeros(rounds, rounds, dtype=torch.float64)
    for j in range(rounds):
        end = cut if j < cut else rounds
        matrix[j:end, j] = column[: end - j]
    whole = float(sensitivity(column, participation))
    for first in range(rounds):  # the pattern with each possible first round
        chosen = list(range(first, rounds, separation))
        assert float(matrix[:, chosen].sum(1).norm()) <= whole * (1 + 1e-12)


def test_memory_is_constant_and_known() -> None:
    strategy = buffered(Participation(rounds=200, separation=100), buffers=4)
    assert 1 <= len(strategy.decays) <= 4  # those that change nothing are left out
    assert NoiseChain(strategy, 1000, rounds=200, scale=1e9).bytes == len(strategy.decays) * 8 * 1000
    assert NoiseChain(Banded((1.0,)), 1000, rounds=200, scale=1e9).bytes == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_error_of_arithmetic_is_within_its_bound(strategy: Strategy) -> None:
    """Against fractions, which have no rounding: what is carried over at each of 40 steps, before it is made whole."""
    torch.manual_seed(0)
    rounds, scale = 40, 2.0**40
    if isinstance(strategy, Buffered):
        pairs = [(Fraction(d), Fraction(s)) for d, s in zip(strategy.decays, strategy.scales, strict=True)]
        column = [sum((s * d**t for d, s in pairs), Fraction(0)) for t in range(rounds)]
    else:
        column = [Fraction(c) for c in (*strategy.coefficients[1:], *[0.0] * rounds)]
    bound = arithmetic(strategy, rounds, scale)
    chain, done = NoiseChain(strategy, 1, rounds=rounds, scale=1e9), list[Fraction]()
    for _ in range(rounds):
        exact = sum((column[age] * w for age, w in enumerate(reversed(done))), Fraction(0))
        assert abs(Fraction(float(chain._carried(slice(0, 1)))) - exact) <= bound
        w = chain.follow((scale * torch.randn(1, dtype=torch.float64)).round(), 0)
        done.append(Fraction(float(w)))
        chain.advance()


def test_noise_that_float64_cannot_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="error of arithmetic"):
        NoiseChain(Buffered((1 - 1e-9,), (0.1,)), 3, rounds=1000, scale=1e9)
    with pytest.raises(ConfigError, match="error of arithmetic"):
        NoiseChain(Buffered((0.9,), (0.1,)), 3, rounds=1000, scale=2.0**52)


def test_what_rounding_costs() -> None:
    """In units of the grid, which is 1e-6 clip norms over sqrt(d): half a unit per coordinate, step and neighbour."""
    rounds, dimension = 400, 50
    most = math.sqrt(rounds * dimension) * 1e-6 / math.sqrt(dimension)
    assert rounding(rounds) - 1 >= 1.9 * most
