from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfsilver._core.tensors import flatten, norm, trainable
from halfsilver.errors import ConfigError, ConvergenceError
from halfsilver.mirror import Clock, Euclidean, PublicLoss, Quadratic, Step

MakePublic = Callable[..., PublicLoss]
Released = Callable[[PublicLoss], list[Tensor]]
CLOCK = Clock(step=0, total_steps=1)


def apply(mirror: Quadratic | Euclidean, released: list[Tensor], public: PublicLoss | None) -> list[Tensor]:
    params = trainable(public.model) if public else [torch.zeros_like(r) for r in released]
    state = mirror.init(params=params, public=public)
    return mirror.direction(released, state, Step(params=params, public=public, clock=CLOCK, lr=0.1))[0]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return norm([x - y for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("size", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("dense_limit", [8192, 0], ids=["cholesky", "cg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_identity_is_euclidean_bit_for_bit(size: int, dense_limit: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    magnitudes = torch.exp(10 * torch.randn(size, generator=generator))
    released = [
        (torch.randn(size, generator=generator) * magnitudes).to(dtype),
        torch.tensor(0.1, dtype=dtype),
    ]
    mirror = Quadratic(torch.eye(size + 1), dense_limit=dense_limit)
    for ours, plain in zip(apply(mirror, released, None), apply(Euclidean(), released, None), strict=True):
        assert torch.equal(ours, plain)


def test_a_multiple_of_the_identity_is_euclidean_too() -> None:
    released = [torch.linspace(-1, 1, 9, dtype=torch.float64)]
    for factor in (0.03, 17.0):
        assert distance(apply(Quadratic(factor * torch.eye(9)), released, None), released) < 1e-15


@pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
def test_cholesky_and_conjugate_gradients_agree(damping: float, least_squares: MakePublic, released: Released) -> None:
    public = least_squares()
    gradient = released(public)
    dense = apply(Quadratic(damping=damping), gradient, public)
    iterative = apply(Quadratic(damping=damping, dense_limit=0), gradient, public)
    given = apply(Quadratic(public.hessian(), damping=damping, dense_limit=0), gradient, public)
    assert distance(dense, iterative) < 1e-9 * norm(dense)
    assert distance(dense, given) < 1e-9 * norm(dense)


def test_lanczos_finds_the_edge_of_a_crowded_spectrum() -> None:
    values = torch.tensor([0.01, *torch.linspace(0.02, 1.0, 399).tolist()], dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(400, 400, generator=torch.Generator().manual_seed(0)).double())
    mirror = Quadratic(basis @ torch.diag(values) @ basis.T, dense_limit=0)
    state = mirror.init(params=[torch.zeros(400)], public=None)
    assert float(state["scale"]) == pytest.approx(0.01, rel=1e-8)


@pytest.mark.parametrize("dense_limit", [8192, 0], ids=["cholesky", "cg"])
def test_largest_eigenvalue_of_the_applied_inverse_is_one(dense_limit: int, least_squares: MakePublic) -> None:
    public = least_squares()
    mirror, params = Quadratic(damping=0.01, dense_limit=dense_limit), trainable(public.model)
    state = mirror.init(params=params, public=public)

    def column(unit: Tensor) -> Tensor:
        parts = unit.split([p.numel() for p in params])  # type: ignore[no-untyped-call]
        released = [u.reshape(p.shape) for u, p in zip(parts, params, strict=True)]
        direction = mirror.direction(released, state, Step(params=params, public=public, clock=CLOCK, lr=1.0))[0]
        return flatten(direction)

    applied = torch.stack([column(unit) for unit in torch.eye(8, dtype=torch.float64)], dim=1)
    assert float(torch.linalg.matrix_norm(applied, 2)) == pytest.approx(1.0, abs=1e-9)
    inverse = torch.linalg.inv(public.hessian() + 0.01 * torch.eye(8))
    assert torch.allclose(applied, inverse / torch.linalg.matrix_norm(inverse, 2), atol=1e-9)


def test_a_singular_hessian_needs_damping(least_squares: MakePublic, released: Released) -> None:
    public = least_squares()
    x, y = public.rows.batch(slice(None), torch.device("cpu"))
    x = torch.cat([x[:, :6], x[:, :1]], dim=1)  # the last column repeats the first
    singular = PublicLoss(public.model, public.loss_fn, (x, y))
    for dense_limit in (8192, 0):
        with pytest.raises(ConfigError, match="raise damping"):
            apply(Quadratic(dense_limit=dense_limit), released(public), singular)
        direction = apply(Quadratic(damping=1e-3, dense_limit=dense_limit), released(public), singular)
        assert norm(direction) <= norm(released(public)) * (1 + 1e-9)


def test_only_a_quadratic_loss_gives_its_hessian_unasked(logistic_regression: MakePublic, released: Released) -> None:
    public = logistic_regression()
    with pytest.raises(ConfigError, match="quadratic public loss"):
        apply(Quadratic(), released(public), public)
    assert norm(apply(Quadratic(public.hessian()), released(public), public)) > 0


def test_refusals_name_the_value() -> None:
    with pytest.raises(ConfigError, match=r"damping=-1"):
        Quadratic(damping=-1)
    with pytest.raises(ConfigError, match=r"hessian\.shape=\(2, 2\)"):
        Quadratic(torch.eye(2)).init(params=[torch.zeros(3)], public=None)
    with pytest.raises(ConfigError, match="needs public data"):
        Quadratic().init(params=[torch.zeros(3)], public=None)


def test_too_few_iterations_are_reported(least_squares: MakePublic, released: Released) -> None:
    public = least_squares()
    mirror = Quadratic(dense_limit=0, max_iterations=2)
    with pytest.raises(ConvergenceError, match="max_iterations"):
        mirror.init(params=trainable(public.model), public=public)
    state = {"scale": torch.tensor(1.0)}
    with pytest.raises(ConvergenceError, match="max_iterations=2"):
        mirror.direction(
            released(public), state, Step(params=trainable(public.model), public=public, clock=CLOCK, lr=1.0)
        )


@pytest.mark.parametrize("dense_limit", [3, 0])
def test_a_hessian_of_each_output_is_the_block_diagonal_one(dense_limit: int) -> None:
    torch.manual_seed(0)
    root = torch.randn(3, 3, dtype=torch.float64)
    each, params = root @ root.T + torch.eye(3), [torch.zeros(2, 3, dtype=torch.float64)]
    released = [torch.randn(2, 3, dtype=torch.float64)]
    found = []
    for hessian in (each, torch.kron(torch.eye(2, dtype=torch.float64), each)):
        mirror = Quadratic(hessian, damping=0.1, dense_limit=dense_limit if hessian is each else 6)
        state = mirror.init(params=params, public=None)
        step = Step(params=params, public=None, clock=Clock(step=0, total_steps=1), lr=1.0)
        found.append(mirror.direction(released, state, step)[0][0])
    torch.testing.assert_close(*found)
    with pytest.raises(ConfigError, match=r"\(3, 3\) or \(6, 6\)"):
        Quadratic(torch.eye(2)).init(params=params, public=None)


def test_without_normalising_it_is_a_newton_step() -> None:
    """A learning rate of 1 from anywhere reaches the minimum of a quadratic loss; a singular matrix is refused."""
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    hessian, theta, minimum = root @ root.T, torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    for dense_limit in (100, 1):
        mirror = Quadratic(hessian, normalize=False, dense_limit=dense_limit)
        state = mirror.init(params=[theta], public=None)
        clock = Clock(step=0, total_steps=1)
        gradient = [hessian @ (theta - minimum)]
        direction, _ = mirror.direction(gradient, state, Step(params=[theta], public=None, clock=clock, lr=1.0))
        torch.testing.assert_close(theta - direction[0], minimum)
    with pytest.raises(ConfigError, match="damping"):
        Quadratic(torch.zeros(6, 6), normalize=False).init(params=[theta], public=None)
