"""A study on disk: starts, search, runs and summary; whatever is there already is not done again."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from halfsilver._core import system
from halfsilver.errors import require
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.arena import Arena, SearchMode, make_plan, search_arena
from halfsilver.study.check import require_same, require_usable, sizes
from halfsilver.study.jobs import Tell, do_all, workers
from halfsilver.study.method import METHODS, Method, recorded
from halfsilver.study.problem import Problem, Recipe, Setting
from halfsilver.study.records import Choice, Result, StudyRecord, Summary
from halfsilver.study.run import CURVE_POINTS, Job, run
from halfsilver.study.search import broken_start, choose, costs_of, settings_wanted
from halfsilver.study.start import make_start
from halfsilver.study.summary import STAMPS, summary_of

SCHEMA_VERSION = 1
SEARCH_SEED = 100

ProblemSource = Callable[[], Problem]  # opens the problem in whichever process needs it


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a study is to do; fixed by its first start, except that seeds and methods may be added.

    `seeds` is the number of runs of each method by name; `methods` without one are left out. Both that and the order of
    `methods` are as `resolve` and `seeds_for` give them. A method in `settings` has its setting from there and needs no
    search.
    """

    task: str
    recipe: Recipe
    epsilon: float | None
    delta: float
    seeds: Mapping[str, int]
    methods: tuple[Method, ...] = METHODS
    search: SearchMode = "public search"
    quick: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(0 < self.delta < 1, "delta", self.delta, "in (0, 1)")
        require(self.search in STAMPS, "search", self.search, f"in {tuple(STAMPS)}")
        names = tuple(method.name for method in self.methods)
        unknown = sorted(set(self.seeds) - set(names))
        require(not unknown and bool(self.seeds), "methods", unknown or {}, f"some of {names}")
        require(min(self.seeds.values()) >= 1, "seeds", dict(self.seeds), "at least 1 for each method")

    @property
    def arms(self) -> list[Method]:
        """The methods that are run, in the order of tables."""
        return [method for method in self.methods if method.name in self.seeds]

    @property
    def searched(self) -> list[Method]:
        """Those whose learning rate is not known yet."""
        return [method for method in self.arms if method.trains and method.name not in self.settings]

    def to_json(self) -> dict[str, Any]:
        """What must be the same when a study is resumed, apart from its methods and seeds."""
        fixed = {
            "task": self.task,
            "recipe": asdict(self.recipe),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "search": self.search,
            "quick": self.quick,
            "options": dict(self.options),
            "settings": {name: setting.to_json() for name, setting in self.settings.items()},
        }
        return dict(json.loads(json.dumps(fixed)))


@dataclass(frozen=True, kw_only=True)
class Study:
    """The folder of a study, and all that is done in it.

    Guarantee: every run that touches private rows is in the study's ledger before it does so, the runs of a paper
    search included. Runs of a public search have ledgers of their own, because their rows are public.

    With `unsafe_seeds` all methods of a seed have the same noise and samples, so what differs between them is due to
    the methods alone. Such runs are not private, and the summary says so.
    """

    folder: Path
    request: Request
    source: ProblemSource
    data_ledger: Path | None = None
    unsafe_seeds: bool = False
    curve_points: int = CURVE_POINTS

    @property
    def ledger(self) -> Path:
        """That of the private data where they have one; else the study's own."""
        return self.data_ledger or self.folder / "ledger.jsonl"

    def go(self, *, workers_count: int = 1, tell: Tell = lambda text: None, only: int | None = None) -> Summary:
        """Do what is missing, of all seeds or of one, and return the summary."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with system.lock_file(self.folder / ".lock", blocking=False), workers(workers_count) as pool:
            self._claim()
            do_all(pool, self.start, [s for s in self._missing_starts() if s[1] or only in (None, s[0])], tell)
            while missing := self._missing_trials():
                do_all(pool, self.try_setting, missing, tell)
            self._choose(tell)
            do_all(pool, self.run, [arm for arm in self._missing_runs() if only in (None, arm[1])], tell)
            summary = self.summary()
            write_json(self.folder / "summary.json", summary.to_json())
            return summary

    def summary(self) -> Summary:
        """Everything a reader needs, from the files that are there."""
        return summary_of(self.folder, self.ledger)

    # The first step: study.json.

    def _claim(self) -> None:
        """Write down what is to be done, or check that it is the same as before; seeds and methods may be added."""
        path, problem, request = self.folder / "study.json", self.source(), self.request
        fixed = {**request.to_json(), **sizes(problem)}
        arms: dict[str, Any] = json.loads(json.dumps(recorded(request.arms, request.recipe)))
        names = [method.name for method in request.arms]
        if path.exists():
            written = read_json(path)
            before = StudyRecord.from_json(written)
            require_same({"settings": {}, **written}, fixed, self.folder)
            for name, count in before.seeds.items():
                now = request.seeds.get(name, 0)
                require(now >= count, f"seeds of {name}", now, f"at least {count}, as before: none may be left out")
            same_arms = {f"method {name}": arms.get(name) for name in before.arms}
            require_same({f"method {name}": arm for name, arm in before.arms.items()}, same_arms, self.folder)
            record = replace(before, seeds=request.seeds, methods=names, arms=arms)
        else:
            require_usable(problem, request.recipe, request.search, request.arms, request.searched)
            plan = make_plan(request.recipe, problem.population, request.epsilon, request.delta)
            record = StudyRecord(
                schema_version=SCHEMA_VERSION,
                **fixed,
                seeds=request.seeds,
                plan=plan.to_dict(),
                methods=names,
                arms=arms,
                problem=dict(problem.about),
                versions={**versions(), "python": platform.python_version()},
                machine={"cpu": platform.machine(), "cores": os.cpu_count()},
            )
        write_json(path, record.to_json())

    # What workers do: each opens the problem for itself and leaves one file.

    def start(self, start: tuple[int, bool]) -> str:
        seed, for_search = start
        problem = self._search_arena().problem if for_search else self.source()
        make_start(problem, self.request.recipe, seed, self._start_file(seed, for_search))
        return f"start of seed {seed}" + (" for the search" if for_search else "")

    def try_setting(self, trial: tuple[Method, Setting]) -> str:
        method, setting = trial
        arena, folder = self._search_arena(), self._search_folder(method) / setting.label
        job = Job(
            method=method,
            seed=SEARCH_SEED,
            setting=setting,
            folder=folder,
            start=self._start_file(SEARCH_SEED, True),
            ledger=self.ledger if arena.spends else folder / "ledger.jsonl",
            delta=self.request.delta,
        )
        run(arena, self.request.recipe, job, curve_points=0)
        return f"search {method.name} {setting.label}: {_final_text(folder)}"

    def run(self, arm: tuple[Method, int]) -> str:
        method, seed = arm
        job = self.job(method, seed, self._setting(method))
        arena = Arena(problem=self.source(), plan=self._plan(), spends=True)
        run(arena, self.request.recipe, job, curve_points=self.curve_points)
        return f"{method.name} seed {seed}: {_final_text(job.folder)}"

    def job(self, method: Method, seed: int, setting: Setting) -> Job:
        """The run of a method and seed."""
        return Job(
            method=method,
            seed=seed,
            setting=setting,
            folder=self._run_folder(method, seed),
            start=self._start_file(seed, False),
            ledger=self.ledger,
            delta=self.request.delta,
            unsafe_seed=seed if self.unsafe_seeds else None,
        )

    # What is missing.

    def _missing_starts(self) -> list[tuple[int, bool]]:
        """Seeds, and whether the start is for the search."""
        warm = [method for method in self.request.arms if method.start == "public"]
        seeds = range(max((self.request.seeds[method.name] for method in warm), default=0))
        wanted = [(seed, False) for seed in seeds]
        if any(method in self.request.searched for method in warm):
            wanted.append((SEARCH_SEED, True))
        return [start for start in wanted if not self._start_file(*start).exists()]

    def _missing_trials(self) -> list[tuple[Method, Setting]]:
        trials = []
        for method in self._unsettled():
            wanted = self._settings(method)
            done = self._costs(method, wanted)
            trials += [(method, setting) for setting in wanted if setting not in done]
        return trials

    def _missing_runs(self) -> list[tuple[Method, int]]:
        """Private runs from the public start first, one seed after the other: an unfinished study can be compared."""
        seeds = self.request.seeds
        runs = [(method, seed) for method in reversed(self.request.arms) for seed in range(seeds[method.name])]
        runs.sort(key=lambda one: (not one[0].trains or one[0].start == "random", one[1]))
        return [one for one in runs if not (self._run_folder(*one) / "result.json").exists()]

    def _unsettled(self) -> list[Method]:
        """Methods without a choice. One that was made stays: runs at two settings must not be averaged."""
        return [method for method in self.request.searched if not self._choice_file(method).exists()]

    # The search.

    def _settings(self, method: Method) -> list[Setting]:
        """All that are to be tried, as far as the costs so far tell."""
        grid = self.request.recipe.grid
        wanted: list[Setting] = []
        while True:
            more = settings_wanted(grid, method, self._costs(method, wanted), widen=not self.request.quick)
            if more == wanted:
                return wanted
            wanted = more

    def _costs(self, method: Method, settings: Sequence[Setting]) -> dict[Setting, float]:
        return costs_of(self._search_folder(method), settings, self.request.recipe.score)

    def _choose(self, tell: Tell) -> None:
        for method in self._unsettled():
            choice = choose(self._search_folder(method), self._settings(method), self.request.recipe.score)
            write_json(self._choice_file(method), choice.to_json())
            tell(f"{self.request.search}: {method.name} {_choice_text(choice)}")
        choices = {method.name: self._choice(method) for method in self.request.searched}
        if remark := broken_start(choices, self.request.arms):
            tell(remark)

    def _choice(self, method: Method) -> Choice:
        return Choice.from_json(read_json(self._choice_file(method)))

    def _setting(self, method: Method) -> Setting:
        """What was given or the search chose; a method that takes no private step needs none."""
        if method.name in self.request.settings:
            return self.request.settings[method.name]
        setting = self._choice(method).setting if method.trains else None
        return setting or Setting(1.0)

    def _search_arena(self) -> Arena:
        return search_arena(self.source(), self.request.recipe, self._plan(), self.request.search)

    # Where things are.

    def _plan(self) -> PrivacyPlan:
        return PrivacyPlan.from_dict(read_json(self.folder / "study.json")["plan"])

    def _run_folder(self, method: Method, seed: int) -> Path:
        return self.folder / "runs" / f"{method.name}-seed-{seed}"

    def _start_file(self, seed: int, for_search: bool) -> Path:
        return self.folder / "start" / f"{'search' if for_search else 'seed'}-{seed}.safetensors"

    def _search_folder(self, method: Method) -> Path:
        return self.folder / "search" / method.name

    def _choice_file(self, method: Method) -> Path:
        return self._search_folder(method) / "choice.json"


def _final_text(folder: Path) -> str:
    final = Result.from_json(read_json(folder / "result.json")).final
    return ", ".join(f"{name} {'diverged' if v is None else format(v, '.4f')}" for name, v in final.items())


def _choice_text(choice: Choice) -> str:
    label = choice.setting.label if choice.setting else "no setting"
    error = f", {choice.standard_error:.4f} standard error" if choice.standard_error is not None else ""
    return label + (f", ahead by {choice.difference:.4f}{error}" if choice.difference is not None else "")


def seeds_for(methods: Sequence[Method], seeds: int, random_start_seeds: int | None = None) -> dict[str, int]:
    """The same number of seeds for every method; for those from random weights another, or 0 to leave them out.

    >>> from halfsilver.study.method import COLD, WARM
    >>> seeds_for((COLD, WARM), 3, 1), seeds_for((COLD, WARM), 3, 0)
    ({'cold': 1, 'warm': 3}, {'warm': 3})
    """
    fewer = seeds if random_start_seeds is None else random_start_seeds
    left_out = [method for method in methods if method.start == "random" and random_start_seeds == 0]
    return {method.name: fewer if method.start == "random" else seeds for method in methods if method not in left_out}
