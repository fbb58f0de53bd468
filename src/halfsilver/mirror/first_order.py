"""FirstOrder: the mirror step to first order, which networks can afford."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import final

from halfsilver._core.tensors import Tensors, lerp
from halfsilver.errors import require
from halfsilver.mirror.base import Mixture, State, Stateless, Step, clip_factor, clip_norm, need_public
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.schedules import Constant, Cosine, Schedule, weight_at


@final
@dataclass(frozen=True)
class FirstOrder(Stateless):
    """alpha * released + (1 - alpha) * grad Psi: mirror descent to first order, for networks.

    The noise is inside alpha. The public gradient is that of the public batch of the step, clipped to
    `public_max_norm` if given; where alpha is 1 it is never asked for.
    """

    alpha: float | Schedule
    _: KW_ONLY
    public_max_norm: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.alpha):
            require(0 <= self.alpha <= 1, "alpha", self.alpha, "in [0, 1]")
        limit = self.public_max_norm
        require(limit is None or limit > 0, "public_max_norm", limit, "above 0, or None")

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        if self.alpha not in (1, Constant(1.0), Cosine(end=1.0)):
            need_public(public, self)  # now, not after the first private step
        return {}

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        alpha = weight_at(self.alpha, step.clock)
        if alpha == 1.0:
            return released, state
        return lerp(alpha, released, self.public_gradient(step)), state

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture:
        alpha = weight_at(self.alpha, step.clock)
        return Mixture(private=alpha, public=(1 - alpha) * self._clip_factor(step), elementwise=True)

    def _clip_factor(self, step: Step) -> float:
        if self.public_max_norm is None:
            return 1.0
        gradient = need_public(step.public, self).gradient(step.params, step=step.clock.step)
        return clip_factor(gradient, self.public_max_norm)

    def public_gradient(self, step: Step) -> Tensors:
        """What this step mixes in: the gradient of the public batch of the step, clipped if asked for."""
        gradient = need_public(step.public, self).gradient(step.params, step=step.clock.step)
        return gradient if self.public_max_norm is None else clip_norm(gradient, self.public_max_norm)
