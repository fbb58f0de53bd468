"""Figures of the studies, made from their result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfsilver.errors import MissingExtra
from halfsilver.runs import read_json

_COLOURS = {"public": "#888888", "cold": "#c0392b", "warm": "#e08e0b", "pda": "#1f6fb2"}


def linreg_figures(rows: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """The paper's two figures (cold and warm; warm and pda), and the gain against the spread of the Hessian."""
    return [
        _against_dimension(rows, ("cold", "warm"), out / "cold-warm.png"),
        _against_dimension(rows, ("public", "warm", "pda"), out / "warm-pda.png"),
        _gain_against_spread(rows, out, out / "gain-spread.png"),
    ]


def _axes() -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("matplotlib", "bench") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    return figure, axes


def _against_dimension(rows: Sequence[Mapping[str, Any]], methods: Sequence[str], path: Path) -> Path:
    figure, axes = _axes()
    for method in methods:
        own = [r for r in rows if r["method"] == method]
        dims, means, widths = ([r[k] for r in own] for k in ("dim", "mean", "ci95"))
        axes.errorbar(dims, means, widths, label=method, color=_COLOURS[method], marker="o", markersize=4, capsize=3)
    axes.axhline(0.01, color="black", linestyle=":", linewidth=1, label="best possible")
    axes.set(xlabel="dimension p", ylabel="population mean squared error", ylim=(0, None))
    axes.legend(frameon=False)
    return _saved(figure, path)


def _gain_against_spread(rows: Sequence[Mapping[str, Any]], out: Path, path: Path) -> Path:
    """How much of warm's excess over the best possible risk pda takes away, where H is more or less like I."""
    figure, axes = _axes()
    for dim in sorted({r["dim"] for r in rows}):
        mean = {r["method"]: r["mean"] for r in rows if r["dim"] == dim}
        eigenvalues = read_json(out / f"p{dim}-search-pda.json")["eigenvalues"]
        spread = eigenvalues["largest"] / eigenvalues["smallest"]
        gain = (mean["warm"] - mean["pda"]) / (mean["warm"] - 0.01)
        axes.plot(spread, 100 * gain, "o", color=_COLOURS["pda"])
        axes.annotate(str(dim), (spread, 100 * gain), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(xlabel="largest over smallest eigenvalue of the public Hessian", ylabel="excess risk saved by pda, %")
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path
