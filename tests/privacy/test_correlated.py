"""Strategies of correlated noise: sensitivity against brute force, inverses and errors against dense matrices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfsilver.errors import ConfigError
from halfsilver.privacy.correlated import Error, banded, buffered, inverse, prefix_error, sensitivity
from halfsilver.privacy.strategies import Banded, Buffered, Participation, Strategy

falling = st.lists(st.floats(0, 1), min_size=0, max_size=7).map(lambda rest: [1.0, *sorted(rest, reverse=True)])


def matrix(column: Tensor) -> Tensor:
    """The whole lower triangular matrix."""
    n = len(column)
    rows, cols = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    return torch.where(rows >= cols, column[(rows - cols).clamp(min=0)], 0.0)


def allowed(participation: Participation) -> list[tuple[int, ...]]:
    """All sets of rounds in which a unit may take part."""
    rounds, most = range(participation.rounds), participation.times
    sets = (chosen for size in range(1, most + 1) for chosen in itertools.combinations(rounds, size))
    return [s for s in sets if all(b - a >= participation.separation for a, b in itertools.pairwise(s))]


@settings(max_examples=60, deadline=None)
@given(column=falling, separation=st.integers(1, 9), most=st.none() | st.integers(1, 4))
def test_sensitivity_is_the_largest_over_all_sets_of_rounds(
    column: list[float], separation: int, most: int | None
) -> None:
    first = torch.tensor(column, dtype=torch.float64)
    participation = Participation(rounds=len(column), separation=separation, most=most)
    whole = matrix(first)
    brute = max(float(whole[:, list(chosen)].sum(1).norm()) for chosen in allowed(participation))
    assert float(sensitivity(first, participation)) == pytest.approx(brute, rel=1e-12)


def test_contributions_in_other_directions_move_less() -> None:
    """1,000 draws of unit vectors for each set of rounds never exceed the bound; the same vector in all reaches it."""
    generator = torch.Generator().manual_seed(0)
    first = torch.tensor([1.0, 0.6, 0.4, 0.4, 0.1, 0.0], dtype=torch.float64)
    participation = Participation(rounds=6, separation=2)
    bound = float(sensitivity(first, participation))
    whole = matrix(first)
    for chosen in allowed(participation):
        x = torch.randn(1000, len(chosen), 3, generator=generator, dtype=torch.float64)
        moved = whole[:, list(chosen)] @ (x / x.norm(dim=2, keepdim=True))
        assert float(moved.flatten(1).norm(dim=1).max()) <= bound + 1e-12
    # A strategy that is scaled to one round alone would be too small.
    assert bound > 1.2 * float(first.norm())


def test_a_column_that_rises_is_refused() -> None:
    """The earliest rounds are not the worst for such a column, so the bound would be wrong."""
    rising = torch.tensor([1.0, 0.0, 0.9, 0.0], dtype=torch.float64)
    participation = Participation(rounds=4, separation=1, most=2)
    worst = max(float(matrix(rising)[:, list(chosen)].sum(1).norm()) for chosen in allowed(participation))
    assert worst > 1.1 * float(sensitivity(rising, participation))
    with pytest.raises(ConfigError, match="coefficients"):
        Banded((1.0, 0.0, 0.9, 0.0))
    with pytest.raises(ConfigError, match="scales"):
        Buffered((0.9, 0.5), (0.8, 0.4))


@settings(max_examples=40, deadline=None)
@given(column=falling, separation=st.integers(1, 4))
def test_inverse_and_error_are_those_of_the_matrices(column: list[float], separation: int) -> None:
    first = torch.tensor(column, dtype=torch.float64)
    n, participation = len(column), Participation(rounds=len(column), separation=separation)
    dense = torch.linalg.inv(matrix(first))
    torch.testing.assert_close(inverse(first), dense[:, 0], rtol=1e-9, atol=1e-9)
    squares = (torch.ones(n, n, dtype=torch.float64).tril() @ dense).square().sum(1)
    scale = float(sensitivity(first, participation))
    assert float(prefix_error(first, participation)) == pytest.approx(
        scale * math.sqrt(float(squares.mean())), rel=1e-6
    )
    largest = prefix_error(first, participation, "max")
    assert float(largest) == pytest.approx(scale * math.sqrt(float(squares.max())), rel=1e-6)


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize(("rounds", "separation"), [(64, 64), (60, 10)])
def test_the_best_strategies_cannot_be_bettered_nearby(rounds: int, separation: int, error: Error) -> None:
    participation = Participation(rounds=rounds, separation=separation)
    alone = torch.eye(rounds, dtype=torch.float64)[0]

    def cost(strategy: Strategy) -> float:
        return float(prefix_error(strategy.column(rounds), participation, error))

    bands = banded(participation, bands=separation, error=error)
    blt = buffered(participation, buffers=3, error=error)
    assert cost(bands) < 0.5 * float(prefix_error(alone, participation, error))
    assert cost(blt) < 1.15 * cost(bands)  # which has as many numbers as there are rounds between two participations
    for i, factor in itertools.product(range(3), (0.97, 1.03)):
        scales = [s * (factor if i == j else 1) for j, s in enumerate(blt.scales)]
        assert cost(Buffered(blt.decays, tuple(scales))) >= cost(blt) * (1 - 1e-6)


def test_the_square_root_of_prefix_sums_is_best_for_the_last_of_them() -> None:
    """Without repeated participation, coefficients binom(2t, t) / 4^t minimise the error of the last prefix sum.

    Source: Fichtenberger, Henzinger and Upadhyay 2023, Constant Matters, arXiv:2202.11205.
    """
    once = Participation(rounds=32, separation=32)
    found = torch.tensor(banded(once, bands=32, error="max").coefficients)
    root = torch.tensor([math.comb(2 * t, t) / 4**t for t in range(32)])
    torch.testing.assert_close(found, root, rtol=1e-3, atol=1e-3)


def test_values_out_of_range() -> None:
    for values in ({"rounds": 0, "separation": 1}, {"rounds": 1, "separation": 0}):
        with pytest.raises(ConfigError, match="=0"):
            Participation(**values)
    with pytest.raises(ConfigError, match="most=0"):
        Participation(rounds=3, separation=1, most=0)
    with pytest.raises(ConfigError, match="bands=4"):
        banded(Participation(rounds=3, separation=1), bands=4)
    with pytest.raises(ConfigError, match="buffers=0"):
        buffered(Participation(rounds=3, separation=1), buffers=0)
    with pytest.raises(ConfigError, match="decays"):
        Buffered((1.0,), (0.5,))
