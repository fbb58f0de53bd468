"""Where randomness comes from: the operating system, or, under a name that says so, a seed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from ssl import RAND_add, RAND_bytes
from typing import Protocol, final

import torch
from torch import Tensor

# Small enough that a block's words, radii and angles stay in the cache together.
BLOCK = 1 << 16

_FRESH_BYTES = 32


class Entropy(Protocol):
    """A source of uniform 64-bit words."""

    @property
    def is_private(self) -> bool:
        """Whether nobody can know these words; only then does a guarantee hold."""
        ...

    def words(self, n: int) -> Tensor: ...


@final
class OsEntropy:
    """OpenSSL's generator, AES in counter mode, with new bytes of the kernel's own mixed in before every draw.

    So nothing is reused after a crash, a fork, a resume or a restored image of the machine. To take all bytes from the
    kernel would be ten times slower, and cost more than the rest of the noise.
    """

    is_private = True

    def words(self, n: int) -> Tensor:
        if n == 0:
            return torch.empty(0, dtype=torch.int64)
        RAND_add(os.urandom(_FRESH_BYTES), float(_FRESH_BYTES))
        return torch.frombuffer(bytearray(RAND_bytes(8 * n)), dtype=torch.int64)


@final
class UnsafeSeed:
    """Reproducible words for tests and debugging. Whoever knows the seed can subtract the noise."""

    is_private = False

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def words(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int64).random_(-(2**63), None, generator=self._generator)


def uniform(entropy: Entropy, n: int) -> Tensor:
    """`n` float64 values on the grid k * 2^-53, k = 1 .. 2^53: all of (0, 1], never 0, so that its log is finite."""
    return ((entropy.words(n) >> 11) & (2**53 - 1)).add_(1).double().mul_(2.0**-53)


def normal_blocks(entropy: Entropy, n: int, scale: float) -> Iterator[tuple[int, Tensor]]:
    """`n` float64 normals, a block at a time with its start; the next block takes its place.

    Box-Muller on whole words: the radius from one with more than 53 bits, the angle, uniform on the circle, from
    another; both give a normal. A draw can be as large as `MAX_NORMAL` standard deviations.
    """
    block, radii, angles = (torch.empty(k, dtype=torch.float64) for k in (BLOCK, BLOCK // 2, BLOCK // 2))
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        half = (size + 1) // 2
        words, radius, angle = entropy.words(2 * half), radii[:half], angles[:half]
        radius.copy_(words[:half]).abs_().clamp_(min=1.0).mul_(2.0**-63)  # in (0, 1]
        radius.log_().mul_(-2 * scale**2).sqrt_()
        angle.copy_(words[half:]).mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=block[:half]).mul_(radius)
        torch.sin(angle, out=block[half : 2 * half]).mul_(radius)
        yield start, block[:size]


MAX_NORMAL = math.sqrt(2 * 63 * math.log(2))  # in standard deviations
