"""One record moves the sum by at most the clip norm, the rounding of all other records included.

One more record in front moves every other one by a place: other rows meet in a kernel, and all sums round anew. These
rows are made so that the differences add up instead of cancelling.
"""

from __future__ import annotations

import math
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
from halfsilver.privacy.gradients.base import ClippedSum, clip_and_sum, clip_factors, measurable, weighted_rows
from halfsilver.privacy.gradients.linear import LinearModel, with_row_norms
from halfsilver.privacy.gradients.softmax import SoftmaxModel, softmax_records
from halfsilver.privacy.gradients.users import clipped_user_gradient
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.users.engine import Contribution
from halfsilver.privacy.users.fold import Fold

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


@pytest.mark.nightly
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
        assert float(flatten(backend.clipped_sum(x, clip, torch.arange(16) < 1).tensors).double().norm()) <= clip


# ---- weights without a jump

STEP = 1 + 2.0**-3
Lengths = Callable[[Tensor], Tensor]  # of rows of these norms, after they were clipped to norm 1


def steepest(lengths: Lengths, low: float, high: float) -> float:
    """How much the clipped length changes between norms that differ by 1 / 8, in units of that difference."""
    norms = STEP ** torch.arange(math.log(low, STEP), math.log(high, STEP), dtype=torch.float64)
    return float(lengths(norms).diff().abs().max()) / (STEP - 1)


def one_by_one(found: Callable[[float], ClippedSum]) -> Lengths:
    return lambda norms: torch.stack([flatten(found(n).tensors).double().norm() for n in norms.tolist()])


def products(name: str, left: Callable[[float], float], right: Callable[[float], float]) -> Lengths:
    """Rows with an input of length `left` and a derivative of the loss of length `right`."""
    model, entries = nn.Linear(9, 1, bias=False), torch.full((1, 9), 1 / 3)

    def loss(model: Any, batch: Batch) -> Tensor:
        out: Tensor = model(batch[0])[:, 0] * batch[1]
        return out

    backend = BACKENDS[name](model, loss, (torch.ones(2, 9), torch.ones(2)))
    return one_by_one(lambda n: backend.clipped_sum((left(n) * entries, torch.tensor([right(n)])), 1.0))


def closed_forms() -> dict[str, Lengths]:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(linear.weight)
    softmax = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    nn.init.zeros_(softmax.weight)

    def squared(x: float, y: float) -> ClippedSum:
        rows = with_row_norms(torch.tensor([[x]], dtype=torch.float64), torch.tensor([y], dtype=torch.float64))
        return LinearModel(linear.double()).clipped_sum(rows, 1.0)

    def classes(x: float, weight: float) -> ClippedSum:
        features = torch.tensor([[x, 0.0]], dtype=torch.float64)
        given = softmax_records(features, torch.tensor([0]), torch.tensor([weight]).double(), torch.zeros(1, 0))
        return SoftmaxModel(softmax).clipped_sum(given, 1.0)

    def folded(norm: float) -> ClippedSum:
        fold = Fold([torch.zeros(1)], 1.0)
        fold.add(Contribution([torch.tensor([norm])]))
        return fold.total

    def user(norm: float) -> ClippedSum:
        return clipped_user_gradient(linear.float(), outputs, [torch.tensor([[norm]])], 1.0)

    return {
        "linear": one_by_one(lambda n: squared(n, 1.0)),
        "linear, target": one_by_one(lambda n: squared(2.0**-500, n * 2.0**490)),
        "softmax": one_by_one(lambda n: classes(n, 1.0)),
        "softmax, weight": one_by_one(lambda n: classes(2.0**-30, n * 2.0**30)),
        "fold": one_by_one(folded),
        "user": one_by_one(user),
    }


def test_no_weight_jumps() -> None:
    """100 clip norms and margins without a false alarm; a jump at a random norm is found in 10 of 10."""
    g = torch.Generator().manual_seed(0)

    def alarm(clip: float, tau: float, zero_from: float = math.inf) -> bool:
        def lengths(norms: Tensor) -> Tensor:
            return norms * clip_factors(measurable(norms), clip, tau) * (norms < zero_from) / clip

        return steepest(lengths, 2.0**-40, 2.0**82) > 1.1

    clips, taus = 10 ** (12 * torch.rand(100, generator=g) - 6), 10 ** (-6 * torch.rand(100, generator=g) - 1)
    assert sum(alarm(*given) for given in zip(clips.tolist(), taus.tolist(), strict=True)) == 0
    places = 2 ** (56 * torch.rand(10, generator=g) + 4)
    assert sum(alarm(1.0, 1e-3, place) for place in places.tolist()) == 10


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_no_weight_jumps_in_a_backend(name: str) -> None:
    """Also where one factor overflows and the gradient, their product, is ordinary."""
    cases: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
        "long": (lambda n: n, lambda n: 1.0),
        "steep": (lambda n: 1.0, lambda n: n),
        "long and flat": (lambda n: n, lambda n: 2.0**-61),
    }
    for case, (left, right) in cases.items():
        assert steepest(products(name, left, right), 2.0**59, 2.0**82) < 1.1, case


@pytest.mark.parametrize("name", sorted(closed_forms()))
def test_no_weight_jumps_in_a_closed_form_or_for_a_user(name: str) -> None:
    assert steepest(closed_forms()[name], 2.0**59, 2.0**82) < 1.1


@pytest.mark.parametrize("clip", [1e-10, 1e11])
def test_clip_norms_that_cannot_be_measured_are_refused(clip: float, tmp_path: Path) -> None:
    model, x = nn.Linear(WIDTH, 1), torch.randn(20, WIDTH)
    plan = PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=20, noise_multiplier=1.0, max_grad_norm=clip)
    run: dict[str, Any] = {"ledger": Ledger.open(tmp_path / "ledger.jsonl"), "run_id": "run"}
    with pytest.raises(ConfigError, match=r"max_grad_norm=.*Scale the loss"):
        PrivateGradient(model, outputs, PrivateData(x), plan, **run)
    PrivateGradient(model.double(), outputs, PrivateData(x.double()), plan, **run)
