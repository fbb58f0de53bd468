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
    """theta_{t+1} = argmin over C of lr <released, theta> + B_Psi(theta, theta_t): Algorithm 1, line 5.

    The direction is (theta_t - theta_{t+1}) / lr, so the step is exact with plain SGD. Psi is the loss on
    the whole public set plus ``damping/2 |theta|^2``, any convex loss; ``quadratic=True`` promises that it is
    quadratic (checked) and takes the closed form in the eigenbasis of its Hessian.

    The residual of the mirror equation is at most ``tolerance * max(1, |dual|)``. A loss without strong
    convexity (logistic regression) may have no solution for a large step: give it some damping.
    """

    persistent: ClassVar[tuple[str, ...]] = ()

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        theta, psi = doubles(step.params), self._psi(state, step.public)
        dual = axpy(-step.lr, doubles(released), psi.gradient(theta))
        return _towards(psi.argmin(dual, theta, self.constraint), step), state


@final
@dataclass(frozen=True, kw_only=True)
class DualAveraging(_ExactStep):
    """``theta_{t+1} = argmin over C of <sum of lr_i released_i, theta> + Psi(theta) + damping/2 |theta|^2``.

    The lazy form of mirror descent: only the running sum is kept, in float64 under "dual". Without a set,
    and started at the minimiser of the damped public loss, its iterates are those of `Bregman`.
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
