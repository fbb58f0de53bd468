"""The hardened Gaussian mechanism: noise is added exactly, on a grid that does not depend on the data.

Plain float noise leaves traces: which floats are reachable depends on the value that the noise was added to. Here the
sum and the noise are both rounded to multiples of one power of two, and their addition is exact in float64, so the set
of possible outputs is the same whatever the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from halfsilver._core.tensors import Tensors
from halfsilver.errors import ConfigError
from halfsilver.privacy.entropy import MAX_SCALE, Entropy, normal_blocks
from halfsilver.privacy.gradients.base import ClippedSum

_GRID_SHARE = 1e-6
# Rounding to the grid raises the sensitivity by at most g * sqrt(d) <= 1e-6 C; the noise pays for twice that.
_SCALE_MARGIN = 1 + 2e-6
# Integers up to here, and their sums, are exact in float64.
_EXACT = 2.0**52


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
    """Refuse a plan whose noise float64 could not draw finely enough; far below it, all additions are exact."""
    g = grid(sensitivity, dimension)
    if noise_scale(noise_multiplier, sensitivity) > MAX_SCALE * g:
        raise ConfigError(
            f"Expected noise_multiplier={noise_multiplier:g} below {MAX_SCALE * g / sensitivity:.3g} for {dimension} "
            "parameters; beyond it float64 cannot draw the noise finely enough. Train fewer parameters."
        )


def add_noise(
    clipped: ClippedSum, noise_multiplier: float, entropy: Entropy, *, dimension: int | None = None
) -> Tensors:
    """The sum plus Gaussian noise of `noise_multiplier` times its sensitivity, as float64 multiples of the grid.

    Guarantee: one release of the Gaussian mechanism with at least this noise multiplier, on a grid. Rounding the sum is
    paid for by the scale of the noise, and adding is exact, so an output depends on the sum through the probability of
    the noise alone. The noise is a rounded normal as far as `normal_blocks` says; that distance is not in epsilon or
    delta. `dimension` is the number of parameters of the whole model where `clipped` holds one shard of it.
    """
    double = [torch.float64] * len(clipped.tensors)
    copy = ClippedSum([t.to(torch.float64, copy=True) for t in clipped.tensors], clipped.sensitivity)
    return noisy_mean(copy, noise_multiplier, entropy, expected=1.0, dtypes=double, dimension=dimension)


def noisy_mean(
    clipped: ClippedSum,
    noise_multiplier: float,
    entropy: Entropy,
    *,
    expected: float,
    dtypes: Sequence[torch.dtype],
    dimension: int | None = None,
) -> Tensors:
    """What `add_noise` returns, divided by the expected batch size and cast; may overwrite the sum itself.

    One pass over blocks that stay in the cache does it all: memory traffic would cost more than the arithmetic.
    """
    dimension = dimension if dimension is not None else sum(t.numel() for t in clipped.tensors)
    check_exactness(noise_multiplier, clipped.sensitivity, dimension)
    g = grid(clipped.sensitivity, dimension)
    steps = noise_scale(noise_multiplier, clipped.sensitivity) / g
    sums = [t.contiguous() for t in clipped.tensors]
    out = [t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t, dtype in zip(sums, dtypes, strict=True)]
    for total, released in zip(sums, out, strict=True):
        _release(total.view(-1), released.view(-1), g, steps, g / expected, entropy)
    return out


def _release(total: Tensor, released: Tensor, g: float, steps: float, unit: float, entropy: Entropy) -> None:
    """Everything between sum and release in units of the grid, where each number is an integer and adding is exact."""
    tame = bool(torch.linalg.vector_norm(total) < _EXACT * g)  # not if NaN
    for start, noise in normal_blocks(entropy, len(total), steps):
        block = slice(start, start + len(noise))
        released[block] = on_grid(total[block], g, tame=tame).add_(noise.round_().to(total.device)).mul_(unit)


def on_grid(values: Tensor, g: float, *, tame: bool = False) -> Tensor:
    """The nearest multiples of the power of two `g`, in units of `g`, as a new float64 tensor.

    Clamping to the exact range is 1-Lipschitz, so it cannot raise the sensitivity. The mechanism passes finite sums
    only; a NaN from elsewhere becomes 0, because to publish it would tell more. `tame` values need neither.
    """
    scaled = values.to(torch.float64, copy=True).mul_(1 / g)
    return (scaled if tame else scaled.nan_to_num_(nan=0.0).clamp_(-_EXACT, _EXACT)).round_()
