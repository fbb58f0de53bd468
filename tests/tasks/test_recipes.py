"""Recipes: every file loads, the paper's are those of its table, and a mistake in one is told by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.study.problem import Recipe
from halfsilver.tasks import TASKS
from halfsilver.tasks.recipes import load, names, parse

ALL = [(task, name) for task in TASKS for name in names(task)]
# Private rows of the paper: 96 % of each training set.
POPULATION = {"cifar10": 48_000, "emnist": 670_015, "wikitext2": 46_813}


def test_each_task_has_a_workstation_recipe_and_the_two_of_the_paper() -> None:
    assert {(task, name) for task, name in ALL} == {
        ("cifar10", "workstation"), ("cifar10", "eps3.51"), ("cifar10", "eps0.19"),
        ("emnist", "workstation"), ("emnist", "eps25.8"), ("emnist", "eps0.48"), ("emnist", "short"),
        ("wikitext2", "workstation"), ("wikitext2", "eps15.7"), ("wikitext2", "eps1.71"), ("wikitext2", "ood"),
        ("wikitext2", "both"), ("wikitext2", "paper"),
        ("cifar10", "short"), ("stackexchange", "workstation"), ("stackexchange", "paper"),
        ("cifar10", "fifth"), ("wikitext2", "fifth"), ("stackexchange", "fifth"),
        ("cifar10", "paper"), ("emnist", "paper"), ("stackexchange", "subwords"),
    }  # fmt: skip


@pytest.mark.parametrize(("task", "name"), ALL)
def test_every_recipe_loads(task: str, name: str) -> None:
    recipe, more = load(task, name)
    assert recipe.name == name
    assert set(more) <= {"epsilon", "delta", "task", "paper"}
    assert 0 < more["delta"] < 1e-4
    assert recipe.public_batch_size == (5 if recipe.local else recipe.batch_size // 4)
    assert (recipe.local is None) == (recipe.rounds is None) == (task != "stackexchange")


@pytest.mark.parametrize(("task", "name"), [pair for pair in ALL if pair[1].startswith("eps")])
def test_paper_recipes_spend_what_the_paper_says(task: str, name: str) -> None:
    """By RDP, as there, within 1 % or half a unit of its last digit; and K is the one of its figure."""
    recipe, more = load(task, name)
    assert name == f"eps{more['epsilon']:g}"
    assert recipe.noise_multiplier is not None
    plan = hs.PrivacyPlan(
        steps=recipe.steps(POPULATION[task]),
        sampling_rate=recipe.batch_size / POPULATION[task],
        expected_batch_size=recipe.batch_size,
        noise_multiplier=recipe.noise_multiplier,
    )
    assert plan.epsilon(more["delta"], "rdp") == pytest.approx(more["epsilon"], rel=1e-2, abs=5e-3)
    assert recipe.epochs is not None
    ends = [math.cos(math.pi * recipe.epochs / (2 * more["paper"]["alpha_K"]))]
    assert set(ends) <= set(recipe.grid.alpha_end)
    figures = [more["paper"][method] for method in ("cold", "warm", "pda")]
    assert figures == sorted(figures, key=lambda f: -f["loss"])


GOOD = """
epsilon = 1
[recipe]
batch_size = 8
public_batch_size = 2
epochs = 3
[recipe.grid]
cold = [1, 2.5]
warm = [1.0]
pda = [1.0]
alpha_end = [0.9]
"""


def test_whole_numbers_serve_as_fractions() -> None:
    recipe, more = parse(GOOD, "mine")
    assert isinstance(recipe, Recipe)
    assert (recipe.epochs, recipe.grid.cold, more) == (3.0, (1.0, 2.5), {"epsilon": 1.0})
    assert (type(recipe.epochs), type(recipe.batch_size)) == (float, int)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_size = 8", "batch = 8", r"unknown key 'recipe\.batch'; expected one of"),
        ("batch_size = 8", "", r"lacks 'recipe\.batch_size'"),
        ("batch_size = 8", "batch_size = 8.5", r"'recipe\.batch_size'=8\.5; expected int"),
        ("batch_size = 8", "batch_size = true", r"'recipe\.batch_size'=True; expected int"),
        ("batch_size = 8", 'batch_size = "8"', r"'recipe\.batch_size'='8'; expected int"),
        ("batch_size = 8", "batch_size = 0", r"batch_size=0 at least 1"),
        ("epochs = 3", "epochs = nan", r"'recipe\.epochs'=nan; expected a finite number"),
        ("epochs = 3", "epochs = 3\naverage = 'long'", r"'recipe\.average'='long'; expected float"),
        ("cold = [1, 2.5]", "cold = 1", r"'recipe\.grid\.cold'=1; expected list"),
        ("cold = [1, 2.5]", "cold = [1, 'x']", r"'recipe\.grid\.cold'='x'; expected float"),
        ("cold = [1, 2.5]", "", r"lacks 'recipe\.grid\.cold'"),
        ("alpha_end = [0.9]", "alpha_end = [1.9]", r"alpha_end=\(1\.9,\) each in \[0, 1\]"),
        ("alpha_end = [0.9]", "", r"alpha_end=\(\) one or more, or none with damping"),
        ("alpha_end = [0.9]", "alpha_K = [2]", r"alpha_K=\(2\.0,\); expected at least 3\.0 epochs"),
        ("alpha_end = [0.9]", "alpha_end = [0.9]\nalpha_K = [9]", "expected one of them"),
        ("epsilon = 1", "epsilon = 'one'", "'epsilon'='one'; expected float"),
        ("epsilon = 1", "eps = 1", r"unknown key 'eps'; expected 'recipe' or"),
        ("epsilon = 1", "epsilon = ", "is not TOML"),
        (GOOD, "epsilon = 1", "lacks 'recipe'"),
        (GOOD, "recipe = 1", "'recipe'=1; expected dict"),
        (GOOD, "[recipe]\nbatch_size = 8", "lacks 'recipe.grid'"),
        (GOOD, GOOD + "[recipe.pretrain]\nepoch = 1", r"unknown key 'recipe\.pretrain\.epoch'"),
        (GOOD, GOOD + "[recipe.local]\nrate = 1", r"unknown key 'recipe\.local\.rate'"),
        ("epochs = 3", "epochs = 3\nrounds = 3", "epochs and rounds"),
        ("epochs = 3", "", "epochs and rounds"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=message):
        parse(GOOD.replace(old, new), "mine")


def test_an_unknown_recipe_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"recipe='eps9' of task 'emnist' in \('eps0.48', 'eps25.8', 'paper', "):
        load("emnist", "eps9")


JSON = st.recursive(
    st.one_of(st.integers(-3, 300), st.floats(-2, 2), st.booleans(), st.text("ab'", max_size=3)),
    lambda inner: st.lists(inner, max_size=3),
)


@given(
    key=st.sampled_from(["batch_size", "epochs", "average", "clip_released", "grid", "pretrain", "name"]), value=JSON
)
def test_any_value_is_taken_or_refused_with_a_typed_error(key: str, value: object) -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith(key)]
    text = str(value).replace("True", "true").replace("False", "false")
    lines.insert(lines.index("[recipe]") + 1, f"{key} = {text if not isinstance(value, str) else repr(value)}")
    try:
        recipe, _ = parse("\n".join(lines), "mine")
    except ConfigError:
        return
    assert isinstance(recipe, Recipe)
