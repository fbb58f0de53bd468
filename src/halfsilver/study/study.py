"""A study on disk: starts, search, runs and summary; whatever is there already is not done again."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfsilver._core import system
from halfsilver.errors import require
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.arena import Arena, SearchMode, make_plan, search_arena
from halfsilver.study.check import require_same, require_usable, sizes
from halfsilver.study.jobs import Tell, do_all, workers
from halfsilver.study.problem import METHODS, Problem, Recipe, Setting
from halfsilver.study.run import Run, run
from halfsilver.study.search import SEARCHED, broken_start, choose, costs_of, settings_wanted
from halfsilver.study.start import make_start
from halfsilver.study.summary import STAMPS, summary_of

SCHEMA_VERSION = 1
SEARCH_SEED = 100

Source = Callable[[], Problem]  # opens the problem in whichever process needs it


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a study is asked to do; fixed by its first start."""

    task: str
    recipe: Recipe
    epsilon: float | None
    delta: float
    seeds: Mapping[str, int]
    search: SearchMode = "public search"
    quick: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(0 < self.delta < 1, "delta", self.delta, "in (0, 1)")
        require(self.search in STAMPS, "search", self.search, f"in {tuple(STAMPS)}")
        unknown = sorted(set(self.seeds) - set(METHODS))
        require(not unknown and bool(self.seeds), "methods", unknown or {}, f"some of {METHODS}")
        require(min(self.seeds.values()) >= 1, "seeds", dict(self.seeds), "at least 1 for each method")

    @property
    def methods(self) -> list[str]:
        return [m for m in METHODS if m in self.seeds]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The folder of a study, and all that is done in it.

    Guarantee: every run that touches private rows is in the study's ledger before it does so, the runs of a paper
    search included. Runs of a public search have ledgers of their own, because their rows are public.
    """

    folder: Path
    asked: Asked
    source: Source
    data_ledger: Path | None = None

    @property
    def ledger(self) -> Path:
        """That of the private data where they have one; else the study's own."""
        return self.data_ledger or self.folder / "ledger.jsonl"

    def go(self, *, workers_count: int = 1, tell: Tell = lambda text: None) -> dict[str, Any]:
        """Do what is missing and return the summary."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with system.lock_file(self.folder / ".lock", blocking=False), workers(workers_count) as pool:
            self._claim()
            do_all(pool, self.start, self._starts(), tell)
            while missing := self._searches():
                do_all(pool, self.try_setting, missing, tell)
            self._choose(tell)
            do_all(pool, self.run, self._runs(), tell)
            summary = self.summary()
            write_json(self.folder / "summary.json", summary)
            return summary

    # What workers do: each opens the problem for itself and leaves one file.

    def start(self, job: tuple[int, bool]) -> str:
        seed, for_search = job
        problem = self._search_arena().problem if for_search else self.source()
        make_start(problem, self.asked.recipe, seed, self._start(seed, for_search))
        return f"start of seed {seed}" + (" for the search" if for_search else "")

    def try_setting(self, job: tuple[str, Setting]) -> str:
        method, setting = job
        arena = self._search_arena()
        ledger = self.ledger if arena.spends else self.folder / "search" / method / setting.label / "ledger.jsonl"
        run(arena, self.asked.recipe, self._job(method, SEARCH_SEED, setting, ledger, search=True), curve_points=0)
        return f"search {method} {setting.label}: {_told(self.folder / 'search' / method / setting.label)}"

    def run(self, job: tuple[str, int]) -> str:
        method, seed = job
        setting = Setting(1.0)  # public trains no further
        if method != "public":
            setting = Setting(**read_json(self._choice(method))["setting"])
        made = self._job(method, seed, setting, self.ledger, search=False)
        run(Arena(problem=self.source(), plan=self._plan(), spends=True), self.asked.recipe, made)
        return f"{method} seed {seed}: {_told(made.folder)}"

    # What is missing.

    def _starts(self) -> list[tuple[int, bool]]:
        needs = [m for m in self.asked.methods if m != "cold"]
        seeds = range(max((self.asked.seeds[m] for m in needs), default=0))
        wanted = [(seed, False) for seed in seeds]
        if any(m in SEARCHED for m in needs):
            wanted.append((SEARCH_SEED, True))
        return [(seed, searching) for seed, searching in wanted if not self._start(seed, searching).exists()]

    def _searches(self) -> list[tuple[str, Setting]]:
        jobs = []
        for method in self._unsettled():
            wanted = self._settings(method)
            done = self._costs(method, wanted)
            jobs += [(method, setting) for setting in wanted if setting not in done]
        return jobs

    def _settings(self, method: str) -> list[Setting]:
        grid = self.asked.recipe.grid
        wanted: list[Setting] = []
        while True:
            more = settings_wanted(grid, method, self._costs(method, wanted), widen=not self.asked.quick)
            if more == wanted:
                return wanted
            wanted = more

    def _costs(self, method: str, settings: Sequence[Setting]) -> dict[Setting, float]:
        return costs_of(self.folder / "search" / method, settings, self.asked.recipe.score)

    def _choose(self, tell: Tell) -> None:
        for method in self._unsettled():
            choice = choose(self.folder / "search" / method, self._settings(method), self.asked.recipe.score)
            write_json(self._choice(method), choice)
            error = f", {choice['standard_error']:.4f} standard error" if "standard_error" in choice else ""
            ahead = f", ahead by {choice['difference']:.4f}{error}" if "difference" in choice else ""
            tell(f"{self.asked.search}: {method} {Setting(**choice['setting']).label}{ahead}")
        if remark := broken_start({m: read_json(self._choice(m)) for m in self._searched()}):
            tell(remark)

    def _runs(self) -> list[tuple[str, int]]:
        """Pairs of pda and warm first, one seed after the other: an unfinished study has something to compare."""
        order = [m for m in ("pda", "warm", "cold", "public") if m in self.asked.methods]
        jobs = [(m, seed) for m in order for seed in range(self.asked.seeds[m])]
        jobs.sort(key=lambda job: (job[0] not in ("pda", "warm"), job[1]))
        return [(m, seed) for m, seed in jobs if not (self._run_folder(m, seed) / "result.json").exists()]

    def _searched(self) -> list[str]:
        return [m for m in self.asked.methods if m in SEARCHED]

    def _unsettled(self) -> list[str]:
        """Methods without a choice. One that was made stays: runs at two settings must not be averaged."""
        return [m for m in self._searched() if not self._choice(m).exists()]

    # Where things are.

    def _job(self, method: str, seed: int, setting: Setting, ledger: Path, *, search: bool) -> Run:
        folder = self.folder / "search" / method / setting.label if search else self._run_folder(method, seed)
        return Run(
            method=method,
            seed=seed,
            setting=setting,
            folder=folder,
            start=self._start(seed, search),
            ledger=ledger,
            delta=self.asked.delta,
        )

    def _run_folder(self, method: str, seed: int) -> Path:
        return self.folder / "runs" / f"{method}-seed-{seed}"

    def _start(self, seed: int, search: bool) -> Path:
        return self.folder / "start" / f"{'search' if search else 'seed'}-{seed}.safetensors"

    def _choice(self, method: str) -> Path:
        return self.folder / "search" / method / "choice.json"

    def _plan(self) -> PrivacyPlan:
        return PrivacyPlan.from_dict(read_json(self.folder / "study.json")["plan"])

    def _search_arena(self) -> Arena:
        return search_arena(self.source(), self.asked.recipe, self._plan(), self.asked.search)

    def _claim(self) -> None:
        """Write down what was asked, or check that the same is asked again; only seeds may be added."""
        path, problem = self.folder / "study.json", self.source()
        asked = {**json.loads(json.dumps(asdict(self.asked))), **sizes(problem)}
        if path.exists():
            found = read_json(path)
            require_same(found, {k: v for k, v in asked.items() if k != "seeds"}, self.folder)
            for method, count in found["seeds"].items():
                now = asked["seeds"].get(method, 0)
                require(now >= count, f"seeds of {method}", now, f"at least {count}, as before: none may be left out")
            write_json(path, {**found, "seeds": asked["seeds"], "methods": self.asked.methods})
            return
        require_usable(problem, self.asked.recipe, self.asked.search)
        plan = make_plan(self.asked.recipe, problem.population, self.asked.epsilon, self.asked.delta)
        about = {
            "schema_version": SCHEMA_VERSION,
            **asked,
            "plan": plan.to_dict(),
            "methods": self.asked.methods,
            "problem": dict(problem.about),
            "versions": {**versions(), "python": platform.python_version()},
            "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        }
        write_json(path, about)

    def summary(self) -> dict[str, Any]:
        """Everything a reader needs, from the files that are there."""
        return summary_of(self.folder, self.ledger)


def _told(folder: Path) -> str:
    final = read_json(folder / "result.json")["final"]
    return ", ".join(f"{name} {'diverged' if v is None else format(v, '.4f')}" for name, v in final.items())


def seeds_for(methods: Sequence[str], seeds: int, cold_seeds: int | None = None) -> dict[str, int]:
    """The same number of seeds for every method; fewer for cold where asked, because it is the least interesting.

    >>> seeds_for(("cold", "warm"), 3, 1), seeds_for(("cold", "warm"), 3, 0)
    ({'cold': 1, 'warm': 3}, {'warm': 3})
    """
    counted = {m: cold_seeds if m == "cold" and cold_seeds is not None else seeds for m in methods}
    return {m: n for m, n in counted.items() if (m, n) != ("cold", 0)}
