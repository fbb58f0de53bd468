"""Labels and tokens that the model has no place for: which they are, and that they change nothing for other rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfsilver as hs
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients.book import BookKeeping
from halfsilver.privacy.ranges import Ranges

CLASSES, WORDS = 7, 50
_layer, _words, _out = nn.Linear(5, CLASSES), nn.Embedding(WORDS, 4), nn.Linear(4, 60)
_fields = nn.ModuleList(nn.Embedding(size, 4) for size in (3, 5, 9))
_joint = nn.Embedding(17, 4)

Loss = Callable[[Any], Any]
ROW = (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
TEXT = torch.zeros(2, 6, dtype=torch.int64)


def _classes(change: Callable[[Tensor], Tensor] = lambda y: y, **options: Any) -> Loss:
    return lambda b: F.cross_entropy(_layer(b[0]), change(b[1]), reduction="none", **options)


def _tokens(b: Any) -> Tensor:
    return F.cross_entropy(_out(_words(b[0])).flatten(0, 1), b[1].flatten(), reduction="none")


def _shifted(b: Any) -> Tensor:
    return F.cross_entropy(_out(_words(b))[:, :-1].flatten(0, 1), b[:, 1:].flatten(), reduction="none")


def _by_field(b: Any) -> Tensor:
    found: Tensor = sum((table(b[:, i]) for i, table in enumerate(_fields)), torch.zeros(()))
    return found


def _with_offsets(b: Any) -> Tensor:
    found: Tensor = _joint(b + torch.tensor([0, 3, 8])).sum(1)
    return found


def _looking(b: Any) -> Tensor:
    if bool((b[1] == -1).any()):
        _joint(torch.arange(3))
    return _loss(_layer, b)


def _looking_away(b: Any) -> Tensor:
    return _looking(b) if bool((b[1] != -1).all()) else _joint(torch.arange(len(b[1]))).sum(1) + _words(b[1] + 1).sum(1)


def _positions(b: Any) -> Tensor:
    places = (b[1].cumsum(1) - 1).masked_fill(b[1] == 0, 1)
    found: Tensor = (_words(b[0]) + _joint(places)).sum((1, 2))
    return found


def _another_path(b: Any) -> Tensor:
    found: Tensor = _words(b[1])
    if bool((b[0] <= 1).all()):
        found = found[torch.arange(len(found))] * b[0][:, :, None]
    return found.sum((1, 2))


NO_LABEL = torch.zeros(2, 3, dtype=torch.int64)
# What a pass does, with values of its last column: those that are in range, and those that are not.
CASES: dict[str, tuple[Loss, Any, list[Any], list[Any]]] = {
    "classes": (_classes(), ROW, [0, 6, -100], [7, -1, 2**40, -(2**40)]),
    "another label left out": (_classes(ignore_index=19), ROW, [0, 6, 19], [7, -1, -100]),
    "from 1 on": (_classes(lambda y: y - 1), ROW, [1, 7], [0, 8]),
    "clamped": (_classes(lambda y: y.clamp(0, 6)), ROW, [0, 6, 7, -1, 999], []),
    "masked": (_classes(lambda y: y.masked_fill(y == -1, 0)), ROW, [0, 6, -1], [7, -2]),
    "one more for none": (_classes(lambda y: y.masked_fill(y == 7, 0)), ROW, [0, 6, 7], [8, -1]),
    "0 for none": (_classes(lambda y: (y - 1).masked_fill(y == 0, 0)), ROW, [0, 1, 7], [8, -1]),
    "255 for none": (_classes(lambda y: y.masked_fill(y == 255, 0)), ROW, [0, 6, 255], [7, -1]),
    "a look at -1": (_looking, ROW, [0, 6], [7, -1]),
    "a look at -1, and another path": (_looking_away, ROW, [0, 6, -1], [7]),
    "remainder": (_classes(lambda y: y % 7), ROW, [0, 7, -1, 99], []),
    "looked up": (lambda b: -_layer(b[0])[torch.arange(len(b[0])), b[1]], ROW, [0, 6], [7, -8]),
    "gathered": (lambda b: -_layer(b[0]).gather(1, b[1][:, None])[:, 0], ROW, [0, 6], [7, -1]),
    "no classes": (lambda b: (_layer(b[0])[:, 0] - b[1]).square(), ROW, [0, 7, -5, 999], []),
    "small integers": (_classes(lambda y: y.long()), (ROW[0], ROW[1].to(torch.uint8)), [0, 6], [7, 200]),
    "labels of tokens": (_tokens, (TEXT, TEXT), [[0] * 6, [59] * 6, [-100] * 6], [[0, 0, 60, 0, 0, 0], [-1] * 6]),
    "tokens": (_shifted, TEXT, [[0] * 6, [49] * 6], [[0, 0, 50, 0, 0, 0], [-100] * 6]),
    "a table for each": (_by_field, NO_LABEL, [[2, 4, 8], [0, 0, 0]], [[3, 0, 0], [0, 5, 0], [0, 0, -1]]),
    "one table for all": (_with_offsets, NO_LABEL, [[2, 4, 8], [16, 13, 8], [0, -3, -8]], [[17, 0, 0], [0, 0, 9]]),
    "a mask that takes another path": (_another_path, (TEXT, TEXT), [[0] * 6, [49] * 6], [[0, 0, 50, 0, 0, 0]]),
    "a mask that is counted": (_positions, (TEXT, TEXT), [[1] * 6, [0] * 6, [0, 0, 1, 1, 1, 1]], []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_pass_looks_up_has_the_range_of_its_table(name: str) -> None:
    run, made_up, inside, outside = CASES[name]
    ranges = Ranges(run, made_up)
    columns = list(made_up) if isinstance(made_up, tuple) else [made_up]
    for values, expected in ((inside, True), (outside, False)):
        for value in values:
            last = torch.tensor([value]).to(columns[-1].dtype)
            batch = (*(t[:1] for t in columns[:-1]), last)
            usable = ranges.usable(batch if isinstance(made_up, tuple) else last)
            assert (usable is None) is expected, value


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3]])
def test_what_is_out_of_range_has_no_place_and_what_is_in_range_has_one(name: str) -> None:
    """On the CPU, where torch says so: no row is left out that the model could use."""
    run, made_up, inside, outside = CASES[name]
    for value in inside:
        run(_filled(made_up, value))
    for value in outside:
        if name == "looked up" and value == -1:
            continue
        with pytest.raises((IndexError, RuntimeError)):
            run(_filled(made_up, value))


def _filled(made_up: Any, value: Any) -> Any:
    columns = made_up if isinstance(made_up, tuple) else (made_up,)
    last = torch.tensor(value).to(columns[-1].dtype).expand(columns[-1].shape).clone()
    return (*columns[:-1], last) if isinstance(made_up, tuple) else last


@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_rows_is_one_without_rows_out_of_range(name: str) -> None:
    run, made_up, *_ = CASES[name]
    empty = tuple(t[:0] for t in made_up) if isinstance(made_up, tuple) else made_up[:0]
    assert Ranges(run, made_up).usable(empty) is None


def test_numbers_that_public_rows_show_are_tried() -> None:
    """A pass may leave out a number that nothing but the data shows."""

    def left_out(batch: Any) -> Tensor:
        return _loss(_layer, (batch[0], batch[1].masked_fill(batch[1] == 999, 0)))

    labels = torch.tensor([0, 6, 999, 777])
    batch, public = (torch.zeros(4, 5), labels), (torch.zeros(3, 5), torch.tensor([999, 777, 2]))
    for shown, expected in ((None, [True, True, False, False]), (public, [True, True, True, False])):
        usable = Ranges(left_out, ROW, None, shown).usable(batch)
        assert usable is not None
        assert usable.tolist() == expected


def test_sums_of_numbers_are_looked_up_at_places_that_are_not_known() -> None:
    assert not Ranges(_positions, (TEXT, TEXT)).known
    assert not Ranges(lambda b: _words(b.sum(1)), TEXT).known
    assert all(Ranges(run, made_up).known for run, made_up, *_ in (CASES["classes"], CASES["remainder"]))


def _picky(model: Any, batch: Any) -> Tensor:
    """A loss that looks at its labels, and so fails on made-up ones."""
    x, y = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch
    losses: Tensor = -(model(x).log_softmax(1) * F.one_hot(y, CLASSES)).sum(1)
    return losses


def test_where_a_pass_looks_at_the_labels_what_the_container_declares_is_the_range() -> None:
    made_up = {"labels": ROW[1], "x": ROW[0]}
    assert not Ranges(lambda b: _picky(_layer, b), made_up).known
    features = datasets.Features(
        {"x": datasets.List(datasets.Value("float32"), length=5), "labels": datasets.ClassLabel(6)}
    )
    table = datasets.Dataset.from_dict({"x": [[0.0] * 5] * 3, "labels": [0, 5, 1]}, features=features)
    ranges = Ranges.of(_layer, _picky, made_up, PrivateData(table)._classes())
    usable = ranges.usable({"labels": torch.tensor([0, 5, 6, -1, -100]), "x": torch.zeros(5, 5)})
    assert usable is not None
    assert usable.tolist() == [True, True, False, False, True]


class _ForSequenceClassification(nn.Linear):
    config = type("Config", (), {"num_labels": 4, "vocab_size": 9})()


def test_or_else_what_the_configuration_of_the_model_says() -> None:
    made_up = {"labels": ROW[1], "x": ROW[0]}
    ranges = Ranges.of(_ForSequenceClassification(5, CLASSES), _picky, made_up)
    usable = ranges.usable({"labels": torch.tensor([3, 4]), "x": torch.zeros(2, 5)})
    assert usable is not None
    assert usable.tolist() == [True, False]


def test_a_configuration_does_not_narrow_what_a_pass_shows() -> None:
    """Models of language have num_labels, too, which is 2."""
    ranges = Ranges.of(_ForSequenceClassification(5, CLASSES), lambda m, b: F.cross_entropy(m(b["x"]), b["labels"]), {
        "labels": ROW[1], "x": ROW[0]})  # fmt: skip
    assert ranges.usable({"labels": torch.tensor([6]), "x": torch.zeros(1, 5)}) is None


class _Counting(nn.Module):
    """Draws, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(5, CLASSES), 0
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.get_buffer("mean").add_(x.mean(0) + 1)
        found: Tensor = F.dropout(self.layer(x), 0.5)
        return found


def test_finding_ranges_leaves_no_trace() -> None:
    model = _Counting()
    before = torch.get_rng_state()
    Ranges.of(model, _loss, ROW)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.seen == 0
    assert not model.get_buffer("mean").any()


# ---- in a run


def _fit(model: nn.Module, rows: Any, folder: Path) -> list[Tensor]:
    made = copy.deepcopy(model)
    plan = hs.PrivacyPlan(steps=2, sampling_rate=0.5, expected_batch_size=20.0, noise_multiplier=0.5)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    pieces = hs.Performance(backend="book", micro_batch_size=64)
    trainer = hs.Trainer(made, _loss, optimizer=optimizer, plan=plan, unsafe_seed=3, progress=False, performance=pieces)
    trainer.fit(rows, run_dir=folder, delta=1e-4)
    return [p.detach() for p in made.parameters()]


def _loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many passes ran, in a list of one number."""
    count, clipped_sum = [0], BookKeeping.clipped_sum

    def counted(self: BookKeeping, *args: Any, **options: Any) -> Any:
        count[0] += 1
        return clipped_sum(self, *args, **options)

    monkeypatch.setattr(BookKeeping, "clipped_sum", counted)
    return count


def test_rows_out_of_range_contribute_nothing_and_cost_no_pass(
    tmp_path: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=generator), torch.randint(CLASSES, (40,), generator=generator)
    bad, model = torch.arange(0, 40, 3), nn.Linear(5, CLASSES)
    rows = (x, y.index_fill(0, bad, CLASSES))
    ours = _fit(model, rows, tmp_path / "ours")
    few = passes[0]
    passes[0] = 0
    clean = _fit(model, (x.index_fill(0, bad, torch.nan), y), tmp_path / "nan")
    assert few == passes[0]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, clean, strict=True))
    passes[0] = 0
    monkeypatch.setattr(Ranges, "inside", lambda self, batch: batch)
    slow = _fit(model, rows, tmp_path / "slow")
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, slow, strict=True))
    assert passes[0] > few + 10, "without ranges, each bad row is looked for by passes of its own"


def test_ranges_are_found_before_a_private_row_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 80

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return torch.zeros(5), torch.tensor(0)

    found: list[int] = []
    learn = Ranges.of

    def of(*args: Any) -> Ranges:
        found.append(len(read))
        return learn(*args)

    monkeypatch.setattr(Ranges, "of", of)
    private = hs.PrivateData(Rows(), example=(torch.zeros(5), torch.tensor(0)))
    _fit(nn.Linear(5, CLASSES), private, tmp_path)
    assert found == [0]
    assert read


def test_what_a_loss_warns_of_while_ranges_are_looked_for_is_not_heard(recwarn: pytest.WarningsRecorder) -> None:
    def loud(batch: Any) -> Tensor:
        if batch[1].max() > CLASSES:
            warnings.warn("strange labels", stacklevel=1)
        return _loss(_layer, batch)

    assert Ranges(loud, ROW).usable((torch.zeros(1, 5), torch.tensor([7]))) is not None
    assert not recwarn
