"""The hardened Gaussian mechanism: noise is added exactly, on a grid that does not depend on the data.

Plain float noise leaves traces: which floats are reachable depends on the value that the noise was added to. Here the
sum and the noise are both rounded to multiples of one power of two, and their addition is exact in float64, so the set
of possible outputs is the same whatever the data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfsilver._tensors import Tensors
from halfsilver.errors import ConfigError
from halfsilver.privacy.entropy import MAX_NORMAL, Entropy, normal
from halfsilver.privacy.gradients.base import ClippedSum

_GRID_SHARE = 1e-6
# Rounding to the grid raises the sensitivity by at most g * sqrt(d) <= 1e-6 C; the noise pays for twice that.
_SCALE_MARGIN = 1 + 2e-6


def grid(sensitivity: float, dimension: int) -> float:
    """The largest power of two that is at most 1e-6 * sensitivity / sqrt(dimension).

    >>> grid(1.0, 1)
    9.5367431640625e-07
    """
    return 2.0 ** math.floor(math.log2(_GRID_SHARE * sensitivity / math.sqrt(max(dimension, 1))))


def noise_scale(noise_multiplier: float, sensitivity: float) -> float:
    """Standard deviation that is really drawn."""
    return noise_multiplier * sensitivity * _SCALE_MARGIN


def check_exactness(noise_multiplier: float, sensitivity: float, dimension: int) -> None:
    """Refuse a plan whose noise could leave the range in which float64 adds multiples of the grid exactly."""
    largest = MAX_NORMAL * noise_scale(noise_multiplier, sensitivity)
    if largest >= 2.0**52 * grid(sensitivity, dimension):
        highest = 2.0**52 * grid(sensitivity, dimension) / (MAX_NORMAL * sensitivity)
        raise ConfigError(
            f"Expected noise_multiplier={noise_multiplier:g} below {highest:.3g} for {dimension} parameters; beyond it "
            "float64 cannot add the noise exactly. Train fewer parameters."
        )


def add_noise(
    clipped: ClippedSum, noise_multiplier: float, entropy: Entropy, *, dimension: int | None = None
) -> Tensors:
    """The sum plus Gaussian noise of `noise_multiplier` times its sensitivity, as float64 multiples of the grid.

    Guarantee: one release of the Gaussian mechanism with at least this noise multiplier, in the reals and not only up
    to rounding. `dimension` is the number of parameters of the whole model where `clipped` holds one shard of it.
    """
    dimension = dimension if dimension is not None else sum(t.numel() for t in clipped.tensors)
    check_exactness(noise_multiplier, clipped.sensitivity, dimension)
    g = grid(clipped.sensitivity, dimension)
    scale = noise_scale(noise_multiplier, clipped.sensitivity)
    return [_on_grid(t, g) + _draw(t, g, scale, entropy) for t in clipped.tensors]


def _on_grid(total: Tensor, g: float) -> Tensor:
    """Nearest multiples of g. Clamping to the exact range is 1-Lipschitz, so it cannot raise the sensitivity.

    The mechanism passes finite sums only; a NaN from elsewhere becomes 0, because to publish it would tell more.
    """
    limit = 2.0**52 * g
    return round_to(torch.nan_to_num(total.double(), nan=0.0, posinf=limit, neginf=-limit).clamp_(-limit, limit), g)


def _draw(like: Tensor, g: float, scale: float, entropy: Entropy) -> Tensor:
    return round_to(normal(entropy, like.numel(), scale), g).reshape(like.shape).to(like.device)


def round_to(values: Tensor, g: float) -> Tensor:
    """Round to multiples of the power of two `g`; scaling by it is exact. Changes `values`."""
    return values.mul_(1 / g).round_().mul_(g)
