"""Figures of a study: the methods side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfsilver.report.figures import Picture, Series, finite, label_of, line, picture, scale, series
from halfsilver.report.looks import ACCENT, GREY, Look, looks_of
from halfsilver.report.plots import INK
from halfsilver.report.words import figure, level, one_of, points, short, slug
from halfsilver.study.method import in_order
from halfsilver.study.problem import Setting
from halfsilver.study.records import Choice, Difference, Mean, Result, Summary

Band = tuple[float, float, float, float]  # step, mean, lowest and highest seed


def study_pictures(study: Summary) -> dict[str, list[Picture]]:
    """All figures for which the study has values, by the part of the report that they belong to."""
    metrics = metrics_of(study.runs)
    drawn = {
        "curves": [_curves(study, metric, near) for near in (False, True) for metric in metrics],
        "finals": [_finals(study, metric) for metric in metrics],
        "differences": [_differences(study, metric) for metric in metrics],
        "schedules": [_trace(study, "alpha"), _trace(study, "lr")],
        "search": [_search(study)],
    }
    return {part: [one for one in some if one is not None] for part, some in drawn.items()}


def metrics_of(runs: Iterable[Result]) -> list[str]:
    """Names of all final figures, loss first."""
    names = {name for run in runs for name in run.final}
    return sorted(names, key=lambda name: (name != "loss", name != "accuracy", name))


def methods_of(study: Summary) -> list[str]:
    """The methods that were run, in their usual order."""
    names = {run.method for run in study.runs}
    return [arm.name for arm in study.arms() if arm.name in names]


def choices_of(study: Summary) -> dict[str, Choice]:
    """What the search chose for each method, in their usual order, which a JSON object does not keep."""
    order = [arm.name for arm in study.arms() if arm.name in study.choices]
    names = [*order, *(name for name in in_order(study.choices) if name not in order)]
    return {name: study.choices[name] for name in names}


def _looks(study: Summary) -> Mapping[str, Look]:
    return looks_of([*(arm.name for arm in study.arms()), *study.choices])


def _from_random(study: Summary) -> list[str]:
    """The methods whose untrained weights would press the curves of all others flat."""
    shown = methods_of(study)
    return [arm.name for arm in study.arms() if arm.start == "random" and arm.name in shown]


def _curves(study: Summary, metric: str, near: bool) -> Picture | None:
    """All methods, or those `near` each other: without those from random weights."""
    random, looks = _from_random(study), _looks(study)
    left_out = random if near else []
    bands = {name: _over_seeds(study.runs_of(name), metric) for name in methods_of(study) if name not in left_out}
    bands = {name: rows for name, rows in bands.items() if rows}
    if not any(len(rows) > 1 for rows in bands.values()) or (near and not left_out):
        return None
    end = max(rows[-1][0] for rows in bands.values())
    low, high = _window(bands, random, end)
    cut = [name for name in random if any(row[2] < low or row[3] > high for row in bands.get(name, ()))]

    def paint(axes: Any) -> None:
        for name, rows in bands.items():
            _band(axes, name, looks[name], rows if len(rows) > 1 else [(0, *rows[0][1:]), (end, *rows[0][1:])])
        axes.set(xlabel="private steps", ylabel=label_of(metric), xlim=(0, end), ylim=(low, high))

    last = ", ".join(f"{name} {figure(rows[-1][1] / scale(metric), metric)}" for name, rows in bands.items())
    apart = f", without {one_of(left_out)}" if left_out else ""
    return picture(
        f"curve-{slug(metric)}{'-near' if near else ''}",
        paint,
        title=f"Test {metric}{apart}",
        caption="Line: mean over seeds. Band: lowest to highest seed."
        + (f" The beginning of {one_of(cut)} is cut off." if cut else ""),
        alt=f"Line chart of test {metric} against private steps{apart}. At the end: {last}.",
    )


def _over_seeds(runs: Iterable[Result], metric: str) -> list[Band]:
    """(step, mean, lowest, highest) at each step."""
    at: dict[float, list[float]] = {}
    for run in runs:
        for step, value in series(run.curve, metric):
            at.setdefault(step, []).append(value * scale(metric))
    return [(step, sum(v) / len(v), min(v), max(v)) for step, v in sorted(at.items())]


def _band(axes: Any, name: str, look: Look, rows: Sequence[Band]) -> None:
    steps, means, lows, highs = zip(*rows, strict=True)
    axes.fill_between(steps, lows, highs, color=look.colour, alpha=0.2, linewidth=0)
    line(axes, look, list(zip(steps, means, strict=True)), name)


def _window(bands: Mapping[str, Sequence[Band]], random: Sequence[str], end: float) -> tuple[float, float]:
    """Limits that hold everything but the beginning of runs from random weights."""
    begin = dict.fromkeys(random, 0.6 * end)
    shown = [v for name, rows in bands.items() for step, *own in rows if step >= begin.get(name, 0) for v in own]
    shown = shown or [v for rows in bands.values() for _, *own in rows for v in own]
    room = 0.06 * (max(shown) - min(shown) or abs(max(shown)) or 1)
    return min(shown) - room, max(shown) + room


def _finals(study: Summary, metric: str) -> Picture | None:
    ends = {
        name: [value for run in study.runs_of(name) if (value := run.final.get(metric)) is not None and finite(value)]
        for name in methods_of(study)
    }
    ends = {name: values for name, values in ends.items() if values}
    if not ends:
        return None
    factor, looks = scale(metric), _looks(study)

    def paint(axes: Any) -> None:
        for row, (name, values) in enumerate(ends.items()):
            dots = {"color": looks[name].colour, "alpha": 0.5, "markersize": 4, "linewidth": 0}
            axes.plot([v * factor for v in values], [row + 0.22] * len(values), "o", **dots)
            if mean := study.verdict.mean(name, metric):
                _whisker(axes, mean, row, factor, looks[name])
        axes.set(xlabel=label_of(metric), ylim=(len(ends) - 0.5, -0.5))
        axes.set_yticks(range(len(ends)), map(short, ends))
        axes.margins(x=0.08)

    interval = level(study.verdict.confidence)
    return picture(
        f"final-{slug(metric)}",
        paint,
        title=f"Final test {metric}",
        caption=f"Mark and bar: mean over seeds and its {interval} t-interval. Small dots: single seeds.",
        alt=f"Final test {metric} of each method with intervals; the figures are in the table of methods.",
        height=0.9 + 0.5 * len(ends),
    )


def _whisker(axes: Any, value: Mean | Difference, row: float, factor: float, look: Look) -> None:
    mean, low, high = value.mean, value.low, value.high
    if mean is not None and finite(mean):
        known = low is not None and high is not None and finite(low) and finite(high)
        width = [[factor * (mean - low)], [factor * (high - mean)]] if known else None  # type: ignore[operator]
        bar = {"fmt": look.marker or "D", "color": look.colour, "capsize": 4, "markersize": 6}
        axes.errorbar([factor * mean], [row], xerr=width, **bar)


def _differences(study: Summary, metric: str) -> Picture | None:
    shown = [d for d in study.verdict.differences if d.metric == metric and finite(d.mean)]
    if not shown:
        return None
    factor = scale(metric)

    def paint(axes: Any) -> None:
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        for row, difference in enumerate(shown):
            colour = GREY.colour if difference.within_noise else ACCENT.colour
            _whisker(axes, difference, row, factor, Look(colour=colour, marker="D"))
        unit = ", points" if "accuracy" in metric else ""
        axes.set(xlabel=f"difference of {short(metric)}{unit}", ylim=(len(shown) - 0.5, -0.5))
        axes.locator_params(axis="x", nbins=5)  # small differences have long labels
        axes.set_yticks(range(len(shown)), [short(d.name) for d in shown])
        axes.margins(x=0.1)

    means = "; ".join(f"{d.name}: {points(d.mean, metric)}" for d in shown)
    return picture(
        f"difference-{slug(metric)}",
        paint,
        title=f"Paired differences of test {metric}",
        caption=f"Mean over seeds and {level(study.verdict.confidence)} t-interval; grey where it is within noise. "
        f"{'Left' if 'accuracy' not in metric else 'Right'} of the dotted line: better.",
        alt=f"Paired differences of test {metric}. {means}.",
        height=0.9 + 0.5 * len(shown),
    )


def _trace(study: Summary, what: str) -> Picture | None:
    """A schedule of each method, the same for all of its seeds; of alpha only where the search chose its end."""
    lines: dict[str, Series] = {}
    for name in methods_of(study):
        runs = [run for run in study.runs_of(name) if what != "alpha" or (run.setting and run.setting.alpha_end)]
        if values := next(filter(None, (series(run.trace, what) for run in runs)), None):
            lines[name] = values
    if not lines:
        return None
    looks = _looks(study)

    def paint(axes: Any) -> None:
        for width, (name, values) in zip(range(len(lines), 0, -1), lines.items(), strict=True):
            line(axes, looks[name], values, name, linewidth=0.5 + width)  # the same schedule twice: both are seen
        axes.set(xlabel="private steps", ylabel="alpha" if what == "alpha" else "learning rate", xlim=(0, None))
        if what == "lr":
            axes.set_ylim(0, None)

    only = f"The rest, 1 - alpha, is the public gradient ({', '.join(lines)} only)."
    title, caption = {
        "alpha": ("alpha: share of the private gradient", only),
        "lr": ("Learning rate", "Each method has its own, found by the search."),
    }[what]
    ends = ", ".join(f"{name} from {values[0][1]:.3g} to {values[-1][1]:.3g}" for name, values in lines.items())
    return picture(what, paint, title=title, caption=caption, alt=f"{title} against private steps: {ends}.")


def _search(study: Summary) -> Picture | None:
    choices, looks = choices_of(study), _looks(study)
    score = next((choice.score for choice in choices.values()), "loss")
    lines: dict[tuple[str, float | None], list[tuple[float, float]]] = {}
    for name, choice in choices.items():
        for trial in choice.tried:
            value = trial.figures.get(score)
            if value is not None and finite(value):
                lines.setdefault((name, _second(trial.setting)), []).append((trial.setting.lr, value))
    if not lines:
        return None
    lines = {key: lines[key] for key in sorted(lines, key=lambda key: (list(choices).index(key[0]), key[1] or 0))}

    def paint(axes: Any) -> None:
        styles, count = ("-", "--", ":", "-."), dict.fromkeys(choices, 0)
        for (name, second), tried in lines.items():
            label = name if second is None else f"{name} {second:g}"
            line(axes, looks[name], sorted(tried), label, linestyle=styles[count[name] % len(styles)], markevery=1)
            count[name] += 1
        for name, choice in choices.items():
            _ring(axes, looks[name], choice, score)
        values = [value for tried in lines.values() for _, value in tried]
        rates = sorted({rate for tried in lines.values() for rate, _ in tried})
        axes.set(xlabel="learning rate", ylabel=f"{short(score)} of the search", xscale="log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xticks([], minor=True)
        if max(values) > 4 * min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")

    tried = [(name, trial.setting) for name, choice in choices.items() for trial in choice.tried]
    mixed = list(dict.fromkeys(name for name, setting in tried if setting.alpha_end is not None))
    damped = list(dict.fromkeys(name for name, setting in tried if setting.damping is not None))
    numbers = f" For {one_of(mixed)}, the number is where alpha ends." if mixed else ""
    numbers += f" For {one_of(damped)}, it is the damping." if damped else ""
    return picture(
        "search",
        paint,
        title="What the search tried",
        caption=f"Ringed: chosen.{numbers} Settings that diverged are left out.",
        alt=f"{score.capitalize()} of the search against learning rate for {', '.join(choices)}; choices: see table.",
        height=3.6,
    )


def _second(setting: Setting) -> float | None:
    """What the search tries beside the learning rate."""
    return setting.damping if setting.alpha_end is None else setting.alpha_end


def _ring(axes: Any, look: Look, choice: Choice, score: str) -> None:
    for trial in choice.tried:
        value = trial.figures.get(score)
        if trial.setting == choice.setting and value is not None and finite(value):
            ring = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.5}
            axes.plot([trial.setting.lr], [value], "o", color=look.colour, **ring)
