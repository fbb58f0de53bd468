"""Studies and runs of the benchmark tasks, by the names of task and recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfsilver.errors import ConfigError, require
from halfsilver.runs.folder import read_json
from halfsilver.study.advice import Advice
from halfsilver.study.arena import SEARCH, Arena, make_plan
from halfsilver.study.auto import advise_problem, advised_study
from halfsilver.study.jobs import Tell
from halfsilver.study.method import METHODS, Method, registered, resolve
from halfsilver.study.problem import Grid, Recipe, Setting
from halfsilver.study.run import CURVE_POINTS, Job, run
from halfsilver.study.start import make_start
from halfsilver.study.study import Request, Study, seeds_for
from halfsilver.tasks import TASKS
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

DEFAULT_DELTA = 1e-5
QUICK_POINTS = 5  # of a curve


def study_of_task(
    task: str,
    *,
    data: Path,
    recipe: str = "workstation",
    epsilon: float | None = None,
    delta: float | None = None,
    seeds: int = 3,
    cold_seeds: int | None = None,
    methods: Sequence[Method | str] = METHODS,
    search: str = "public",
    quick: bool = False,
    out: Path | None = None,
    tell: Tell = lambda text: None,
) -> Study:
    """The study of a task as the command line asks for it; the method "auto" stands alone, and takes advice first."""
    require(search in SEARCH, "search", search, f"in {tuple(SEARCH)}")
    training, more = _recipe(task, recipe, quick)
    epsilon = _epsilon(training, epsilon, more)
    options = _options(training, more, set_aside=search == "paper")
    name = f"{task}-eps{epsilon:g}-{recipe}{'-quick' if quick else ''}" if epsilon else f"{task}-{recipe}"
    folder, opened = out or Path("studies") / name, TaskSource.of(task, data, options)
    own_delta, settings = _delta(delta, more), dict[str, Setting]()
    if list(methods) == ["auto"]:
        if epsilon is None:
            raise ConfigError(f"Expected epsilon: advice needs one, and the recipe {recipe!r} of {task} has none.")
        advised = advised_study(opened(), training, epsilon=epsilon, delta=own_delta, folder=folder, tell=tell)
        training, methods, settings = advised.recipe, advised.methods, advised.settings
    arms = resolve(methods)
    request = Request(
        task=task,
        recipe=training,
        epsilon=epsilon,
        delta=own_delta,
        methods=arms,
        seeds=seeds_for(arms, seeds, cold_seeds),
        search=SEARCH[search],
        quick=quick,
        options=options,
        settings=settings,
    )
    return Study(folder=folder, request=request, source=opened)


def run_of_task(
    name: str,
    *,
    method: Method | str,
    data: Path,
    epsilon: float | None,
    delta: float | None,
    rate: float | None,
    alpha_end: float | None,
    seed: int,
    quick: bool,
    out: Path | None,
    tell: Tell,
    rounds: int | None = None,
) -> dict[str, Any]:
    """One run at a given setting, without a search; the result record, with the folder it is in."""
    method = registered(method) if isinstance(method, str) else method
    task, _, recipe_name = name.partition("-")
    recipe, more = _recipe(task, recipe_name or "workstation", quick)
    if rounds is not None:
        require(recipe.rounds is not None, "rounds", rounds, f"to be left out: the recipe of {task} counts epochs")
        recipe = replace(recipe, rounds=rounds)
    options = _options(recipe, more, set_aside=False)
    problem = TaskSource.of(task, data, options)()
    own_delta = _delta(delta, more)
    plan = make_plan(recipe, problem.population, _epsilon(recipe, epsilon, more), own_delta)
    folder = out or Path("runs") / f"{name}-{method.name}{'-quick' if quick else ''}-seed-{seed}"
    job = Job(
        method=method,
        seed=seed,
        setting=method.middle_of(recipe.grid, rate, alpha_end),
        folder=folder,
        start=folder / "start.safetensors",
        ledger=folder / "ledger.jsonl",
        delta=own_delta,
    )
    tell(f"{method.name} at {job.setting.label}, noise multiplier {plan.noise_multiplier:.4g}, {plan.steps} steps")
    if method.start == "public":
        make_start(problem, recipe, seed, job.start)
    points = QUICK_POINTS if quick else CURVE_POINTS
    run(Arena(problem=problem, plan=plan, spends=True), recipe, job, curve_points=points, progress=None)
    return {**read_json(job.result), "quick": quick, "folder": str(folder)}


def advice_for_task(
    task: str, *, data: Path, recipe: str, epsilon: float | None, delta: float | None, out: Path, tell: Tell
) -> Advice:
    """Advice for a task at the number of epochs and with the pretraining of its recipe; the start is kept in `out`."""
    training, more = _recipe(task, recipe, quick=False)
    budget = _epsilon(training, epsilon, more)
    if budget is None:
        raise ConfigError(f"Expected epsilon: advice needs one, and the recipe {recipe!r} of {task} has none.")
    problem = TaskSource.of(task, data, _options(training, more, set_aside=False))()
    start = out / "start" / "seed-0.safetensors"
    return advise_problem(problem, training, epsilon=budget, delta=_delta(delta, more), start=start, tell=tell)


def quick_recipe(recipe: Recipe) -> Recipe:
    """2 epochs or 20 rounds, 3 learning rates and 1 alpha end."""
    grid = recipe.grid
    middle = () if grid.middle_end is None else (grid.middle_end,)
    small = Grid(cold=_three(grid.cold), warm=_three(grid.warm), pda=_three(grid.warm), alpha_end=middle)
    epochs, rounds = recipe.epochs and min(2.0, recipe.epochs), recipe.rounds and min(20, recipe.rounds)
    return replace(recipe, epochs=epochs, rounds=rounds, grid=small)


def _three(rates: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sorted({rates[0], rates[len(rates) // 2], rates[-1]}))


def _recipe(task: str, name: str, quick: bool) -> tuple[Recipe, dict[str, Any]]:
    if task not in TASKS:
        raise ConfigError(f"Expected task={task!r} in {('linreg', *TASKS)}.")
    recipe, more = load(task, name)
    return (quick_recipe(recipe) if quick else recipe), more


def _options(recipe: Recipe, more: dict[str, Any], *, set_aside: bool) -> dict[str, Any]:
    """The task's options; training rows are set aside only for a search that scores on them, users in any case."""
    return {**more.get("task", {}), **({} if set_aside or recipe.local else {"validation": 0})}


def _epsilon(recipe: Recipe, asked: float | None, more: dict[str, Any]) -> float | None:
    """None where the recipe gives the noise: what the paper's noise costs depends on how many rows there are here."""
    return more.get("epsilon") if asked is None and recipe.noise_multiplier is None else asked


def _delta(delta: float | None, more: dict[str, Any]) -> float:
    return float(more.get("delta", DEFAULT_DELTA)) if delta is None else delta
