"""Commands that train: compare, advise, run and report."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from halfsilver.cli.names import ALL_METHODS, METHODS
from halfsilver.errors import ConfigError, require
from halfsilver.tasks import TASKS

if TYPE_CHECKING:
    from halfsilver.study.records import Summary

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Data = Annotated[Path | None, typer.Option(help="Folder of the data sets (default: $HALFSILVER_DATA).")]
RecipeName = Annotated[str, typer.Option(help="workstation, or another recipe of the task, such as paper or short.")]
Epsilon = Annotated[
    float | None, typer.Option(help="Epsilon of each private run (default: the recipe's, if it has one).")
]
Delta = Annotated[float | None, typer.Option(help="Delta (default: the recipe's, else 1e-5).")]


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Options from a TOML file, under the names that they have as arguments in Python. The command line goes first."""
    if path is None:
        return None
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"Expected --config {path} to be a TOML file: {error}.") from error
    known = sorted(p.name for p in context.command.params if p.name not in (None, "config", "as_json"))
    unknown = sorted(given.keys() - set(known))
    require(not unknown, f"names in {path}", unknown, f"to be among {known}")
    if isinstance(given.get("methods"), list):
        given["methods"] = ",".join(map(str, given["methods"]))
    context.default_map = {**(context.default_map or {}), **given}
    return path


Config = Annotated[
    Path | None,
    typer.Option(callback=_from_file, is_eager=True, help="TOML file with these options, such as epsilon = 2.0."),
]


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def data_folder(data: Path | None) -> Path:
    found = data or (Path(os.environ["HALFSILVER_DATA"]) if os.environ.get("HALFSILVER_DATA") else None)
    if found is None:
        raise ConfigError("Where are the data sets? Give --data DIR, or set HALFSILVER_DATA.")
    return found


def compare(
    task: Annotated[str, typer.Argument(help=f"{', '.join(TASKS)}; or linreg, the synthetic regression.")],
    epsilon: Epsilon = None,
    delta: Delta = None,
    recipe: RecipeName = "workstation",
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 3,
    cold_seeds: Annotated[int | None, typer.Option(help="Runs of cold, if fewer suffice; 0 leaves it out.")] = None,
    methods: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(ALL_METHODS)}; or auto.")] = ",".join(
        METHODS
    ),
    search: Annotated[str, typer.Option(help="public: no private row is used; paper: on set-aside rows.")] = "public",
    quick: Annotated[bool, typer.Option(help="2 epochs, 3 learning rates, 1 alpha; not for publication.")] = False,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; what is there is not run again.")] = None,
    workers: Annotated[int, typer.Option(help="Processes, of one thread each.")] = 2,
    dims: Annotated[list[int] | None, typer.Option(help="linreg: dimensions (default: 500, 1000, ..., 6000).")] = None,
    trials: Annotated[int, typer.Option(help="linreg: fresh data sets per dimension.")] = 20,
    skew: Annotated[float, typer.Option(help="linreg: the variance of feature j is proportional to j^-skew.")] = 0.0,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Several methods side by side at one epsilon, and a verdict."""
    if task == "linreg":
        return compare_linreg(dims, trials, out, as_json, workers, skew)
    from halfsilver.tasks.named import study_of_task

    study = study_of_task(
        task,
        data=data_folder(data),
        recipe=recipe,
        epsilon=epsilon,
        delta=delta,
        seeds=seeds,
        cold_seeds=cold_seeds,
        methods=[name.strip() for name in methods.split(",")],
        search=search,
        quick=quick,
        out=out,
        tell=_tell,
    )
    _tell(f"study in {study.folder}")
    summary = study.go(workers_count=workers, tell=_tell)
    if as_json:
        typer.echo(json.dumps(summary.to_json()))
        return
    show_summary(summary)


def show_summary(summary: Summary) -> None:
    from halfsilver.study.show import columns, notes, rows

    study = summary.study
    table = Table(*columns(summary), title=f"{study.task}, {summary.steps} steps, delta {study.delta:g}")
    for row in rows(summary):
        table.add_row(*row)
    console = Console(markup=False)
    console.print(table)
    verdict = summary.verdict
    for line in (*notes(summary), "", verdict.headline, "", *verdict.sentences):
        console.print(line, highlight=False, markup=False)


def compare_linreg(
    dims: list[int] | None, trials: int, out: Path | None, as_json: bool, workers: int, skew: float
) -> None:
    """The paper's synthetic linear regression, which has data, search and exact mirror steps of its own."""
    from halfsilver.tasks.linreg.study import DIMS, study

    with tempfile.TemporaryDirectory() as temporary:
        rows = study(dims or DIMS, trials, out or Path(temporary), workers=workers, skew=skew, tell=_tell)
        if out is not None:
            from halfsilver.report.plots import linreg_figures

            linreg_figures(rows, out)
    if as_json:
        typer.echo(json.dumps({"results": rows}))
        return
    table = Table("p", "method", "mean MSE", "± 95 %", title=f"Linear regression, epsilon 1, {trials} trials")
    for row in rows:
        table.add_row(str(row["dim"]), row["method"], f"{row['mean']:.5f}", f"{row['ci95']:.5f}")
    Console(markup=False).print(table)


def advise(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    epsilon: Epsilon = None,
    delta: Delta = None,
    recipe: RecipeName = "workstation",
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Folder for start, advice.json and the page.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Batch, clip norm, learning rate and geometry from public rows alone, and a forecast."""
    from halfsilver.report import write_advice
    from halfsilver.runs.folder import write_json
    from halfsilver.tasks.named import advice_for_task

    folder = out or Path("advice") / f"{task}-{recipe}{'' if epsilon is None else f'-eps{epsilon:g}'}"
    advice = advice_for_task(
        task, data=data_folder(data), recipe=recipe, epsilon=epsilon, delta=delta, out=folder, tell=_tell
    )
    write_json(folder / "advice.json", advice.to_json())
    page = write_advice(advice, folder)
    typer.echo(json.dumps({**advice.to_json(), "page": str(page)}) if as_json else f"{advice}\nPage: {page}")


def run(
    task: Annotated[str, typer.Argument(help="A task, or one of its recipes such as cifar10-eps3.51.")],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(ALL_METHODS)}.")] = METHODS[-1],
    epsilon: Epsilon = None,
    delta: Delta = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: the middle of the recipe's grid.")] = None,
    alpha_end: Annotated[float | None, typer.Option(help="Default: the middle of the recipe's grid.")] = None,
    seed: Annotated[int, typer.Option(help="Of the model's first weights; noise always comes from the system.")] = 0,
    rounds: Annotated[int | None, typer.Option(help="Rounds of a federated task (default: the recipe's).")] = None,
    quick: Annotated[bool, typer.Option(help="2 epochs or 20 rounds; not for publication.")] = False,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; an unfinished run there is resumed.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """One method, one run: progress, a run folder, and a report."""
    from halfsilver.study.method import registered
    from halfsilver.tasks.named import run_of_task

    trains = registered(method).trains

    result = run_of_task(
        task,
        method=method,
        data=data_folder(data),
        epsilon=epsilon,
        delta=delta,
        rate=learning_rate,
        alpha_end=alpha_end,
        seed=seed,
        quick=quick,
        out=out,
        tell=_tell,
        rounds=rounds,
    )
    if trains:
        from halfsilver.report import write_report

        result["report"] = str(write_report(Path(result["folder"])))
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table(title=f"{task}, {method}", show_header=False)
    own = {"epsilon (PLD)": result["epsilon"]["pld"], "delta": result["delta"], "steps": result["steps"]}
    for name, value in {
        **result["final"],
        **own,
        "folder": result["folder"],
        "report": result.get("report", "-"),
    }.items():
        table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console(markup=False).print(table)


def report(
    path: Annotated[Path, typer.Argument(help="A run folder, a study folder, or a study's summary.json.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the report (default: that of the run or study).")] = None,
    as_json: Json = False,
) -> None:
    """One HTML page that works offline, and its figures as PNG and SVG."""
    from halfsilver.report import write_report

    page = write_report(path, out)
    typer.echo(json.dumps({"report": str(page)}) if as_json else str(page))
