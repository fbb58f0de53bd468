"""The best model at each epsilon, for README.md and docs/results.md: ``python -m tools.best`` writes the tables.

Each row says which method is the library's choice. It is fixed here before figures are read: the default of the
estimator, or the arm whose settings come from public rows. `--check` writes nothing, and exits with 1 if a page is out
of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
BEGIN, END = "<!-- best:begin -->", "<!-- best:end -->"
HEADS = "python -m benchmarks.studies.heads head --task {task} --seed 0 --out DIR"

Figures = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task at one epsilon: mean figures by method, and the method that the library takes.

    `minutes` is the time of one seed of that method: of a head with its network and features, of a study the private
    run without the public start, as a machine took it beside other work. None where it is not on record.
    """

    task: str
    epsilon: float
    figures: Mapping[str, Figures]
    chosen: str
    seeds: int
    minutes: float | None
    command: str

    def cells(self) -> list[str]:
        """As the table has them."""
        public, warm, chosen, ceiling = (
            shown(self.figures.get(name)) for name in ("public", "warm", self.chosen, "nonprivate")
        )
        return [
            self.task,
            f"{self.epsilon:g}",
            public,
            warm,
            f"{chosen} (`{self.chosen}`)",
            ceiling,
            str(self.seeds),
            "" if self.minutes is None else f"{self.minutes:.0f}",
            f"`{self.command}`",
        ]


def shown(figures: Figures | None) -> str:
    """Accuracy and loss, as far as there are such.

    >>> shown({"accuracy": 0.7731, "loss": 0.698}), shown({"loss": 5.1509}), shown(None)
    ('77.3 % / 0.698', '5.151', '')
    """
    if figures is None:
        return ""
    accuracy = [f"{100 * figures['accuracy']:.1f} %"] if "accuracy" in figures else []
    return " / ".join([*accuracy, f"{figures['loss']:.3f}"])


def rows() -> Iterator[Row]:
    """All rows, in the order of the table."""
    yield from _heads("cifar10", "CIFAR-10, head on a network from 2,000 public images", "cifar10-width24-epochs60")
    yield from _heads("emnist", "EMNIST, head on a network from 3,994 public letters", "emnist-width24-epochs40")
    other = read("studies/wikitext2-eps1-other-public-text.json")
    yield _studied(
        other,
        "WikiText-2, start from other public text",
        "pda",
        "halfsilver compare wikitext2 --recipe ood --search paper --seeds 1 --cold-seeds 0",
        ceiling="wikitext2-ood",
    )
    yield _studied(
        read("best/wikitext2-eps1.71-all-public-text.json"),
        "WikiText-2, start from other public text and its own",
        "warm",
        "python -m benchmarks.studies.finals benchmarks/results/best/wikitext2-eps1.71-settings.json --seeds 2 "
        "--curve-points 0 --out DIR",
        ceiling="wikitext2-both",
    )
    for one in read("posts-head.json")["results"]:
        task = "Stack Exchange posts, head on a frozen text encoder"
        yield _studied(one, task, "whitened", "python examples/posts.py head --data DIR --out DIR")
    for epsilon in (2, 8):
        yield _studied(
            read(f"studies/stackexchange-eps{epsilon}.json"),
            "Stack Exchange users, next word",
            "pda",
            f"halfsilver compare stackexchange --epsilon {epsilon} --search paper --cold-seeds 1",
            ceiling="stackexchange-workstation",
        )


def read(name: str) -> Any:
    """A file of figures."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _heads(task: str, title: str, stem: str) -> Iterator[Row]:
    records = [
        json.loads(path.read_text(encoding="utf-8"))["results"]
        for path in sorted((RESULTS / "heads").glob(f"{stem}-seed?-head-network.json"))
    ]
    made = [
        json.loads(path.read_text(encoding="utf-8"))["seconds"]
        for path in sorted((RESULTS / "heads").glob(f"{stem}-seed?.json"))
    ]
    before = median(one["network"] + one["features"] for one in made)
    private = {one["epsilon"] for record in records for one in record if one["epsilon"]}
    for epsilon in sorted(private):
        at: dict[str, list[Figures]] = {}
        having = [record for record in records if any(one["epsilon"] == epsilon for one in record)]
        for one in (one for record in having for one in record if one["epsilon"] in (epsilon, 0.0, None)):
            at.setdefault(one["method"], []).append(one)
        means = {name: _mean(found) for name, found in at.items()}
        fits = [
            one["seconds"]
            for record in having
            for one in record
            if (one["method"], one["epsilon"]) == ("whitened", epsilon)
        ]
        yield Row(
            task=title,
            epsilon=epsilon,
            figures=means,
            chosen="whitened",
            seeds=len(having),
            minutes=(before + fmean(fits)) / 60,
            command=HEADS.format(task=task),
        )


def _studied(study: Mapping[str, Any], title: str, chosen: str, command: str, ceiling: str = "") -> Row:
    runs: dict[str, list[Figures]] = {}
    for path in sorted((RESULTS / "ceilings").glob(f"{ceiling}-seed?.json")) if ceiling else ():
        runs.setdefault("nonprivate", []).append(json.loads(path.read_text(encoding="utf-8"))["final"])
    for run in study["runs"]:
        runs.setdefault(run["method"], []).append(run["final"])
    means = {name: _mean(found) for name, found in runs.items()}
    times = [run["seconds"] for run in study["runs"] if run["method"] == chosen and "seconds" in run]
    return Row(
        task=title,
        epsilon=study["epsilon"],
        figures=means,
        chosen=chosen,
        seeds=len(runs[chosen]),
        minutes=fmean(times) / 60 if times else None,
        command=command,
    )


def _mean(found: Sequence[Figures]) -> Figures:
    return {name: fmean(one[name] for one in found) for name in ("accuracy", "loss") if name in found[0]}


def table(full: bool) -> str:
    """With the commands if `full`."""
    head = ["task", "ε", "public rows alone", "DP-SGD from there", "halfsilver", "without privacy", "seeds", "minutes"]
    head += ["command"]
    lines = [head, ["---"] * len(head), *(row.cells() for row in rows())]
    return "\n".join("| " + " | ".join(line if full else line[:-2]) + " |" for line in lines)


def page(path: Path) -> str:
    """The page with the table of today's figures."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(full=path.name != 'README.md')}\n\n{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.best", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a page is out of date")
    options = parser.parse_args(argv)
    stale = [path for path in PAGES if page(path) != path.read_text(encoding="utf-8")]
    if not options.check:
        for path in stale:
            path.write_text(page(path), encoding="utf-8")
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} differs from the figures. Run: python -m tools.best", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
