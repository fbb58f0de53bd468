"""The report of a study."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from halfsilver.privacy.ledger.records import ADJACENCY
from halfsilver.report.figures import Json, Picture
from halfsilver.report.page import Html, facts, join, more, page, section, table, tag
from halfsilver.report.parts import digits, gallery, guarantee, ledger_part, named, stamp_box, stamp_line
from halfsilver.report.study_figures import choices_of, methods_of, metrics_of
from halfsilver.report.words import METHODS, NONE, figure, flat, level, plain, points, setting, with_interval

Pictures = Mapping[str, Sequence[Picture]]


def study_page(study: Json, pictures: Pictures) -> Html:
    """Verdict first, then what it rests on, then how to do it again."""
    task = study.get("task") or "custom"
    title = f"{'Own model' if task == 'custom' else task} at epsilon {digits(_epsilon(study))}"
    verdict = study.get("verdict") or {}
    stamps = _stamps(study)
    return page(
        f"{title} - halfsilver",
        tag("h1", title),
        tag("p", str(verdict.get("headline") or "No verdict yet."), class_="verdict"),
        stamp_line(stamps),
        _methods(study, pictures),
        _meaning(verdict, pictures),
        section("curves", "Curves", gallery(pictures.get("curves", ()))),
        _privacy(study, stamps),
        ledger_part(study.get("ledger") or {}),
        section("schedules", "alpha and learning rate", gallery(pictures.get("schedules", ()))),
        _search(study, pictures),
        _configuration(study),
    )


def _methods(study: Json, pictures: Pictures) -> Html:
    runs = study.get("runs") or ()
    metrics = metrics_of(runs)
    means = (study.get("verdict") or {}).get("means") or {}
    rows = []
    for method in methods_of(runs):
        own = [run for run in runs if run.get("method") == method]
        cells = [_mean((means.get(method) or {}).get(metric) or {}, metric) for metric in metrics]
        cost = max((run.get("epsilon") or {}).get("pld") or 0.0 for run in own)
        rows.append([named(method, METHODS.get(method, "")), *cells, digits(cost), str(len(own))])
    header = ["method", *(f"test {metric}" for metric in metrics), "own epsilon", "seeds"]
    note = (
        f"Mean over seeds \N{PLUS-MINUS SIGN} half the width of its {level(study)} t-interval; one seed has none. "
        f"Own epsilon: of one run, by PLD, at delta {plain(study.get('delta'))}."
    )
    content = [table(header, rows), tag("p", note, class_="note")] if rows else []
    return section("methods", "The methods side by side", *content, gallery(pictures.get("finals", ())))


def _mean(found: Json, metric: str) -> Html:
    mean, half = with_interval(found, metric)
    if found and found.get("mean") is None:
        return join(["diverged"])
    return join([mean, " ", tag("span", half, class_="half")]) if half else join([mean])


def _meaning(verdict: Json, pictures: Pictures) -> Html:
    said = [tag("li", str(sentence)) for sentence in verdict.get("sentences") or ()]
    rows = [
        [
            str(d.get("name", NONE)),
            str(d.get("metric", NONE)),
            points(d.get("mean"), str(d.get("metric"))),
            _between(d),
            str(d.get("n", NONE)),
            "within noise" if d.get("within_noise") else "beyond noise",
        ]
        for d in verdict.get("differences") or ()
    ]
    header = ["difference", "metric", "mean", "interval", "paired seeds", "verdict"]
    shown = [table(header, rows)] if rows else []
    words = [tag("ul", *said)] if said else []
    return section("meaning", "What it means", *words, gallery(pictures.get("differences", ())), *shown)


def _between(difference: Json) -> str:
    low, high, metric = (difference.get(name) for name in ("low", "high", "metric"))
    if low is None or high is None:
        return "none: one seed"
    return f"{points(low, str(metric)).removesuffix(' points')} to {points(high, str(metric))}"


def _privacy(study: Json, stamps: Sequence[str]) -> Html:
    costs = [run.get("epsilon") or {} for run in study.get("runs") or ()]
    most = {name: max((cost.get(name) or 0.0 for cost in costs), default=None) for name in ("pld", "rdp")}
    words = (
        "Holds for the output of one run of cold, warm or pda on its own; public uses no private data and costs "
        "nothing. All steps after the noise is added, the mirror among them, cost nothing more."
    )
    figures = guarantee(_plan(study), most, study.get("delta"), str(study.get("adjacency") or ADJACENCY))
    return section("privacy", "Privacy statement", stamp_box(stamps), tag("p", words), figures)


def _plan(study: Json) -> dict[str, Any]:
    """The plan of the study, or what the rest of the summary tells of it."""
    recipe = study.get("recipe") or {}
    noise = [run.get("noise_multiplier") for run in study.get("runs") or () if run.get("noise_multiplier")]
    known = {"steps": study.get("steps"), "max_grad_norm": recipe.get("max_grad_norm")}
    return {**known, "noise_multiplier": noise[0] if noise else None, **(study.get("plan") or {})}


def _search(study: Json, pictures: Pictures) -> Html:
    choices = choices_of(study)
    if not choices:
        return Html("")
    mode = str(study.get("search") or "search")
    words = {
        "public search": "Public search: short runs on public rows alone; no private row was used to choose.",
        "paper search": "Paper search: short runs on private rows, scored on training examples that were set aside.",
    }.get(mode, mode)
    note = (
        "Ahead by: how much better it scored than the runner-up, with the standard error of that difference, paired "
        "over the scored examples. It says how far the choice depends on those examples, not on the noise of a run. "
        "At edge: a better setting may lie outside the grid."
    )
    rows = [[named(method), *_choice(choice)] for method, choice in choices.items()]
    header = ["method", "chosen", "tried", "runner-up", "ahead by (std. error)", "at edge"]
    return section(
        "search",
        "How the settings were chosen",
        tag("p", words),
        gallery(pictures.get("search", ())),
        table(header, rows),
        tag("p", note, class_="note"),
    )


def _choice(choice: Json) -> list[str]:
    ahead, error = choice.get("difference"), choice.get("standard_error")
    sure = figure(ahead) + (f" ({figure(error)})" if error is not None else "")
    count = str(len(choice.get("tried") or ()))
    return [
        setting(choice.get("setting")),
        count,
        setting(choice.get("runner_up")),
        sure,
        plain(choice.get("at_edge")),
    ]


def _configuration(study: Json) -> Html:
    names = ("versions", "machine", "commit", "task", "options", "seeds", "population")
    shown = [(name, plain(study[name])) for name in names if study.get(name) not in (None, {}, [])]
    data = {name: value for name, value in (study.get("problem") or {}).items() if name != "stamps"}
    seconds = sum(run.get("seconds") or 0.0 for run in study.get("runs") or ())
    took = f"{seconds / 3600:.1f} core-hours" if seconds > 3600 else f"{seconds:.0f} seconds"
    return section(
        "configuration",
        "Configuration, versions, and how to do it again",
        _again(study),
        facts([*shown, *flat(data, "data:"), ("time of all runs shown", took)]),
        more("The whole recipe", facts(flat(study.get("recipe") or {}))),
    )


def _again(study: Json) -> Html:
    """The command; for a user's own model there is none to print."""
    task = str(study.get("task") or "")
    if study.get("command"):
        return tag("pre", str(study["command"]))
    if task in ("", "custom"):
        return tag("p", "To do it again, call halfsilver.compare with the same model, data and arguments.")
    seeds = study.get("seeds") or {}
    most, cold = max(seeds.values(), default=None), seeds.get("cold")
    options = {
        "--epsilon": study.get("epsilon"),
        "--delta": study.get("delta"),
        "--recipe": (study.get("recipe") or {}).get("name"),
        "--seeds": most,
        "--cold-seeds": cold if cold != most else None,
        "--search": str(study.get("search") or "").removesuffix(" search") or None,
    }
    words = ["halfsilver", "compare", task]
    words += [word for name, value in options.items() if value is not None for word in (name, plain(value))]
    command = tag("pre", shlex.join([*words, *(["--quick"] if study.get("quick") else [])]))
    left_out = [method for method in METHODS if seeds and method not in seeds]
    note = f"This study left out {', '.join(left_out)}, which the command runs too."
    return join([command, tag("p", note, class_="note")]) if left_out else command


def _epsilon(study: Json) -> Any:
    costs = [(run.get("epsilon") or {}).get("pld") or 0.0 for run in study.get("runs") or ()]
    return study.get("epsilon") or max(costs, default=None)


def _stamps(study: Json) -> list[str]:
    stamps = [str(stamp) for stamp in study.get("stamps") or ()]
    missing = study.get("quick") and not any(stamp.startswith("quick") for stamp in stamps)
    return stamps + (["quick"] if missing else [])
