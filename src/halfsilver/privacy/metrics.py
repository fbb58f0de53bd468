"""Metrics on private rows. They are *not* private; only a caller who asks for that by name gets here."""

from __future__ import annotations

from typing import Any

import torch

from halfsilver._core.model_state import untouched
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import LossFn, batch_rows, map_batch, trainable
from halfsilver.privacy.data import PrivateData


@torch.no_grad()
def mean_not_private(
    private: PrivateData, metric: LossFn, model: torch.nn.Module, example: Any = None, rows: int = 512
) -> float:
    """Mean of a metric over all readable private rows, in the clear and outside the privacy guarantee.

    Args:
        private: The private records.
        metric: A function of model and batch that returns one number per example.
        model: The model. It is left as it was.
        example: One made-up record that shows the shapes, where the records do not. Default None.
        rows: How many records to read per batch, at least 1. Default 512. Lower it if memory is short.

    Returns:
        The mean, or 0 if no record is readable. Do not publish it.

    Example:
        >>> import torch
        >>> data = PrivateData(torch.ones(10, 2))
        >>> mean_not_private(data, lambda model, batch: batch.sum(1), torch.nn.Linear(2, 1))
        2.0
    """
    records, _ = private._open()
    schema = private._schema(example)
    device = trainable(model)[0].device
    total, count = 0.0, 0
    with untouched(model), own_randomness(0, [device]):
        for start in range(0, records.size(), rows):
            batch = records.fetch(slice(start, min(start + rows, records.size())), schema)
            batch = map_batch(lambda t: t.to(device), batch)
            if batch_rows(batch):
                total += float(metric(model, batch).double().sum())
                count += batch_rows(batch)
    return total / max(count, 1)
