"""Where randomness comes from: the operating system or, under a name that says so, a seed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from ssl import RAND_add, RAND_bytes
from typing import Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Small enough that a block's words, radii and angles stay in the cache together.
BLOCK = 1 << 16

_FRESH_BYTES = 32

# Shares this close to 0 or 1 get the bits of a further word. There the 63 bits of one, and next to 1 the 53 bits of a
# float64, would leave gaps between the radii.
_CLOSE = 2.0**-20
_LEAST = np.int64(-(2**63))


class Entropy(Protocol):
    """A source of uniform 64-bit words."""

    @property
    def is_private(self) -> bool:
        """Whether nobody can know these words. Only then does a guarantee hold."""
        ...

    def words(self, n: int) -> Tensor: ...


@final
class OsEntropy:
    """OpenSSL's generator (AES in counter mode), with fresh bytes from the kernel mixed in before every draw.

    So no random bits repeat after a crash, a fork, a resume or a restored machine image. Taking all bytes from the
    kernel would be ten times slower, and would cost more than the rest of the noise.

    References:
        - Barker and Kelsey 2015, Recommendation for Random Number Generation Using Deterministic Random Bit Generators,
          NIST SP 800-90A Rev. 1, for the generator (CTR_DRBG).
    """

    is_private = True

    def words(self, n: int) -> Tensor:
        if n == 0:
            return torch.empty(0, dtype=torch.int64)
        RAND_add(os.urandom(_FRESH_BYTES), float(_FRESH_BYTES))
        return torch.frombuffer(bytearray(RAND_bytes(8 * n)), dtype=torch.int64)


@final
class UnsafeSeed:
    """Reproducible words for tests and debugging. Anyone who knows the seed can subtract the noise."""

    is_private = False

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def words(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int64).random_(-(2**63), None, generator=self._generator)


def uniform(entropy: Entropy, n: int) -> Tensor:
    """`n` float64 values k * 2^-53 with k uniform on 1 .. 2^53: in (0, 1] and never 0, so the logarithm is finite."""
    return ((entropy.words(n) >> 11) & (2**53 - 1)).add_(1).double().mul_(2.0**-53)


def normal_blocks(entropy: Entropy, n: int, scale: float, size: int = BLOCK) -> Iterator[tuple[int, Tensor]]:
    """Yield `n` float64 normals of standard deviation `scale`, `size` at a time with the place of the first.

    The next block overwrites the memory of the last one.

    Box-Muller on whole words: with U uniform on (0, 1] and an independent angle A uniform on the circle, the two
    numbers scale * sqrt(-2 log U) * (cos A, sin A) are independent normals. U comes from one word with more than 53
    bits, A from another.

    Distance from the normal distribution, for `scale` up to `MAX_SCALE` and after rounding to whole numbers:

    - Support: every pair of whole numbers is possible, up to a radius that an exact sampler exceeds with probability
      scale * 2^-116, so at most 2^-73. No number is larger than `MAX_NORMAL` standard deviations.
    - Rounding: a number is within 2^-44 standard deviations, and on average 2^-49, of the one that exact arithmetic
      would compute from the same words. So it is rounded to another whole number with probability below scale * 2^-48.

    References:
        - Box and Muller 1958, A Note on the Generation of Random Normal Deviates, Annals of Mathematical Statistics
          29(2).
    """
    most = (min(size, n) + 1) // 2
    block, radii, angles = (torch.empty(k, dtype=torch.float64) for k in (2 * most, most, most))
    for start in range(0, n, size):
        count = min(size, n - start)
        half = (count + 1) // 2
        words, radius, angle = entropy.words(2 * half), radii[:half], angles[:half]
        radius.copy_(words[:half]).abs_().mul_(2.0**-63)  # in [0, 1]
        _log(radius, words, entropy).mul_(-2 * scale**2).sqrt_()
        angle.copy_(words[half:]).mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=block[:half]).mul_(radius)
        torch.sin(angle, out=block[half : 2 * half]).mul_(radius)
        yield start, block[:count]


def _log(share: Tensor, words: Tensor, entropy: Entropy) -> Tensor:
    """log(share) in its place, where a share is |word| * 2^-63."""
    values = share.numpy()
    bits = values.view(np.int64)  # in the same order, and compared faster; so is argmin faster than min
    least, largest = values[bits.argmin()], values[bits.argmax()]
    if least >= _CLOSE and largest <= 1 - _CLOSE:  # in fifteen blocks of sixteen
        return share.log_()
    ends = np.flatnonzero((values < _CLOSE) | (values > 1 - _CLOSE))
    share.log_()
    values[ends] = _log_of_ends(words.numpy()[ends], uniform(entropy, len(ends)).numpy())
    return share


def _log_of_ends(words: NDArray[np.int64], fresh: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(share) of shares next to 0 or 1. A fresh uniform chooses the place of each within the range of its word."""
    small = np.abs(words.astype(np.float64)) < 2.0**62
    whole = np.where(small, words, _LEAST - np.abs(words))  # 2^63 - |word|, modulo 2^64
    part = np.abs(np.abs(whole.astype(np.float64)) + (fresh - 0.5)) * 2.0**-63
    return np.where(small, np.log(np.maximum(part, 2.0**-117)), np.log1p(-part))


MAX_NORMAL = math.sqrt(2 * 117 * math.log(2))  # in standard deviations
MAX_SCALE = 2.0**43
