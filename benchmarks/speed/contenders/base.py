"""What a contender is, and the SGD update that those without an optimizer of their own share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.speed.models import Workload
from benchmarks.speed.networks import Recurrent

Named = dict[str, Tensor]

NOISE_MULTIPLIER = 1.0


class Contender(Protocol):
    """One way to take a training step on the batch of a workload; `detail` is what it chose by itself, for the row."""

    detail: str

    def step(self) -> None:
        """Gradient, clip, sum, noise and update: what is timed."""
        ...

    def clipped_sum(self) -> Named | None:
        """The clipped sum without noise at the current parameters, by name; None where nothing is clipped.

        May take a step. It is called once, before the first timed step.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """How ours is to run; the others run as they come."""

    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender that can be made: `build` raises where it cannot run here, and says why."""

    build: Callable[[Workload, nn.Module, Options], Contender]
    recurrent: Callable[[], Recurrent] = lambda: nn.LSTM
    prepare: Callable[[], None] = lambda: None  # imports, which are no part of anyone's memory
    pda: bool = False  # whether its rows belong to the second table, half private and half public


def update(model: nn.Module, total: Named, clip: float, rows: int, lr: float) -> None:
    """Noise and an SGD step on the mean, for contenders that compute a clipped sum and nothing else."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noisy = total[name] + torch.randn_like(p) * (NOISE_MULTIPLIER * clip)
            p.sub_(noisy, alpha=lr / rows)
