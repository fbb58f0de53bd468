"""`compare`: methods side by side on your own model and data, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from halfsilver._core.tensors import LossFn
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.rows import PublicRows
from halfsilver.study.arena import SEARCH
from halfsilver.study.jobs import Tell
from halfsilver.study.method import METHODS, Method, resolve
from halfsilver.study.problem import Augment, Grid, Pretrain, Problem, Recipe
from halfsilver.study.records import Summary
from halfsilver.study.study import Request, Study, seeds_for

DEFAULT_GRID = Grid(cold=(0.25, 1.0, 4.0), warm=(0.1, 0.25, 1.0, 4.0), pda=(0.25, 1.0), alpha_end=(0.8, 0.9, 0.95))


@dataclass(frozen=True)
class Comparison:
    """How a study ended: `summary` is all of it, as in its summary.json; printing it gives table and verdict."""

    folder: Path
    summary: Mapping[str, Any]

    @property
    def verdict(self) -> Mapping[str, Any]:
        """Means, paired differences with their intervals, and the sentences that say what they mean."""
        return self.summary["verdict"]  # type: ignore[no-any-return]

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
    methods: Sequence[Method | str] = METHODS,
    search: Literal["public", "paper"] = "public",
    validation: Any = None,
    curve: Any = None,
    ledger: str | Path | None = None,
    augment: Augment | None = None,
    tell: Tell | None = None,
) -> Comparison:
    """Train several methods on your model and data at one epsilon, and say what private data and mirror add.

    `make_model` returns a new model with random weights, `loss_fn(model, batch)` one loss per example, as does each of
    `metrics`. `test` must be public; `curve` are the rows of it on which curves are drawn, where all would take too
    long. `population` is the number of private records that you declare, and together with `batch_size` fixes the
    sampling rate; it is never counted. `batch_size` and `epochs` are enough for a start; a `recipe` in their place says
    everything about training. All files go to the folder `out`, and a call with the same arguments goes on with what
    lies there.

    `methods` are `Method` values, or names of registered ones; by default public, cold, warm and pda. A method of your
    own has its row in the table, and with `against` its sentences in the verdict.

    Learning rates and alpha are searched for each method on its own. A public search touches no private record: it
    splits the public ones into mirror, stand-ins for the private ones, and rows to score on. A paper search trains on
    private records and scores on `validation`; the summary is then stamped. Each method and seed is a private run:
    every one is (epsilon, delta)-DP by itself, and the ledger's total, which is what publishing all of them costs,
    stands beside it. `ledger` is that of the private data, where they have one; otherwise the study gets its own.
    """
    require(search in SEARCH, "search", search, f"in {tuple(SEARCH)}")
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
    arms = resolve(methods)
    request = Request(
        task="custom",
        recipe=recipe,
        epsilon=epsilon,
        delta=delta,
        methods=arms,
        seeds=seeds_for(arms, seeds),
        search=SEARCH[search],
    )
    data_ledger = None if ledger is None else Path(ledger)
    study = Study(folder=Path(out), request=request, source=lambda: problem, data_ledger=data_ledger)
    return Comparison(Path(out), study.go(tell=tell or (lambda text: None)).to_json())


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
