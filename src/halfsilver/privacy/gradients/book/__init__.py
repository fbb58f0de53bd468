"""Book-keeping: clipped sums at nearly the cost of a plain backward pass.

One backward pass runs to the outputs of the layers only. A layer's input and the gradient at its output give first the
norms of all per-example gradients and then, with the clip factors known, their weighted sum. So there is no second
backward pass and, where the shapes allow it, no per-example gradient in memory.

References:
    - Goodfellow 2015, Efficient Per-Example Gradient Computations, arXiv:1510.01799, for norms from inputs and output
      gradients.
    - Li, Tramer, Liang and Hashimoto 2022, Large Language Models Can Be Strong Differentially Private Learners,
      arXiv:2110.05679, for norms of layers with a time axis (ghost clipping).
    - Bu, Wang, Zha and Karypis 2023, Differentially Private Optimization on Large Model at Small Cost,
      arXiv:2210.00038, for the weighted sum without a second backward pass (book-keeping).
"""

from __future__ import annotations

from halfsilver.privacy.gradients.book.backend import BookKeeping

__all__ = ["BookKeeping"]
