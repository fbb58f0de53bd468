"""You train with Opacus, and part of your data is public. Can it help without spending budget?

Yes, with one added line. The plan that comes to mind is a switch that turns privacy off for public batches and on
again for private ones. Then two kinds of step take turns on one optimizer, and hooks must be off at the right moments.
It is simpler to let Opacus make its private step as always, and to change what the optimizer gets once the noise is in:

    model, optimizer, loader = PrivacyEngine().make_private(...)                     # as before
    attach_mirror(optimizer, FirstOrder(0.5), PublicLoss(model, loss_fn, public))    # new
    for batch in loader: ...                                                         # as before

Each update is now half Opacus's noisy gradient and half the plain gradient of the public loss. What happens to a
gradient after the noise costs nothing: the epsilon that Opacus reports stays as it was, and stays right. It is a
promise to the private records only; the public ones get none.

This script compares four ways to use 120 public digits of scikit-learn's 1,797, at one epsilon:

    public   train on the public digits only
    cold     Opacus on the private digits, from a random start
    warm     the same, from the public model
    pda      the same, with the line above

    python examples/opacus_mirror.py            10 splits, about a minute on one core
    python examples/opacus_mirror.py --quick    one split, a few seconds

The noise takes away what the warm start knew, and the mirror keeps it. Where there is little noise, there is little to
keep: with --epsilon 1 the two come out alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from typing import Any

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from halfsilver import FirstOrder, PublicLoss
from halfsilver.mirror import pretrain
from halfsilver.opacus import attach_mirror

METHODS = ("public", "cold", "warm", "pda")
DELTA, EPOCHS, BATCH, PUBLIC, TEST = 1e-4, 15, 128, 120, 400

Rows = tuple[Tensor, Tensor]


def split(seed: int) -> tuple[Rows, Rows, Rows]:
    """Public, test and private digits, at random."""
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = torch.split(order, [PUBLIC, TEST, len(order) - PUBLIC - TEST])
    public, test, private = ((images[part].float() / 16, labels[part]) for part in parts)
    return public, test, private


def loss_fn(model: Any, batch: Rows) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def run(method: str, epsilon: float, seed: int) -> tuple[float, float]:
    """Epsilon spent, and accuracy on the test digits."""
    public, test, private = split(seed)
    torch.manual_seed(seed)  # also of Opacus's noise: for a table that can be repeated, never for records that matter
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    if method != "cold":
        pretrain(net, loss_fn, public, optimizer=torch.optim.Adam(net.parameters(), lr=0.01))
    spent = 0.0 if method == "public" else train(net, private, public if method == "pda" else None, epsilon)
    return spent, float((net(test[0]).argmax(1) == test[1]).double().mean())


def train(net: nn.Module, private: Rows, public: Rows | None, epsilon: float) -> float:
    """An ordinary Opacus loop, with one line more where there is public data."""
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(*private), batch_size=BATCH),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    if public is not None:
        attach_mirror(optimizer, FirstOrder(0.5), PublicLoss(model, loss_fn, public))
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss_fn(model, batch).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return float(engine.get_epsilon(DELTA))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=0.5)
    parser.add_argument("--quick", action="store_true", help="one split instead of ten")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus on its random generator, torch on Opacus's hooks
    rows = []
    for method in METHODS:
        spent, right = zip(*(run(method, args.epsilon, seed) for seed in range(1 if args.quick else 10)), strict=True)
        row = {"method": method, "epsilon": max(spent), "accuracy": statistics.mean(right)}
        rows.append(row | ({} if args.quick else {"sd": statistics.stdev(right)}))
    if args.json:
        print(json.dumps({"quick": args.quick, "delta": DELTA, "rows": rows}))
        return
    for row in rows:
        spread = f" +- {row['sd']:.3f}" if "sd" in row else ""
        print(f"{row['method']:8} epsilon {row['epsilon']:5.2f}  accuracy {row['accuracy']:.3f}{spread}")


if __name__ == "__main__":
    main()
