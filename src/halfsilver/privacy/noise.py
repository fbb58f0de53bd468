"""The hardened Gaussian mechanism: noise is added exactly, on a grid that does not depend on the data.

Noise in plain floating point leaks: which floats are reachable depends on the value to which the noise was added. Here
the sum and the noise are both rounded to multiples of one power of two, and their addition is exact in float64. So the
set of possible outputs is the same whatever the data.

References:
    - Mironov 2012, On Significance of the Least Significant Bits for Differential Privacy, CCS, for the attack.
    - Canonne, Kamath and Steinke 2020, The Discrete Gaussian for Differential Privacy, arXiv:2004.00010, for noise on a
      grid. Here a continuous normal is rounded to the grid, which is post-processing of the Gaussian mechanism.
    - Google 2020, Secure Noise Generation (differential-privacy library), for a grid of a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfsilver._core.tensors import Tensors
from halfsilver.errors import ConfigError
from halfsilver.privacy.entropy import BLOCK, MAX_SCALE, Entropy, normal_blocks
from halfsilver.privacy.gradients.base import ClippedSum

if TYPE_CHECKING:
    from halfsilver.privacy.noise_chain import NoiseChain

GRID_SHARE = 1e-6
# Rounding to the grid raises the sensitivity by at most g * sqrt(d) <= 1e-6 C; the noise pays for twice that.
_SCALE_MARGIN = 1 + 2e-6
# Integers up to here, and their sums, are exact in float64.
_EXACT = 2.0**52


def grid(sensitivity: float, dimension: int) -> float:
    """The spacing of the grid: the largest power of two that is at most 1e-6 * sensitivity / sqrt(dimension).

    Rounding moves a coordinate by at most g / 2, so it moves the difference of two neighbouring sums by at most g *
    sqrt(dimension) <= 1e-6 * sensitivity in Euclidean norm. `noise_scale` pays for twice that.

    Args:
        sensitivity: How much one unit can move the sum, in Euclidean norm; above 0.
        dimension: The number of coordinates of the whole sum.

    Returns:
        The spacing g.

    Example:
        >>> grid(1.0, 1)
        9.5367431640625e-07
    """
    return 2.0 ** math.floor(math.log2(GRID_SHARE * sensitivity / math.sqrt(max(dimension, 1))))


def noise_scale(noise_multiplier: float, sensitivity: float) -> float:
    """Standard deviation of the noise that is drawn: noise_multiplier * sensitivity * (1 + 2e-6)."""
    return noise_multiplier * sensitivity * _SCALE_MARGIN


def check_exactness(noise_multiplier: float, sensitivity: float, dimension: int) -> None:
    """Refuse a plan whose noise float64 could not draw finely enough. Far below that limit, all additions are exact."""
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

    Guarantee: one release of the Gaussian mechanism with at least this noise multiplier, rounded to a grid. The scale
    of the noise pays for rounding the sum, and the addition is exact. So an output depends on the sum only through the
    probability of the noise. `normal_blocks` states how far the noise is from a rounded normal; that distance is not in
    epsilon or delta.

    Args:
        clipped: The sum of clipped gradients, with its sensitivity.
        noise_multiplier: Standard deviation of the noise in units of the sensitivity; above 0.
        entropy: The source of random bits.
        dimension: The number of parameters of the whole model, where `clipped` holds one shard of it. Default None,
            which counts the coordinates of `clipped`.

    Returns:
        The noisy sum, one float64 tensor per tensor of `clipped`.

    References:
        - Dwork and Roth 2014, The Algorithmic Foundations of Differential Privacy, Appendix A, for the Gaussian
          mechanism.
        - Abadi et al. 2016, Deep Learning with Differential Privacy, arXiv:1607.00133, for its use on clipped
          gradients.
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
    chain: NoiseChain | None = None,
) -> Tensors:
    """The result of `add_noise`, divided by the expected batch size and cast. It may overwrite the sum.

    With a `chain`, the noise is what it makes of fresh noise, and it has taken one step after that.

    It makes one pass over blocks that stay in the cache, because memory traffic would cost more than the arithmetic.
    """
    dimension = dimension if dimension is not None else sum(t.numel() for t in clipped.tensors)
    check_exactness(noise_multiplier, clipped.sensitivity, dimension)
    g = grid(clipped.sensitivity, dimension)
    steps = noise_scale(noise_multiplier, clipped.sensitivity) / g
    sums, first = [t.contiguous() for t in clipped.tensors], 0
    out = [t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t, dtype in zip(sums, dtypes, strict=True)]
    for places in _together(sums):
        flat = [sums[i].view(-1) for i in places]
        total = flat[0] if len(flat) == 1 else torch.cat(flat)
        released = out[places[0]].view(-1) if len(flat) == 1 else torch.empty_like(total, dtype=torch.float64)
        _release(total, released, g, steps, g / expected, entropy, chain, first)
        first += len(total)
        if len(flat) > 1:
            torch._foreach_copy_(
                [out[i].view(-1) for i in places], [*torch.split_with_sizes(released, [len(t) for t in flat])]
            )
    if chain is not None:
        chain.advance()
    return out


def _together(sums: Sequence[Tensor]) -> Iterator[list[int]]:
    """Places of tensors that are released in one go: neighbours that fit into one block, because a draw has a cost."""
    places: list[int] = []
    for i, t in enumerate(sums):
        alike = places and (t.dtype, t.device) == (sums[places[0]].dtype, sums[places[0]].device)
        if places and not (alike and sum(sums[k].numel() for k in places) + t.numel() <= BLOCK):
            yield places
            places = []
        places.append(i)
    if places:
        yield places


def _release(
    total: Tensor,
    released: Tensor,
    g: float,
    steps: float,
    unit: float,
    entropy: Entropy,
    chain: NoiseChain | None,
    first: int,
) -> None:
    """From sum to release in units of the grid, where each number is an integer and addition is exact."""
    tame = bool(torch.linalg.vector_norm(total) < _EXACT * g)  # not if NaN
    # Each thread of PyTorch keeps a block of its own in its cache. A seed gives one sequence for any number of them.
    size = BLOCK * torch.get_num_threads() if entropy.is_private else BLOCK
    for start, noise in normal_blocks(entropy, len(total), steps, size):
        fresh = noise.round_().to(total.device)
        added = fresh if chain is None else chain.follow(fresh, first + start)
        block = slice(start, start + len(noise))
        released[block] = on_grid(total[block], g, tame=tame).add_(added).mul_(unit)


def on_grid(values: Tensor, g: float, *, tame: bool = False) -> Tensor:
    """The nearest multiples of the power of two `g`, in units of `g`, as a new float64 tensor.

    Clamping to the exact range is 1-Lipschitz, so it cannot raise the sensitivity. The mechanism passes only finite
    sums. A NaN from elsewhere becomes 0, because publishing it would reveal more. `tame` values need neither step.
    """
    scaled = values.double() * (1 / g)
    return (scaled if tame else scaled.nan_to_num_(nan=0.0).clamp_(-_EXACT, _EXACT)).round_()
