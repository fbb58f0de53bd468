"""Features of private records: computed behind the handle, without a trace of a record that cannot be mapped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.tensors import take_rows
from halfsilver.errors import ConfigError, PrivateDataError
from halfsilver.features import Cached, Frozen
from halfsilver.privacy.data import PrivateData
from tests.test_boundaries import Spy


class Rude(BaseException):
    """An error that is no `Exception`."""


def rows(n: int = 20) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return x, (x.sum(1) > 0).long()


def layer() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh())


FEATURES = Frozen(layer()).fit().transform


def opened(data: PrivateData) -> Any:
    records, _ = data._open()
    return records.fetch(slice(0, records.size()), data._schema())


@pytest.mark.parametrize("batch", [1, 7, 20, 250])
def test_features_replace_the_input(batch: int) -> None:
    x, y = rows()
    z, labels = opened(PrivateData((x, y)).mapped(FEATURES, rows=batch))
    torch.testing.assert_close(z, FEATURES(x))
    assert torch.equal(labels, y)


def test_records_in_any_form() -> None:
    x, y = rows()
    torch.testing.assert_close(opened(PrivateData(x).mapped(FEATURES)), FEATURES(x))
    named = opened(PrivateData({"x": x, "y": y}).mapped(FEATURES, column="x"))
    assert (list(named), named["y"].tolist()) == (["x", "y"], y.tolist())
    torch.testing.assert_close(named["x"], FEATURES(x))
    listed = PrivateData([(a, b) for a, b in zip(x, y, strict=True)], example=(torch.zeros(3), torch.tensor(0)))
    torch.testing.assert_close(opened(listed.mapped(FEATURES))[0], FEATURES(x))
    assert opened(PrivateData((x[:0], y[:0])).mapped(FEATURES))[0].shape == (0, 5)


def fails_on(bad: Tensor, error: BaseException) -> Any:
    def transform(x: Tensor) -> Tensor:
        if torch.eq(x, bad).all(1).any():
            raise error
        return FEATURES(x)

    return transform


@pytest.mark.parametrize("error", [ValueError("a private value"), SystemExit(3), Rude()], ids=repr)
def test_a_record_on_which_the_map_fails_is_left_out_and_changes_no_other(error: BaseException) -> None:
    x, y = rows()
    good = opened(PrivateData((x, y)).mapped(FEATURES, rows=8))
    left = opened(PrivateData((x, y)).mapped(fails_on(x[5], error), rows=8))
    kept = torch.arange(20) != 5
    assert torch.equal(left[0], good[0][kept])  # to the bit: nothing but the record itself is different
    assert torch.equal(left[1], y[kept])


class Damaged(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 5:
            raise OSError("a private value")
        return super().__getitem__(index)


def test_a_record_that_cannot_be_read_is_left_out_and_changes_no_other() -> None:
    x, y = rows()
    pairs, example = list(zip(x, y, strict=True)), (torch.zeros(3), torch.tensor(0))
    good = opened(PrivateData(pairs, example=example).mapped(FEATURES, rows=8))
    left = opened(PrivateData(Damaged(pairs), example=example).mapped(FEATURES, rows=8))
    assert torch.equal(left[0], good[0][torch.arange(20) != 5])


def test_what_the_map_writes_into_its_input_stays_there() -> None:
    x, y = rows()
    before = x.clone()
    z, _ = opened(PrivateData((x, y)).mapped(lambda x: x.mul_(2)))
    assert torch.equal(x, before)
    torch.testing.assert_close(z, 2 * x)


def test_users_keep_their_rows() -> None:
    x, y = rows()
    private = PrivateData((x, y), users=torch.arange(20) % 4)
    records, users = private.mapped(FEATURES)._open()
    assert users is not None
    assert users is private._open()[1]
    assert records.size() == 20


def test_a_handle_with_features_knows_its_records() -> None:
    x, y = rows()
    private = PrivateData((x, y)).mapped(FEATURES)
    assert private.shares_rows_with(x)
    assert not private.shares_rows_with(x.clone())
    assert repr(private) == "PrivateData(<opaque>)"


def test_maps_that_mix_rows_are_refused_before_a_record_is_read() -> None:
    class Untouched(Spy):
        def _note(self, method: str) -> None:
            assert method == "__len__", "a record was read"

    norm = nn.BatchNorm1d(3)
    private = PrivateData(Untouched(*rows()), example=(torch.zeros(3), torch.tensor(0)))
    for transform in (lambda x: x - x.mean(0), lambda x: x + torch.randn(()), lambda x: norm(x).detach()):
        with pytest.raises(PrivateDataError, match="change with the rows beside it"):
            private.mapped(transform)
    with pytest.raises(PrivateDataError, match="one row of features"):
        private.mapped(lambda x: x[:3])
    with pytest.raises(PrivateDataError, match="one row of features"):
        private.mapped(lambda x: x.sum(1))
    with pytest.raises(ConfigError, match="column='z'"):
        private.mapped(FEATURES, column="z")
    with pytest.raises(ConfigError, match="rows"):
        private.mapped(FEATURES, rows=0)


def loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trained(private: Any, folder: Path) -> Tensor:
    model = nn.Linear(5, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    plan = hs.PrivacyPlan(steps=3, sampling_rate=1.0, expected_batch_size=20, noise_multiplier=0.5)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    hs.Trainer(model, loss, optimizer=sgd, plan=plan, unsafe_seed=0).fit(private, run_dir=folder)
    return model.weight.detach().clone()


def test_training_on_features_is_training_on_a_table_and_a_bad_record_contributes_zero(tmp_path: Path) -> None:
    x, y = rows()
    table = trained((FEATURES(x), y), tmp_path / "table")
    handle = PrivateData((x, y)).mapped(FEATURES)
    torch.testing.assert_close(trained(handle, tmp_path / "handle"), table)
    bad = PrivateData((x, y)).mapped(fails_on(x[5], ValueError("a private value")))
    kept = torch.arange(20) != 5
    without = trained((FEATURES(x)[kept], y[kept]), tmp_path / "without")
    torch.testing.assert_close(trained(bad, tmp_path / "bad"), without)
    assert not torch.allclose(without, table, atol=1e-3)


def test_only_privacy_touches_the_records_of_a_handle_with_features(tmp_path: Path) -> None:
    spy, model = Spy(*rows(64)), layer()
    before = copy.deepcopy(model.state_dict())
    map = Cached(map=Frozen(model).fit(), folder=tmp_path / "features")
    private = PrivateData(spy, example=(torch.zeros(3), torch.tensor(0))).mapped(map.transform, rows=16)
    assert "__getitem__" not in spy.touched_by, "the ledger comes first"
    trained(private, tmp_path / "run")
    assert "__getitem__" in spy.touched_by, "the spy saw nothing"
    assert spy.strangers() == set()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))


def test_the_cache_serves_the_second_run(tmp_path: Path) -> None:
    x, y = rows()
    map = Cached(map=Frozen(layer()).fit(), folder=tmp_path)
    first = opened(PrivateData((x, y)).mapped(map.transform, rows=8))
    files = sorted(tmp_path.glob("*.safetensors"))
    second = opened(PrivateData((x, y)).mapped(map.transform, rows=8))
    assert torch.equal(first[0], second[0])
    assert sorted(tmp_path.glob("*.safetensors")) == files
    assert take_rows(first, 0)[1] == y[0]
