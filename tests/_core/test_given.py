"""Arrays, frames and loaders train as the tensors that they hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset

import halfsilver as hs
from halfsilver._core.given import as_data
from halfsilver._core.tensors import flatten
from halfsilver.errors import ConfigError
from halfsilver.mirror.rows import PublicRows

pandas = pytest.importorskip("pandas")

X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


def loss_fn(model: Any, batch: Any) -> Tensor:
    losses: Tensor = (model(batch[0])[:, 0] - batch[1]).square()
    return losses


def trained(private: Any, public: Any, folder: Path) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=hs.PrivacyPlan(steps=5, sampling_rate=0.1, expected_batch_size=20, noise_multiplier=1.0),
        mirror=hs.FirstOrder(0.5),
        unsafe_seed=0,
    )
    trainer.pretrain(public, epochs=2)
    trainer.fit(private, public, run_dir=folder, test=public)
    return flatten([p.detach() for p in model.parameters()])


def frames(rows: slice) -> tuple[Any, Any]:
    return pandas.DataFrame(X[rows].numpy().astype(float), columns=list("abcd")), pandas.Series(Y[rows].numpy())


FORMS: dict[str, Callable[[slice], Any]] = {
    "arrays": lambda rows: (X[rows].numpy().copy(), Y[rows].numpy().copy()),
    "double precision": lambda rows: (X[rows].double().numpy(), Y[rows].double().numpy()),
    "frames": frames,
    "a loader": lambda rows: DataLoader(TensorDataset(X[rows].clone(), Y[rows].clone()), shuffle=True, batch_size=7),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_the_same(form: str, tmp_path: Path) -> None:
    private, public = slice(0, 200), slice(200, 300)
    plain = trained((X[private], Y[private]), (X[public], Y[public]), tmp_path / "plain")
    assert torch.equal(plain, trained(FORMS[form](private), FORMS[form](public), tmp_path / "other"))


@pytest.mark.parametrize("form", ["arrays", "frames"])
def test_shared_memory_is_recognised_through_a_conversion(form: str, tmp_path: Path) -> None:
    whole = FORMS["double precision"](slice(0, 300)) if form == "arrays" else frames(slice(0, 300))
    part = tuple(column[:50] for column in whole)
    with pytest.raises(ConfigError, match="private data were given as"):
        trained(whole, PublicRows(part).source, tmp_path)


def test_what_stays_as_it_is_and_what_is_told(caplog: pytest.LogCaptureFixture) -> None:
    pair, rows = (X, Y), [1, 2, 3]
    assert as_data(pair) is pair
    assert as_data(rows) is rows
    fixed = np.arange(4.0)
    fixed.flags.writeable = False
    assert as_data({"x": fixed, "y": Y})["x"].dtype == torch.float32
    assert as_data(np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]
    assert as_data(pandas.DataFrame({"a": [True, False]})).dtype == torch.bool
    with caplog.at_level(logging.WARNING, "halfsilver"):
        as_data(DataLoader(TensorDataset(X)))
    assert "its data set is used" in caplog.text


@pytest.mark.parametrize("kind", ["Int64", "boolean", "Float64"])
def test_a_missing_value_decides_nothing(kind: str) -> None:
    """Where a dtype allows for missing values, NumPy's depends on whether one is missing: refused in either case."""
    for values in ([1, 0], [1, None]):
        with pytest.raises(ConfigError, match=kind):
            as_data((X[:2], pandas.Series(values, dtype=kind)))
    mixed = pandas.DataFrame({"a": [1, 2], "b": [True, False], "c": [0.5, 1.5]})
    assert as_data(mixed).tolist() == [[1.0, 1.0, 0.5], [2.0, 0.0, 1.5]]


def test_a_loader_of_a_part_is_refused_however_it_is_told() -> None:
    rows, part = TensorDataset(X), SubsetRandomSampler(range(3))
    for loader in (DataLoader(rows, sampler=part), DataLoader(rows, batch_sampler=BatchSampler(part, 2, False))):
        with pytest.raises(ConfigError, match="SubsetRandomSampler"):
            as_data(loader)
    with pytest.raises(ConfigError, match="got one with a list"):
        as_data(DataLoader(rows, batch_sampler=[[0, 1], [2]]))
    with pytest.raises(ConfigError, match="mask"):
        as_data(np.ma.array([1.0, 999.0], mask=[False, True]))


def test_columns_that_are_no_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="'town'"):
        as_data(pandas.DataFrame({"age": [1, 2], "town": ["a", "b"]}))
