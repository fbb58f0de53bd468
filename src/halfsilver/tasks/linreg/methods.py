"""The study of the paper's section 4, and one more arm: public, cold, warm, pda and whitened, at epsilon 1.

All grid points of a trial are the columns of one matrix, so that a step of all of them is two sparse products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor

from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.study.method import NAMES, WHITENED, registered
from halfsilver.tasks.linreg.data import Problem, gram, row_norms

EPSILON, DELTA = 1.0, 1e-5
METHODS = (*NAMES, WHITENED.name)
_DAMPING = 1e-3  # times the mean eigenvalue: every row has the same two block sums, so that H has rank p - 1


@dataclass(frozen=True, order=True)
class Point:
    """One setting of the search: number of steps, clip norm, how far a step goes, and the damping of the geometry.

    `reach` is learning rate times clip norm, in units of the inverse mean curvature: once every gradient is clipped, it
    is all that matters, so that a search over (reach, clip) does not drift along a valley.
    """

    steps: int
    reach: float
    clip: float
    damping: float = 0.0  # of methods with a geometry

    @property
    def lr(self) -> float:
        return self.reach / self.clip


@dataclass(frozen=True, eq=False)
class Prepared:
    """A trial with what its public data give: the Hessian's factor and the public model."""

    problem: Problem

    @cached_property
    def hessian(self) -> Tensor:
        return gram(self.problem.public[0])

    @cached_property
    def curvature(self) -> float:
        """Mean eigenvalue of the public Hessian."""
        return float(self.hessian.trace()) / self.problem.dim

    @cached_property
    def inverse(self) -> Tensor:
        """(H + damping)^-1 in units of the inverse mean curvature."""
        damped = self.hessian + _DAMPING * self.curvature * torch.eye(self.problem.dim, dtype=torch.float64)
        return torch.cholesky_inverse(torch.linalg.cholesky(damped.float())) * self.curvature

    @cached_property
    def public_model(self) -> Tensor:
        x, y = self.problem.public
        return self.inverse @ (x.t() @ y[:, None] / (len(y) * self.curvature)).squeeze(1)

    def whitening(self, damping: float) -> tuple[Tensor, Tensor]:
        """U with U'U = ((H / curvature + damping) / (1 + damping))^-1 from public rows, and |U x| for private rows x.

        Any such U gives the same run up to a rotation, and so the same law of its result. That of a Cholesky
        factorisation takes a tenth of the time of the symmetric root.
        """
        return _whitening(self, damping)

    @cached_property
    def row_norms(self) -> Tensor:
        return row_norms(self.problem.private[0])

    @cached_property
    def transposed(self) -> Tensor:
        return self.problem.private[0].t().to_sparse_csr()


@lru_cache(maxsize=2)  # of the trials of a search, whose points come damping by damping
def _whitening(prepared: Prepared, damping: float) -> tuple[Tensor, Tensor]:
    eye = torch.eye(prepared.problem.dim)
    damped = ((prepared.hessian / prepared.curvature).float() + damping * eye) / (1 + damping)
    root: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(damped), eye, upper=False)
    x = prepared.problem.private[0]
    return root, torch.linalg.vector_norm(x @ root.T.contiguous(), dim=1)


def noise_multiplier(steps: int) -> float:
    """Tight Gaussian accounting: T full-batch steps are one Gaussian of sigma / sqrt(T)."""
    return _one_step() * math.sqrt(steps)


@cache
def _one_step() -> float:
    plan = PrivacyPlan.calibrate(epsilon=EPSILON, delta=DELTA, steps=1, population=1, batch_size=1)
    return plan.noise_multiplier


def run(prepared: Prepared, method: str, points: Sequence[Point], seed: int) -> dict[tuple[Point, str], float]:
    """Population risk of the last and of the averaged iterate of `method` at each point; columns share one loop.

    All points have the same damping.
    """
    points = sorted(points, reverse=True)  # longest first, so that the columns still running are always the first ones
    generator = torch.Generator().manual_seed(seed)
    random = registered(method).start == "random"
    start = torch.zeros(prepared.problem.dim) if random else prepared.public_model
    last = start.float()[:, None].repeat(1, len(points))
    total = torch.zeros_like(last)
    for step in range(points[0].steps):
        active = sum(p.steps > step for p in points)
        update(prepared, method, points[:active], last[:, :active], generator)
        total[:, :active] += last[:, :active]
    averaged = total / torch.tensor([float(p.steps) for p in points])
    risks = {"last": prepared.problem.risk(last), "average": prepared.problem.risk(averaged)}
    return {(p, kind): float(r[i]) for kind, r in risks.items() for i, p in enumerate(points)}


def update(prepared: Prepared, method: str, points: Sequence[Point], theta: Tensor, generator: torch.Generator) -> None:
    """One private full-batch step of every column of `theta`, in place: clip, sum, noise, divide, mirror."""
    (x, y), n = prepared.problem.private, len(prepared.problem.private[1])
    lr, clip = torch.tensor([p.lr for p in points]), torch.tensor([p.clip for p in points])
    sigma = torch.tensor([noise_multiplier(p.steps) for p in points])
    shaped = registered(method).geometry
    root, norms = prepared.whitening(points[0].damping) if shaped else (None, prepared.row_norms)
    residual = x @ theta - y[:, None]
    residual *= (clip / (residual.abs() * norms.reshape(-1, 1)).clamp_min(1e-20)).clamp_max(1.0)
    gradient = prepared.transposed @ residual
    if root is not None:
        gradient = root @ gradient
    gradient += torch.randn(gradient.shape, generator=generator) * (sigma * clip)
    if root is not None:
        gradient = root.T @ gradient
    direction = prepared.inverse @ gradient if registered(method).has_mirror else gradient
    theta -= direction * (lr / (n * prepared.curvature))
