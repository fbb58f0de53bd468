from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import axpy, flatten, norm, scale, trainable, unflatten
from halfsilver.errors import ConfigError, ConvergenceError
from halfsilver.mirror import (
    Bregman,
    Clock,
    DualAveraging,
    GradientBall,
    Intersection,
    L2Ball,
    MirrorMap,
    PublicLoss,
    Quadratic,
    Step,
)

MakePublic = Callable[..., PublicLoss]
Released = Callable[..., list[Tensor]]
CLOCK = Clock(step=0, total_steps=1)


def after_sgd(mirror: MirrorMap, released: list[Tensor], public: PublicLoss, lr: float) -> list[Tensor]:
    """The parameters to which plain SGD goes along the direction of `mirror`."""
    params = [p.detach() for p in trainable(public.model)]
    state = mirror.init(params=params, public=public)
    direction, _ = mirror.direction(released, state, Step(params=params, public=public, clock=CLOCK, lr=lr))
    return axpy(-lr, direction, params)


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return norm(axpy(-1.0, a, b))


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"gradient_only": True}, {"quadratic": True}], ids=str)
def test_bregman_is_quadratic_on_least_squares(
    options: dict[str, Any], damping: float, least_squares: MakePublic, released: Released
) -> None:
    public, lr = least_squares(), 0.3
    gradient = released(public)
    smallest = float(torch.linalg.eigvalsh(public.hessian())[0]) + damping
    # Quadratic multiplies by lambda_min so that a learning rate means the same as for SGD; undo it here.
    expected = after_sgd(Quadratic(damping=damping), gradient, public, lr / smallest)
    got = after_sgd(Bregman(damping=damping, **options), gradient, public, lr)
    assert distance(got, expected) < 1e-6 * min(1.0, norm(expected))


@pytest.mark.parametrize("gradient_only", [False, True], ids=["hvp", "differences"])
@pytest.mark.parametrize("lr", [0.01, 0.3, 3.0])
def test_logistic_mirror_step_is_solved_to_1e_8(
    lr: float, gradient_only: bool, logistic_regression: MakePublic, released: Released
) -> None:
    public, damping = logistic_regression(), 1e-2
    gradient, theta = released(public), [p.detach() for p in trainable(public.model)]
    after = after_sgd(Bregman(damping=damping, gradient_only=gradient_only), gradient, public, lr)

    def mirrored(point: list[Tensor]) -> list[Tensor]:
        return axpy(damping, point, public.gradient(point))

    residual = axpy(-1.0, axpy(-lr, gradient, mirrored(theta)), mirrored(after))
    assert norm(residual) < 1e-8
    assert distance(after, theta) > 1e-3


def test_float32_parameters_are_solved_in_float64(logistic_regression: MakePublic, released: Released) -> None:
    single, double = logistic_regression(torch.float32), logistic_regression(torch.float64)
    got = after_sgd(Bregman(damping=0.01), released(single), single, 0.3)
    expected = after_sgd(Bregman(damping=0.01), released(double), double, 0.3)
    assert got[0].dtype == torch.float32
    assert distance([g.double() for g in got], expected) < 1e-5


def test_a_step_without_solution_is_reported(logistic_regression: MakePublic, released: Released) -> None:
    # The gradient of a logistic loss is bounded, so a long dual step leaves its range.
    public = logistic_regression()
    with pytest.raises(ConvergenceError, match="raise damping"):
        after_sgd(Bregman(), scale(released(public), 100.0), public, 1.0)


def test_a_concave_loss_is_reported(least_squares: MakePublic, released: Released) -> None:
    public = least_squares()
    concave = PublicLoss(
        public.model, lambda m, b: -public.loss_fn(m, b), public.rows.batch(slice(None), torch.device("cpu"))
    )
    with pytest.raises(ConvergenceError, match="convex"):
        after_sgd(Bregman(), released(public), concave, 1.0)
    with pytest.raises(ConfigError, match="no stable inverse"):
        after_sgd(Bregman(quadratic=True), released(public), concave, 1.0)


def minimiser(public: PublicLoss, damping: float) -> None:
    """Move the model of `public` to the minimiser of the damped loss, by a mirror step towards dual zero."""
    params = trainable(public.model)
    gradient = axpy(damping, [p.detach() for p in params], public.gradient())
    target = after_sgd(Bregman(damping=damping, tolerance=1e-13), gradient, public, 1.0)
    with torch.no_grad():
        for p, t in zip(params, target, strict=True):
            p.copy_(t)


@pytest.mark.parametrize("problem", ["least_squares", "logistic_regression"])
def test_dual_averaging_without_a_set_is_bregman(
    problem: str, released: Released, request: pytest.FixtureRequest
) -> None:
    public: PublicLoss = request.getfixturevalue(problem)()
    minimiser(public, damping=1.0)
    eager = lazy = [p.detach().clone() for p in trainable(public.model)]
    bregman, averaging = Bregman(damping=1.0), DualAveraging()
    state = averaging.init(params=lazy, public=public)
    for step, lr in enumerate([0.3, 0.2, 0.5, 0.1]):
        gradient = released(public, seed=step)
        d, _ = bregman.direction(gradient, {}, Step(params=eager, public=public, clock=CLOCK, lr=lr))
        eager = axpy(-lr, d, eager)
        d, state = averaging.direction(gradient, state, Step(params=lazy, public=public, clock=CLOCK, lr=lr))
        lazy = axpy(-lr, d, lazy)
        assert distance(eager, lazy) < 1e-8


def scipy_argmin(public: PublicLoss, dual: Tensor, damping: float, radius: float | None = None) -> np.ndarray[Any, Any]:
    """argmin of <dual, theta> + Psi(theta) + damping/2 |theta|^2 in a ball, by a solver that is not ours."""
    like = [p.detach() for p in trainable(public.model)]

    def objective(x: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        theta = torch.from_numpy(x)
        value = public.value(unflatten(theta, like)) + float(dual @ theta) + damping / 2 * float(theta @ theta)
        slope = flatten(public.gradient(unflatten(theta, like))) + dual + damping * theta
        return value, slope.numpy()

    ball = {"type": "ineq", "fun": lambda x: radius**2 - x @ x, "jac": lambda x: -2 * x} if radius else ()
    found = scipy.optimize.minimize(
        objective,
        np.zeros(8),
        jac=True,
        method="SLSQP",
        constraints=ball,
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return np.asarray(found.x)


@pytest.mark.parametrize("radius", [None, 0.7], ids=["free", "ball"])
@pytest.mark.parametrize("problem", ["least_squares", "logistic_regression"])
def test_dual_averaging_against_scipy(
    problem: str, radius: float | None, released: Released, request: pytest.FixtureRequest
) -> None:
    public: PublicLoss = request.getfixturevalue(problem)()
    mirror = DualAveraging(damping=0.5, constraint=L2Ball(radius) if radius else None)
    params = [p.detach() for p in trainable(public.model)]
    state = mirror.init(params=params, public=public)
    for step in range(3):
        gradient = released(public, seed=step)
        d, state = mirror.direction(gradient, state, Step(params=params, public=public, clock=CLOCK, lr=0.2))
        params = axpy(-0.2, d, params)
    dual = 0.2 * sum(flatten(released(public, seed=step)) for step in range(3))
    assert isinstance(dual, Tensor)
    expected = torch.from_numpy(scipy_argmin(public, dual, 0.5, radius))
    assert float((flatten(params) - expected).norm()) < 2e-6


def test_a_gradient_oracle_is_enough(logistic_regression: MakePublic, released: Released) -> None:
    """With `gradient_only` the map never asks for second derivatives."""
    public = logistic_regression()
    expected = after_sgd(Bregman(damping=0.1), released(public), public, 0.5)
    public.hvp = public.hessian = None  # type: ignore[assignment, method-assign]
    got = after_sgd(Bregman(damping=0.1, gradient_only=True), released(public), public, 0.5)
    assert distance(got, expected) < 1e-8


@pytest.mark.parametrize("constraint", [GradientBall(1.0), Intersection(L2Ball(1.0), GradientBall(1.0))], ids=str)
@pytest.mark.parametrize("mirror", [Bregman, DualAveraging])
def test_a_gradient_ball_needs_a_quadratic_loss(mirror: Any, constraint: Any) -> None:
    with pytest.raises(ConfigError, match="quadratic=True"):
        mirror(constraint=constraint)


def test_the_promise_of_a_quadratic_loss_is_checked(logistic_regression: MakePublic) -> None:
    public = logistic_regression()
    with pytest.raises(ConfigError, match="quadratic public loss"):
        Bregman(quadratic=True).init(params=trainable(public.model), public=public)


def test_public_data_is_required_before_the_first_step() -> None:
    for mirror in (Bregman(), DualAveraging()):
        with pytest.raises(ConfigError, match="needs public data"):
            mirror.init(params=[nn.Parameter(torch.zeros(2))], public=None)
