"""Write the tables of docs/choosing.md from the figures of the benchmarks: ``python -m tools.finishes``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "choosing.md"
NAMES = {
    "start": "public start",
    "none": "after training",
    "temperature": "and a temperature",
    "temperature and biases": "and biases",
    "all": "and a part of the way",
}


def finishes() -> str:
    """One row for each run with its finishes."""
    lines = ["| ε, method, seed | " + " | ".join(NAMES.values()) + " |", "|---" * (len(NAMES) + 1) + "|"]
    for record in _records("finish", "finish-*.json"):
        cells = [_three(record["results"][name]) for name in NAMES]
        lines.append(f"| {record['epsilon']:g}, `{record['method']}`, {record['seed']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def advised() -> str:
    """One row for each advised run on a benchmark task, beside the run of the recipe by hand."""
    lines = [
        "| task, ε, seed | public start | by hand | and a temperature | advised | and a temperature | forecast |",
        "|---" * 7 + "|",
    ]
    of_emnist = {("emnist", one["epsilon"], one["seed"]): one for one in _records("finish", "finish-*-warm-*.json")}
    for record in _records("advised", "*.json"):
        found, bounds = record["results"], record["advice"]["forecast"]["loss"]
        finished = of_emnist.get((record["task"], record["epsilon"], record["seed"]))
        cells = [
            _three(found["start"]),
            _three(found.get("by hand", record["by hand"])),
            _three(finished["results"]["temperature"] if finished else found.get("by hand and finished", {})),
            _three(found["advised"]),
            _three(found.get("advised and finished", {})),
            f"{bounds['expected']:.2f}, {bounds['low']:.2f} to {bounds['high']:.2f}",
        ]
        name = f"{record['task']}, {record['epsilon']:g}, {record['seed']}"
        name += "" if record["held_out"] else ", start from all users"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def tables() -> str:
    """One row for each table of the adviser's benchmark."""
    head = "| table, ε | score | public start | by hand | advised | advised less by hand | forecast of the loss held |"
    lines = [head, "|---" * 7 + "|"]
    for row in json.loads((RESULTS / "tables.json").read_text(encoding="utf-8"))["rows"]:
        percent = row["score"] == "accuracy"
        shown = [f"{100 * row[k]:.1f} %" if percent else f"{row[k]:.4f}" for k in ("start", "by hand", "advised")]
        gain, half = (100 * row[k] if percent else row[k] for k in ("difference", "half_width"))
        difference = f"{gain:+.1f} ± {half:.1f} points" if percent else f"{gain:+.4f} ± {half:.4f}"
        cells = [row["score"], *shown, difference, f"{row['forecast held']} of {row['splits']}"]
        lines.append(f"| {row['table']}, {row['epsilon']:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


TABLES = {"finish": finishes, "advised": advised, "tables": tables}


def page(text: str) -> str:
    """The page with the tables of today's figures."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def _records(folder: str, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((RESULTS / folder).glob(pattern))]


def _three(figures: dict[str, float]) -> str:
    """Loss, accuracy and calibration error, as far as there are such figures."""
    forms = {"loss": "{:.3f}", "accuracy": "{:.2%}", "calibration error": "{:.3f}"}
    shown = [form.format(figures[name]).replace("%", " %") for name, form in forms.items() if name in figures]
    return ", ".join(shown)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
