"""A user's program as strict mypy sees it, from the types that the package ships.

`mypy` reads this file in CI. An ignore without a mistake to ignore is an error there, so each one below is a mistake
that was found.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs

Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_right_types_pass(tmp_path: Path) -> None:
    rows: Batch = (torch.randn(40, 3), torch.arange(40) % 2)
    public: Batch = (torch.randn(10, 3), torch.arange(10) % 2)
    model = nn.Linear(3, 2)
    plan = hs.PrivacyPlan.calibrate(epsilon=2, delta=1e-3, population=40, batch_size=20, epochs=1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hs.Trainer(
        model, loss_fn, optimizer=sgd, plan=plan, mirror=hs.FirstOrder(hs.cosine(end=0.9)), progress=False
    )
    result = assert_type(trainer.fit(rows, public, run_dir=tmp_path), hs.trainer.RunResult)
    assert assert_type(result.epsilon(delta=1e-3), float) <= 2
    assert set(assert_type(trainer.evaluate(public), dict[str, float])) == {"loss"}


def test_wrong_types_do_not() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises((hs.HalfsilverError, TypeError)):
        hs.PrivacyPlan.calibrate(epsilon="2", delta=1e-3, population=40, batch_size=20, epochs=1)  # type: ignore[arg-type]
    with pytest.raises((hs.HalfsilverError, TypeError)):
        hs.FirstOrder("0.9")  # type: ignore[arg-type]
    with pytest.raises((hs.HalfsilverError, TypeError)):
        hs.Trainer(model, loss_fn, optimizer="sgd", plan=None)  # type: ignore[arg-type]
