"""Figures of a study: the methods side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfsilver.report.figures import (
    LOOKS,
    OTHER,
    Json,
    Picture,
    Series,
    colour_of,
    finite,
    label_of,
    line,
    picture,
    scale,
    series,
)
from halfsilver.report.plots import COLOURS, INK
from halfsilver.report.words import METHODS, figure, level, points, short, slug


def study_pictures(study: Json) -> dict[str, list[Picture]]:
    """All figures for which the study has figures, by the part of the report that they belong to."""
    runs = list(study.get("runs") or ())
    metrics = metrics_of(runs)
    made = {
        "curves": [_curves(runs, metric, without) for without in ("", "cold") for metric in metrics],
        "finals": [_finals(study, metric) for metric in metrics],
        "differences": [_differences(study, metric) for metric in metrics],
        "schedules": [_trace(runs, "alpha"), _trace(runs, "lr")],
        "search": [_search(choices_of(study))],
    }
    return {part: [one for one in found if one is not None] for part, found in made.items()}


def metrics_of(runs: Iterable[Json]) -> list[str]:
    """Names of all final figures, loss first."""
    found = {name for run in runs for name in run.get("final") or ()}
    return sorted(found, key=lambda name: (name != "loss", name != "accuracy", name))


def methods_of(runs: Iterable[Json]) -> list[str]:
    """The methods that were run, in their usual order."""
    return in_order({str(run.get("method")): run for run in runs})


def in_order(found: Iterable[str]) -> list[str]:
    """Methods in their usual order, which a JSON object with sorted names does not keep."""
    return sorted(found, key=lambda name: (list(METHODS).index(name) if name in METHODS else len(METHODS), name))


def choices_of(study: Json) -> dict[str, Json]:
    """What the search chose for each method."""
    choices = study.get("choices") or {}
    return {method: choices[method] for method in in_order(choices)}


def _curves(runs: Sequence[Json], metric: str, without: str = "") -> Picture | None:
    curves = {method: _over_seeds(runs, method, metric) for method in methods_of(runs) if method != without}
    curves = {method: rows for method, rows in curves.items() if rows}
    if not any(len(rows) > 1 for rows in curves.values()) or (without and without not in methods_of(runs)):
        return None
    end = max(rows[-1][0] for rows in curves.values())
    low, high = _window(curves, end)
    cut = any(row[2] < low or row[3] > high for row in curves.get("cold", ()))

    def paint(axes: Any) -> None:
        for method, rows in curves.items():
            _band(axes, method, rows if len(rows) > 1 else [(0, *rows[0][1:]), (end, *rows[0][1:])])
        axes.set(xlabel="private steps", ylabel=label_of(metric), xlim=(0, end), ylim=(low, high))

    last = ", ".join(f"{method} {figure(rows[-1][1] / scale(metric), metric)}" for method, rows in curves.items())
    apart = f", without {without}" if without else ""
    return picture(
        f"curve-{slug(metric)}{'-near' if without else ''}",
        paint,
        title=f"Test {metric}{apart}",
        caption="Line: mean over seeds. Band: lowest to highest seed."
        + (" The beginning of cold is cut off." if cut else ""),
        alt=f"Line chart of test {metric} against private steps{apart}. At the end: {last}.",
    )


def _over_seeds(runs: Iterable[Json], method: str, metric: str) -> list[tuple[float, float, float, float]]:
    """(step, mean, lowest, highest) at each step."""
    at: dict[float, list[float]] = {}
    for run in runs:
        if run.get("method") == method:
            for step, value in series(run.get("curve") or (), metric):
                at.setdefault(step, []).append(value * scale(metric))
    return [(step, sum(v) / len(v), min(v), max(v)) for step, v in sorted(at.items())]


def _band(axes: Any, method: str, rows: Sequence[tuple[float, float, float, float]]) -> None:
    steps, means, lows, highs = zip(*rows, strict=True)
    axes.fill_between(steps, lows, highs, color=colour_of(method), alpha=0.2, linewidth=0)
    line(axes, method, list(zip(steps, means, strict=True)), method)


def _window(curves: Mapping[str, Sequence[tuple[float, float, float, float]]], end: float) -> tuple[float, float]:
    """Limits that hold everything but the beginning of cold: untrained weights would press all others flat."""
    begin = {"cold": 0.6 * end}
    shown = [v for name, c in curves.items() for step, *values in c if step >= begin.get(name, 0) for v in values]
    shown = shown or [v for c in curves.values() for _, *values in c for v in values]
    room = 0.06 * (max(shown) - min(shown) or abs(max(shown)) or 1)
    return min(shown) - room, max(shown) + room


def _finals(study: Json, metric: str) -> Picture | None:
    runs = [run for run in study.get("runs") or () if finite((run.get("final") or {}).get(metric))]
    methods = methods_of(runs)
    if not methods:
        return None
    means = (study.get("verdict") or {}).get("means") or {}
    factor = scale(metric)

    def paint(axes: Any) -> None:
        for row, method in enumerate(methods):
            values = [run["final"][metric] * factor for run in runs if run.get("method") == method]
            colour = colour_of(method)
            axes.plot(values, [row + 0.22] * len(values), "o", color=colour, alpha=0.5, markersize=4, linewidth=0)
            _whisker(axes, (means.get(method) or {}).get(metric) or {}, row, factor, colour, method)
        axes.set(xlabel=label_of(metric), ylim=(len(methods) - 0.5, -0.5))
        axes.set_yticks(range(len(methods)), map(short, methods))
        axes.margins(x=0.08)

    return picture(
        f"final-{slug(metric)}",
        paint,
        title=f"Final test {metric}",
        caption=f"Mark and bar: mean over seeds and its {level(study)} t-interval. Small dots: single seeds.",
        alt=f"Final test {metric} of each method with intervals; the figures are in the table of methods.",
        height=0.9 + 0.5 * len(methods),
    )


def _whisker(axes: Any, found: Json, row: float, factor: float, colour: str, method: str = "public") -> None:
    mean, low, high = (found.get(name) for name in ("mean", "low", "high"))
    if finite(mean):
        known = finite(low) and finite(high)
        width = [[factor * (mean - low)], [factor * (high - mean)]] if known else None  # type: ignore[operator]
        marker = LOOKS.get(method, OTHER)[1] or "D"
        axes.errorbar([factor * mean], [row], xerr=width, fmt=marker, color=colour, capsize=4, markersize=6)  # type: ignore[operator]


def _differences(study: Json, metric: str) -> Picture | None:
    found = [d for d in (study.get("verdict") or {}).get("differences") or () if d.get("metric") == metric]
    found = [d for d in found if finite(d.get("mean"))]
    if not found:
        return None
    factor = scale(metric)

    def paint(axes: Any) -> None:
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        for row, difference in enumerate(found):
            colour = COLOURS["public" if difference.get("within_noise") else "pda"]
            _whisker(axes, difference, row, factor, colour)
        unit = ", points" if "accuracy" in metric else ""
        axes.set(xlabel=f"difference of {short(metric)}{unit}", ylim=(len(found) - 0.5, -0.5))
        axes.locator_params(axis="x", nbins=5)  # small differences have long labels
        axes.set_yticks(range(len(found)), [short(str(d.get("name"))) for d in found])
        axes.margins(x=0.1)

    said = "; ".join(f"{d.get('name')}: {points(d['mean'], metric)}" for d in found)
    return picture(
        f"difference-{slug(metric)}",
        paint,
        title=f"Paired differences of test {metric}",
        caption=f"Mean over seeds and {level(study)} t-interval; grey where it is within noise. "
        f"{'Left' if 'accuracy' not in metric else 'Right'} of the dotted line: better.",
        alt=f"Paired differences of test {metric}. {said}.",
        height=0.9 + 0.5 * len(found),
    )


def _trace(runs: Sequence[Json], what: str) -> Picture | None:
    """A schedule of each method, the same for all of its seeds; of alpha only where the mirror is used."""
    lines: dict[str, Series] = {}
    for method in methods_of(runs) if what != "alpha" else ["pda"]:
        found = (series(run.get("trace") or (), what) for run in runs if run.get("method") == method)
        if shown := next(filter(None, found), None):
            lines[method] = shown
    if not lines:
        return None

    def paint(axes: Any) -> None:
        for width, (method, values) in zip(range(len(lines), 0, -1), lines.items(), strict=True):
            line(axes, method, values, method, linewidth=0.5 + width)  # the same schedule twice: both are seen
        axes.set(xlabel="private steps", ylabel="alpha" if what == "alpha" else "learning rate", xlim=(0, None))
        if what == "lr":
            axes.set_ylim(0, None)

    title, caption = {
        "alpha": ("alpha: share of the private gradient", "The rest, 1 - alpha, is the public gradient (pda only)."),
        "lr": ("Learning rate", "Each method has its own, found by the search."),
    }[what]
    ends = ", ".join(f"{method} from {values[0][1]:.3g} to {values[-1][1]:.3g}" for method, values in lines.items())
    return picture(what, paint, title=title, caption=caption, alt=f"{title} against private steps: {ends}.")


def _search(choices: Mapping[str, Json]) -> Picture | None:
    score = next((choice["score"] for choice in choices.values() if "score" in choice), "loss")
    lines: dict[tuple[str, float | None], list[tuple[float, float]]] = {}
    for method, choice in choices.items():
        for one in choice.get("tried") or ():
            if finite(one.get(score)):
                key = method, one["setting"].get("alpha_end")
                lines.setdefault(key, []).append((one["setting"]["lr"], one[score]))
    if not lines:
        return None
    lines = {key: lines[key] for key in sorted(lines, key=lambda key: (list(choices).index(key[0]), key[1] or 0))}

    def paint(axes: Any) -> None:
        styles, seen = ("-", "--", ":", "-."), dict.fromkeys(choices, 0)
        for (method, alpha), tried in lines.items():
            label = method if alpha is None else f"{method} {alpha:g}"
            looks = styles[seen[method] % len(styles)]
            line(axes, method, sorted(tried), label, linestyle=looks, markevery=1)
            seen[method] += 1
        for method, choice in choices.items():
            _ring(axes, method, choice, score)
        values = [value for tried in lines.values() for _, value in tried]
        rates = sorted({rate for tried in lines.values() for rate, _ in tried})
        axes.set(xlabel="learning rate", ylabel=f"{short(score)} of the search", xscale="log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xticks([], minor=True)
        if max(values) > 4 * min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")

    return picture(
        "search",
        paint,
        title="What the search tried",
        caption="Ringed: chosen. For pda, the number is where alpha ends. Settings that diverged are left out.",
        alt=f"{score.capitalize()} of the search against learning rate for {', '.join(choices)}; choices: see table.",
        height=3.6,
    )


def _ring(axes: Any, method: str, choice: Json, score: str) -> None:
    for one in choice.get("tried") or ():
        if one.get("setting") == choice.get("setting") and finite(one.get(score)):
            ring = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.5}
            axes.plot([one["setting"]["lr"]], [one[score]], "o", color=colour_of(method), **ring)
