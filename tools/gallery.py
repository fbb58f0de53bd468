"""Pictures of examples that draw none themselves, from their committed figures: ``python -m tools.gallery``.

`--check` writes nothing, and exits with 1 if a picture differs from what the figures give.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfsilver.report.plots import COLOURS, INK, new_axes, rendered, style

ROOT = Path(__file__).parents[1]
PICTURES, RESULTS = ROOT / "docs" / "pictures", ROOT / "benchmarks" / "results"
LEVELS = {"nonprivate": ("without privacy", ":"), "public": ("public rows alone", "--")}


def brackets() -> bytes:
    """Accuracy of the private classifier against epsilon, with 95 % intervals over splits."""
    rows = json.loads((RESULTS / "brackets.json").read_text(encoding="utf-8"))["rows"]
    with style():
        figure, axes = new_axes(6, 3.4)
        for row in (row for row in rows if row["method"] in LEVELS):
            _level(axes, row["method"], 100 * row["accuracy"], "{:.1f} %")
        for shift, method in ((0.97, "warm"), (1.03, "whitened")):
            own = [row for row in rows if row["method"] == method]
            at, values = [shift * row["epsilon"] for row in own], [100 * row["accuracy"] for row in own]
            errors = [100 * row["accuracy_ci95"] for row in own]
            axes.errorbar(at, values, errors, color=COLOURS[method], marker="o", capsize=3, label=method)
        ticks = sorted({row["epsilon"] for row in rows if row["method"] == "warm"})
        axes.set(xscale="log", xlabel="epsilon (delta = 1e-5)", ylabel="test accuracy, per cent")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1.0, 0.38))
        return rendered(figure, "svg")


def causal_lm() -> bytes:
    """Perplexity of the language model against epsilon."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((RESULTS / "causal-lm").glob("*.json"))]
    perplexity = {(run["arm"], run["epsilon"]): math.exp(run["loss"]) for run in runs}
    with style():
        figure, axes = new_axes(6, 3.4)
        for arm in LEVELS:
            _level(axes, arm, perplexity[arm, 0.0], "{:.0f}")
        for arm, name in (("lora", "LoRA"), ("frozen", "LoRA, factors A frozen")):
            own = sorted((epsilon, value) for (of, epsilon), value in perplexity.items() if of == arm)
            colour = COLOURS["warm" if arm == "lora" else "whitened"]
            axes.plot(*zip(*own, strict=True), "o-", color=colour, label=name)
        axes.set(xscale="log", xlabel="epsilon (delta = 1e-5)", ylabel="test perplexity per token", xlim=(1.5, 11))
        axes.set_xticks([2, 8], ["2", "8"])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=9)
        return rendered(figure, "svg")


def _level(axes: Any, arm: str, value: float, form: str) -> None:
    name, line = LEVELS[arm]
    axes.axhline(value, color=INK, linestyle=line, linewidth=1, label=f"{name}, {form.format(value)}")


MADE: Mapping[str, Callable[[], bytes]] = {"example-brackets.svg": brackets, "example-causal-lm.svg": causal_lm}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gallery", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a picture differs")
    options = parser.parse_args(argv)
    stale = {}
    for name, make in MADE.items():
        path, wanted = PICTURES / name, make()
        if not path.exists() or path.read_bytes() != wanted:
            stale[path] = wanted
    if not options.check:
        for path, wanted in stale.items():
            path.write_bytes(wanted)
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} differs from the figures. Run: python -m tools.gallery", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
