"""Methods as values: a user's own map is an arm of a study like any other, and mistakes are refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.report import write_report
from halfsilver.report.looks import looks_of
from halfsilver.runs.folder import read_json
from halfsilver.study.arena import make_plan
from halfsilver.study.method import NAMES, PUBLIC, REGISTERED, WARM, WHITENED, Conditions, resolve
from halfsilver.study.problem import Setting
from halfsilver.study.records import Result
from halfsilver.study.run import Job, make_trainer
from halfsilver.study.search import settings_wanted
from halfsilver.study.verdict import verdict
from tests.study.small_study import GRID, RECIPE, loss_fn, make_model, problem, records


@dataclass(frozen=True)
class Shrink:
    """A user's own map: the released gradient times a factor, whatever else a step tells."""

    factor: float
    persistent: ClassVar[tuple[str, ...]] = ()

    def init(self, **given: Any) -> dict[str, Any]:
        return {}

    def direction(self, released: Any, state: Any, *step: Any, **more: Any) -> Any:
        return [self.factor * g for g in released], state


def shrunk(factor: float = 0.5, **changes: Any) -> hs.Method:
    return hs.Method(**{"name": "shrunk", "mirror": Shrink(factor), "against": "warm", **changes})


def compare(out: Path, *methods: hs.Method | str) -> hs.study.Comparison:
    data = records(200, 0), records(40, 1), records(100, 2)
    return hs.compare(
        make_model, loss_fn, *data, epsilon=5.0, delta=1e-4, population=200, recipe=RECIPE, seeds=2, methods=methods,
        out=out,
    )  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> hs.study.Comparison:
    return compare(tmp_path_factory.mktemp("study"), PUBLIC, shrunk(), "warm")


def test_a_users_map_is_an_arm_of_a_study(study: hs.study.Comparison) -> None:
    assert study.summary["methods"] == ["public", "warm", "shrunk"]
    assert list(study.verdict["means"]) == ["public", "warm", "shrunk"]
    assert "shrunk - warm" in [d["name"] for d in study.verdict["differences"]]
    text = str(study)
    assert "The method shrunk " in text
    assert "the method shrunk " in study.verdict["headline"]
    assert "public search, shrunk: learning rate" in text
    tried = study.summary["choices"]["shrunk"]["tried"]
    assert {one["setting"]["lr"] for one in tried} >= set(GRID.warm), "without its own, it has the rates of its pair"
    config = read_json(study.folder / "runs" / "shrunk-seed-0" / "config.json")
    assert config["mirror"] == "Shrink(factor=0.5)"


def test_it_stands_in_the_report(study: hs.study.Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = write_report(study.folder, tmp_path).read_text(encoding="utf-8")
    assert "The method shrunk " in page
    assert "Shrink(factor=0.5)" in page, "the table describes it by its map"
    own = looks_of(["shrunk"])["shrunk"]
    assert own not in looks_of([]).values()
    assert f"var(--{own.variable})" in page, "it has a colour of its own"
    assert "one run of warm or shrunk on its own; public uses no private data" in page


def test_another_map_under_its_name_is_noticed(study: hs.study.Comparison) -> None:
    with pytest.raises(ConfigError, match=r"method shrunk.*Shrink\(factor=0.5\).*Shrink\(factor=0.25\)"):
        compare(study.folder, "public", "warm", shrunk(0.25))
    with pytest.raises(ConfigError, match="seeds of shrunk=0"):
        compare(study.folder, "public", "warm")
    assert compare(study.folder, "public", "warm", shrunk()).summary["runs"] == study.summary["runs"]


def test_the_four_are_recorded_by_name_alone(study: hs.study.Comparison) -> None:
    """So study.json of a study without other methods is what it was before methods were values."""
    assert set(read_json(study.folder / "study.json")["arms"]) == {"shrunk"}


def test_a_map_may_depend_on_the_setting() -> None:
    def mirror(at: Conditions) -> Any:
        return Shrink(at.setting.alpha_end or 1.0)

    method = shrunk(mirror=mirror, learning_rates=(0.1, 0.2), searches_alpha=True)
    assert method.settings_in(GRID) == [Setting(0.1, 0.9), Setting(0.2, 0.9)]
    assert method.mirror_at(Conditions(setting=Setting(0.1, 0.9), recipe=RECIPE)) == Shrink(0.9)
    assert method.to_json(RECIPE)["mirror"] == "Shrink(factor=0.9)"


def test_learning_rates_come_from_the_pair() -> None:
    first = shrunk(name="first", against="pda")
    second = shrunk(name="second", against="first")
    alone = shrunk(name="alone", against=None)
    rates = {method.name: method.rates_in(GRID) for method in resolve([second, first, alone, "warm", "pda"])}
    assert rates["first"] == rates["second"] == rates["pda"] == GRID.pda
    assert rates["alone"] == GRID.warm
    assert list(rates) == ["warm", "pda", "second", "first", "alone"], "the library's first, then as given"


def test_every_private_method_from_the_public_start_may_be_the_best() -> None:
    losses = {"public": (0.7, 0.72), "cold": (0.1, 0.12), "warm": (0.6, 0.61), "shrunk": (0.5, 0.53)}
    runs = [Result(method=m, seed=s, final={"loss": v}) for m, own in losses.items() for s, v in enumerate(own)]
    found = verdict(runs, resolve(["public", "cold", "warm", shrunk()]))
    private = found.difference("private - public", "loss")
    assert private is not None
    assert private.method == "shrunk"
    assert private.level == pytest.approx(0.975)
    assert any("because warm or shrunk was picked" in sentence for sentence in found.sentences)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["sgd"], rf"method='sgd' in \('{NAMES[0]}', '{NAMES[1]}'"),
        ([], "one or more"),
        (["warm", WARM], "each name once"),
        ([shrunk(), shrunk(0.1), "warm"], "each name once"),
        ([shrunk()], "against of shrunk='warm' in"),
        ([replace(WARM, mirror=Shrink(0.5))], "that of a registered method"),
    ],
)
def test_wrong_sets_of_methods_are_refused(methods: list[hs.Method | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(methods)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": ""}, "name=''"),
        ({"name": "private"}, "name='private'"),
        ({"start": "cold"}, "start='cold'"),
        ({"against": "shrunk"}, "against='shrunk'"),
        ({"mirror": Shrink}, "to be a map such as"),
        ({"mirror": 0.9}, "to be a map such as"),
        ({"learning_rates": (0.0,)}, "each above 0"),
        ({"geometry": object()}, "geometry=.* to be a geometry such as Whitened"),
        ({"finish": object()}, "a last step such as Finish"),
    ],
)
def test_wrong_methods_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shrunk(**wrong)


def test_the_registry_knows_its_methods_by_name() -> None:
    assert all(REGISTERED[name].name == name for name in REGISTERED)
    assert tuple(REGISTERED)[:4] == NAMES


def test_the_damping_of_a_geometry_is_searched_beyond_its_first_value() -> None:
    wanted = WHITENED.settings_in(GRID)
    assert wanted == [Setting(lr, damping=1.0) for lr in GRID.warm]
    best, tried = Setting(0.5, damping=0.1), list(wanted)
    while True:
        costs = {s: abs(s.lr - best.lr) + abs(math.log10((s.damping or 1.0) / 0.1)) for s in tried}
        if (wanted := settings_wanted(GRID, WHITENED, costs, widen=True)) == tried:
            break
        tried = wanted
    assert min(costs, key=lambda s: costs[s]) == best
    assert {s.damping for s in tried} == {0.01, 0.1, 1.0, 10.0}, "so that the best one is not at an edge"
    assert WHITENED.geometry_at(Conditions(setting=best, recipe=RECIPE)) == hs.Whitened(damping=0.1)


def test_settings_without_a_damping_are_written_as_before() -> None:
    assert Setting(0.5, 0.9).to_json() == {"lr": 0.5, "alpha_end": 0.9}
    assert Setting(**Setting(0.5, damping=2.0).to_json()) == Setting(0.5, damping=2.0)  # type: ignore[arg-type]


def test_a_recipe_may_name_any_optimizer_of_torch(tmp_path: Path) -> None:
    recipe = replace(RECIPE, optimizer="RMSprop", momentum=0.5)
    job = Job(
        method=WHITENED, seed=0, setting=Setting(0.1, damping=3.0), folder=tmp_path, start=tmp_path, ledger=tmp_path,
        delta=1e-4,
    )  # fmt: skip
    trainer = make_trainer(make_model(), problem(), recipe, job, make_plan(recipe, 200, 5.0, 1e-4))
    assert isinstance(trainer.optimizer, torch.optim.RMSprop)
    assert trainer.optimizer.defaults["momentum"] == 0.5
    assert trainer.geometry == hs.Whitened(damping=3.0)
    for wrong in ("Adm", "lr_scheduler"):
        with pytest.raises(ConfigError, match="optimizer"):
            replace(RECIPE, optimizer=wrong)


def test_the_model_of_a_run_can_be_loaded(study: hs.study.Comparison) -> None:
    folder = study.run_dir("warm")
    [found] = [run for run in study.summary["runs"] if (run["method"], run["seed"]) == ("warm", 0)]
    model = make_model()
    assert hs.load(folder, model)["delta"] == found["delta"]
    loss = float(loss_fn(model, records(100, 2)).mean().detach())
    assert loss == pytest.approx(found["final"]["loss"], rel=1e-4)
    with pytest.raises(ConfigError, match=r"run='public-seed-0' one of \['"):
        study.run_dir("public")
