"""Whether a classifier is as often right as it says it is."""

from __future__ import annotations

import torch
from torch import Tensor

from halfsilver.errors import require


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """The expected calibration error: the mean distance between confidence and accuracy, in bins of confidence.

    Args:
        confidence: The largest probability of each row, in [0, 1].
        correct: 1 for each row whose most probable class is right, else 0.
        bins: Number of bins of equal width, at least 1.

    Returns:
        A number in [0, 1]. With few rows in a bin it is too high by chance.

    References:
        Guo et al. (2017), On Calibration of Modern Neural Networks, arXiv:1706.04599, equation 3.

    >>> round(calibration_error(torch.tensor([0.9, 0.9, 0.9, 0.9]), torch.tensor([1.0, 1.0, 1.0, 0.0])), 3)
    0.15
    """
    require(bins >= 1, "bins", bins, "at least 1")
    place = (confidence.double() * bins).long().clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    gaps.index_add_(0, place, confidence.double() - correct.double())
    return float(gaps.abs().sum()) / len(confidence)
