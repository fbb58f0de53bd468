"""Projections are judged by their optimality conditions, from gradients alone, not by the code under test."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from halfsilver._core.tensors import axpy, flatten, scale, trainable, unflatten
from halfsilver.errors import ConfigError, ConvergenceError
from halfsilver.mirror import (
    Bregman,
    Clock,
    ConstraintSet,
    DualAveraging,
    GradientBall,
    Intersection,
    L2Ball,
    PublicLoss,
    Step,
)
from halfsilver.mirror.solvers import multiplier

MakePublic = Callable[..., PublicLoss]
Released = Callable[..., list[Tensor]]
CLOCK = Clock(step=0, total_steps=1)
LR = 2.0


class Problem:
    """argmin over C of Psi^(theta) - <dual, theta>: the mirror step of `mirror`, seen from outside."""

    def __init__(self, mirror: Bregman, public: PublicLoss, released: list[Tensor]) -> None:
        assert mirror.constraint is not None
        self.public, self.damping, self.set = public, mirror.damping, mirror.constraint
        self.params = [p.detach() for p in trainable(public.model)]
        state = mirror.init(params=self.params, public=public)
        direction, _ = mirror.direction(released, state, Step(params=self.params, public=public, clock=CLOCK, lr=LR))
        self.solution = flatten(axpy(-LR, direction, self.params))
        self.dual = self.slope(flatten(self.params)) + self.damping * flatten(self.params) - LR * flatten(released)

    def slope(self, theta: Tensor) -> Tensor:
        return flatten(self.public.gradient(unflatten(theta, self.params)))

    def objective(self, theta: Tensor) -> float:
        value = self.public.value(unflatten(theta, self.params))
        return value + self.damping / 2 * float(theta @ theta) - float(self.dual @ theta)

    def excess(self, theta: Tensor) -> tuple[float, float]:
        """How far outside the ball and the gradient ball; negative inside."""
        return float(theta.norm()) - self.set.radius, float(self.slope(theta).norm()) - self.set.bound

    def active(self) -> tuple[bool, bool]:
        ball, gradient_ball = self.excess(self.solution)
        return ball > -1e-8, gradient_ball > -1e-8

    def assert_optimal(self) -> None:
        """Feasible, and minus the gradient of the objective is a positive mix of the active normals."""
        theta = self.solution
        assert max(self.excess(theta)) < 1e-8
        descent = self.dual - self.slope(theta) - self.damping * theta
        normals = [theta, self.public.hessian(unflatten(theta, self.params)) @ self.slope(theta)]
        used = [n for n, active in zip(normals, self.active(), strict=True) if active]
        if not used:
            assert float(descent.norm()) < 1e-8
            return
        _, residual = scipy.optimize.nnls(torch.stack(used, 1).numpy(), descent.numpy())
        assert residual < 1e-8 * max(1.0, float(descent.norm()))

    def assert_beats_random_points(self, inside: Tensor, count: int = 50) -> None:
        """Compare with the last feasible points on random rays from `inside`, near the solution and far."""
        best, generator = self.objective(self.solution), torch.Generator().manual_seed(5)
        for number in range(count):
            noise = torch.randn(len(inside), generator=generator, dtype=torch.float64)
            ray = (self.solution - inside) + noise * 10.0 ** -(number % 5)
            length = next(t for t in np.geomspace(4, 1e-4, 20) if max(self.excess(inside + t * ray)) <= 0)
            assert self.objective(inside + float(length) * ray) >= best - 1e-9


def optimum(public: PublicLoss) -> Tensor:
    newton: Tensor = torch.linalg.solve(public.hessian(), flatten(public.gradient()))
    return flatten([p.detach() for p in trainable(public.model)]) - newton


# The optimum of the least-squares problem has a norm of 2.512 and lies inside all of these sets.
SETS: dict[str, tuple[ConstraintSet, tuple[bool, bool]]] = {
    "ball-inactive": (L2Ball(1e4), (False, False)),
    "ball-active": (L2Ball(2.8), (True, False)),
    "gradient-inactive": (GradientBall(1e4), (False, False)),
    "gradient-active": (GradientBall(0.3), (False, True)),
    "both-inactive": (Intersection(L2Ball(1e4), GradientBall(1e4)), (False, False)),
    "both-only-ball": (Intersection(L2Ball(2.8), GradientBall(1e4)), (True, False)),
    "both-only-gradient": (Intersection(L2Ball(1e4), GradientBall(0.3)), (False, True)),
    "both-active": (Intersection(L2Ball(2.8), GradientBall(0.3)), (True, True)),
    "both-active-small": (Intersection(L2Ball(2.53), GradientBall(0.01)), (True, True)),
}


@pytest.mark.parametrize("damping", [0.0, 0.2])
@pytest.mark.parametrize(("constraint", "active"), SETS.values(), ids=SETS)
def test_quadratic_projections_are_optimal(
    constraint: ConstraintSet,
    active: tuple[bool, bool],
    damping: float,
    least_squares: MakePublic,
    released: Released,
) -> None:
    public = least_squares()
    mirror = Bregman(quadratic=True, constraint=constraint, damping=damping)
    problem = Problem(mirror, public, scale(released(public), -1.0))
    if damping == 0:
        assert problem.active() == active
    problem.assert_optimal()
    problem.assert_beats_random_points(optimum(public))


def test_many_random_projections_on_both_limits_are_optimal(least_squares: MakePublic, released: Released) -> None:
    public, both = least_squares(), 0
    mirror = Bregman(quadratic=True, constraint=Intersection(L2Ball(2.52), GradientBall(0.05)), damping=1e-6)
    for seed in range(20):
        problem = Problem(mirror, public, released(public, seed=seed))
        problem.assert_optimal()
        both += problem.active() == (True, True)
    assert both >= 5


@pytest.mark.parametrize(("radius", "active"), [(1.0, True), (1e4, False)])
@pytest.mark.parametrize("gradient_only", [False, True], ids=["hvp", "differences"])
def test_ball_projection_under_a_logistic_loss_is_optimal(
    radius: float, active: bool, gradient_only: bool, logistic_regression: MakePublic, released: Released
) -> None:
    public = logistic_regression()
    mirror = Bregman(constraint=L2Ball(radius), damping=0.05, gradient_only=gradient_only)
    problem = Problem(mirror, public, released(public))
    assert problem.active() == (active, False)
    problem.assert_optimal()
    problem.assert_beats_random_points(torch.zeros(8, dtype=torch.float64))


@pytest.mark.parametrize("mirror", [Bregman, DualAveraging])
def test_general_and_closed_form_agree(
    mirror: type[Bregman | DualAveraging], least_squares: MakePublic, released: Released
) -> None:
    public = least_squares()
    params, ends = [p.detach() for p in trainable(public.model)], []
    for quadratic in (True, False):
        m = mirror(constraint=L2Ball(1.5), quadratic=quadratic, damping=0.1)
        state = m.init(params=params, public=public)
        ends.append(m.direction(released(public), state, Step(params=params, public=public, clock=CLOCK, lr=1.0))[0])
    assert float((flatten(ends[0]) - flatten(ends[1])).norm()) < 1e-7


def test_an_empty_set_is_reported(least_squares: MakePublic, released: Released) -> None:
    public = least_squares()
    mirror = Bregman(quadratic=True, constraint=Intersection(L2Ball(0.1), GradientBall(1e-3)))
    with pytest.raises(ConvergenceError, match="No point satisfies"):
        Problem(mirror, public, released(public))


@pytest.mark.parametrize("make", [L2Ball, GradientBall])
def test_sets_refuse_empty_sizes(make: Callable[[float], ConstraintSet]) -> None:
    with pytest.raises(ConfigError):
        make(0.0)


def test_multiplier_finds_the_root_of_a_secular_equation() -> None:
    weights = torch.logspace(-8, 3, 12, dtype=torch.float64)

    def size(m: float) -> float:
        return float((weights.sqrt() / (weights + m)).norm())

    for limit in (1e-6, 1e-2, 1.0, 1e3):
        assert size(multiplier(size, limit)) == pytest.approx(limit, rel=1e-13)
    assert multiplier(size, math.inf) == 0.0
    assert multiplier(size, 2 * size(0.0)) == 0.0
