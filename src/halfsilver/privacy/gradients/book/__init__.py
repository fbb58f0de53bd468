"""Book-keeping: clipped sums at nearly the price of a plain backward pass.

One backward pass runs to the layers' outputs only. From a layer's input and the gradient at its output follow first the
norms of all per-example gradients and then, with the clip factors known, their weighted sum: no second backward pass
and, where the shapes allow it, no per-example gradient ever in memory.
"""

from __future__ import annotations

from halfsilver.privacy.gradients.book.backend import BookKeeping

__all__ = ["BookKeeping"]
