"""A study whose private side are users: all four methods, both searches, one ledger of user-level runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.federated import InProcess, LocalTraining, PrivateUsers, PublicUsers
from halfsilver.mirror.users import pooled
from halfsilver.study.arena import SearchMode, make_plan, search_arena
from halfsilver.study.method import resolve
from halfsilver.study.problem import Problem
from halfsilver.study.sides import private_side, public_side
from halfsilver.study.study import Request, Study
from tests.federated.helpers import columns, linear, loss_fn, users

RECIPE = hs.Recipe(
    name="tiny",
    batch_size=10,
    rounds=5,
    public_batch_size=2,
    public_examples=3,
    max_grad_norm=0.5,
    local=LocalTraining(lr=0.1, batch_size=4),
    grid=hs.study.Grid(cold=(1.0,), warm=(0.5, 1.0), pda=(1.0,), alpha_end=(0.9,)),
    pretrain=hs.study.Pretrain(epochs=2),
    search_share=0.4,
)


class Forbidden:
    def size(self) -> int:
        raise AssertionError("private users were counted")

    def rows(self, user: int, limit: int) -> Any:
        raise AssertionError("a private user was read")


def problem(**changes: Any) -> Problem:
    public = [columns(6, seed) for seed in range(1, 9)]
    values: dict[str, Any] = {
        "make_model": linear,
        "loss_fn": loss_fn,
        "private": users(40),
        "public": pooled(public),
        "public_users": public,
        "test": columns(50, seed=20),
        "validation": columns(30, seed=21),
        "population": 40,
    }
    return Problem(**{**values, **changes})


@pytest.mark.paper
@pytest.mark.parametrize("search", ["public search", "paper search"])
def test_all_methods_on_users(tmp_path: Path, search: SearchMode) -> None:
    seeds = {"public": 1, "cold": 1, "warm": 1, "pda": 1, **({"whitened": 1} if search == "public search" else {})}
    request = Request(
        task="custom",
        recipe=RECIPE,
        epsilon=8.0,
        delta=1e-4,
        seeds=seeds,
        methods=resolve(tuple(seeds)),
        search=search,
        quick=True,
    )
    summary = Study(folder=tmp_path, request=request, source=problem).go().to_json()
    private = [run for run in summary["runs"] if run["method"] != "public"]
    assert {run["plan"]["unit"] for run in private} == {"user"}
    assert {run["steps"] for run in private} == {5}
    assert all(run["epsilon"]["pld"] <= 8.0 for run in private)
    assert hs.Ledger.open(tmp_path / "ledger.jsonl").unit == "user"
    assert {run["method"] for run in private} == set(seeds) - {"public"}
    assert summary["ledger"]["runs"] == (4 if search == "public search" else 3 + 4)


def test_public_search_keeps_users_apart_and_reads_no_private_one() -> None:
    own = problem(private=PrivateUsers(Forbidden()))
    plan = make_plan(RECIPE, own.population, 8.0, 1e-4)
    arena = search_arena(own, RECIPE, plan, "public search")
    assert not arena.spends
    noise = plan.noise_multiplier * 3 / 10  # on a sum over 3 users: the same noise on the mean
    small = replace(plan, expected_batch_size=3.0, sampling_rate=1.0, noise_multiplier=noise)
    assert arena.plan == replace(small, steps=2, spare_steps=1)
    engine = private_side(arena.problem, RECIPE)
    assert isinstance(engine, InProcess)
    assert engine.population == arena.problem.population == 3  # of 8 users
    parts = [arena.problem.test[0], arena.problem.public[0]]
    parts.append(torch.cat([engine._store.rows(user, 99)[0] for user in range(3)]))
    rows = [{tuple(row) for row in part.tolist()} for part in parts]
    assert len(set.union(*rows)) == sum(map(len, rows)) == 48
    with pytest.raises(ConfigError, match="at least 5 public users"):
        search_arena(replace(own, public_users=[columns(6)] * 4), RECIPE, plan, "public search")


def test_public_users_train_as_the_recipe_says() -> None:
    model = linear()
    side = public_side(model, problem(), RECIPE)
    assert isinstance(side, PublicUsers)
    assert (side._cohort, side._local.max_examples, side._max_norm) == (2, 3, 0.5)
    with pytest.raises(ConfigError, match=r"\[recipe\.local\]"):
        public_side(model, problem(), replace(RECIPE, local=None))
    with pytest.raises(ConfigError, match="autocast"):
        replace(RECIPE, autocast="bfloat16")
