"""The report of a study."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from halfsilver.privacy.ledger.records import ADJACENCY
from halfsilver.report.figures import Picture
from halfsilver.report.looks import OTHER, looks_of
from halfsilver.report.page import Html, facts, join, more, page, section, table, tag
from halfsilver.report.parts import digits, gallery, guarantee, ledger_part, named, stamp_box, stamp_line
from halfsilver.report.study_figures import choices_of, methods_of, metrics_of
from halfsilver.report.words import NONE, figure, flat, level, one_of, plain, points, setting, with_interval
from halfsilver.study.method import NAMES
from halfsilver.study.records import Choice, Difference, Mean, StudyRecord, Summary, Verdict

Pictures = Mapping[str, Sequence[Picture]]

_CUSTOM = StudyRecord().task  # a user's own model and data
_SEARCHES = {
    "public search": "Public search: short runs on public rows alone; no private row was used to choose.",
    "paper search": "Paper search: short runs on private rows, scored on training examples that were set aside.",
}


def study_page(study: Summary, pictures: Pictures) -> Html:
    """Verdict first, then what it rests on, then how to do it again."""
    task = study.study.task
    title = f"{'Own model' if task == _CUSTOM else task} at epsilon {digits(_epsilon(study))}"
    stamps = _stamps(study)
    return page(
        f"{title} - halfsilver",
        tag("h1", title),
        tag("p", study.verdict.headline or "No verdict yet.", class_="verdict"),
        stamp_line(stamps),
        _methods(study, pictures),
        _meaning(study.verdict, pictures),
        section("curves", "Curves", gallery(pictures.get("curves", ()))),
        _privacy(study, stamps),
        ledger_part(study.ledger),
        section("schedules", "alpha and learning rate", gallery(pictures.get("schedules", ()))),
        _search(study, pictures),
        _configuration(study),
    )


def _methods(study: Summary, pictures: Pictures) -> Html:
    metrics, shown = metrics_of(study.runs), methods_of(study)
    looks, rows = looks_of(shown), []
    for arm in study.arms():
        runs = study.runs_of(arm.name)
        if runs:
            cells = [_mean(study.verdict.mean(arm.name, metric), metric) for metric in metrics]
            cost = digits(max(run.epsilon_pld for run in runs))
            rows.append([named(arm.name, looks[arm.name], arm.description), *cells, cost, str(len(runs))])
    header = ["method", *(f"test {metric}" for metric in metrics), "own epsilon", "seeds"]
    note = (
        f"Mean over seeds \N{PLUS-MINUS SIGN} half the width of its {level(study.verdict.confidence)} t-interval; one "
        f"seed has none. Own epsilon: of one run, by PLD, at delta {plain(study.study.delta)}."
    )
    content = [table(header, rows), tag("p", note, class_="note")] if rows else []
    return section("methods", "The methods side by side", *content, gallery(pictures.get("finals", ())))


def _mean(mean: Mean | None, metric: str) -> Html:
    if mean is None:
        return join([NONE])
    if mean.mean is None:
        return join(["diverged"])
    value, half = with_interval(mean, metric)
    return join([value, " ", tag("span", half, class_="half")]) if half else join([value])


def _meaning(verdict: Verdict, pictures: Pictures) -> Html:
    rows = [
        [
            d.name,
            d.metric,
            points(d.mean, d.metric),
            _between(d),
            str(d.n),
            "within noise" if d.within_noise else "beyond noise",
        ]
        for d in verdict.differences
    ]
    header = ["difference", "metric", "mean", "interval", "paired seeds", "verdict"]
    figures = [table(header, rows)] if rows else []
    sentences = [tag("li", str(sentence)) for sentence in verdict.sentences]
    words = [tag("ul", *sentences)] if sentences else []
    return section("meaning", "What it means", *words, gallery(pictures.get("differences", ())), *figures)


def _between(d: Difference) -> str:
    if d.low is None or d.high is None:
        return "none: one seed"
    return f"{points(d.low, d.metric).removesuffix(' points')} to {points(d.high, d.metric)}"


def _privacy(study: Summary, stamps: Sequence[str]) -> Html:
    most = {name: max((run.epsilon.get(name) or 0.0 for run in study.runs), default=None) for name in ("pld", "rdp")}
    arms = study.arms()
    private, public = ([arm.name for arm in arms if arm.trains == trains] for trains in (True, False))
    free = "".join(f"; {name} uses no private data and costs nothing" for name in public)
    words = (
        f"Holds for the output of one run of {one_of(private or ['a private method'])} on its own{free}. "
        "All steps after the noise is added, the mirror among them, cost nothing more."
    )
    adjacency = str(study.study.more.get("adjacency") or ADJACENCY)
    figures = guarantee(_plan(study), most, study.study.delta, adjacency)
    return section("privacy", "Privacy statement", stamp_box(stamps), tag("p", words), figures)


def _plan(study: Summary) -> dict[str, Any]:
    """The plan of the study, or what the rest of the summary tells of it."""
    noise = next((run.noise_multiplier for run in study.runs if run.noise_multiplier), None)
    clip = study.study.recipe.get("max_grad_norm")
    return {"steps": study.steps, "max_grad_norm": clip, "noise_multiplier": noise, **study.study.plan}


def _search(study: Summary, pictures: Pictures) -> Html:
    choices = choices_of(study)
    if not choices:
        return Html("")
    note = (
        "Ahead by: how much better it scored than the runner-up, with the standard error of that difference, paired "
        "over the scored examples. It says how far the choice depends on those examples, not on the noise of a run. "
        "At edge: a better setting may lie outside the grid."
    )
    looks = looks_of([*methods_of(study), *choices])
    rows = [[named(name, looks.get(name, OTHER)), *_choice(choice)] for name, choice in choices.items()]
    header = ["method", "chosen", "tried", "runner-up", "ahead by (std. error)", "at edge"]
    return section(
        "search",
        "How the settings were chosen",
        tag("p", _SEARCHES.get(study.study.search, study.study.search)),
        gallery(pictures.get("search", ())),
        table(header, rows),
        tag("p", note, class_="note"),
    )


def _choice(choice: Choice) -> list[str]:
    error = "" if choice.standard_error is None else f" ({figure(choice.standard_error)})"
    return [
        setting(choice.setting),
        str(len(choice.tried)),
        setting(choice.runner_up),
        figure(choice.difference) + error,
        plain(choice.at_edge),
    ]


def _configuration(study: Summary) -> Html:
    record = study.study
    named_facts = {
        "versions": record.versions,
        "machine": record.machine,
        "commit": record.more.get("commit"),
        "task": record.task,
        "options": record.options,
        "seeds": record.seeds,
        "population": record.population,
    }
    shown = [(name, plain(value)) for name, value in named_facts.items() if value not in (None, {}, [])]
    data = {name: value for name, value in record.problem.items() if name != "stamps"}
    seconds = sum(run.seconds for run in study.runs)
    took = f"{seconds / 3600:.1f} core-hours" if seconds > 3600 else f"{seconds:.0f} seconds"
    return section(
        "configuration",
        "Configuration, versions, and how to do it again",
        _again(record),
        facts([*shown, *flat(data, "data:"), ("time of all runs shown", took)]),
        more("The whole recipe", facts(flat(record.recipe))),
    )


def _again(study: StudyRecord) -> Html:
    """The command; for a user's own model there is none to print."""
    if command := study.more.get("command"):
        return tag("pre", str(command))
    if study.task == _CUSTOM:
        return tag("p", "To do it again, call halfsilver.compare with the same model, data and arguments.")
    arms = study.all_arms()
    most = max(study.seeds.values(), default=None)
    random = [study.seeds[arm.name] for arm in arms if arm.start == "random" and arm.name in study.seeds]
    fewer = random[0] if random else most
    names = [arm.name for arm in arms]
    options = {
        "--epsilon": study.epsilon,
        "--delta": study.delta,
        "--recipe": study.recipe.get("name"),
        "--seeds": most,
        "--cold-seeds": fewer if fewer != most else None,
        "--methods": ",".join(names) if names and tuple(names) != NAMES else None,
        "--search": study.search.removesuffix(" search") if study.search in _SEARCHES else None,
    }
    words = ["halfsilver", "compare", study.task]
    words += [word for name, value in options.items() if value is not None for word in (name, plain(value))]
    return tag("pre", shlex.join([*words, *(["--quick"] if study.quick else [])]))


def _epsilon(study: Summary) -> float | None:
    return study.study.epsilon or max((run.epsilon_pld for run in study.runs), default=None)


def _stamps(study: Summary) -> list[str]:
    stamps = [str(stamp) for stamp in study.stamps]
    missing = study.study.quick and not any(stamp.startswith("quick") for stamp in stamps)
    return stamps + (["quick"] if missing else [])
