"""A clip norm from private records: the quantile, what a record can change, the ledger's entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver.errors import BudgetExceeded, ConfigError
from halfsilver.privacy.clip_norm import ClipNorm
from halfsilver.privacy.ledger import Ledger


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=draw) * torch.rand(count, 1, generator=draw) * 10
    return x, (x.sum(1) > 0).long()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def norms(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    found = []
    for i in range(len(data[0])):
        one = (data[0][i : i + 1], data[1][i : i + 1])
        grads = torch.autograd.grad(loss_fn(net, one).sum(), list(net.parameters()))
        found.append(torch.cat([g.flatten() for g in grads]).norm())
    return torch.stack(found).double()


def found(tmp_path: Path, data: Any, **changes: Any) -> ClipNorm:
    asked: dict[str, Any] = {"population": 500, "noise_multiplier": 1.0, "ledger": tmp_path / "ledger.jsonl"}
    return hs.private_clip_norm(model(), loss_fn, data, **{**asked, **changes})


@pytest.mark.nightly
@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
def test_it_is_the_quantile_up_to_a_bin(tmp_path: Path, quantile: float) -> None:
    """500 records, noise of 1.4 per count: 17 bins hold it to 3 % of the records, and a bin is a factor of 1.8."""
    data = rows(500)
    clip = found(tmp_path, data, quantile=quantile, unsafe_seed=1, lowest=0.01, highest=100.0)
    exact = norms(model(), data)
    assert float(exact.quantile(quantile - 0.03)) <= clip.value <= 1.8 * float(exact.quantile(quantile + 0.03))
    edges, counts = torch.tensor(clip.edges), torch.tensor(clip.counts)
    true = torch.bincount(torch.bucketize(exact, edges), minlength=len(edges))
    assert float((counts - true).abs().max()) < 8  # 5 standard deviations of 1.41, and not of 15
    assert float((counts - true).std()) > 0.5


@pytest.mark.nightly
def test_a_record_is_counted_once_and_a_broken_one_not_at_all(tmp_path: Path) -> None:
    x, y = rows(500)
    broken = x.clone()
    broken[0] = float("nan")
    whole = found(tmp_path, (x, y), unsafe_seed=1).counts
    without = found(tmp_path, (broken, y), unsafe_seed=1).counts
    changes = [round(a - b, 6) for a, b in zip(whole, without, strict=True) if abs(a - b) > 1e-6]
    assert changes == [1.0]


@pytest.mark.nightly
def test_the_ledger_counts_it_and_the_budget_can_refuse_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.open(path, budget=hs.Budget(epsilon=1.0, delta=1e-5))
    clip = found(tmp_path, rows(500), ledger=ledger, noise_multiplier=8.0)
    assert ledger.runs[clip.run_id].spent == 1
    single = hs.PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=500, noise_multiplier=8.0)
    assert clip.plan.epsilon(1e-5) == pytest.approx(single.epsilon(1e-5))
    with pytest.raises(BudgetExceeded):
        found(tmp_path, rows(500), ledger=ledger, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"quantile": 1.0}, "quantile"),
        ({"lowest": 2.0, "highest": 1.0}, "lowest"),
        ({"noise_multiplier": 0.0}, "noise"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(tmp_path, rows(500), **wrong)
