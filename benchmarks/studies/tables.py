"""The adviser on five tables that it was not made for, against the default recipe with its public search.

    python -m benchmarks.studies.tables --out DIR [--only digits] [--splits 3] [--json]

scikit-learn's digits, breast cancer and diabetes; the hourly earnings of 61,395 workers (wages/cpssw8.csv in
HALFSILVER_DATA) as a number and in four brackets. A split is public, private and test rows at random. Both sides are
calls of `hs.compare` with the same model, pretraining, epsilon and epochs: methods="auto", and the method "warm" with a
twentieth of the records per step and a learning rate that is searched on public rows. Whatever lies in DIR is not run
again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.compare import default_recipe

DELTA, EPOCHS, HIDDEN = 1e-5, 10, 32
REGIONS = ("Midwest", "Northeast", "South", "West")
BRACKETS = (10.0, 15.0, 25.0)

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TableOf:
    """A table: its rows, how many are public and private (the rest are test rows), and the budget."""

    load: Callable[[Path], Arrays]
    public: int
    private: int
    epsilon: float
    classes: int  # 0: a number


def workers(folder: Path) -> Arrays:
    """Constants scale the features, so that no private row does."""
    with (folder / "wages" / "cpssw8.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [
        [float(row["gender"] == "female") for row in rows],
        [float(row["age"]) / 20 - 2 for row in rows],
        [float(row["education"]) / 3 - 4.5 for row in rows],
        *([float(row["region"] == region) for row in rows] for region in REGIONS),
    ]
    return np.array(columns).T, np.array([float(row["earnings"]) for row in rows])


def wages(folder: Path) -> Arrays:
    x, earnings = workers(folder)
    return x, np.log(earnings) - 2.8


def brackets(folder: Path) -> Arrays:
    x, earnings = workers(folder)
    return x, np.digitize(earnings, BRACKETS)


def diabetes(_: Path) -> Arrays:
    x, y = load_diabetes(return_X_y=True)
    return x * 20, y / 75 - 2


TABLES = {
    "digits": TableOf(load=lambda _: load_digits(return_X_y=True), public=200, private=1200, epsilon=2, classes=10),
    "cancer": TableOf(
        load=lambda _: load_breast_cancer(return_X_y=True), public=150, private=300, epsilon=2, classes=2
    ),
    "diabetes": TableOf(load=diabetes, public=140, private=220, epsilon=4, classes=0),
    "wages": TableOf(load=wages, public=1_228, private=49_116, epsilon=0.5, classes=0),
    "brackets": TableOf(load=brackets, public=1_228, private=49_116, epsilon=0.5, classes=4),
}


def class_loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def number_loss(model: Any, batch: Any) -> Tensor:
    return torch.square(model(batch[0])[:, 0] - batch[1])


def accuracy(model: Any, batch: Any) -> Tensor:
    return torch.eq(model(batch[0]).argmax(1), batch[1]).double()


def one_split(name: str, seed: int, out: Path, data: Path) -> dict[str, Any]:
    """Both sides on one split; test loss, and accuracy where there are classes."""
    table = TABLES[name]
    x, y = table.load(data)
    order = np.random.default_rng(seed).permutation(len(y))
    public, private, test = np.split(order, [table.public, table.public + table.private])
    centre, scale = x[public].mean(0), x[public].std(0) + 0.1
    features = torch.tensor(np.clip((x - centre) / scale, -5, 5), dtype=torch.float32)
    target = torch.tensor(y, dtype=torch.long if table.classes else torch.float32)
    rows = [(features[part], target[part]) for part in (private, public, test)]

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, max(1, table.classes)))

    recipe = default_recipe(batch_size=max(32, table.private // 20), epochs=EPOCHS)
    recipe = replace(recipe, pretrain=replace(recipe.pretrain, holdout=0.3))
    found: dict[str, Any] = {}
    for kind, methods in (("by hand", ["public", "warm"]), ("advised", "auto")):
        done = hs.compare(
            make_model,
            class_loss if table.classes else number_loss,
            *rows,
            epsilon=table.epsilon,
            delta=DELTA,
            population=table.private,
            out=out / f"{name}-{seed}-{kind.replace(' ', '-')}",
            recipe=recipe,
            metrics={"accuracy": accuracy} if table.classes else {},
            seeds=1,
            methods=methods,
        )
        runs = {run["method"]: run["final"] for run in done.summary["runs"]}
        found["start"] = runs.pop("public")
        found[kind] = next(iter(runs.values()))
    advice = read_json(out / f"{name}-{seed}-advised" / "advice.json")
    kept = {key: advice[key] for key in ("plan", "optimizer", "learning_rate", "geometry", "forecast")}
    return {"table": name, "split": seed, "epsilon": table.epsilon, **found, "advice": kept}


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each table the means, the paired difference with its 95 % interval, and how often the forecast held."""
    rows = []
    for name in dict.fromkeys(record["table"] for record in records):
        own = [record for record in records if record["table"] == name]
        score = "accuracy" if "accuracy" in own[0]["start"] else "loss"
        gain = np.array([record["advised"][score] - record["by hand"][score] for record in own])
        half = float(stats.t.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / len(gain) ** 0.5) if len(gain) > 1 else None
        bounds = [record["advice"]["forecast"]["loss"] for record in own]
        rows.append(
            {
                "table": name,
                "epsilon": own[0]["epsilon"],
                "score": score,
                **{kind: float(np.mean([r[kind][score] for r in own])) for kind in ("start", "by hand", "advised")},
                "difference": float(gain.mean()),
                "half_width": half,
                "loss": {kind: float(np.mean([r[kind]["loss"] for r in own])) for kind in ("by hand", "advised")},
                "forecast held": sum(
                    b["low"] <= r["advised"]["loss"] <= b["high"] for b, r in zip(bounds, own, strict=True)
                ),
                "splits": len(own),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(TABLES))
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    records = []
    for name in [args.only] if args.only else TABLES:
        for seed in range(args.splits):
            file = args.out / f"{name}-{seed}.json"
            if not file.exists():
                write_json(file, one_split(name, seed, args.out, args.data))
            records.append(read_json(file))
    rows = summary(records)
    result = {"delta": DELTA, "epochs": EPOCHS, "versions": versions(), "rows": rows, "runs": records}
    write_json(args.out / "tables.json", result)
    if args.json:
        print(json.dumps(result))
        return
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
