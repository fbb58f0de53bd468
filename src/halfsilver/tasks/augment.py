"""Random changes to public images, vectorised over a batch; images hold bytes, or numbers from 0 to 255.

All draw from torch's global generator, which pretraining and the mirror step seed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def recoloured(images: Tensor, strength: float) -> Tensor:
    """Brightness, contrast, saturation and each channel's gain changed by up to `strength` (half of it for gains)."""

    def factor(channels: int = 1) -> Tensor:
        return 1 + strength * (2 * torch.rand(len(images), channels, 1, 1, device=images.device) - 1)

    pixels = images.float() * factor()
    pixels = _stretched(pixels, pixels.mean((1, 2, 3), keepdim=True), factor())
    pixels = _stretched(pixels, pixels.mean(1, keepdim=True), factor())
    return (pixels * (1 + factor(images.shape[1])) / 2).clamp(0, 255)


def _stretched(pixels: Tensor, around: Tensor, factor: Tensor) -> Tensor:
    return (pixels - around) * factor + around


def with_hole(images: Tensor, size: int) -> Tensor:
    """Each image with a grey square of `size` pixels somewhere, which may reach over the edge."""
    rows, height, width = images.shape[0], images.shape[2], images.shape[3]
    down = _near(torch.randint(height, (rows, 1), device=images.device), height, size)
    across = _near(torch.randint(width, (rows, 1), device=images.device), width, size)
    return images.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 127.5)


def _near(centre: Tensor, length: int, size: int) -> Tensor:
    return (torch.arange(length, device=centre.device) - centre + 0.5).abs() < size / 2


def mixed(
    images: Tensor, labels: Tensor, classes: int, concentration: float, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Each image blended with its opposite in the batch, and labels as probabilities in the same shares (mixup).

    A share `smoothing` of each label is spread evenly over all classes (label smoothing).
    """
    share = float(torch.distributions.Beta(concentration, concentration).sample())
    sure = functional.one_hot(labels, classes).to(images.dtype)
    sure = (1 - smoothing) * sure + smoothing / classes if smoothing else sure
    return share * images + (1 - share) * images.flip(0), share * sure + (1 - share) * sure.flip(0)
