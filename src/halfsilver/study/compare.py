"""`compare`: methods side by side on your own model and data, and a verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from halfsilver._core.tensors import LossFn
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.rows import PublicRows
from halfsilver.runs.folder import RunFolder
from halfsilver.runs.progress import telling
from halfsilver.study.arena import SEARCH
from halfsilver.study.auto import advised_study, held_out_share, public_clip_norm
from halfsilver.study.jobs import Tell
from halfsilver.study.method import METHODS, Method, resolve
from halfsilver.study.problem import Augment, Grid, Pretrain, Problem, Recipe, Setting
from halfsilver.study.records import Summary
from halfsilver.study.study import Request, Study, seeds_for

_log = logging.getLogger("halfsilver")

_ANY_BATCH = 64  # of the recipe from which an advice takes the epochs, whatever its batch
DEFAULT_GRID = Grid(cold=(0.25, 1.0, 4.0), warm=(0.1, 0.25, 1.0, 4.0), pda=(0.25, 1.0), alpha_end=(0.8, 0.9, 0.95))


@dataclass(frozen=True)
class Comparison:
    """How a study ended. Printing it gives the table and the verdict in words.

    Args:
        folder: The folder of the study, which `halfsilver report` takes.
        summary: Everything that was measured, as in summary.json.
    """

    folder: Path
    summary: Mapping[str, Any]

    @property
    def verdict(self) -> Mapping[str, Any]:
        """Means, paired differences with their intervals, and the sentences that say what they mean."""
        return self.summary["verdict"]  # type: ignore[no-any-return]

    def run_dir(self, method: str, seed: int = 0) -> Path:
        """The run folder of a method, for `halfsilver.load`, `halfsilver report` and `halfsilver verify`.

        The weights are those before the last step of a method with a finish, whose temperature is in ``finish.json``.
        A model that was chosen for its figures costs what all private runs of the study have spent, unless the choice
        was made before.

        Args:
            method: The name of the method.
            seed: The seed of the run, from 0.

        Raises:
            ConfigError: The study has no such run, or the method has no private step.
        """
        folder = self.folder / "runs" / f"{method}-seed-{seed}"
        known = sorted(path.name for path in (self.folder / "runs").glob("*") if RunFolder(path).config.exists())
        require(folder.name in known, "run", folder.name, f"one of {known}")
        return folder

    def __str__(self) -> str:
        from halfsilver.study.show import as_text

        return as_text(Summary.from_json(self.summary))


def compare(
    make_model: Callable[[], nn.Module],
    loss_fn: LossFn,
    private: Any,
    public: Any,
    test: Any,
    *,
    epsilon: float,
    delta: float,
    population: int,
    out: str | Path,
    batch_size: int | None = None,
    epochs: float | None = None,
    recipe: Recipe | None = None,
    metrics: Mapping[str, LossFn] | None = None,
    seeds: int = 3,
    methods: Sequence[Method | str] | Literal["auto"] = METHODS,
    search: Literal["public", "paper"] = "public",
    validation: Any = None,
    curve: Any = None,
    ledger: str | Path | None = None,
    augment: Augment | None = None,
    tell: Tell | None = None,
) -> Comparison:
    """Train several methods on your model and data at one epsilon, and say what private data and mirror add.

    Learning rates and alpha are searched for each method on its own. The clip norm is the third quartile of gradient
    norms of public rows that the start has not seen, unless a `recipe` says otherwise. Then each method trains once per
    seed, and the verdict compares the methods in pairs over seeds. It claims no difference that is within the noise of
    the runs.

    Guarantee: each run is (epsilon, delta)-DP by itself. Publishing all of them costs the ledger's total, which the
    summary states beside it. A public search reads no private record.

    Args:
        make_model: Returns a new model with random weights, from torch's global generator.
        loss_fn: ``loss_fn(model, batch)`` returns one loss per example.
        private: The private rows, or a `PrivateData` handle.
        public: The public rows.
        test: Public test rows.
        epsilon: Epsilon of each private run, above 0.
        delta: Delta of each private run, at most 1 / population.
        population: The number of private records that you declare. It is never counted.
        out: Folder of the study. A call with the same arguments resumes what it finds there.
        batch_size: Expected records per step. Give it with `epochs`, or give a `recipe`. "auto" methods need none.
        epochs: How often a record is drawn on average. Give it with `batch_size`, or give a `recipe`.
        recipe: Everything about training, in place of `batch_size` and `epochs`.
        metrics: Further per-example figures by name, of the form of `loss_fn`. A name with "accuracy" means that more
            is better.
        seeds: Runs per method, at least 1. Intervals need at least 2.
        methods: Names such as "warm" and "pda", or `Method` values (default: public, cold, warm and pda). "auto" asks
            `advise` for batch, clip norm, optimizer, learning rate and geometry, and trains public and advised; the
            recipe gives pretraining and epochs, and nothing is searched.
        search: "public" splits the public rows into mirror, stand-ins for the private rows, and rows to score on.
            "paper" trains on private rows and scores on `validation`, as papers do; the summary then says so.
        validation: Training rows set aside for a paper search.
        curve: The test rows on which curves are drawn (default: all of `test`).
        ledger: The ledger of the private data, where they have one (default: one in `out`).
        augment: Random changes to a public batch, used where the recipe says so.
        tell: Receives one line of progress per finished job (default: a progress line on a terminal, and a log line at
            INFO).

    Returns:
        Folder, summary and verdict.

    Raises:
        ConfigError: An argument is wrong, or the folder holds another study.
    """
    require(search in SEARCH, "search", search, f"in {tuple(SEARCH)}")
    auto, given = isinstance(methods, str), recipe is not None
    require(not auto or methods == "auto", "methods", methods, "a sequence of methods, or 'auto'")
    require(not auto or batch_size is None, "batch_size", batch_size, "None with methods='auto', which chooses it")
    if auto and recipe is None:
        recipe = _recipe(None, _ANY_BATCH, epochs)
        share = held_out_share(len(PublicRows(public)))
        recipe = replace(recipe, pretrain=replace(recipe.pretrain, holdout=share))
    else:
        recipe = _recipe(recipe, batch_size, epochs)
    PublicRows(public).warn_if_many(population)
    problem = Problem(
        make_model=make_model,
        loss_fn=loss_fn,
        private=private,
        public=public,
        test=test,
        population=population,
        metrics=metrics or {},
        validation=validation,
        curve=curve,
        augment=augment,
    )
    with telling(tell) as shown:

        def say(text: str) -> None:
            _log.info("%s", text)
            shown(text)

        settings = dict[str, Setting]()
        if auto:
            advised = advised_study(problem, recipe, epsilon=epsilon, delta=delta, folder=Path(out), tell=say)
            recipe, methods, settings = advised.recipe, advised.methods, advised.settings
        elif not given:
            recipe = clipped_at(recipe, public_clip_norm(problem, recipe, folder=Path(out), tell=say))
        arms = resolve(methods)
        request = Request(
            task="custom",
            recipe=recipe,
            epsilon=epsilon,
            delta=delta,
            methods=arms,
            seeds=seeds_for(arms, seeds),
            search=SEARCH[search],
            settings=settings,
        )
        data_ledger = None if ledger is None else Path(ledger)
        study = Study(folder=Path(out), request=request, source=lambda: problem, data_ledger=data_ledger)
        return Comparison(Path(out), study.go(tell=say).to_json())


def _recipe(recipe: Recipe | None, batch_size: int | None, epochs: float | None) -> Recipe:
    if recipe is not None:
        if batch_size is not None or epochs is not None:
            raise ConfigError("Expected either recipe, or batch_size and epochs; the recipe has its own of both.")
        return recipe
    if batch_size is None or epochs is None:
        raise ConfigError(f"Expected batch_size={batch_size} and epochs={epochs} to be given, or a recipe.")
    return default_recipe(batch_size=batch_size, epochs=epochs)


def default_recipe(*, batch_size: int, epochs: float) -> Recipe:
    """A start for a model nobody has tried: a wide grid, averaged iterates and a falling learning rate."""
    return Recipe(
        name="default",
        batch_size=batch_size,
        epochs=epochs,
        public_batch_size=max(1, batch_size // 4),
        grid=DEFAULT_GRID,
        pretrain=Pretrain(epochs=200),
        average=0.95,
        lr_end=0.1,
    )


def clipped_at(recipe: Recipe, max_grad_norm: float) -> Recipe:
    """The recipe with this clip norm for a trained start, and learning rates that move it as far; cold stays at 1."""
    grid = recipe.grid
    warm, pda = (tuple(lr / max_grad_norm for lr in rates) for rates in (grid.warm, grid.pda))
    return replace(recipe, max_grad_norm=max_grad_norm, cold_max_grad_norm=1.0, grid=replace(grid, warm=warm, pda=pda))
