"""Bregman and DualAveraging: the mirror step of the paper's Algorithm 1, exactly, and its lazy form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from halfsilver._core.sharded import refuse_sharded
from halfsilver._core.tensors import Tensors, axpy, flatten, unflatten
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.base import Mixture, State, Step, need_public
from halfsilver.mirror.psi import ConvexPsi, SpectralPsi
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.sets import ConstraintSet
from halfsilver.mirror.solvers import doubles


@dataclass(frozen=True, kw_only=True)
class _ExactStep:
    """What the two maps share: Psi^ = Psi + damping/2 |theta|^2 over the whole public set, and a set."""

    constraint: ConstraintSet | None = None
    quadratic: bool = False
    damping: float = 0.0
    tolerance: float = 1e-10
    max_iterations: int = 100
    gradient_only: bool = False

    def __post_init__(self) -> None:
        require(self.damping >= 0, "damping", self.damping, "at least 0")
        require(self.tolerance > 0, "tolerance", self.tolerance, "above 0")
        if not self.quadratic and self.constraint is not None and self.constraint.bound < math.inf:
            raise ConfigError(
                f"Expected quadratic=True with constraint={self.constraint!r}: where the public loss is not "
                "quadratic, a bound on its gradient need not be a convex set. Use L2Ball."
            )

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        refuse_sharded(params, type(self).__name__)
        public = need_public(public, self)
        if not self.quadratic:
            return {}
        psi = SpectralPsi.of(public, params, self.damping)
        return {"values": psi.values, "vectors": psi.vectors, "linear": psi.linear}

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture | str:
        if self.constraint is not None:
            return f"{self!r} projects onto a set, which mixes all coordinates"
        return Mixture(private=1 / (curvature + self.damping))

    def _psi(self, state: State, public: PublicLoss | None) -> SpectralPsi | ConvexPsi:
        if self.quadratic:
            eigen = {name: state[name] for name in ("values", "vectors", "linear")}
            return SpectralPsi(**eigen, damping=self.damping)
        return ConvexPsi(
            public=need_public(public, self),
            damping=self.damping,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            gradient_only=self.gradient_only,
        )


def _towards(target: Tensors, step: Step) -> Tensors:
    """The direction with which plain SGD goes from the parameters to `target`; nothing moves at lr = 0."""
    if step.lr == 0:
        return [torch.zeros_like(p) for p in step.params]
    return [((p.detach().double() - t) / step.lr).to(p.dtype) for p, t in zip(step.params, target, strict=True)]


@final
@dataclass(frozen=True, kw_only=True)
class Bregman(_ExactStep):
    """The exact mirror step: ``theta_{t+1} = argmin over C of lr <released, theta> + B_Psi(theta, theta_t)``.

    ``B_Psi(a, b) = Psi(a) - Psi(b) - <grad Psi(b), a - b>`` is the Bregman divergence of Psi, the mean loss over all
    public rows, which must be convex. The direction is ``(theta_t - theta_{t+1}) / lr``, so that the step is exact with
    plain SGD and only with it. The map costs no privacy, because it sees released and public values only.

    Args:
        constraint: The set C that parameters must stay in: `L2Ball`, and with ``quadratic=True`` also `GradientBall` or
            `Intersection`. Default None, all parameters.
        quadratic: Promises that the public loss is quadratic, which `init` checks, and takes the closed form in the
            eigenbasis of its Hessian. Default False. Set it for linear regression, where it is faster and exact.
        damping: The factor of ``|theta|^2 / 2`` that is added to Psi, at least 0. Default 0. A loss without strong
            convexity, such as that of logistic regression, may have no solution for a large step without it.
        tolerance: The residual of the optimality condition that is allowed, relative to ``max(1, |dual|)``, above 0.
            Default 1e-10. The computation is in float64 whatever the dtype of the model.
        max_iterations: The largest number of Newton steps in one mirror step. Default 100.
        gradient_only: Replaces Hessian-vector products by differences of gradients. Default False. Set it for losses
            that cannot be differentiated twice.

    Raises:
        ConfigError: If an argument is out of range, if the set bounds the gradient of a loss that is not quadratic, if
            parameters are sharded, or when training starts without public data.
        ConvergenceError: If Newton's method does not reach the tolerance, often because the loss is not convex.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import Bregman, Clock, PublicLoss, Step
        >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> loss = lambda model, x: 2 * model(x).squeeze(1).square()  # of curvature 4
        >>> public = PublicLoss(model, loss, torch.ones(4, 1, dtype=torch.float64))
        >>> mirror, params = Bregman(damping=0.0), [model.weight]
        >>> state = mirror.init(params=params, public=public)
        >>> step = Step(params=params, public=public, clock=Clock(step=0, total_steps=1), lr=0.1)
        >>> round(float(mirror.direction([torch.ones(1, 1, dtype=torch.float64)], state, step)[0][0]), 6)
        0.25

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        algorithm 1, line 5
        Nemirovsky and Yudin, *Problem Complexity and Method Efficiency in Optimization*, 1983
    """

    persistent: ClassVar[tuple[str, ...]] = ()

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        theta, psi = doubles(step.params), self._psi(state, step.public)
        dual = axpy(-step.lr, doubles(released), psi.gradient(theta))
        return _towards(psi.argmin(dual, theta, self.constraint), step), state


@final
@dataclass(frozen=True, kw_only=True)
class DualAveraging(_ExactStep):
    """The lazy mirror step: ``argmin over C of <sum of lr_i released_i, theta> + Psi(theta) + damping/2 |theta|^2``.

    Each step starts again from the sum of all released gradients, which is the state "dual", in float64. Without a set,
    and started at the minimiser of the damped public loss, the iterates are those of `Bregman`. The direction is
    ``(theta_t - theta_{t+1}) / lr``, so use plain SGD. The map costs no privacy, because it sees released and public
    values only.

    Args:
        constraint: The set C that parameters must stay in: `L2Ball`, and with ``quadratic=True`` also `GradientBall` or
            `Intersection`. Default None, all parameters.
        quadratic: Promises that the public loss is quadratic, which `init` checks, and takes the closed form in the
            eigenbasis of its Hessian. Default False. Set it for linear regression, where it is faster and exact.
        damping: The factor of ``|theta|^2 / 2`` that is added to Psi, at least 0. Default 1. A loss without strong
            convexity, such as that of logistic regression, may have no solution for a large step without it.
        tolerance: The residual of the optimality condition that is allowed, relative to ``max(1, |dual|)``, above 0.
            Default 1e-10. The computation is in float64 whatever the dtype of the model.
        max_iterations: The largest number of Newton steps in one mirror step. Default 100.
        gradient_only: Replaces Hessian-vector products by differences of gradients. Default False. Set it for losses
            that cannot be differentiated twice.

    Raises:
        ConfigError: If an argument is out of range, if the set bounds the gradient of a loss that is not quadratic, if
            parameters are sharded, or when training starts without public data.
        ConvergenceError: If Newton's method does not reach the tolerance, often because the loss is not convex.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import DualAveraging, Clock, PublicLoss, Step
        >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> loss = lambda model, x: 2 * model(x).squeeze(1).square()  # of curvature 4
        >>> public = PublicLoss(model, loss, torch.ones(4, 1, dtype=torch.float64))
        >>> mirror, params = DualAveraging(damping=0.0), [model.weight]
        >>> state = mirror.init(params=params, public=public)
        >>> step = Step(params=params, public=public, clock=Clock(step=0, total_steps=1), lr=0.1)
        >>> round(float(mirror.direction([torch.ones(1, 1, dtype=torch.float64)], state, step)[0][0]), 6)
        0.25

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        appendix on the first-order approximation, which starts from this form
        Nesterov, *Primal-Dual Subgradient Methods for Convex Problems*, Mathematical Programming 120, 2009
    """

    damping: float = 1.0
    persistent: ClassVar[tuple[str, ...]] = ("dual",)

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        state = super().init(params=params, public=public)
        return {**state, "dual": torch.zeros_like(flatten(doubles(params)))}

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        theta = doubles(step.params)
        total = state["dual"] + step.lr * flatten(doubles(released))
        target = self._psi(state, step.public).argmin(unflatten(-total, theta), theta, self.constraint)
        return _towards(target, step), {**state, "dual": total}
