"""`RandomPatches`: features of images, from filters that are patches of public images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from halfsilver.errors import require
from halfsilver.features.base import View, as_is, check_views, name_of, over_views

# So few images and filters at once that their responses stay in the processor's cache: almost twice as fast.
_IMAGES, _FILTERS = 2, 256


@dataclass(frozen=True, kw_only=True)
class RandomPatches:
    """Features of images from random whitened patches of public images. Nothing is trained.

    Each patch p of an image, as a vector of all its numbers, is normalised to ``c(p) = (p - mean p) / sqrt(var p +
    contrast)`` and compared with each of K filters, ``r_k = f_k^T W (c(p) - m)``. Here m and W whiten the normalised
    patches of public images, ``W = (covariance + damping)^(-1/2)``, and f_k is one such patch, whitened and scaled to
    norm 1. ``max(r_k - bias, 0)`` and ``max(-r_k - bias, 0)``, averaged over the cells of a grid, are the features:
    ``2 K grid^2`` numbers per image.

    Guarantee: features of an image depend on that image and on public images only.

    Args:
        filters: The number K of filters, at least 1. Default 1024. More are better and take proportionally longer.
        size: Height and width of a patch in pixels, at least 2. Default 6, for images of 32 x 32.
        grid: Cells per side over which responses are averaged, at least 1. Default 2. Cells overlap by a pixel if the
            sides cannot be divided evenly.
        bias: How strong a response must be to count, at least 0. Default 1, one standard deviation or so.
        white: The value of a white pixel, above 0. Default 255, for bytes. Pixels are divided by it.
        contrast: Added to the variance of a patch, above 0. Default 4.6e-4, so that patches without contrast stay
            small.
        damping: Added to the eigenvalues of the covariance of normalised patches, above 0. Default 0.01.
        sample: Public patches from which m, W and the filters are made, at least `filters`. Default 100000.
        views: Functions of images whose features are averaged for each record. Default only the image itself. Use
            ``(as_is, flipped)`` for images of objects; it doubles the time.
        seed: Determines the filters. Default 0.

    Raises:
        ConfigError: If an argument is out of range, or public rows are not images of at least `size` pixels.

    Example:
        >>> import torch
        >>> public = torch.randint(0, 256, (20, 3, 16, 16), dtype=torch.uint8)
        >>> map = RandomPatches(filters=8, sample=500).fit(public)
        >>> map.transform(public[:5]).shape
        torch.Size([5, 64])

    References:
        Coates and Ng, *The Importance of Encoding Versus Training with Sparse Coding and Vector Quantization*, ICML
        2011; Tramèr and Boneh, *Differentially Private Learning Needs Better Features (or Much More Data)*, 2021,
        arXiv:2011.11660
    """

    filters: int = 1024
    size: int = 6
    grid: int = 2
    bias: float = 1.0
    white: float = 255.0
    contrast: float = 4.6e-4
    damping: float = 0.01
    sample: int = 100_000
    views: Sequence[View] = (as_is,)
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.filters >= 1, "filters", self.filters, "at least 1")
        require(self.size >= 2, "size", self.size, "at least 2")
        require(self.grid >= 1, "grid", self.grid, "at least 1")
        require(self.bias >= 0, "bias", self.bias, "at least 0")
        require(self.sample >= self.filters, "sample", self.sample, f"at least filters={self.filters}")
        for name in ("white", "contrast", "damping"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        check_views(tuple(self.views))

    def fit(self, public: Tensor) -> PatchMap:
        """Draw filters from public images.

        Args:
            public: Public images, shape [N, channels, height, width], bytes or floating point from 0 to `white`.

        Returns:
            The map. It holds the filters and no image.

        Raises:
            ConfigError: If the rows are not images of at least `size` pixels per side.
        """
        shape = tuple(public.shape)
        good = len(shape) == 4 and len(public) > 0 and min(shape[2:]) >= self.size
        require(good, "shape of public images", shape, f"to be [N, channels, H, W] with H, W >= size={self.size}")
        require(self.grid <= min(shape[2:]) - self.size + 1, "grid", self.grid, "at most the patches per side")
        generator = torch.Generator().manual_seed(self.seed)
        patches = self._normalised(self._drawn(public, generator)).double()
        mean = patches.mean(0)
        values, vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
        whiten = vectors * (values.clamp_min(0) + self.damping).rsqrt() @ vectors.T
        chosen = (patches[: self.filters] - mean) @ whiten
        weights = chosen / chosen.norm(dim=1, keepdim=True).clamp_min(1e-12) @ whiten
        return PatchMap(settings=self, weights=weights.T.float().contiguous(), offset=-(weights @ mean).float())

    def _drawn(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Patches at random places of random images, as vectors."""
        down, across = (side - self.size + 1 for side in images.shape[2:])
        image, y, x = (torch.randint(n, (self.sample,), generator=generator) for n in (len(images), down, across))
        windows = images.cpu().unfold(2, self.size, 1).unfold(3, self.size, 1)  # a view, not a copy
        return windows[image, :, y, x].flatten(1).float() / self.white

    def _normalised(self, patches: Tensor) -> Tensor:
        centred = patches - patches.mean(1, keepdim=True)
        return centred.mul_((centred.square().mean(1, keepdim=True) + self.contrast).rsqrt_())


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchMap:
    """The map that `RandomPatches` gives: filters as the columns of `weights`, and `offset` for their responses."""

    settings: RandomPatches
    weights: Tensor
    offset: Tensor

    def transform(self, x: Tensor) -> Tensor:
        return over_views(self._features, x, tuple(self.settings.views), rows=_IMAGES)

    def state(self) -> Mapping[str, Tensor]:
        return {"weights": self.weights, "offset": self.offset}

    def about(self) -> Mapping[str, Any]:
        return {**asdict(self.settings), "kind": "RandomPatches", "views": [*map(name_of, self.settings.views)]}

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        """A convolution as one matrix product: patches are normalised once, and not once for each filter."""
        size, bias = self.settings.size, self.settings.bias
        windows = (images.float() / self.settings.white).unfold(2, size, 1).unfold(3, size, 1)
        down, across = windows.shape[2:4]
        patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(len(images) * down * across, -1)
        normal, cells = self.settings._normalised(patches), _cells(down, across, self.settings.grid).to(images.device)
        strong, opposite = [], []
        for weights, offset in zip(self.weights.split(_FILTERS, 1), self.offset.split(_FILTERS), strict=True):  # type: ignore[no-untyped-call]
            responses = torch.addmm(offset.to(images.device), normal, weights.to(images.device))
            responses = responses.view(len(images), down * across, -1)
            # max(r - b, 0) = max(r, b) - b, and max(-r - b, 0) = -min(r, -b) - b, so each is one clamp and one mean.
            strong.append(cells @ responses.clamp_min(bias) - bias)
            opposite.append(-(cells @ responses.clamp_max_(-bias)) - bias)
        return torch.cat([*strong, *opposite], 2).flatten(1)


def _cells(down: int, across: int, grid: int) -> Tensor:
    """The matrix [grid^2, down * across] that averages over cells, as `adaptive_avg_pool2d` does."""
    return torch.einsum("ai,bj->abij", _cell(down, grid), _cell(across, grid)).reshape(grid * grid, down * across)


def _cell(length: int, grid: int) -> Tensor:
    place, cell = torch.arange(length), torch.arange(grid)[:, None]
    inside = (place >= cell * length // grid) & (place < -(-(cell + 1) * length // grid))
    return inside / inside.sum(1, keepdim=True)
