"""Figures of the studies, made from their result files: what all of them share, and those of linear regression."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfsilver.errors import MissingExtra
from halfsilver.runs.folder import read_json
from halfsilver.study.method import COLD, PDA, PUBLIC, REGISTERED, WARM, WHITENED, Method

# By CSS variable, in the order of the methods. The first four are told apart by lightness too, so by those who do not
# see red and green apart, and on paper.
PALETTE = {
    "arm-1": "#888888",
    "arm-2": "#c0392b",
    "arm-3": "#e08e0b",
    "arm-4": "#1f6fb2",
    "arm-5": "#2e8b57",
    "arm-6": "#7d4fa8",
    "arm-7": "#8c5a2b",
    "arm-8": "#0f8b8d",
    "arm-9": "#b5477d",
    "arm-10": "#5f6b2f",
}
COLOURS = dict(zip(REGISTERED, PALETTE.values(), strict=False))
INK = "#24292f"

_STYLE: dict[Any, Any] = {
    **{f"{name}.color": INK for name in ("text", "xtick", "ytick", "grid")},
    **{f"axes.{name}color": INK for name in ("label", "title", "edge")},
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the letters do not depend on the machine
    "svg.hashsalt": "halfsilver",
    "svg.fonttype": "path",
    "text.parse_math": False,  # a name with dollar signs is a name
}


@contextmanager
def style() -> Iterator[None]:
    """Inside it, what is drawn and saved is the same file on every day and machine with the same matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("matplotlib", "bench") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # nor on the user's own settings
        matplotlib.rcParams.update(_STYLE)
        yield


def new_axes(width: float = 6, height: float = 4) -> tuple[Any, Any]:
    """An empty figure of that many inches and its axes, inside `style`. No window has it, so nobody must close it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.15)
    return figure, axes


def rendered(figure: Any, kind: str, dpi: int = 150) -> bytes:
    """The file of a figure, "png" or "svg", without date or program."""
    file = io.BytesIO()
    nothing = {"png": ("Software",), "svg": ("Date", "Creator", "Format", "Type")}
    figure.savefig(file, format=kind, dpi=dpi, metadata=dict.fromkeys(nothing[kind]))
    return file.getvalue()


def saved(figure: Any, path: Path) -> Path:
    """Write the figure in the format of the name's ending."""
    path.write_bytes(rendered(figure, path.suffix[1:]))
    return path


def linreg_figures(rows: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """The paper's two figures (cold and warm; warm, pda and whitened), and the gain against the Hessian's spread."""
    with style():
        return [
            _against_dimension(rows, (COLD, WARM), out / "cold-warm.png"),
            _against_dimension(rows, (PUBLIC, WARM, PDA, WHITENED), out / "warm-pda.png"),
            _gain_against_spread(rows, out, out / "gain-spread.png"),
        ]


def _against_dimension(rows: Sequence[Mapping[str, Any]], methods: Sequence[Method], path: Path) -> Path:
    figure, axes = new_axes()
    for method in methods:
        own = [r for r in rows if r["method"] == method.name]
        dims, means, widths = ([r[k] for r in own] for k in ("dim", "mean", "ci95"))
        axes.errorbar(
            dims, means, widths, label=method.name, color=COLOURS[method.name], marker="o", markersize=4, capsize=3
        )
    axes.axhline(0.01, color="black", linestyle=":", linewidth=1, label="best possible")
    axes.set(xlabel="dimension p", ylabel="population mean squared error", ylim=(0, None))
    axes.legend(frameon=False)
    return saved(figure, path)


def _gain_against_spread(rows: Sequence[Mapping[str, Any]], out: Path, path: Path) -> Path:
    """How much of warm's excess over the best possible risk pda takes away, where H is more or less like I."""
    figure, axes = new_axes()
    for dim in sorted({r["dim"] for r in rows}):
        mean = {r["method"]: r["mean"] for r in rows if r["dim"] == dim}
        eigenvalues = read_json(out / f"p{dim}-search-{PDA.name}.json")["eigenvalues"]
        spread = eigenvalues["largest"] / eigenvalues["smallest"]
        gain = (mean[WARM.name] - mean[PDA.name]) / (mean[WARM.name] - 0.01)
        axes.plot(spread, 100 * gain, "o", color=COLOURS[PDA.name])
        axes.annotate(str(dim), (spread, 100 * gain), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(xlabel="largest over smallest eigenvalue of the public Hessian", ylabel="excess risk saved by pda, %")
    return saved(figure, path)
