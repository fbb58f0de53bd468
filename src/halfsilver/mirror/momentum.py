"""Momentum: an average of released gradients, for use before a map that is not linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from halfsilver._core.sharded import refuse_sharded
from halfsilver._core.tensors import Tensors, flatten, unflatten
from halfsilver.errors import require
from halfsilver.mirror.base import State, Step
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.solvers import doubles


@final
@dataclass(frozen=True)
class Momentum:
    """An exponential average of released gradients: ``v_t = beta * v_{t-1} + (1 - beta) * released``, from v = 0.

    The direction is ``v_t / (1 - beta^(t+1))``, in which the weights of all gradients sum to 1. Independent noise
    averages out: after many steps its variance is ``(1 - beta) / (1 + beta)`` of that of one step. In return the
    direction lags, because gradients at earlier parameters count. Put it first in a `chain`, so that the next map is
    given the average. The momentum of an optimizer comes after all maps and averages their public part as well.

    The map costs no privacy, because it is post-processing of released gradients. The state "velocity" holds v, in
    float64.

    Args:
        beta: The weight of the past, in [0, 1). About 1 / (1 - beta) steps count. Raise it where noise dominates the
            gradient and parameters change slowly.

    Raises:
        ConfigError: If `beta` is not in [0, 1), or when training starts if parameters are sharded.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import Clock, Momentum, Step
        >>> mirror, params = Momentum(0.5), [torch.zeros(1)]
        >>> state = mirror.init(params=params, public=None)
        >>> for t, released in enumerate([3.0, 0.0]):
        ...     step = Step(params=params, public=None, clock=Clock(step=t, total_steps=2), lr=0.1)
        ...     direction, state = mirror.direction([torch.tensor([released])], state, step)
        >>> direction
        [tensor([1.])]

    References:
        Polyak, *Some methods of speeding up the convergence of iteration methods*, 1964
    """

    beta: float
    persistent: ClassVar[tuple[str, ...]] = ("velocity",)

    def __post_init__(self) -> None:
        require(0 <= self.beta < 1, "beta", self.beta, "in [0, 1)")

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        refuse_sharded(params, "Momentum")
        return {"velocity": torch.zeros_like(flatten(doubles(params)))}

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        velocity = torch.lerp(flatten(doubles(released)), state["velocity"], self.beta)
        average = velocity / (1 - self.beta ** (step.clock.step + 1))
        return unflatten(average, step.params), {"velocity": velocity}

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> str:
        return f"{self!r} adds gradients of earlier steps"
