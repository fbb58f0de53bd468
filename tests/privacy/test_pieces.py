"""How many rows are taken at once: numbers at which a row is rounded by its place are found, and not used.

Kernels round the rows that are left over by their groups in another way. Which rows these are differs from one library,
processor and number of threads to another, so that most faults here are planted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.tensors import Batch, flatten
from halfsilver.errors import PrivateDataError, UnsupportedLayer
from halfsilver.features import Frozen
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.pieces import alike
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.row_map import RowMap

pytest.importorskip("opacus")


class RoundsByPlace(nn.Module):
    """Numbers of rows at some places are off by a unit in the last place, as those that a group leaves over."""

    def __init__(self, unlike: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.unlike = unlike

    def forward(self, x: Tensor) -> Tensor:
        places = self.unlike(torch.arange(len(x))) if len(x) > 1 else torch.zeros(1, dtype=torch.bool)
        return torch.where(places[:, None], x * (1 + 2.0**-23), x)


def network(unlike: Callable[[Tensor], Tensor]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 8), RoundsByPlace(unlike), nn.Linear(8, 4))


def nowhere(places: Tensor) -> Tensor:
    return places < 0


def loss(model: Any, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 16, generator=g), torch.randint(0, 4, (n,), generator=g)


def source(folder: Path, model: nn.Module, size: int | None, expected: float = 100, **options: Any) -> PrivateGradient:
    plan = PrivacyPlan(steps=500, sampling_rate=1.0, expected_batch_size=expected, noise_multiplier=1.0)
    given = {"loss_fn": loss, "private": PrivateData(rows(int(expected))), **options}
    return PrivateGradient(
        model, plan=plan, ledger=Ledger.open(folder / "ledger.jsonl"), run_id="run",
        performance=Performance(backend=given.pop("backend", "book"), micro_batch_size=size), **given,
    )  # fmt: skip


# ---- the check itself


@pytest.mark.nightly
def test_places_that_round_otherwise_are_found() -> None:
    """Planted at a random place of a random size: found in 10 of 10, and 0 false alarms in 100 sizes without."""

    def found(size: int, place: int | None) -> bool:
        def numbers(batch: Tensor) -> list[Tensor]:
            squares = torch.stack([row.double().square().sum() for row in batch])  # one by one: alike for certain
            if place is not None:
                squares[place] *= 1 + 2.0**-50
            return [squares]

        return not alike(numbers, lambda n: rows(n)[0], size)

    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 64, (100,), generator=g).tolist()
    assert sum(found(size, None) for size in sizes) == 0
    assert (
        sum(found(size, int(torch.randint(size, (), generator=g))) for size in [*sizes[:5], 64, 128, 192, 320, 512])
        == 10
    )


def test_below_64_rows_each_row_visits_each_place() -> None:
    """A pair of one row and one place that rounds otherwise is found, whichever it is."""
    made = rows(12)[0]
    for row in range(12):
        for place in (0, 5, 11):

            def numbers(batch: Batch, row: int = row, place: int = place) -> list[Tensor]:
                return [batch + 2.0**-20 * (batch[place] == made[row]).all() * torch.eye(12)[place][:, None]]

            assert not alike(numbers, lambda n: rows(n)[0], 12)


@pytest.mark.parametrize("numbers", [lambda batch: [batch + torch.randn(())], lambda batch: []], ids=["random", "none"])
def test_what_cannot_be_seen_is_trusted_at_multiples_of_64_alone(numbers: Callable[[Batch], list[Tensor]]) -> None:
    """Losses that draw random numbers, and backends that show nothing."""
    trusted = [n for n in (1, 2, 32, 64, 65, 128) if alike(numbers, lambda n: rows(n)[0], n)]
    assert trusted == [1, 64, 128]


def test_a_check_that_would_take_too_long_is_not_made() -> None:
    calls: list[int] = []

    def slow(batch: Batch) -> list[Tensor]:
        calls.append(len(batch))
        time.sleep(0.05)
        return [batch]

    assert not alike(slow, lambda n: rows(n)[0], 60, passes=10)
    assert len(calls) == 2
    assert alike(slow, lambda n: rows(n)[0], 128, passes=10)
    assert len(calls) == 6, "multiples of 64 are turned twice at least"


# ---- gradients


@pytest.mark.parametrize("backend", ["book", "hooks"])
@pytest.mark.parametrize(
    ("asked", "unlike", "taken"),
    [
        (1, nowhere, 1),
        (48, nowhere, 48),
        (63, nowhere, 63),
        (64, nowhere, 64),
        (100, nowhere, 64),
        (250, nowhere, 192),
        (16, lambda places: places == 15, 1),
        (63, lambda places: places == 40, 1),
        (250, lambda places: places == 130, 128),
        (250, lambda places: places >= 64, 64),
        (250, lambda places: places > 2, 1),
    ],
)
def test_micro_batches_that_round_unlike_become_smaller(
    tmp_path: Path, asked: int, unlike: Callable[[Tensor], Tensor], taken: int, backend: str
) -> None:
    found = source(tmp_path, network(unlike), asked, backend=backend)
    assert found._batches.rows == taken
    assert len(found._batches.padding[0]) == taken


class BackwardByPlace(torch.autograd.Function):
    """The identity. Its gradient is off by a bit in the last row of several."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        factors = torch.ones(len(g[0]), 1)
        factors[1:][-1:] += 2.0**-23
        return g[0] * factors


def test_a_layer_that_starts_at_zero_hides_nothing_before_it(tmp_path: Path) -> None:
    """As the second matrix of LoRA does: at the start, no gradient comes through it."""

    class Low(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(apply(x))

    apply: Any = BackwardByPlace.apply
    model = nn.Sequential(nn.Linear(16, 8), Low(), nn.Linear(8, 4))
    last: Any = model[2]
    nn.init.zeros_(last.weight)
    found = source(tmp_path, model, 250)
    assert found._batches.rows == 1
    assert not last.weight.any(), "the weights are as they were"


@pytest.mark.parametrize("expected", [8, 30, 100, 300])
def test_what_is_chosen_by_speed_is_checked(tmp_path: Path, expected: int) -> None:
    sizes = [
        source(tmp_path / str(i), network(unlike), None, expected)._batches.rows
        for i, unlike in enumerate((nowhere, lambda places: places % 8 == 3, lambda places: places == 40))
    ]
    assert sizes[0] > 1
    assert sizes[1:] == [1, min(sizes[2], 40)]


@pytest.mark.parametrize("size", [16, 48, 80, None])
def test_hostile_records_that_show_their_place_do_not_add_up(tmp_path: Path, size: int | None) -> None:
    """A convolution with channels last rounds the last of 16, 48 or 80 rows unlike the others on some processors.

    A record's label is the model's own output at the first place, so its gradient is zero there, and rounding alone at
    others, times a weight that makes it a clip norm. Without the first record, all others move up by one place.
    """

    def squares(model: Any, batch: Batch) -> Tensor:
        difference = (model(batch[0]) - batch[1]).square().flatten(1).sum(1)
        return torch.as_tensor(batch[2] * difference)

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.GELU(), nn.Conv2d(5, 7, 3, stride=2))
    model.to(memory_format=torch.channels_last)
    expected, x = 3 * (size or 80), torch.randn(3, 9, 9)
    with torch.no_grad():
        many = x.expand(size or 80, 3, 9, 9).contiguous(memory_format=torch.channels_last)
        label = model(many)[0]
    records = (
        x.expand(expected + 1, 3, 9, 9).clone(),
        label.expand(expected + 1, *label.shape).clone(),
        torch.full((expected + 1,), 1e12).index_fill(0, torch.tensor(0), 0.0),
    )
    sums = []
    for first in (0, 1):
        kept = PrivateData(tuple(t[first:] for t in records))
        found = source(tmp_path / str(first), model, size, expected, loss_fn=squares, private=kept)
        sums.append(flatten([t.double() for t in found._clipped_sum().tensors]))
    assert float((sums[0] - sums[1]).norm()) <= 1.0


def test_a_model_that_mixes_rows_of_large_batches_only_is_refused(tmp_path: Path) -> None:
    class Ghost(nn.Module):
        """Normalises groups of 16 rows, and fewer rows not at all."""

        def forward(self, x: Tensor) -> Tensor:
            groups = x.view(len(x) // 16, 16, -1) if len(x) >= 16 else x[:, None]
            return (groups - groups.mean(1, keepdim=True) * (len(x) >= 16)).view_as(x)

    model = nn.Sequential(nn.Linear(16, 4), Ghost())
    with pytest.raises(UnsupportedLayer, match="depends on another example"):
        source(tmp_path, model, 64)
    source(tmp_path / "small", model, 8)


# ---- metrics, features and rows of estimators


@pytest.mark.parametrize("size", [16, 250])
def test_released_metrics_are_computed_where_places_do_not_show(tmp_path: Path, size: int) -> None:
    """An accuracy jumps where two numbers tie, so that made-up rows show no last bit in it, but in what is compared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1, bias=False), RoundsByPlace(lambda places: places == len(places) - 1))
    tie = model(torch.ones(1, 16))[0, 0].detach()

    def correct(model: Any, batch: Batch) -> Tensor:
        return torch.as_tensor(model(batch[0])[:, 0] == tie).double()

    n = 2 * size
    plan = hs.PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=n, noise_multiplier=1.0, delta=1e-4)
    options: dict[str, Any] = {
        "performance": hs.Performance(micro_batch_size=size),
        "metrics": {"right": correct},
        "unsafe_seed": 1,
    }
    trainer = hs.Trainer(
        model, lambda model, batch: model(batch[0]).square().sum(1), plan=plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options,
    )  # fmt: skip
    release = hs.Release(noise_multiplier=1e-6, bounds={"right": 1.0}, population=n)
    found = trainer.evaluate((torch.ones(n, 16), torch.zeros(n)), release=release, ledger=tmp_path / "ledger.jsonl")
    assert found.means["right"].value == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("asked", [8, 100, 256])
def test_features_are_computed_where_places_do_not_show(asked: int) -> None:
    """The last row of a call is off by a bit. No record may change the features of others, whoever is left out."""
    scores = network(lambda places: places == places[-1]).eval()
    x, y = rows(300)
    found = []
    for first in (0, 1):
        handle = PrivateData((x[first:], y[first:])).mapped(Frozen(scores).fit().transform, rows=asked)
        records, _ = handle._open()
        found.append(records.fetch(slice(0, records.size()), handle._schema())[0])
    assert torch.equal(found[0][1:], found[1])


def test_a_map_is_refused_where_rows_of_whole_numbers_mix() -> None:
    """A scale from the largest number of the batch, as quantised layers have it, on records with an example."""
    torch.manual_seed(0)
    embedding, example = nn.Embedding(1000, 16), (torch.randint(2, 990, (12,)), torch.tensor(0))

    @torch.no_grad()
    def quantised(tokens: Tensor) -> Tensor:
        means = embedding(tokens).mean(1)
        scale = means.abs().max() / 127
        return torch.as_tensor((means / scale).round() * scale)

    @torch.no_grad()
    def normalised(tokens: Tensor) -> Tensor:
        means = embedding(tokens).mean(1)
        return torch.as_tensor((means - means.mean(0)) / means.std(0))

    private = PrivateData([example] * 5, example=example)
    for mixes in (quantised, normalised):
        with pytest.raises(PrivateDataError, match="change with the rows beside it"):
            private.mapped(mixes)


@pytest.mark.parametrize("shape", [(768, 299), (100, 33), (65, 7)])
def test_mapped_rows_are_the_same_to_the_bit_at_all_places(shape: tuple[int, int]) -> None:
    """Also rows so far from the public axes that nothing but rounding is left of them. One record less in front moves
    all others, and a frame has its columns where a matrix has its rows.
    """
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=shape))[0]
    row_map = RowMap(centre=np.zeros(shape[0]), axes=axes, constant=0.3)
    x = rng.normal(size=(700, shape[0]))
    x -= (x @ axes) @ axes.T
    whole = row_map(1e17 * x)
    assert np.isfinite(whole).all()
    for first in (1, 2, 255):
        assert np.array_equal(row_map(1e17 * x[first:]), whole[first:])
    assert np.array_equal(row_map(np.asfortranarray(1e17 * x)), whole)
