"""Quadratic: the exact mirror map of a least-squares public loss, H^-1 times the released gradient."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import final

import torch
from torch import Tensor

from halfsilver._core.sharded import refuse_sharded
from halfsilver._core.tensors import Tensors, flatten, scale, unflatten
from halfsilver.errors import ConfigError, ConvergenceError, require
from halfsilver.mirror.base import Mixture, State, Stateless, Step, need_public
from halfsilver.mirror.psi import is_quadratic, require_invertible
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.solvers import (
    Operator,
    conjugate_gradients,
    doubles,
    extreme_eigenvalues,
    plus_ridge,
)


@final
@dataclass(frozen=True, eq=False)
class Quadratic(Stateless):
    """The exact mirror step of a quadratic public loss: ``lambda_min(A) * A^-1 * released`` with A = H + damping * I.

    H is the Hessian of the public loss over all public rows. The factor lambda_min(A) makes 1 the largest eigenvalue of
    what is applied, so that learning rates mean the same as for `Euclidean`, and H = I gives `Euclidean` bit for bit.
    The map costs no privacy, because it sees released and public values only.

    Args:
        hessian: A fixed symmetric matrix to use for H, such as the Hessian of a logistic loss at its minimum. Its order
            is that of the flattened parameters. For one parameter of shape (outputs, n) it may be of size n; then it is
            that of each output. Default None: H is computed, and the loss must be quadratic.
        damping: Added to the diagonal of H, at least 0, in the unit of the Hessian. Default 0. Raise it if H is
            singular or nearly so, for instance with fewer public rows than parameters.
        normalize: Whether to apply lambda_min(A). Default True. With False a learning rate of 1 is a Newton step.
        dense_limit: Up to this number of parameters A is factorised once, in memory of 8 bytes times its square.
            Default 8192. Above, each step runs conjugate gradients on Hessian-vector products.
        max_iterations: The largest number of these products in one solution. Default 2000.

    Raises:
        ConfigError: If `damping` is negative; when training starts, if the public loss is not quadratic and no
            `hessian` is given, if `hessian` has the wrong shape, or if A is singular to rounding.
        ConvergenceError: If conjugate gradients do not converge within `max_iterations`.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import Clock, Quadratic, Step
        >>> mirror, params = Quadratic(torch.diag(torch.tensor([1.0, 4.0]))), [torch.zeros(2)]
        >>> state = mirror.init(params=params, public=None)
        >>> step = Step(params=params, public=None, clock=Clock(step=0, total_steps=1), lr=0.1)
        >>> mirror.direction([torch.tensor([1.0, 1.0])], state, step)[0]
        [tensor([1.0000, 0.2500])]

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        section 4 (for linear regression the mirror step applies the inverse of the public Hessian)
    """

    hessian: Tensor | None = field(default=None, repr=False)
    _: KW_ONLY
    damping: float = 0.0
    normalize: bool = True
    dense_limit: int = 8192
    max_iterations: int = 2_000

    def __post_init__(self) -> None:
        require(self.damping >= 0, "damping", self.damping, "at least 0")

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        refuse_sharded(params, "Quadratic")
        size = sum(p.numel() for p in params)
        if self.hessian is not None:
            shape, sizes = tuple(self.hessian.shape), {size, *(params[0].shape[-1:] if len(params) == 1 else ())}
            wanted = " or ".join(f"{(n, n)}" for n in sorted(sizes))
            require(shape in {(n, n) for n in sizes}, "hessian.shape", shape, f"to be {wanted}")
            size = len(self.hessian)
        elif not is_quadratic(need_public(public, self), params):
            raise ConfigError(
                "Quadratic() needs a quadratic public loss. Use Bregman, or give a fixed matrix as hessian."
            )
        return self._factor(params, public) if size <= self.dense_limit else self._scale(params, public)

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        if "factor" in state:
            factor = state["factor"]
            rows = flatten(doubles(released)).view(-1, len(factor))  # one, or one for each output
            return unflatten(torch.cholesky_solve(rows.T, factor).T.reshape(-1), step.params), state
        solved = self._solve(self._operator(step.params, step.public), doubles(released))
        scaled = scale(solved, float(state["scale"]))
        return [x.to(p.dtype) for x, p in zip(scaled, step.params, strict=True)], state

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture | str:
        if self.hessian is not None:
            return f"{self!r} was given a Hessian, whose entries for the audit's parameters are unknown"
        if self.normalize and "factor" in state:
            return f"{self!r} is scaled by an eigenvalue that it does not keep; audit it with normalize=False"
        scale = float(state["scale"]) if "scale" in state else 1.0
        return Mixture(private=scale / (curvature + self.damping))

    def _factor(self, params: Tensors, public: PublicLoss | None) -> State:
        hessian = self.hessian if self.hessian is not None else need_public(public, self).hessian(params)
        matrix = hessian.detach().to(params[0].device, torch.float64)
        matrix = matrix + self.damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        if not self.normalize:
            factor, failed = torch.linalg.cholesky_ex(matrix)
            require(int(failed) == 0, "damping", self.damping, "to make the Hessian positive definite")
            return {"factor": factor}
        values = torch.linalg.eigvalsh(matrix)
        require_invertible(float(values[0]), float(values[-1]), len(values), self.damping)
        return {"factor": torch.linalg.cholesky(matrix / values[0])}

    def _scale(self, params: Tensors, public: PublicLoss | None) -> State:
        operator = self._operator(params, public)
        if not self.normalize:
            return {"scale": torch.ones((), dtype=torch.float64, device=params[0].device)}
        low, high = extreme_eigenvalues(operator, doubles(params), max_iterations=self.max_iterations)
        require_invertible(low, high, sum(p.numel() for p in params), self.damping)
        return {"scale": torch.tensor(low, dtype=torch.float64, device=params[0].device)}

    def _operator(self, params: Tensors, public: PublicLoss | None) -> Operator:
        """Multiplication by A, without the matrix unless the user gave it."""
        point, hessian = doubles(params), self.hessian
        if hessian is None:
            loss = need_public(public, self)
            return plus_ridge(lambda v: loss.hvp(v, point), self.damping)
        matrix = hessian.detach().to(point[0])
        return plus_ridge(lambda v: unflatten((flatten(v).view(-1, len(matrix)) @ matrix).reshape(-1), v), self.damping)

    def _solve(self, operator: Operator, rhs: Tensors) -> Tensors:
        solution, residual = conjugate_gradients(operator, rhs, tolerance=1e-12, max_iterations=self.max_iterations)
        if residual > 1e-6:
            raise ConvergenceError(
                f"Conjugate gradients stopped at a relative residual of {residual:.1e}: "
                f"raise damping={self.damping} or max_iterations={self.max_iterations}."
            )
        return solution
