"""One contract for every engine: what the source of releases relies on, wherever users train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfsilver._core.tensors import flatten, take_rows
from halfsilver.federated import Engine, InProcess, Round, WithCentre, Workers, local_update
from tests.federated.flower_grid import FakeGrid, asked, nodes, server_process, strategy, total
from tests.federated.helpers import LOCAL, columns, users

_ = server_process  # a fixture

Make = Callable[[Path], AbstractContextManager[Engine]]


def flower(sizes: list[int]) -> Make:
    @contextmanager
    def made(folder: Path) -> Iterator[Engine]:
        members = nodes(folder, sizes)
        engine = strategy(members, folder)
        engine.grid = FakeGrid(members)
        yield engine

    return made


# Each over the 20 users of the helpers, who have six rows each.
ENGINES: dict[str, Make] = {
    "in-process": lambda folder: nullcontext(InProcess(users(), LOCAL)),
    "workers": lambda folder: Workers(users(), LOCAL),
    "flower-devices": flower([1] * 20),
    "flower-silos": flower([5, 1, 14]),
}


def one_by_one(round: Round) -> Tensor:
    """Independent of engines and fold: each user's update, clipped, in float64."""
    rows, sums = columns(120), torch.zeros(21, dtype=torch.float64)
    for user in round.users.tolist():
        own = take_rows(rows, slice(6 * user, 6 * user + 6))
        update = flatten(local_update(round.model, round.loss_fn, own, LOCAL)).double()
        update -= 0 if round.centre is None else flatten(round.centre).double()
        sums += update * min(1.0, round.max_grad_norm / float(update.norm()))
    return sums


@pytest.mark.parametrize("drawn", [[0, 3, 4, 19], [*range(20)], []], ids=["some", "all", "nobody"])
@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_round_is_the_sum_of_clipped_updates(make: Make, drawn: list[int], tmp_path: Path) -> None:
    """To 1e-3 of a clip norm a user, the margin of the fold; the same again, and the model is left as it was."""
    round = asked(drawn, max_grad_norm=0.12)
    weights = flatten(list(round.model.parameters())).detach().clone()
    with make(tmp_path) as engine:
        assert engine.population == 20
        found = total(engine, round)
        assert float((found - one_by_one(round)).norm()) <= 1e-3 * 0.12 * len(drawn)
        assert float((total(engine, round) - found).norm()) <= 1e-6  # in another order, perhaps
    assert torch.equal(flatten(list(round.model.parameters())), weights)


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_centre_is_subtracted_before_the_clip(make: Make, tmp_path: Path) -> None:
    """Another one in each round."""
    with make(tmp_path) as engine:
        assert isinstance(engine, WithCentre)
        assert engine.subtracts_centre
        for step, size in enumerate((0.01, -0.03)):
            round = asked(
                [*range(20)], step, max_grad_norm=0.12, centre=[torch.full((3, 6), size), torch.full((3,), size)]
            )
            assert float((total(engine, round) - one_by_one(round)).norm()) <= 1e-3 * 0.12 * 20
        plain = asked([*range(20)], 2, max_grad_norm=0.12)
        assert float((total(engine, plain) - one_by_one(round)).norm()) > 0.1


def test_the_clip_norm_of_the_contract_clips_some_and_not_all() -> None:
    norms = [float(one_by_one(asked([user], max_grad_norm=100.0)).norm()) for user in range(20)]
    assert min(norms) < 0.12 < max(norms)
