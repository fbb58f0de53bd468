"""The results table of the README, the page docs/results.md and its figures, from the committed studies.

`python -m tools.table` writes them. `--check` writes nothing, shows what differs and exits with 1. Each study is a file
benchmarks/results/studies/TASK-epsE[-NAME].json, an unchanged copy of the study's summary.json. Those that train as the
paper does are in benchmarks/results/paper and have a table of their own.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from halfsilver.report import study_pictures
from halfsilver.report.figures import Picture
from halfsilver.report.words import with_interval
from halfsilver.study.method import NAMES, PDA, WARM
from halfsilver.study.records import Mean, Result, Summary
from halfsilver.study.verdict import verdict
from halfsilver.tasks import recipes

ROOT = Path(__file__).parents[1]
PICTURES = Path("docs/pictures/studies")
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PAPER_BEGIN, PAPER_END = "<!-- paper:begin -->", "<!-- paper:end -->"
NOTHING = "No results committed yet."
TITLES = {"emnist": "EMNIST", "cifar10": "CIFAR-10", "wikitext2": "WikiText-2", "stackexchange": "Stack Exchange"}
TEXT = ("wikitext2", "stackexchange")  # whose loss has a perplexity
_NAME = re.compile(r"(?P<task>[a-z0-9]+)-eps(?P<epsilon>[0-9.]+)(?:-(?P<name>[\w-]+))?")


@dataclass(frozen=True, eq=False)
class Study:
    """One committed summary, and what the tables say about it."""

    stem: str
    summary: Mapping[str, Any]

    @cached_property
    def found(self) -> dict[str, Any]:
        """The verdict, made anew: the tables rest on the runs alone."""
        return verdict([Result.from_json(run) for run in self.summary["runs"]]).to_json()

    @property
    def task(self) -> str:
        """The task's name in headings."""
        return str(TITLES.get(self.summary["task"], self.summary["task"]))

    @property
    def title(self) -> str:
        """Task, and the rest of the file's name."""
        match = _NAME.fullmatch(self.stem)
        name = match["name"] if match else None
        return f"{self.task} ({name.replace('-', ' ')})" if name else self.task

    @property
    def order(self) -> tuple[Any, ...]:
        """The paper's larger epsilon first, as there."""
        task = self.summary["task"]
        return [*TITLES, task].index(task), task, -self.summary["epsilon"], self.stem

    @property
    def budget(self) -> str:
        """Epsilon and delta.

        >>> Study("", {"epsilon": 0.48, "delta": 1e-6}).budget
        '0.48 (10⁻⁶)'
        """
        power = math.log10(self.summary["delta"])
        digits = str(round(-power)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        delta = f"10⁻{digits}" if power == round(power) else f"{self.summary['delta']:g}"
        return f"{self.summary['epsilon']:g} ({delta})"

    @property
    def heading(self) -> str:
        return f"{self.title}, ε = {self.summary['epsilon']:g}"

    @property
    def stamps(self) -> str:
        """What readers must know, such as 'search not accounted', without the explanation."""
        return "; ".join(stamp.partition(":")[0] for stamp in self.summary["stamps"])

    def about(self) -> list[str]:
        recipe = self.summary["recipe"]
        length = f"{recipe['rounds']} rounds" if recipe.get("rounds") else f"{recipe['epochs']:g}"
        return [self.title, self.budget, length]

    def methods(self) -> list[str]:
        """Those with a finished run."""
        return [m for m in NAMES if m in self.found["means"]]

    def cell(self, method: str, metric: str) -> str:
        """Mean and half interval of one figure."""
        mean = self.found["means"].get(method, {}).get(metric)
        if mean is None:
            return ""
        if not mean["n"]:
            return "diverged"
        perplexity = metric == "loss" and self.summary["task"] in TEXT
        end = f"(perplexity {math.exp(mean['mean']):.1f})" if perplexity else ""
        return " ".join(part for part in (*with_interval(Mean.from_json(mean), metric), end) if part)

    def short(self, method: str) -> str:
        """Accuracy, where there is one, and loss; means alone."""
        means = self.found["means"].get(method, {})
        return _short({k: mean["mean"] for k, mean in means.items() if mean["n"]}) or ("diverged" if means else "")

    def seeds(self, method: str) -> str:
        """How many runs the figures hold, and of how many if some are missing or diverged."""
        n, asked = self.found["means"].get(method, {}).get("loss", {"n": 0})["n"], self.summary["seeds"][method]
        return str(n) if n == asked else f"n={n} of {asked}"

    def all_seeds(self) -> str:
        """That of pda, or of the last method; and of those that have another."""
        by_method = {m: self.seeds(m) for m in NAMES if m in self.summary["seeds"]}
        *_, most = by_method.values()
        return "; ".join([most, *(f"{m} {n}" for m, n in by_method.items() if n != most)])

    def change(self, name: str, metric: str) -> str:
        """A paired difference with its interval: losses in per cent of the baseline's mean, accuracies in points."""
        found = [d for d in self.found["differences"] if (d["name"], d["metric"]) == (name, metric)]
        if not found:
            return ""
        d = found[0]
        base, unit = (1.0, "points") if "accuracy" in metric else (d["baseline_mean"], "%")
        mean, *ends = (_percent(d[k], base) for k in ("mean", "low", "high") if d[k] is not None)
        if d["lost"]:
            return f"{mean} {unit}, without {', '.join(d['lost'])} (diverged)"
        if not ends:
            return f"{mean} {unit} (one seed)"
        return f"{mean} {unit} ({ends[0]} to {ends[1]})" + (", within noise" if d["within_noise"] else "")

    @cached_property
    def published(self) -> Mapping[str, Any] | None:
        """The recipe of the paper's run at this epsilon, with its figures by method."""
        task, name = self.summary["task"], f"eps{self.summary['epsilon']:g}"
        if name not in recipes.names(task):
            return None
        recipe, more = recipes.load(task, name)
        return {"epochs": recipe.epochs, **more["paper"]}

    def paper(self) -> str:
        """What pda changes of warm's loss in the figures that the paper publishes for this epsilon."""
        if self.published is None:
            return ""
        pda, warm = (self.published[method.name]["loss"] for method in (PDA, WARM))
        return f"{_percent(pda - warm, warm)} %"

    def beside_paper(self) -> list[str]:
        """Cells of the table of studies that train as the paper does: own figures, and the paper's in brackets."""
        published = self.published
        if published is None:
            raise SystemExit(f"The paper has no figures for {self.heading}. Move it to benchmarks/results/studies.")
        cells = [f"{self.short(name)} ({_short(published[name])})" for name in (WARM.name, PDA.name)]
        length = f"{self.summary['recipe']['epochs']:g} ({published['epochs']:g})"
        change = [self.change(PDA.pair, "loss"), self.paper(), self.change(PDA.pair, "accuracy")]
        minutes = sum(run["seconds"] for run in self.summary["runs"]) / 60
        head = [self.task, self.budget, length, self.short("public")]
        return [*head, *cells, *change, self.seeds(PDA.name), f"{minutes:.0f}"]


def _short(figures: Mapping[str, float]) -> str:
    """Accuracy, where there is one, and loss.

    >>> _short({"loss": 0.698, "accuracy": 0.7731}), _short({"loss": 5.1509})
    ('77.3 % / 0.698', '5.151')
    """
    looks = (("accuracy", "{:.1%}"), ("loss", "{:.3f}"))
    return " / ".join(look.format(figures[k]).replace("%", " %") for k, look in looks if k in figures)


def _percent(difference: float, base: float) -> str:
    """Two decimals, or as many as show on which side of 0 it is.

    >>> _percent(-0.242, 0.85), _percent(-0.00004, 1.0)
    ('-28.47', '-0.004')
    """
    value = 100 * difference / base
    return f"{value:+.2f}" if abs(value) >= 0.005 or value == 0 else f"{value:+.1g}"


def load(folder: Path) -> list[Study]:
    """All committed studies; quick ones are refused."""
    found = []
    for file in sorted(folder.glob("*.json")):
        study = Study(file.stem, json.loads(file.read_text(encoding="utf-8")))
        match = _NAME.fullmatch(file.stem)
        named = (study.summary["task"], "{:g}".format(study.summary["epsilon"] or math.nan))
        if study.summary["quick"]:
            raise SystemExit(f"{file} is a quick study, too short to publish. Remove it, or run it without --quick.")
        if match is None or (match["task"], match["epsilon"]) != named:
            raise SystemExit(
                f"{file} holds {named[0]} at epsilon {named[1]}, so name it {named[0]}-eps{named[1]}[-NAME].json."
            )
        found.append(study)
    return sorted(found, key=lambda study: study.order)


def full_table(studies: Iterable[Study]) -> str:
    """One row for each method of each study."""
    head = ["task", "ε (δ)", "epochs", "method", "test accuracy", "test loss", "seeds"]
    rows = [[*head, "loss, pda - warm", "the same in the paper", "stamps"]]
    for study in studies:
        for method in study.methods():
            own = [method, study.cell(method, "accuracy"), study.cell(method, "loss"), study.seeds(method)]
            last = [study.change(PDA.pair, "loss"), study.paper()] if method == PDA.name else ["", ""]
            rows.append([*study.about(), *own, *last, study.stamps])
    return _markdown(rows)


def paper_table(studies: Iterable[Study]) -> str:
    """One row for each study that trains as the paper does."""
    head = ["task", "ε (δ)", "epochs (paper)", "public", "warm (paper)", "pda (paper)"]
    head += ["loss, pda - warm", "in the paper", "accuracy, pda - warm", "seeds", "minutes"]
    return _markdown([head, *(study.beside_paper() for study in studies)])


def difference_table(studies: Iterable[Study]) -> str:
    """One row for each comparison of each study."""
    rows = [["study", "difference", "test loss", "test accuracy", "paired seeds"]]
    for study in studies:
        for d in study.found["differences"]:
            if d["metric"] == "loss":
                name = f"{d['method']} - {d['baseline']}"
                cells = [study.change(d["name"], metric) for metric in ("loss", "accuracy")]
                rows.append([study.heading, name, *cells, str(d["n"])])
    return _markdown(rows)


def short_table(studies: Sequence[Study]) -> str:
    """One row for each study, for the README, and how to read it."""
    rows = [["task", "ε (δ)", "epochs", *NAMES, "loss, pda - warm", "in the paper", "seeds"]]
    for study in studies:
        last = [study.change(PDA.pair, "loss"), study.paper(), study.all_seeds()]
        rows.append([*study.about(), *map(study.short, NAMES), *last])
    stamps = sorted({part for study in studies for part in study.stamps.split("; ") if part})
    note = (
        "Cells show test accuracy / test loss, as means over seeds.\n"
        "*pda - warm* is the paired difference with its 95 % t-interval."
    )
    return (
        f"{_markdown(rows)}\n\n{note} {''.join(f'*{stamp}*. ' for stamp in stamps)}More in [Results](docs/results.md)."
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def figures(study: Study) -> dict[str, Picture]:
    """Curves by file name; those without cold where there are such, because cold presses the others flat."""
    keep = ("method", "seed", "curve")
    runs = [{**{k: run[k] for k in keep}, "final": dict.fromkeys(run["final"])} for run in study.summary["runs"]]
    made = {
        picture.name: picture for picture in study_pictures(Summary.from_json({"runs": runs}))["curves"]
    }  # no ends: curves alone
    return {f"{study.stem}-{name}.svg": one for name, one in made.items() if f"{name}-near" not in made}


def results_page(studies: Sequence[Study], drawn: Mapping[Study, Mapping[str, Picture]]) -> str:
    """What stands between the markers of docs/results.md."""
    verdicts = "\n".join(f"- **{study.heading}**: {study.found['headline']}" for study in studies)
    curves = [
        f"**{study.heading}**\n\n"
        + "\n".join(f'<img src="pictures/studies/{name}" width="49%" alt="{one.alt}">' for name, one in made.items())
        for study, made in drawn.items()
    ]
    tasks = dict.fromkeys(study.task for study in studies)
    tables = [f"### {name}, all methods\n\n{full_table(s for s in studies if s.task == name)}" for name in tasks]
    parts = [*tables, "## Verdicts", verdicts, "## Paired differences", difference_table(studies)]
    return "\n\n".join(["## All methods", *parts, "## Curves", *curves])


def wanted(root: Path) -> dict[Path, str]:
    """Every file that follows from the committed studies, with the text that it should have."""
    studies = load(root / "benchmarks/results/studies")
    drawn = {study: figures(study) for study in studies}
    as_paper = load(root / "benchmarks/results/paper")
    readme, results = (page.read_text(encoding="utf-8") for page in (root / "README.md", root / "docs/results.md"))
    results = between(results, results_page(studies, drawn) if studies else NOTHING)
    if as_paper:
        results = between(results, paper_table(as_paper), PAPER_BEGIN, PAPER_END)
    return {
        root / "README.md": between(readme, short_table(studies) if studies else NOTHING),
        root / "docs/results.md": results,
        **{root / PICTURES / name: one.svg for made in drawn.values() for name, one in made.items()},
    }


def between(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with `text` between its markers."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        title = page.partition("\n")[0]
        raise SystemExit(
            f"The page {title!r} needs the line {begin} once and {end} once below it, for the table between them."
        )
    start, stop = page.index(begin) + len(begin), page.index(end)
    return f"{page[:start]}\n\n{text}\n\n{page[stop:]}"


def stale(root: Path, files: Iterable[Path]) -> list[Path]:
    """Figures of studies that are no longer there."""
    return sorted(set((root / PICTURES).glob("*.svg")) - set(files))


def differences(root: Path, files: Mapping[Path, str]) -> Iterator[str]:
    """What is not as it should be; pages line by line, figures by name."""
    for path, text in files.items():
        name, found = str(path.relative_to(root)), path.read_text(encoding="utf-8") if path.exists() else ""
        if found != text and path.suffix == ".svg":
            yield f"{name} {'differs from what the studies give' if found else 'is missing'}"
        elif found != text:
            yield from difflib.unified_diff(
                found.splitlines(), text.splitlines(), name, f"{name} (wanted)", lineterm=""
            )
    yield from (f"{path.relative_to(root)} belongs to no study" for path in stale(root, files))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a file is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    options = parser.parse_args(argv)
    files = wanted(options.root)
    if options.check:
        lines = list(differences(options.root, files))
        print("\n".join(lines) or "README, docs and figures match the studies.")
        if lines:
            print("Run: python -m tools.table", file=sys.stderr)
        return 1 if lines else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in stale(options.root, files):
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
