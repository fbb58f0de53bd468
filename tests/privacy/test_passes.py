"""A batch in which some rows fail: which are left out, in how many passes, and where the others stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch, batch_rows, flatten
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import ClippedSum, Performance
from halfsilver.privacy.gradients.base import Adding
from halfsilver.privacy.gradients.vmap import Vmap
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.plan import PrivacyPlan

ROWS = 64
Fails = Callable[[Tensor, Tensor], bool]  # by the marks of the rows that are together in a pass, and their places


class ByPlace:
    """A row contributes 1 at its own place: the sum shows where each one stood."""

    name = "by place"

    def __init__(self, fails: Fails) -> None:
        self.fails, self.passes, self.shapes = fails, 0, set[int]()

    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        assert adding is not None, "the mechanism always says how rows are added up"
        mine = batch[:, 0] >= 0  # the marks of private rows; made-up ones have none
        self.passes, self.shapes = self.passes + 1, self.shapes | {batch_rows(batch)}
        everyone = torch.ones(batch_rows(batch), dtype=torch.bool)
        counted = everyone if counted is None else counted
        if mine.any():
            assert torch.equal(mine, counted), "a row that does not count is not in the pass"
            if self.fails(batch[mine, 0], mine.nonzero().flatten()):
                raise RuntimeError("a row fails")
        total = torch.zeros(ROWS, 1, dtype=torch.float64)
        total[: len(counted), 0] = counted.double() * max_grad_norm
        return ClippedSum([total], max_grad_norm)


def summed(folder: Path, fails: Fails, rows: int = ROWS) -> tuple[Tensor, ByPlace]:
    backend = ByPlace(fails)
    plan = PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=rows, noise_multiplier=1.0)
    numbers = torch.arange(rows, dtype=torch.float32)[:, None]
    private = PrivateData(list(numbers), example=torch.tensor([-3.0]))
    source = PrivateGradient(
        nn.Linear(ROWS, 1, bias=False), lambda model, batch: batch[:, 0], private, plan, run_id="run",
        ledger=Ledger.open(folder / "ledger.jsonl"), performance=Performance(backend=backend, micro_batch_size=ROWS),
    )  # fmt: skip
    backend.passes = 0
    return flatten(source._clipped_sum().tensors), backend


def holds(bad: Sequence[int]) -> Fails:
    return lambda marks, places: bool(torch.isin(marks.long(), torch.tensor(bad)).any())


@pytest.mark.parametrize(
    ("bad", "most"),
    [([], 1), ([0], 15), ([17], 15), ([63], 15), ([3, 40], 27), (range(0, 64, 8), 80), (range(64), 130)],
)
def test_good_rows_keep_their_places(tmp_path: Path, bad: Sequence[int], most: int) -> None:
    """At most 2 log2(64) passes more for one bad row, and one last pass in which all others stand where they were."""
    found, backend = summed(tmp_path, holds(bad))
    expected = torch.ones(ROWS, dtype=torch.float64)
    expected[list(bad)] = 0.0
    assert torch.equal(found, expected)
    assert backend.shapes == {ROWS}
    assert backend.passes <= most


@pytest.mark.parametrize("bad", [[], [5], [0, 36]])
def test_the_same_in_a_piece_that_is_not_full(tmp_path: Path, bad: Sequence[int]) -> None:
    found, backend = summed(tmp_path, holds(bad), rows=37)
    expected = torch.arange(ROWS) < 37
    expected[bad] = False
    assert torch.equal(found, expected.double())
    assert backend.shapes == {ROWS}


def test_rows_that_fail_together_only_are_summed_one_by_one(tmp_path: Path) -> None:
    found, _ = summed(tmp_path, lambda marks, places: len(marks) > 40)
    assert torch.equal(found, torch.ones(ROWS, dtype=torch.float64))


def test_a_failure_that_does_not_come_back_costs_no_row(tmp_path: Path) -> None:
    times = iter([True])
    found, _ = summed(tmp_path, lambda marks, places: next(times, False))
    assert torch.equal(found, torch.ones(ROWS, dtype=torch.float64))


def test_a_backend_that_counts_the_first_rows_only_fails_before_a_record_is_read(tmp_path: Path) -> None:
    """As all backends did before rows had a mask. Else every piece with a bad or missing row would add nothing."""

    class Before(ByPlace):
        def clipped_sum(self, batch: Batch, max_grad_norm: float, rows: Any = None, adding: Any = None) -> ClippedSum:
            return ClippedSum([batch[: rows or len(batch)]], max_grad_norm)

    plan = PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=8, noise_multiplier=1.0)
    with pytest.raises((TypeError, RuntimeError)):
        PrivateGradient(
            nn.Linear(1, 1), lambda model, batch: batch[:, 0], PrivateData(torch.zeros(8, 1)), plan, run_id="run",
            ledger=Ledger.open(tmp_path / "l"), performance=Performance(backend=Before(lambda marks, places: False)),
        )  # fmt: skip


def test_a_bad_row_does_not_move_the_sum_of_the_others_by_a_bit(tmp_path: Path) -> None:
    """On a layer that rounds by place, as some kernels do: the row that is left out takes nobody to another place."""

    class RoundsByPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + 2.0**-10 * torch.arange(len(x), dtype=x.dtype)[:, None])

    torch.manual_seed(0)
    model = nn.Sequential(RoundsByPlace(), nn.Linear(6, 3))
    x, y = torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,)).float()  # ranges are for whole numbers
    bad = torch.tensor([4, 33, 34])
    labels = y.index_fill(0, bad, 99.0)

    def loss(model: Any, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1].long(), reduction="none")

    plan = PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=ROWS, noise_multiplier=1.0)
    backend = Vmap(model, loss, (x[:2], y[:2]))
    source = PrivateGradient(
        model, loss, PrivateData((x, labels), example=(x[0], torch.tensor(1.0))), plan,
            ledger=Ledger.open(tmp_path / "l"), run_id="run",
        performance=Performance(backend=backend, micro_batch_size=ROWS),
    )  # fmt: skip
    counted = torch.ones(ROWS, dtype=torch.bool).index_fill(0, bad, False)
    expected = backend.clipped_sum((x, y), 1.0, counted, Adding.of(ROWS, 1.0))
    assert torch.equal(flatten(source._clipped_sum().tensors), flatten(expected.tensors))
    assert source._passes.usable([slice(0, ROWS)]) == ROWS - 3
