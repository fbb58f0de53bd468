"""Figures of a report, and those of one run. Each is drawn narrow enough to be read on a phone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfsilver._core import system
from halfsilver.errors import ConfigError
from halfsilver.report.looks import ACCENT, Look
from halfsilver.report.plots import new_axes, rendered, style
from halfsilver.report.words import figure, short, slug

Json = Mapping[str, Any]
Paint = Callable[[Any], None]
Series = Sequence[tuple[float, float]]

_SIZE = (4.2, 3.1)
_SCHEDULES = {"lr": "learning rate", "released_norm": "norm of the released gradient"}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure in both formats, with the words that belong to it.

    Its `name` is made of slugs, for it is that of its files and of all ids in its markup.
    """

    name: str
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes

    def write(self, folder: Path) -> list[Path]:
        """Both files, under the picture's name. A link in their place is replaced and not followed."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {inside(folder, f"{self.name}.svg"): self.svg.encode(), inside(folder, f"{self.name}.png"): self.png}
        for path, content in files.items():
            system.write_atomically(path, content)
        return list(files)


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, refused where the name or a folder that is a link would lead elsewhere."""
    path = folder / name
    if path.parent != folder or name in ("", "..") or (path.is_symlink() and path.is_dir()):
        raise ConfigError(
            f"Expected {str(path)!r} to lie in its folder, but it leads out of it. Name another one by --out."
        )
    return path


def picture(name: str, paint: Paint, *, title: str, caption: str, alt: str, height: float = _SIZE[1]) -> Picture:
    """Draw by `paint(axes)`, legend below the axes; the files depend on nothing but what is drawn."""
    with style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # a box; the page has the name
        drawing, axes = new_axes(_SIZE[0], height)
        paint(axes)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = 3 if len(labels) > 4 and max(map(len, labels)) > 6 else 4  # what fits beside each other
            looks = {"ncols": min(len(labels), columns), "frameon": False, "columnspacing": 1.2}
            drawing.legend(handles, labels, loc="outside lower center", **looks)
        drawing.draw_without_rendering()
        drawing.set_layout_engine("none")  # the layout is found: each format would look for it again
        svg, png = rendered(drawing, "svg").decode(), rendered(drawing, "png", dpi=200)
    return Picture(name=name, title=title, caption=caption, alt=alt, svg=svg, png=png)


def run_pictures(history: Sequence[Json]) -> dict[str, list[Picture]]:
    """Figures of the metrics, and of what else the run logged, against steps."""
    drawn = {
        "curves": [_logged(history, name, f"test {name}", label_of(name)) for name in metrics_of_run(history)],
        "schedules": [_logged(history, name, label, label) for name, label in _SCHEDULES.items()],
    }
    return {part: [one for one in some if one is not None] for part, some in drawn.items()}


def metrics_of_run(history: Sequence[Json]) -> list[str]:
    """What it measured on test rows, loss and accuracy first."""
    names = {name for line in history for name in line} - {"step", *_SCHEDULES}
    return sorted(names, key=lambda name: (name != "loss", name != "accuracy", name))


def _logged(history: Sequence[Json], name: str, title: str, label: str) -> Picture | None:
    values = series(history, name)
    if not values:
        return None

    def paint(axes: Any) -> None:
        marks = {} if len(values) <= 40 else {"marker": ""}
        line(axes, ACCENT, [(step, value * scale(name)) for step, value in values], title, **marks)
        axes.set(xlabel="private steps", ylabel=label)
        if name in _SCHEDULES:
            axes.set_ylim(0, None)

    last = figure(values[-1][1], name)
    whole = title[0].upper() + title[1:]
    return picture(
        slug(name),
        paint,
        title=whole,
        caption=f"Last value: {last}.",
        alt=f"{whole} against private steps; last {last}.",
    )


def line(axes: Any, look: Look, values: Series, label: str, **options: Any) -> None:
    """A line in the colour, dashes and marks of its method."""
    x, y = zip(*values, strict=True)
    usual = {"linestyle": look.dashes, "marker": look.marker, "markersize": 4, "linewidth": 1.7}
    every = max(1, len(x) // 6)
    axes.plot(x, y, label=short(label), color=look.colour, **{**usual, "markevery": every, **options})


def series(lines: Iterable[Json], name: str) -> Series:
    """(step, value) of the lines that have the value, and a finite one."""
    return [(line["step"], line[name]) for line in lines if finite(line.get(name)) and finite(line.get("step"))]


def finite(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def scale(metric: str) -> float:
    """Accuracies are shares of 1, and drawn in percent."""
    return 100.0 if "accuracy" in metric else 1.0


def label_of(metric: str) -> str:
    """What is written along its axis."""
    return f"test {short(metric)}, %" if "accuracy" in metric else f"test {short(metric)}"
