"""In which of four brackets are the hourly earnings of a worker? A private classifier on a real table.

    python examples/brackets.py --data DIR                  5 splits, a table
    python examples/brackets.py --data DIR --json           the same for machines
    python examples/brackets.py --data DIR --search         how far "auto" is from settings that are chosen on test rows

DIR holds wages/cpssw8.csv (61,395 workers, Current Population Survey). Features are those of wages.py. Brackets are
constants: below 10, 15 and 25 dollars, and above. A split is 2 % public, 80 % private and 18 % test rows at random.

    nonprivate   scikit-learn's LogisticRegression on the private rows, without privacy
    public       MirrorLogisticRegression(method="public"): public rows alone
    warm         DP gradient descent from the public solution
    whitened     the same in coordinates from public rows

All settings are "auto", so no private or test row chooses any of them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from wages import DELTA, N_PRIVATE, N_PUBLIC, load, mean_and_half_width  # type: ignore[import-not-found]

from halfsilver.linear_model import MirrorLogisticRegression
from halfsilver.runs.folder import versions

EPSILONS, BRACKETS = (0.1, 0.5, 1.0), (10.0, 15.0, 25.0)
RATES, DAMPINGS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.3, 1.0, 3.0, 10.0)

Row = dict[str, Any]


class Rows:
    """One split of the workers."""

    def __init__(self, x: np.ndarray, y: np.ndarray, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(y))
        public, private, test = np.split(order, [N_PUBLIC, N_PUBLIC + N_PRIVATE])
        self.public, self.private, self.test = ((x[rows], y[rows]) for rows in (public, private, test))

    def scores(self, model: Any) -> dict[str, float]:
        x, y = self.test
        loss = float(log_loss(y, model.predict_proba(x), labels=range(len(BRACKETS) + 1)))
        return {"accuracy": float(model.score(x, y)), "loss": loss}

    def fit(self, method: Any, epsilon: float, **options: Any) -> MirrorLogisticRegression:
        classes = range(len(BRACKETS) + 1)
        model = MirrorLogisticRegression(
            method=method, epsilon=epsilon, delta=DELTA, classes=classes, n_private=N_PRIVATE, **options
        )
        return model.fit(*self.private, X_public=self.public[0], y_public=self.public[1])


def one_split(rows: Rows) -> Iterator[Row]:
    free = LogisticRegression(C=100.0, max_iter=500).fit(*rows.private)
    yield {"method": "nonprivate", "epsilon": None, **rows.scores(free)}
    yield {"method": "public", "epsilon": 0.0, **rows.scores(rows.fit("public", 1.0))}
    for method, epsilon in product(("warm", "whitened"), EPSILONS):
        yield {"method": method, "epsilon": epsilon, **rows.scores(rows.fit(method, epsilon))}


def searched(rows: Rows) -> Iterator[Row]:
    """At each epsilon, "auto" and the best of a grid around it by test accuracy: not private, a reference only."""
    for epsilon in EPSILONS:
        auto = rows.fit("whitened", epsilon)
        tried = [
            rows.scores(
                rows.fit(
                    "whitened",
                    epsilon,
                    steps=auto.choice_.steps,
                    learning_rate=factor * auto.choice_.learning_rate,
                    damping=damping,
                )
            )
            for factor, damping in product(RATES, DAMPINGS)
        ]
        best = max(tried, key=lambda one: one["accuracy"])
        yield {"method": "auto", "epsilon": epsilon, **rows.scores(auto)}
        yield {"method": f"best of {len(tried)}", "epsilon": epsilon, **best}


def summary(found: list[list[Row]]) -> list[Row]:
    """Means over splits with 95 % t-intervals."""
    rows = []
    for same in zip(*found, strict=True):
        row: Row = {"method": same[0]["method"], "epsilon": same[0]["epsilon"]}
        for name in ("accuracy", "loss"):
            values = np.array([one[name] for one in same])
            row[name], row[f"{name}_ci95"] = (
                mean_and_half_width(values) if len(values) > 1 else (float(values[0]), float("nan"))
            )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, or set HALFSILVER_DATA")
    torch.set_num_threads(1)
    x, earnings = load(Path(args.data))
    y = np.digitize(np.exp(earnings), BRACKETS)
    how = searched if args.search else one_split
    rows = summary([list(how(Rows(x, y, seed))) for seed in range(args.splits)])
    if args.json:
        print(json.dumps({"splits": args.splits, "delta": DELTA, "versions": versions(), "rows": rows}, indent=1))
        return
    for row in rows:
        where = f"epsilon {row['epsilon']:<4g}" if row["epsilon"] else " " * 12
        print(
            f"{row['method']:10} {where} accuracy {100 * row['accuracy']:.2f} +- {100 * row['accuracy_ci95']:.2f} %, "
            f"loss {row['loss']:.4f} +- {row['loss_ci95']:.4f}"
        )


if __name__ == "__main__":
    main()
