"""Private rows that are public too: they contribute exactly nothing, and nothing tells of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs
from halfsilver._core.tensors import Batch, flatten, map_batch, take_rows
from halfsilver.privacy.copies import PublicCopies
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import UnsafeSeed
from halfsilver.privacy.gradients import BACKENDS, Performance
from halfsilver.privacy.gradients.linear import LinearModel, with_row_norms
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.plan import PrivacyPlan, Unit
from halfsilver.privacy.schema import Schema

COPIES = [3, 17, 18, 37]  # places among the 40 private rows


def loss_fn(model: Any, batch: Batch) -> Tensor:
    assert len(batch[1])
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)


def with_copies(private: Batch, public: Batch) -> Batch:
    """`private` with its rows at COPIES replaced by public ones."""

    def mixed(column: Tensor, other: Tensor) -> Tensor:
        return column.index_copy(0, torch.tensor(COPIES), other[: len(COPIES)])

    return tuple(mixed(a, b) for a, b in zip(private, public, strict=True))


def without(private: Batch) -> Batch:
    return take_rows(private, torch.tensor([i for i in range(40) if i not in COPIES]))


def source(folder: Path, private: Any, public: Any, model: nn.Module | None = None, **options: Any) -> PrivateGradient:
    unit: Unit = "user" if isinstance(private, PrivateData) else "example"
    data = private if isinstance(private, PrivateData) else PrivateData(private)
    plan = PrivacyPlan(steps=9, sampling_rate=1.0, expected_batch_size=40, noise_multiplier=1.0, unit=unit)
    return PrivateGradient(
        model or nn.Linear(6, 3),
        options.pop("loss_fn", loss_fn),
        data,
        plan,
        ledger=Ledger.open(folder / "ledger.jsonl", unit=unit),
        run_id="run",
        public_rows=[] if public is None else [public],
        entropy=UnsafeSeed(5),
        **options,
    )


def release(*args: Any, **options: Any) -> Tensor:
    return flatten(source(*args, **options).release())


# ---- exactly zero


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_a_copy_of_a_public_row_changes_no_bit_of_a_release(tmp_path: Path, backend: Any) -> None:
    """Noise frozen, one piece of rows: the release is that of data without the copies, and not so without the guard."""
    model, public, speed = nn.Linear(6, 3), rows(9, 1), Performance(backend=backend, micro_batch_size=64)
    private = with_copies(rows(40), public)
    found = {
        "guarded": release(tmp_path / "a", private, public, model, performance=speed),
        "absent": release(tmp_path / "b", without(private), None, model, performance=speed),
        "open": release(tmp_path / "c", private, None, model, performance=speed),
    }
    assert torch.equal(found["guarded"], found["absent"])
    assert not torch.equal(found["open"], found["absent"])


def test_a_copy_changes_no_bit_in_the_closed_form(tmp_path: Path) -> None:
    model = nn.Linear(6, 1, bias=False)
    public, private = (with_row_norms(x, y.float()) for x, y in (rows(9, 1), rows(40)))
    private = with_copies(private, public)
    found = [
        release(
            tmp_path / str(i),
            data,
            shown,
            model,
            performance=Performance(backend=LinearModel(model), micro_batch_size=64),
        )
        for i, (data, shown) in enumerate(((private, public), (without(private), None), (private, None)))
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_copy_changes_no_bit_across_pieces_and_out_of_a_data_set(tmp_path: Path) -> None:
    """Pieces of 16 rows, read one by one; the copies stand in front, so that all others move up."""
    model, public, (x, y) = nn.Linear(6, 3), rows(9, 1), rows(40)
    listed = list(zip(x, y.tolist(), strict=True))
    copies = [(public[0][i], int(public[1][i])) for i in range(5)]
    options: dict[str, Any] = {"public_example": (x[0], y[0]), "performance": Performance(micro_batch_size=16)}
    guarded = release(tmp_path / "a", copies + listed, public, model, **options)
    assert torch.equal(guarded, release(tmp_path / "b", listed, None, model, **options))
    assert not torch.equal(guarded, release(tmp_path / "c", copies + listed, None, model, **options))


def test_a_user_keeps_the_rows_that_are_not_public(tmp_path: Path) -> None:
    model, public = nn.Linear(6, 3), rows(9, 1)
    private = with_copies(rows(40), public)
    keys = torch.arange(40) // 8
    keys[torch.tensor(COPIES[1:3])] = 99  # a user of copies only
    left = torch.tensor([i for i in range(40) if i not in COPIES])
    speed = Performance(micro_batch_size=1)  # so that parts of users are empty, which `loss_fn` would not bear
    guarded = release(tmp_path / "a", PrivateData(private, users=keys), public, model, performance=speed)
    absent = PrivateData(without(private), users=keys[left])
    assert torch.equal(guarded, release(tmp_path / "b", absent, None, model, performance=speed))


def test_the_guard_of_a_trainer_is_on_and_has_a_switch(tmp_path: Path) -> None:
    """Weights, metrics and statement of a whole run, to the last bit, also where public rows have their own loss."""

    def trained(name: str, private: Batch, **options: Any) -> tuple[Tensor, Any, Any]:
        model = nn.Linear(6, 3)
        nn.init.constant_(model.weight, 0.1)
        nn.init.constant_(model.bias, 0.0)
        plan = hs.PrivacyPlan(steps=4, sampling_rate=1.0, expected_batch_size=40, noise_multiplier=1.0)
        trainer = hs.Trainer(
            model,
            loss_fn,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            plan=plan,
            mirror=hs.FirstOrder(0.7),
            performance=Performance(micro_batch_size=64),
            unsafe_seed=1,
            **options,
        )
        result = trainer.fit(private, public, run_dir=tmp_path / name, delta=1e-5)
        return flatten([p.detach() for p in model.parameters()]), result.history, result.statement

    public = rows(9, 1)
    before, private = map_batch(torch.clone, public), with_copies(rows(40), public)
    absent = trained("absent", without(private))
    guarded = trained("guarded", private)
    assert torch.equal(guarded[0], absent[0])
    assert guarded[1:] == absent[1:]
    other = trained("other", private, public_loss_fn=lambda model, batch: loss_fn(model, batch))
    assert torch.equal(other[0], absent[0])
    assert not torch.equal(trained("open", private, skip_public_copies=False)[0], absent[0])
    assert all(torch.equal(a, b) for a, b in zip(before, public, strict=True))


# ---- nothing tells of it


def test_copies_leave_no_trace(tmp_path: Path, caplog: Any, capsys: Any) -> None:
    """Data of copies only: noise alone is released, and the ledger has what it always has."""
    model, public = nn.Linear(6, 3), rows(40, 1)
    empty = take_rows(public, slice(0, 0))
    with caplog.at_level(logging.DEBUG):
        steps = [source(tmp_path / name, data, public, model) for name, data in (("a", public), ("b", empty))]
        released = [flatten(s.release()) for s in steps]
    assert torch.equal(*released)
    assert [s.out.count for s in steps] == [1, 1]
    lines = [(tmp_path / name / "ledger.jsonl").read_text().splitlines() for name in "ab"]
    assert len(lines[0]) == len(lines[1])
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 1e-40, 0.0])
def test_no_value_makes_the_comparison_raise(value: float) -> None:
    """And a row of it is found if the public set has it, NaN included: bytes are compared, not numbers."""
    odd = (torch.full((1, 6), value), torch.tensor([2]))
    batch = tuple(torch.cat(pair) for pair in zip(rows(3), odd, strict=True))
    schema = Schema.of_columns(batch)
    assert _same(PublicCopies(schema, [odd]).left_out_of(batch), rows(3))
    assert _same(PublicCopies(schema, [rows(5, 1)]).left_out_of(batch), batch)


# ---- what is a copy


def _same(a: Batch, b: Batch) -> bool:
    return all(x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def _left(private: Batch, *public: Batch) -> int:
    batch = PublicCopies(Schema.of_columns(private), public).left_out_of(private)
    return len(torch.utils._pytree.tree_leaves(batch)[0])


def test_every_tensor_of_a_row_counts() -> None:
    x, y = rows(4)
    assert _left((x, y), (x, y)) == 0
    assert _left((x, y), (x, (y + 1) % 3)) == 4  # another label: that one is not public
    assert _left((x, y), (x.flip(1), y)) == 4
    assert _left((x, y), (x[:2], y[:2]), (x[3:], y[3:])) == 1


def test_bytes_are_compared_in_the_private_dtype() -> None:
    x, y = rows(4)
    assert _left((x, y), (x.double(), y.int())) == 0
    zero = torch.zeros(2, 3)
    assert _left(zero, zero) == 0
    assert _left(zero, -zero) == 2


def test_spelling_and_layout_do_not_count() -> None:
    x, y = torch.rand(4, 3, 5, 5), torch.arange(4)
    assert _left({"x": x, "y": y}, {"y": y, "x": x}) == 0
    assert _left((x, y), [x, y]) == 0
    assert _left((x.contiguous(memory_format=torch.channels_last), y), (x, y)) == 0
    flat, wide = x.flatten(1), torch.rand(4, 8)
    columns = flat.T.contiguous().T  # as tables often lie
    assert _left((columns, y), (flat, y)) == _left((flat, y), (columns, y)) == 0
    assert _left(wide[:, ::2], wide[:, ::2].clone()) == _left(wide[:, ::2].clone(), wide[:, ::2]) == 0


@pytest.mark.parametrize("public", ["words", "fewer", "wider", "named", "fractions"])
def test_rows_of_another_kind_are_no_copies(public: str) -> None:
    x, y = rows(4)
    kinds: dict[str, Any] = {
        "words": ["a", "b", "c", "d"],
        "fewer": x,
        "wider": (torch.cat([x, x], 1), y),
        "named": {"x": x, "y": y},
        "fractions": (x, y + 0.5),  # which whole numbers would cut off
    }
    assert _left((x, y), kinds[public]) == 4
