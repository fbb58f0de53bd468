"""FallBack: the first-order mirror that lets go of public data which work against the private gradient."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, final

import torch

from halfsilver._core.tensors import Tensors, dot, lerp, norm
from halfsilver.errors import require
from halfsilver.mirror.base import Mixture, State, Step
from halfsilver.mirror.first_order import FirstOrder
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.schedules import weight_at


@final
@dataclass(frozen=True)
class FallBack:
    """`FirstOrder` that falls back to plain DP-SGD when the public data work against the private gradient.

    To first order, a step along the public gradient p lowers the private loss if the private gradient has a positive
    projection on p, and raises it if the projection is negative. With the projections x of released gradients on
    ``p / |p|``, k = 1 - 1 / memory and i steps back::

        score = sum_i k^i x_i / sqrt(sum_i k^(2i) x_i^2)
        trust = min over all steps so far of clamp(2 + score / sigmas, 0, 1)
        direction = (1 - trust * (1 - alpha)) * released + trust * (1 - alpha) * p

    Without agreement or disagreement, and with public batches drawn anew in each step, the score is nearly a standard
    normal variable, whatever the scale of the noise. With the same public batch in every step, projections depend on
    earlier steps and the score varies more. The trust is 1 down to a score of -`sigmas` and 0 from -2 `sigmas` on, and
    it never rises again. A public gradient that is not finite is not used.

    The map costs no privacy, because it is post-processing of released gradients. The state "evidence" holds the two
    sums and the trust.

    Args:
        mirror: The map to use while the public data help, with its schedule for alpha.
        sigmas: How many standard deviations of disagreement begin to lower the trust, above 0. Default 4. Smaller
            values react sooner, and more often by chance.
        memory: For about how many steps a projection counts, at least ``2 * sigmas**2 + 0.5``. Default 200. Lower it
            if public data are good at first and harmful later; raise it where the noise hides the disagreement.

    Raises:
        ConfigError: If `sigmas` or `memory` is out of range, or when training starts without public data.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import Clock, FallBack, FirstOrder, PublicLoss, Step
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> public = PublicLoss(model, lambda model, x: model(x).squeeze(1), torch.ones(4, 1))  # its gradient is 1
        >>> step = Step(params=[model.weight], public=public, clock=Clock(step=0, total_steps=99), lr=0.1)
        >>> mirror = FallBack(FirstOrder(0.5))
        >>> state = mirror.init(params=[model.weight], public=public)
        >>> for _ in range(99):  # the private gradient points the other way
        ...     direction, state = mirror.direction([torch.tensor([[-1.0]])], state, step)
        >>> direction
        [tensor([[-1.]])]

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193
        (the map that it guards; the test of agreement is this library's)
    """

    mirror: FirstOrder
    _: KW_ONLY
    sigmas: float = 4.0
    memory: float = 200.0
    persistent: ClassVar[tuple[str, ...]] = ("evidence",)

    def __post_init__(self) -> None:
        require(self.sigmas > 0, "sigmas", self.sigmas, "above 0")
        least = 2 * self.sigmas**2 + 0.5  # equal projections end at a score of sqrt(2 * memory - 1)
        wanted = f"at least 2 * sigmas^2 + 0.5 = {least:g} steps"
        require(self.memory >= least, "memory", self.memory, wanted, "A shorter one would never reach plain DP-SGD.")

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        self.mirror.init(params=params, public=public)
        start = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
        return {"evidence": start.to(params[0].device) if params else start}

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        alpha = weight_at(self.mirror.alpha, step.clock)
        if alpha == 1.0:
            return released, state
        gradient = self.mirror.public_gradient(step)
        length = norm(gradient)
        if not math.isfinite(length):
            return released, state
        evidence = self._weigh(dot(released, gradient) / length if length else 0.0, *state["evidence"].tolist())
        after = {"evidence": state["evidence"].new_tensor(evidence)}
        return lerp(alpha + (1 - evidence[2]) * (1 - alpha), released, gradient), after

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture:
        direction, after = self.direction(released, state, step)
        if direction is released:  # alpha is 1, or the public gradient is not finite
            return Mixture(private=1.0)
        one, trust = self.mirror.mixture(released, state, step, curvature=curvature), float(after["evidence"][2])
        return Mixture(private=1 - trust * (1 - one.private), public=trust * one.public)

    def _weigh(self, projection: float, total: float, squares: float, trust: float) -> tuple[float, float, float]:
        """The evidence with one more projection."""
        keep = 1 - 1 / self.memory
        total, squares = keep * total + projection, keep**2 * squares + projection**2
        score = total / math.sqrt(squares) if squares > 0 else 0.0
        # Trust that came back with the score would do its harm again until the score has fallen again.
        return total, squares, min(trust, max(0.0, 2 + score / self.sigmas))
