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
    """`mirror` while released and public gradients agree or may agree; plain DP-SGD once they clearly do not.

    To first order a step along the public gradient p lowers the private loss where the private gradient has a positive
    projection on p, and raises it where that is negative. The projections of released gradients on ``p / |p|`` are
    summed over about the last `memory` steps, and the sum is divided by the root of the sum of squares. Where no
    agreement exists, and public batches are drawn anew in each step, the score is nearly a normal variable, whatever
    the scale of the noise and however much the batches add to it. With the same public batch in every step, projections
    depend on the steps before, and the score wanders further than that. The lowest score so far decides: down to
    -`sigmas` alpha is that of the schedule, from -2 `sigmas` on it is 1, and in between it rises evenly. Alpha is never
    below the schedule. A public gradient that is not finite is not used.

    All of it is post-processing of released gradients, so it costs no privacy. The state "evidence" holds both sums and
    the trust: the share of 1 - alpha that is left to the public gradient.
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
