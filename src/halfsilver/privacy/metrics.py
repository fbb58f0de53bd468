"""Metrics on private rows. They are *not* private; only a caller who says so gets here."""

from __future__ import annotations

from typing import Any

import torch

from halfsilver._core.model_state import untouched
from halfsilver._core.tensors import LossFn, batch_rows, map_batch, trainable
from halfsilver.privacy.data import PrivateData


@torch.no_grad()
def mean_not_private(
    private: PrivateData, metric: LossFn, model: torch.nn.Module, example: Any = None, rows: int = 512
) -> float:
    """Mean of `metric` over all readable private rows, in the clear: outside the guarantee."""
    records, _ = private._open()
    schema = private._schema(example)
    device = trainable(model)[0].device
    total, count = 0.0, 0
    with untouched(model):
        for start in range(0, records.size(), rows):
            batch = records.fetch(slice(start, min(start + rows, records.size())), schema)
            batch = map_batch(lambda t: t.to(device), batch)
            if batch_rows(batch):
                total += float(metric(model, batch).double().sum())
                count += batch_rows(batch)
    return total / max(count, 1)
