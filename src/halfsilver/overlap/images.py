"""Images: equal pixel by pixel, or alike but for a small shift and another brightness, found by a perceptual hash."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from halfsilver.errors import require
from halfsilver.overlap.match import Overlap, overlap

Pixels = NDArray[np.uint8]  # [N, channels, height, width]
Floats = NDArray[np.float32]

CORRELATION = 0.95
_WAVES = 8  # the lowest cosine waves, across and down, whose signs are the hash
_BITS_APART = 16  # of 63; an image that is moved by a pixel is seldom further from itself
_SHIFT = 1
_SMALLEST = 2 * _WAVES
_HASHED, _COMPARED, _CORRELATED = 4096, 2**23, 4096  # at once: images, pairs of hashes, pairs of images


def overlap_of_images(private: Pixels, public: Pixels, *, correlation: float = CORRELATION) -> Overlap:
    """Find images that are in both sets, equal or nearly.

    Two images are near if their pixels correlate by at least `correlation` after one of them is moved by up to one
    pixel. Correlation ignores brightness and contrast. The signs of the lowest cosine waves (a perceptual hash) propose
    the pairs.

    Args:
        private: The private images as bytes, of shape [N, channels, height, width].
        public: The public images, of the same shape per image.
        correlation: The least correlation, in (0, 1]. Default 0.95.

    Returns:
        The overlap, which is not private.

    Raises:
        ConfigError: If `correlation` is out of range, or if the shapes differ or are below 16 pixels.

    Example:
        >>> import numpy as np
        >>> images = np.random.default_rng(0).integers(0, 256, (4, 3, 16, 16), dtype=np.uint8)
        >>> overlap_of_images(images[:3], images[2:]).private.figures()["exact"]
        1
    """
    require(0 < correlation <= 1, "correlation", correlation, "in (0, 1]")
    shapes = [images.shape[1:] for images in (private, public)]
    fits = shapes[0] == shapes[1] and len(shapes[0]) == 3 and min(shapes[0][1:]) >= _SMALLEST
    require(
        fits, "shapes of the images", shapes, f"equal, (channels, height, width), at least {_SMALLEST} wide and high"
    )
    own, shown = ([image.tobytes() for image in side] for side in (private, public))
    return overlap("images", own, shown, partial(_near, shape=shapes[0], correlation=correlation), "images")


def _near(
    private: list[bytes], public: list[bytes], shape: tuple[int, ...], correlation: float
) -> Iterator[tuple[int, int, float]]:
    own, shown = (np.frombuffer(b"".join(side), np.uint8).reshape(-1, *shape) for side in (private, public))
    for i, j in _candidates(_signs(own), _signs(shown)):
        alike = _correlation(own[i], shown[j])
        for k in np.flatnonzero(alike >= correlation):
            yield int(i[k]), int(j[k]), min(1.0, float(alike[k]))


def _signs(images: Pixels) -> Floats:
    """The perceptual hash, as -1 and 1: which of the low cosine waves of the grey image are positive."""
    across, down = (_cosines(size)[:_WAVES] for size in (images.shape[3], images.shape[2]))
    parts = [images[i : i + _HASHED].mean(axis=1, dtype=np.float32) for i in range(0, len(images), _HASHED)]
    waves = np.concatenate([(down @ grey @ across.T).reshape(len(grey), -1) for grey in parts])
    return np.where(waves[:, 1:] > 0, 1, -1).astype(np.float32)  # without the mean, which is brightness


def _cosines(size: int) -> Floats:
    places = np.arange(size)
    return np.cos(math.pi / size * np.outer(places, places + 0.5)).astype(np.float32)


def _candidates(own: Floats, shown: Floats) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Pairs whose hashes differ in few bits; an inner product counts the bits that agree less those that do not."""
    rows = max(1, _COMPARED // len(shown))
    for start in range(0, len(own), rows):
        i, j = np.nonzero(own[start : start + rows] @ shown.T >= own.shape[1] - 2 * _BITS_APART)
        for k in range(0, len(i), _CORRELATED):
            yield i[k : k + _CORRELATED] + start, j[k : k + _CORRELATED]


def _correlation(a: Pixels, b: Pixels) -> Floats:
    """Of the inner parts of each pair of images, at the shift where it is largest."""
    height, width = (size - 2 * _SHIFT for size in a.shape[2:])
    inner = _standard(a[:, :, _SHIFT : _SHIFT + height, _SHIFT : _SHIFT + width])
    places = product(range(2 * _SHIFT + 1), repeat=2)
    moved = (_standard(b[:, :, y : y + height, x : x + width]) for y, x in places)
    best: Floats = np.max([np.einsum("nk,nk->n", inner, other) for other in moved], axis=0)
    return best


def _standard(images: Pixels) -> Floats:
    """Each image as a vector of mean 0 and length 1; one without contrast stays 0 and is like no other."""
    flat: Floats = images.reshape(len(images), -1).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-3)
    return flat
