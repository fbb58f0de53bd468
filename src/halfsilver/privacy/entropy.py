"""Where randomness comes from: the operating system, or, under a name that says so, a seed."""

from __future__ import annotations

import math
import os
from typing import Protocol, final

import torch
from torch import Tensor

# Small enough that a block's words, uniforms and normals stay in the cache together.
_BLOCK = 1 << 16


class Entropy(Protocol):
    """A source of uniform 64-bit words."""

    @property
    def is_private(self) -> bool:
        """Whether nobody can know these words; only then does a guarantee hold."""
        ...

    def words(self, n: int) -> Tensor: ...


@final
class OsEntropy:
    """The kernel's generator. It has no state in this process: nothing to reuse after a crash, a fork or a resume."""

    is_private = True

    def words(self, n: int) -> Tensor:
        if n == 0:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(bytearray(os.urandom(8 * n)), dtype=torch.int64)


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


def normal(entropy: Entropy, n: int, scale: float = 1.0) -> Tensor:
    """`n` float64 normals of standard deviation `scale`.

    Box-Muller on 53-bit uniforms: every uniform gives one normal, and log, cos and sin run vectorised on blocks that
    fit into the cache. A draw can be as large as 8.57 standard deviations.
    """
    out = torch.empty(n, dtype=torch.float64)
    for start in range(0, n, 2 * _BLOCK):
        block = out[start : start + 2 * _BLOCK]
        half = (len(block) + 1) // 2
        u = uniform(entropy, 2 * half)
        radius = u[:half].log_().mul_(-2).sqrt_().mul_(scale)
        angle = u[half:].mul_(2 * math.pi)
        torch.mul(radius, angle.cos(), out=block[:half])
        torch.mul(radius[: len(block) - half], angle[: len(block) - half].sin_(), out=block[half:])
    return out


MAX_NORMAL = math.sqrt(2 * 53 * math.log(2))  # in standard deviations
