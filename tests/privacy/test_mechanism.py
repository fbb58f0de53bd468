"""The mechanism as a whole: ledger first, then data; bad records, empty batches, micro-batches, users."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from halfsilver._core.tensors import flatten
from halfsilver.errors import BudgetExceeded, ConfigError
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import UnsafeSeed
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.noise import grid
from halfsilver.privacy.plan import PrivacyPlan


def loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


def plan(**changes: Any) -> PrivacyPlan:
    defaults = {"steps": 50, "sampling_rate": 0.5, "expected_batch_size": 10, "noise_multiplier": 1.0}
    return PrivacyPlan(**{**defaults, **changes})


def mechanism(folder: Path, private: PrivateData, p: PrivacyPlan, model: nn.Module, **options: Any) -> PrivateGradient:
    ledger = Ledger.open(folder / "ledger.jsonl", unit=p.unit)
    return PrivateGradient(model, loss, private, p, ledger=ledger, run_id="run", **options)


def rows(n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)


class Watching(Dataset[Any]):
    """Says, at each access to a record, how many steps the ledger on disk had by then."""

    def __init__(self, path: Path) -> None:
        self.path, self.x, self.y = path, *rows(20)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self.seen.append(self.path.read_text().count('"type":"intent"'))
        return self.x[i], self.y[i]


def test_intent_is_on_disk_before_the_first_record_is_read(tmp_path: Path) -> None:
    data = Watching(tmp_path / "ledger.jsonl")
    private = PrivateData(data, example=(torch.zeros(6), 0))
    source = mechanism(tmp_path, private, plan(sampling_rate=1.0), nn.Linear(6, 3))
    assert data.seen == []  # building it read nothing
    source.release()
    assert data.seen == [1] * 20


def test_intents_releases_and_draws_reconcile(tmp_path: Path) -> None:
    source = mechanism(tmp_path, PrivateData(rows(20)), plan(steps=7), nn.Linear(6, 3))
    for _ in range(7):
        source.release()
    assert source.out.count == 7
    assert source.out._ledger is not None
    assert source.out._ledger.runs["run"].spent == 7
    with pytest.raises(BudgetExceeded, match="all 7 steps"):
        source.release()


def test_noise_is_the_plans_also_on_empty_batches(tmp_path: Path) -> None:
    """No records at all: what is released is noise of sigma C / expected batch. n = 240,000, chi-square, alpha 1e-6."""
    model = nn.Linear(6, 40_000, bias=False)
    p = plan(noise_multiplier=1.3, max_grad_norm=0.7, expected_batch_size=8.0)
    source = mechanism(tmp_path, PrivateData((torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))), p, model)
    sample = source.release()[0].double().numpy().ravel()
    for factor, accepted in ((1.0, True), (0.98, False), (1.02, False)):
        statistic = float((sample**2).sum()) / (1.3 * 0.7 / 8 * factor) ** 2
        tail = 2 * min(stats.chi2.cdf(statistic, len(sample)), stats.chi2.sf(statistic, len(sample)))
        assert bool(tail > 1e-6) is accepted
    assert source.out.count == 1


def test_division_is_by_the_declared_batch_not_the_real_one(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    releases = []
    for n, folder in ((10, "a"), (30, "b")):
        x, y = rows(10)
        data = PrivateData((x.repeat(n // 10, 1), y.repeat(n // 10)))
        p = plan(sampling_rate=1.0, noise_multiplier=1e-9, expected_batch_size=5)
        releases.append(flatten(mechanism(tmp_path / folder, data, p, model).release()))
    torch.testing.assert_close(releases[1], 3 * releases[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("backend", ["vmap", "hooks", "book"])
def test_micro_batches_and_backends_change_nothing(tmp_path: Path, size: int, backend: Any) -> None:
    """Same rows, other micro-batches and backends, half of the rows clipped: the sum agrees to 1e-5."""
    torch.manual_seed(0)
    model, p = nn.Linear(6, 3), plan(sampling_rate=1.0, max_grad_norm=1.0, noise_multiplier=1e-6)
    found = []
    for folder, speed in (
        ("a", Performance(backend="vmap")),
        ("b", Performance(backend=backend, micro_batch_size=size)),
    ):
        source = mechanism(tmp_path / folder, PrivateData(rows(20)), p, model, performance=speed, entropy=UnsafeSeed(0))
        found.append(flatten(source._clipped_sum().tensors))
    assert float((found[0] - found[1]).norm()) <= 1e-5 * float(found[0].norm())


class Bad(Dataset[Any]):
    """Row 2 has a label that the loss rejects, row 4 is NaN, row 6 cannot be read."""

    def __init__(self, bad: bool) -> None:
        self.x, self.y, self.bad = *rows(12), bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        if self.bad and i == 6:
            raise RuntimeError("unreadable")
        y = 99 if self.bad and i == 2 else self.y[i]
        x = self.x[i] * math.nan if self.bad and i == 4 else self.x[i]
        return x, torch.as_tensor(y)


@pytest.mark.parametrize("backend", ["vmap", "hooks", "book"])
def test_bad_records_contribute_zero_and_raise_nothing(tmp_path: Path, backend: Any) -> None:
    torch.manual_seed(0)
    model, p, example = nn.Linear(6, 3), plan(sampling_rate=1.0), (torch.zeros(6), torch.tensor(0))
    speed = Performance(backend=backend)
    source = mechanism(tmp_path / "a", PrivateData(Bad(True), example=example), p, model, performance=speed)
    x, y = rows(12)
    good = [i for i in range(12) if i not in (2, 4, 6)]
    clean = mechanism(tmp_path / "b", PrivateData((x[good], y[good])), p, model, performance=speed)
    torch.testing.assert_close(
        flatten(source._clipped_sum().tensors), flatten(clean._clipped_sum().tensors), rtol=1e-5, atol=1e-6
    )
    assert all(torch.isfinite(t).all() for t in source.release())
    assert source.out.count == 1


def test_releases_lie_on_the_grid_by_default(tmp_path: Path) -> None:
    model = nn.Linear(6, 3).double()
    x, y = rows(20)
    p = plan(sampling_rate=1.0, expected_batch_size=16)
    source = mechanism(tmp_path, PrivateData((x.double(), y)), p, model)
    out = flatten(source.release()) * 16 / grid(1.0, 21)
    assert torch.equal(out, out.round())


class Drawing(Dataset[Any]):
    """Augments with every generator there is."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return torch.randn(6) + random.random() + np.random.rand(), 0  # noqa: NPY002


def test_global_randomness_is_untouched(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
    source = mechanism(tmp_path, PrivateData(Drawing(), example=(torch.zeros(6), 0)), plan(sampling_rate=1.0), model)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    source.release()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), repr(np.random.get_state()))  # noqa: NPY002


def test_a_data_set_gives_the_sum_that_its_tensors_give(tmp_path: Path) -> None:
    """Records as tuples, public example as a list (as collating makes it): nothing is dropped."""
    model, (x, y) = nn.Linear(6, 3), rows(20)
    p = plan(sampling_rate=1.0)
    listed = mechanism(tmp_path / "a", PrivateData(list(zip(x, y, strict=True))), p, model, public_example=[x[0], y[0]])
    tensors = mechanism(tmp_path / "b", PrivateData((x, y)), p, model)
    a, b = (flatten(m._clipped_sum().tensors) for m in (listed, tensors))
    assert float(a.norm()) > 0.1
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bad", [False, True])
def test_ledger_records_do_not_tell_how_long_a_batch_took(tmp_path: Path, bad: bool) -> None:
    """The number of steps a record covers is fixed before any private row is read."""
    private = PrivateData(Bad(bad), example=(torch.zeros(6), torch.tensor(0)))
    source = mechanism(tmp_path, private, plan(steps=200, sampling_rate=1.0), nn.Linear(6, 3))
    block = source.out._block
    for _ in range(9):
        source.release()
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert {line["count"] for line in lines if line["type"] == "intent"} == {block}


def test_fresh_noise_after_a_restart(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    data = PrivateData(rows(20))
    first = flatten(mechanism(tmp_path, data, plan(sampling_rate=1.0), model).release())
    second = flatten(mechanism(tmp_path, data, plan(sampling_rate=1.0), model).release())
    assert not torch.equal(first, second)
    assert Ledger.open(tmp_path / "ledger.jsonl").runs["run"].spent == 2


def test_user_level_sums_a_person_before_the_clip(tmp_path: Path) -> None:
    """One person with all 20 rows moves the sum by at most C; the same rows as 20 examples move it by much more."""
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(6, 3), rows(20)
    y = torch.zeros_like(y)
    p = plan(sampling_rate=1.0, max_grad_norm=0.1)
    one = mechanism(
        tmp_path / "a",
        PrivateData((x, y), users=["ann"] * 20),
        plan(**{**p.to_dict(), "unit": "user"}),
        model,
    )
    many = mechanism(tmp_path / "b", PrivateData((x, y)), p, model)
    assert float(flatten(one._clipped_sum().tensors).norm()) <= 0.1
    assert float(flatten(many._clipped_sum().tensors).norm()) > 0.5


def test_user_level_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="users=keys"):
        mechanism(tmp_path, PrivateData(rows(20)), plan(unit="user"), nn.Linear(6, 3))
    keyed = PrivateData(rows(20), users=np.arange(20))
    with pytest.raises(ConfigError, match="unit='user'"):
        mechanism(tmp_path / "b", keyed, plan(), nn.Linear(6, 3))


def test_poisson_rate_reaches_the_gradient(tmp_path: Path) -> None:
    """400 steps at q = 0.3 over 50 identical rows: the mean of the sums is n q g to 5 standard errors."""
    model = nn.Linear(2, 1, bias=False)
    data = PrivateData(torch.tensor([[1.0, 0.0]]).repeat(50, 1))
    p = plan(steps=400, sampling_rate=0.3, noise_multiplier=1e-6, max_grad_norm=10.0, expected_batch_size=1)
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    source = PrivateGradient(model, lambda m, b: m(b).squeeze(1), data, p, ledger=ledger, run_id="r")
    sizes = np.array([float(source.release()[0][0, 0]) for _ in range(400)])
    assert abs(sizes.mean() - 15) < 5 * math.sqrt(50 * 0.3 * 0.7 / 400)
    assert sizes.std() > 2


@pytest.mark.parametrize("backend", ["book", "vmap"])
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize("size", [8, 16, 61, 77])
def test_no_row_is_rounded_by_its_place(tmp_path: Path, backend: Any, order: str, outputs: int, size: int) -> None:
    """Records whose residual is mere rounding of numbers as large as 1e5, so that where a row stands would show.

    Without the first record all others move up by one place, also across pieces and into another memory layout.
    """
    torch.manual_seed(0)
    model = nn.Linear(300, outputs, bias=False)
    with torch.no_grad():
        model.weight.mul_(1e6)
    x = torch.randn(300, 257).T if order == "columns" else torch.randn(257, 300)

    def squared(model: Any, batch: Any) -> Tensor:
        return torch.as_tensor((model(batch[0]) - batch[1]).square().sum(1))

    y = torch.cat([model(row[None].contiguous()) for row in x]).detach()
    sums = []
    for i, kept in enumerate((x, x[1:])):
        private = PrivateData((kept, y[i:]))
        p = plan(sampling_rate=1.0, expected_batch_size=257)
        ledger = Ledger.open(tmp_path / f"{i}.jsonl")
        source = PrivateGradient(
            model,
            squared,
            private,
            p,
            ledger=ledger,
            run_id="run",
            performance=Performance(backend=backend, micro_batch_size=size),
        )
        sums.append(flatten([t.double() for t in source._clipped_sum().tensors]))
    assert float((sums[0] - sums[1]).norm()) <= p.max_grad_norm


def test_parameters_that_are_unfrozen_later_are_noticed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    source = mechanism(tmp_path, PrivateData(rows(20)), plan(), model)
    source.release()
    model[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="trainable"):
        source.release()
