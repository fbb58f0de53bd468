"""Statistics of public rows: several maps joined on one scale, and the axes along which public rows differ most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, batch_rows, take_rows
from halfsilver.errors import require
from halfsilver.features.base import FeatureMap, Features

_ROWS = 1000  # that are projected at once


def joined(*parts: Features) -> Joined:
    """Join several kinds of features, each with the same energy on public rows.

    With m_k the mean of block k on public rows and ``E_k = mean |z_k - m_k|^2``, the features are the blocks
    ``(z_k - m_k) / sqrt(E_k)`` side by side. So a block of many or of large numbers does not outweigh the others.

    Args:
        parts: Two or more settings of features, such as `Frozen` and `RandomPatches`.

    Returns:
        Settings of features, with ``fit(public)``.

    Raises:
        ConfigError: If fewer than two are given.

    Example:
        >>> import torch
        >>> from halfsilver.features import Frozen
        >>> public = torch.randn(50, 3)
        >>> both = joined(Frozen(torch.nn.Linear(3, 4)), Frozen(torch.nn.Linear(3, 2)))
        >>> z = both.fit(public).transform(public)
        >>> z.shape, round(float(z.square().sum() / 50), 3)
        (torch.Size([50, 6]), 2.0)
    """
    require(len(parts) >= 2, "parts", len(parts), "at least 2")
    return Joined(parts=parts)


def public_pca(features: Features, *, rank: int | None = None, floor: float = 0.01) -> PublicPCA:
    """Standardise features by public statistics and turn them to the leading public axes.

    With mean m and variance v of each feature on public rows, ``s = 1 / sqrt(v + floor^2 mean(v))``. The new features
    are the coordinates of ``(z - m) s`` along the leading principal axes of the public rows, largest variance first.
    They are not whitened: damping is a matter of the head.

    Args:
        features: Settings of features.
        rank: The number of axes, at least 1. Default None, all along which public rows differ, at most the number of
            public rows minus 1.
        floor: Features that hardly vary on public rows are not scaled up beyond this share, at least 0. Default 0.01.

    Returns:
        Settings of features, with ``fit(public)``.

    Raises:
        ConfigError: If an argument is out of range, or public rows do not differ in any feature.

    Example:
        >>> import torch
        >>> from halfsilver.features import Frozen
        >>> public = torch.randn(50, 3)
        >>> map = public_pca(Frozen(torch.nn.Linear(3, 8)), rank=2).fit(public)
        >>> map.transform(public).shape
        torch.Size([50, 2])
    """
    require(rank is None or rank >= 1, "rank", rank, "at least 1")
    require(floor >= 0, "floor", floor, "at least 0")
    return PublicPCA(features=features, rank=rank, floor=floor)


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """What `joined` returns."""

    parts: tuple[Features, ...]

    def fit(self, public: Batch) -> JoinedMap:
        maps = tuple(part.fit(public) for part in self.parts)
        rows = [map.transform(public) for map in maps]
        means = tuple(z.mean(0) for z in rows)
        energies = [(z - mean).square().sum(1).mean() for z, mean in zip(rows, means, strict=True)]
        for k, energy in enumerate(energies):
            require(bool(energy > 0), f"energy of part {k}", float(energy), "above 0 on public rows")
        return JoinedMap(maps=maps, means=means, scales=torch.stack(energies).rsqrt())


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedMap:
    maps: tuple[FeatureMap, ...]
    means: tuple[Tensor, ...]
    scales: Tensor

    def transform(self, x: Batch) -> Tensor:
        blocks = zip(self.maps, self.means, self.scales, strict=True)
        return torch.cat([(map.transform(x) - mean) * scale for map, mean, scale in blocks], 1)

    def state(self) -> Mapping[str, Tensor]:
        parts = {f"{k}.{name}": t for k, map in enumerate(self.maps) for name, t in map.state().items()}
        return {**parts, **{f"mean.{k}": mean for k, mean in enumerate(self.means)}, "scales": self.scales}

    def about(self) -> Mapping[str, Any]:
        return {"kind": "joined", "parts": [dict(map.about()) for map in self.maps]}


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicPCA:
    """What `public_pca` returns."""

    features: Features
    rank: int | None
    floor: float

    def fit(self, public: Batch) -> PCAMap:
        map = self.features.fit(public)
        rows = map.transform(public).double()
        mean, variance = rows.mean(0), rows.var(0, correction=0)
        require(bool(variance.max() > 0), "variance of the features", 0.0, "above 0 on public rows")
        scale = (variance + self.floor**2 * variance.mean()).rsqrt().nan_to_num_(posinf=0.0)
        variances, axes = _leading((rows - mean) * scale, self.rank)
        numbers = (mean, scale, axes, variances)
        mean, scale, axes, variances = (t.float() for t in numbers)
        return PCAMap(map=map, mean=mean, scale=scale, axes=axes.contiguous(), variances=variances)


def _leading(rows: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    """Variances along the principal axes, largest first, and the axes as columns.

    From the smaller of the two Gram matrices. The largest entry of each axis is positive, so that the same rows give
    the same axes everywhere.
    """
    count, wide = len(rows), rows.shape[1] > len(rows)
    values, vectors = torch.linalg.eigh((rows @ rows.T if wide else rows.T @ rows) / count)
    values, vectors = values.flip(0), vectors.flip(1)
    kept = int((values > 1e-10 * values[0]).sum())
    kept = kept if rank is None else min(rank, kept)
    values, vectors = values[:kept], vectors[:, :kept]
    axes = rows.T @ vectors / (values * count).sqrt() if wide else vectors
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return values, axes * largest.sign()


@dataclass(frozen=True, kw_only=True, eq=False)
class PCAMap:
    """The map that `public_pca` gives; `variances` are those of public rows along the axes, largest first."""

    map: FeatureMap
    mean: Tensor
    scale: Tensor
    axes: Tensor
    variances: Tensor

    def transform(self, x: Batch) -> Tensor:
        """Some rows at a time: what is projected may be much wider than the result."""
        parts = (take_rows(x, slice(i, i + _ROWS)) for i in range(0, max(1, batch_rows(x)), _ROWS))
        return torch.cat([(self.map.transform(part) - self.mean) * self.scale @ self.axes for part in parts])

    def state(self) -> Mapping[str, Tensor]:
        own = {"mean": self.mean, "scale": self.scale, "axes": self.axes, "variances": self.variances}
        return {**{f"map.{name}": t for name, t in self.map.state().items()}, **own}

    def about(self) -> Mapping[str, Any]:
        return {"kind": "public_pca", "of": dict(self.map.about())}
