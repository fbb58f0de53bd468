"""Features from public rows, for heads that are trained privately.

Each kind of features is a frozen value. ``fit(public)`` returns a map, and ``map.transform(x)`` the features of rows.
Features of a row depend on that row and on public rows only, so a map can be applied to private rows inside the privacy
boundary (`PrivateData.mapped`) at no cost in epsilon.
"""

from halfsilver.features.base import FeatureMap, Features, as_is, flipped
from halfsilver.features.cache import Cached
from halfsilver.features.frozen import Frozen
from halfsilver.features.patches import RandomPatches
from halfsilver.features.spectrum import joined, public_pca

__all__ = ["Cached", "FeatureMap", "Features", "Frozen", "RandomPatches", "as_is", "flipped", "joined", "public_pca"]
