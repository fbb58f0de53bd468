"""One record moves the sum by at most the clip norm, the rounding of all other records included.

One more record in front moves every other one by a place: other rows meet in a kernel, and all sums round anew. These
rows are made so that the differences add up instead of cancelling.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch, LossFn, flatten
from halfsilver.errors import ConfigError
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import BACKENDS, Adding, Performance
from halfsilver.privacy.gradients.base import clip_and_sum, weighted_rows
from halfsilver.privacy.gradients.linear import LinearModel, with_row_norms
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.plan import PrivacyPlan

WIDTH = 32


def outputs(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """The sum of a row's outputs: its gradient is the row itself."""
    return model(batch).flatten(1).sum(1)


def clipped(
    folder: Path,
    model: nn.Module,
    x: Any,
    performance: Performance,
    expected: int | None = None,
    loss: LossFn = outputs,
) -> Tensor:
    """The clipped sum of all rows, before the noise."""
    rows = len(x[0] if isinstance(x, tuple) else x)
    plan = PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=expected or rows, noise_multiplier=1.0)
    folder.mkdir()
    ledger = Ledger.open(folder / "ledger.jsonl")
    source = PrivateGradient(model, loss, PrivateData(x), plan, ledger=ledger, run_id="run", performance=performance)
    return flatten(source._clipped_sum().tensors)


def lost_ones(blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of 128 rows: large ones, then ones that float32 rounds away if, and only if, those stand before them."""
    rows = torch.zeros(128, WIDTH, dtype=dtype)
    rows[:64, 0] = rows[127, 0] = 64 / 65
    rows[64:127, 0] = 2.0**-18 * 0.999
    return rows.repeat(blocks, 1)


def front(first: Tensor, others: Tensor) -> Tensor:
    return torch.cat([first[None], others])


@pytest.mark.parametrize(
    ("backend", "blocks"), [("book", 16), ("book", 16_384), ("vmap", 256), ("hooks", 256), ("linear", 16_384)]
)
def test_the_rounding_of_others_is_within_the_bound(backend: Any, blocks: int, tmp_path: Path) -> None:
    """Up to 2,097,152 rows."""
    model, others = nn.Linear(WIDTH, 1, bias=False), lost_ones(blocks)
    nn.init.zeros_(model.weight)
    first = torch.zeros(WIDTH)
    first[0] = -0.999
    made = LinearModel(model) if backend == "linear" else backend
    sums = []
    for name, x in (("with", front(first, others)), ("without", others)):
        rows = with_row_norms(x, -torch.ones(len(x))) if backend == "linear" else x
        sums.append(clipped(tmp_path / name, model, rows, Performance(backend=made, micro_batch_size=4096)))
    assert 0.99 < float((sums[0] - sums[1]).norm()) <= 1.0


@pytest.mark.parametrize("backend", ["book", "vmap"])
def test_more_rows_than_were_declared_are_within_the_bound(backend: Any, tmp_path: Path) -> None:
    """The plan speaks of 64 rows, and there are 32,768."""
    model, others = nn.Linear(WIDTH, 1, bias=False), lost_ones(256)
    first, speed = torch.zeros(WIDTH), Performance(backend=backend, micro_batch_size=4096)
    first[0] = -0.9995
    with_it, without = (
        clipped(tmp_path / str(len(x)), model, x, speed, expected=64) for x in (front(first, others), others)
    )
    assert 0.99 < float((with_it - without).norm()) <= 1.0


class TestTimeAxis:
    """Rows whose terms are hundreds of clip norms long and cancel, so that they are not clipped."""

    STEPS, ROWS, LARGE = 120, 64, 330.0

    def row(self, up: int, down: int) -> Tensor:
        """Small numbers of one sign, and two large ones that cancel: what lies between these, float32 may lose."""
        large = self.LARGE / WIDTH**0.5
        x = torch.full((self.STEPS,), large * 2.0**-24 * 0.98)
        x[up], x[down] = large, -large
        return x

    def rounding(self, x: Tensor) -> Tensor:
        """What a float32 product over all rows of a piece gets wrong about this row, at each place in the piece."""
        pieces = torch.zeros(self.ROWS, self.ROWS * self.STEPS)
        for place in range(self.ROWS):
            pieces[place, place * self.STEPS : (place + 1) * self.STEPS] = x
        left = torch.ones(self.ROWS * self.STEPS, WIDTH)
        found = [(left.T @ piece[:, None].expand(-1, WIDTH).contiguous())[0, 0] for piece in pieces]
        return torch.stack(found).double() - x.double().sum()

    def others(self, count: int) -> Tensor:
        """At each place the row whose rounding moves farthest if it goes on by one."""
        places = range(0, self.STEPS, self.STEPS // 6)
        rows = [self.row(up, down) for up in places for down in range(up + 5, self.STEPS, self.STEPS // 6)]
        rounding = torch.stack([self.rounding(x) for x in rows])
        farthest = (rounding.roll(-1, 1) - rounding).argmax(0)
        piece = torch.stack([rows[int(i)] for i in farthest])
        x = torch.zeros(count, self.STEPS, WIDTH)
        x[:, :, 0] = piece.repeat(count // self.ROWS, 1)
        return x

    @pytest.mark.parametrize(("way", "expected"), [("gram", None), ("gram", 64), ("multiply", None)])
    def test_they_round_within_the_bound(
        self, way: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("halfsilver.privacy.gradients.book.outer.fastest", lambda key, ways: ways[way]())
        model, others = nn.Linear(WIDTH, WIDTH, bias=False), self.others(2048)
        first, speed = torch.zeros(self.STEPS, WIDTH), Performance(backend="book", micro_batch_size=self.ROWS)
        first[0, 0] = 0.999 / WIDTH**0.5
        without = clipped(tmp_path / "without", model, others, speed, expected)
        for sign in (1, -1):
            with_it = clipped(tmp_path / f"{sign}", model, front(sign * first, others), speed, expected)
            assert 0.99 < float((with_it - without).norm()) <= 1.0


@pytest.mark.parametrize("rows", [1, 16, 500, 2_000, 6_000, 10_000])
def test_blocks_round_by_no_more_than_they_pay_for(rows: int) -> None:
    """All the same way: numbers of which each addition loses nearly half a unit in the last place."""
    adding = Adding(rows=rows)
    x = (2.0**-12 + 2.0**-24 + 2.0**-36 * torch.arange(rows)).to(torch.float32)[:, None].expand(-1, 3).contiguous()
    for exact in (False, True):
        found = weighted_rows(torch.ones(rows, dtype=torch.float64), x, Adding(rows=rows, exact=exact))
        error = float((found - x.double().sum(0)).norm()) / float(x.double().norm(dim=1).max())
        assert 2 * error <= (adding.in_float64 if exact else adding.margin(torch.float32) - 1e-4)


def test_neighbours_are_clipped_alike() -> None:
    """How many rows there are must not decide how short each of them is clipped."""
    rows = torch.randn(700, WIDTH)
    for clip in (1e-3, 1.0):
        apart = [clip_and_sum([part], clip).tensors[0] for part in torch.split(rows, [1, 511, 188])]
        torch.testing.assert_close(torch.stack(apart).sum(0), clip_and_sum([rows], clip).tensors[0], rtol=0, atol=1e-5)
    plan = Adding.of(500, 0.01)
    beyond = Adding(rows=plan.rows, exact=True)
    assert plan.margin(torch.float32) == beyond.margin(torch.float32)


@pytest.mark.parametrize("clip", [1e-10, 1e-25, 1e-26, 1e-30, 1e-40])
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_no_weight_is_so_small_that_it_is_inaccurate(name: str, clip: float) -> None:
    """C / norm would be subnormal in float32; such a row contributes at most C all the same."""
    model = nn.Linear(4, 1, bias=False)
    backend = BACKENDS[name](model, outputs, torch.ones(2, 4))
    for size in (2.0**k * (1 + i / 12) for k in (0, 60, 62, 79, 99) for i in range(12)):
        x = torch.zeros(16, 4)
        x[0, 0] = size
        assert float(flatten(backend.clipped_sum(x, clip, 1).tensors).double().norm()) <= clip


@pytest.mark.parametrize("clip", [1e-10, 1e11])
def test_clip_norms_that_cannot_be_measured_are_refused(clip: float, tmp_path: Path) -> None:
    model, x = nn.Linear(WIDTH, 1), torch.randn(20, WIDTH)
    plan = PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=20, noise_multiplier=1.0, max_grad_norm=clip)
    run: dict[str, Any] = {"ledger": Ledger.open(tmp_path / "ledger.jsonl"), "run_id": "run"}
    with pytest.raises(ConfigError, match=r"max_grad_norm=.*Scale the loss"):
        PrivateGradient(model, outputs, PrivateData(x), plan, **run)
    PrivateGradient(model.double(), outputs, PrivateData(x.double()), plan, **run)
